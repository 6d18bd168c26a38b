# SPDX-License-Identifier: Apache-2.0
"""What the commands `compile`, `cache` and `doctor` do about kernels."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sparse_indexer.errors import JitError, describe, expect_int, mismatch
from sparse_indexer.jit import cache
from sparse_indexer.jit.artifacts import device_artifact, host_artifact
from sparse_indexer.jit.clearing import clear as clear_cache
from sparse_indexer.jit.compilers import find_device_compiler
from sparse_indexer.jit.kernel import Kernel, all_kernels, expect_kernels
from sparse_indexer.jit.parallel import max_jobs
from sparse_indexer.jit.places import (
    SCHEMA,
    absolute,
    fallback_root,
    make_staging,
    read_only_note,
    roots,
    variable,
    workspace,
)
from sparse_indexer.jit.resources import Resources
from sparse_indexer.jit.targets import parse_arch
from sparse_indexer.workers import each_done

if TYPE_CHECKING:
    from rich.console import Console


_NAMED = 5  # files that `cache --clear` leaves, by name


class Outcome(NamedTuple):
    """One file of one kernel, compiled, found or failed."""

    kernel: str
    target: str  # an architecture, or this machine's for the host entry
    seconds: float | None  # None: it was in the cache
    resources: dict[str, Resources]  # by variant
    warnings: tuple[str, ...]
    error: str | None


class _Job(NamedTuple):
    kernel: Kernel
    capability: tuple[int, int] | None  # None: the host entry
    target: str


def compile_kernels(
    arch: str,
    kernels: Sequence[Kernel],
    *,
    jobs: int | None = None,
    out: Path | str | None = None,
    on_start: Callable[[int], None] = lambda count: None,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Compile `kernels` and their host entries for architectures like `7.0,9.0a,12.0f`; no GPU.

    `compute_75` is PTX, which no call asks for; GPUs of 7.5 and later take it.

    Args:
        kernels: each is compiled for those of the architectures that it is for.
        jobs: processes, or as many as cores and memory allow.
        out: a cache root to fill instead of the usual one, to be shipped and named in
            `SPARSE_INDEXER_CACHE_DIR` there.
        on_start: called with the number of outcomes to come.
        on_done: called with each of them.

    Raises:
        ValueError: an argument is not what it should be.
        JitError: a process that compiled was killed.
    """
    wanted = _architectures(arch)
    if jobs is not None:
        jobs = expect_int("jobs", jobs, 1)
    # What was loaded stays here, when a worker gets a kernel.
    kernels = [replace(kernel) for kernel in dict.fromkeys(expect_kernels(kernels))]
    if out is None:
        root, jobs = _fallback(jobs)
    else:
        root = _root_at(out)
    work = [_Job(k, cc, target) for k in kernels for cc, target in wanted if k.is_for(cc)]
    hosts = dict.fromkeys(job.kernel for job in work)
    work += [_Job(kernel, None, platform.machine()) for kernel in hosts]
    on_start(len(work))
    outcomes = []
    # In processes, because NVRTC compiles one program at a time in a process.
    results = each_done(_work, work, min(jobs or max_jobs(), len(work)))
    try:
        with variable("SPARSE_INDEXER_CACHE_DIR", root), closing(results):
            for outcome in results:
                outcomes.append(outcome)
                on_done(outcome)
    except BrokenProcessPool as error:
        message = "a process that compiled was killed, perhaps for want of memory"
        raise JitError(f"{message}\n  hint: fewer at once, jobs=1") from error
    return sorted(outcomes, key=lambda outcome: outcome[:2])


def compile_command(
    console: Console, arch: str, names: str | None, jobs: int | None, out: str | None
) -> int:
    """`compile`: a bar, a table, and what failed; the exit status."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    known = all_kernels()
    chosen = list(known)
    if names is not None:
        chosen = [name.strip() for name in names.split(",") if name.strip()] or [names]
    for name in chosen:
        if name not in known:
            raise mismatch("kernels", f"some of {', '.join(known)}", repr(name))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        bar = progress.add_task("compiling")
        outcomes = compile_kernels(
            arch,
            [known[name] for name in chosen],
            jobs=jobs,
            out=out,
            on_start=lambda count: progress.update(bar, total=count),
            on_done=lambda o: progress.update(bar, advance=1, description=f"{o.kernel} {o.target}"),
        )
    if not outcomes:
        raise mismatch("arch", "compute capabilities that a kernel is for", repr(arch))
    status = print_outcomes(console, outcomes)
    for capability, target in _architectures(arch):
        others = ", ".join(name for name in chosen if not known[name].is_for(capability))
        if others:
            console.print(f"not for {target}: {others}", style="dim", soft_wrap=True)
    return status


def _architectures(arch: str) -> list[tuple[tuple[int, int], str]]:
    """(compute capability, target) of each."""
    if not isinstance(arch, str):
        raise mismatch("arch", "a str of compute capabilities", describe(arch))
    compiler = find_device_compiler().found
    version = compiler.version if compiler else (12, 9)
    wanted = [parse_arch(one, version) for one in arch.split(",") if one.strip()]
    if not wanted:
        raise mismatch("arch", "compute capabilities like 8.0,9.0a,12.0f", repr(arch))
    return list(dict.fromkeys(wanted))


def print_outcomes(console: Console, outcomes: Sequence[Outcome]) -> int:
    """A row a variant, then warnings and errors; the exit status, 1 if anything failed."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("kernel", "variant", "arch"):
        table.add_column(name, overflow="fold")
    for name in ("seconds", "registers", "spills", "shared"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        took = "cached" if outcome.seconds is None else f"{outcome.seconds:.2f}"
        took = "failed" if outcome.error else took
        for variant in sorted(outcome.resources) or [""]:
            figures = map(str, outcome.resources.get(variant, ()))
            table.add_row(outcome.kernel, variant, outcome.target, took, *figures)
            took = ""
    console.print(table)
    if any(o.resources for o in outcomes):
        note = "registers of a thread, bytes of its spill stores and loads, static shared bytes"
        console.print(note, style="dim", soft_wrap=True)
    for outcome in outcomes:
        for line in outcome.warnings:
            text = f"{outcome.kernel} for {outcome.target}: {line}"
            console.print(text, style="yellow", markup=False, soft_wrap=True)
    errors = [o.error for o in outcomes if o.error]
    for error in errors:
        console.print(error, style="red", markup=False, soft_wrap=True)
    return 1 if errors else 0


def cache_command(console: Console, *, clear: bool) -> int:
    """`cache`: what is where, or, with `clear`, away with it; the exit status."""
    if clear:
        cleared = clear_cache()
        if not cleared:
            console.print(f"nothing to clear in {roots()[0]}", markup=False, soft_wrap=True)
        for root, left in cleared:
            note = f", left what is not of the cache ({len(left)}): " if left else ""
            names = ", ".join(map(str, left[:_NAMED])) + ", ..." * (len(left) > _NAMED)
            console.print(f"cleared {root}{note}{names}", markup=False, soft_wrap=True)
        return 0
    writable, read_only = roots()
    notes = {writable: ""}
    for root in read_only:
        notes.setdefault(root, f", {read_only_note(root)}")
    fallback = fallback_root()
    if fallback and (fallback / SCHEMA).exists():
        notes.setdefault(fallback, ", used where the first cannot be written")
    for root, note in notes.items():
        files = cache.entries(root)
        size = sum(p.stat().st_size for p in files)
        text = f"{root}{note}: {len(files)} files, {size / 1e6:.1f} MB"
        console.print(text, markup=False, soft_wrap=True)
        for kernel in sorted({p.parents[1].name for p in files}):
            own = [p.parents[2].name for p in files if p.parents[1].name == kernel]
            counts = [f"{target} {own.count(target)}" for target in sorted(set(own))]
            console.print(f"  {kernel}: {', '.join(counts)}", markup=False, soft_wrap=True)
    return 0


def _work(job: _Job) -> Outcome:
    try:
        if job.capability is None:
            stored = host_artifact(job.kernel)
        else:
            stored = device_artifact(job.kernel, job.capability, job.target)
        if stored.path is None:
            what = f"{job.kernel.name} for {job.target}"
            raise JitError(f"cannot keep {what}: {stored.fault}")
    except JitError as error:
        return Outcome(job.kernel.name, job.target, None, {}, (), str(error))
    resources = {k: Resources(*v) for k, v in stored.meta["resources"].items()}
    seconds = stored.meta["seconds"] if stored.fresh else None
    warnings = tuple(stored.meta["warnings"])
    return Outcome(job.kernel.name, job.target, seconds, resources, warnings, None)


def _fallback(jobs: int | None) -> tuple[str | None, int | None]:
    """(`SPARSE_INDEXER_CACHE_DIR` where the first root cannot be written, `jobs`).

    So that it is said here and not by each process; where nothing can be kept, there is only one.
    """
    with workspace() as place:
        if place.root is None:
            return None, 1
        writable, read_only = roots()
        changed = place.root != writable
        known = (place.root, writable, *read_only)  # what was kept before is found there, too
        return os.pathsep.join(map(str, known)) if changed else None, jobs


def _root_at(out: Path | str) -> str:
    """`out` as the one root of `SPARSE_INDEXER_CACHE_DIR`."""
    if not isinstance(out, (Path, str)) or not str(out):
        raise mismatch("out", "a folder", describe(out))
    root = absolute(str(out))
    if os.pathsep in str(root):
        raise mismatch("out", f"a folder without {os.pathsep!r} in its path", repr(str(root)))
    try:
        make_staging(root).rmdir()
    except OSError as error:
        got = f"{str(out)!r} ({error.strerror})"
        raise mismatch("out", "a folder that can be written, or made", got) from error
    return str(root)
