# SPDX-License-Identifier: Apache-2.0
"""A kernel's two compiled files, from the cache or built: its cubin, or PTX, and its host module.

Both keys are hashes of contents, never of paths or times: an untouched tree copied elsewhere hits.
The cubin's source key covers the generated unit and all that it includes, the flags and the target;
the module's covers its .cc file and all that it includes, the flags, tvm-ffi's version and the
machine.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable
from pathlib import Path

from sparse_indexer.errors import JitError
from sparse_indexer.jit import build, cache, hints
from sparse_indexer.jit.build import Built
from sparse_indexer.jit.cache import Entry, Stored
from sparse_indexer.jit.compilers import (
    DeviceCompiler,
    HostCompiler,
    find_device_compiler,
    find_host_compiler,
    host_compiler_command,
)
from sparse_indexer.jit.fingerprint import digest
from sparse_indexer.jit.kernel import Kernel
from sparse_indexer.jit.lock import lock
from sparse_indexer.jit.places import SCHEMA, all_roots, workspace
from sparse_indexer.jit.resources import parse_resources, parse_warnings
from sparse_indexer.jit.settings import setting
from sparse_indexer.jit.sources import read, sources
from sparse_indexer.jit.targets import is_ptx, targets_of

_log = logging.getLogger("sparse_indexer")
_rebuilt: set[Entry] = set()  # in this process, which is often enough


def device_artifact(
    kernel: Kernel, capability: tuple[int, int], target: str | None = None
) -> Stored:
    """The cubin of `kernel` for GPUs of this capability.

    Args:
        target: instead of the one that the capability takes; `compute_75` gives PTX.

    Raises:
        JitError: it is not there and could not be built.
    """
    search = find_device_compiler()
    compiler = search.found
    entries = _device_entries(kernel, capability, target, compiler)

    def make(staging: Path, log: Path | None) -> Built:
        if compiler is None:
            title = f"{kernel.name} for {entries[0].target}: there is no device compiler"
            raise build.missing(title, search.places, hints.no_device_compiler(capability))
        return build.compile_device(kernel, entries[0].target, compiler, staging, log)

    return _fetch(entries, make, compiler.label if compiler else "")


def host_artifact(kernel: Kernel) -> Stored:
    """The module of the host entry of `kernel`.

    Raises:
        JitError: it is not there and could not be built.
    """
    compiler = find_host_compiler()
    entry = _host_entry(kernel, compiler)

    def make(staging: Path, log: Path | None) -> Built:
        if compiler is None:
            title = f"the host entry of {kernel.name}: there is no C++ compiler"
            places = (f"tried {host_compiler_command()[0]} on the PATH",)
            raise build.missing(title, places, hints.no_host_compiler())
        return build.compile_host(kernel, compiler, staging, log)

    return _fetch([entry], make, " ".join(compiler.command) if compiler else "")


def is_cached(kernel: Kernel, capability: tuple[int, int] | None) -> bool:
    """Whether a call would find the cubin for such a GPU, or the host module, and build nothing.

    Raises:
        JitError: it cannot be told what a source includes.
    """
    if capability is None:
        entries = [_host_entry(kernel, find_host_compiler())]
    else:
        entries = _device_entries(kernel, capability, None, find_device_compiler().found)
    mode = setting("SPARSE_INDEXER_JIT")
    return mode != "rebuild" and cache.find(_wanted(entries, mode), all_roots()) is not None


def _device_entries(
    kernel: Kernel,
    capability: tuple[int, int],
    target: str | None,
    compiler: DeviceCompiler | None,
) -> list[Entry]:
    """The cubins that will do, the one to build first."""
    version = compiler.version if compiler else (12, 9)
    targets = [target] if target else targets_of(capability, version)
    contents = [kernel.unit, *build.device_flags(), *sources(kernel, kernel.unit)]
    return [
        Entry(
            name,
            kernel.name,
            "kernel.ptx" if is_ptx(name) else "kernel.cubin",
            digest(SCHEMA, name, *contents),
            compiler and compiler.identity,
        )
        for name in targets
    ]


def _host_entry(kernel: Kernel, compiler: HostCompiler | None) -> Entry:
    import tvm_ffi

    machine, text = platform.machine(), read(kernel.host_source)
    source = digest(
        *(SCHEMA, machine, tvm_ffi.__version__, *build.HOST_FLAGS),
        *(text, *sources(kernel, text, kernel.host_source.parent)),
    )
    return Entry(machine, kernel.name, "host.so", source, compiler and compiler.identity)


def _wanted(entries: list[Entry], mode: str) -> list[Entry]:
    """What is looked for; where nothing can be built, that of any compiler."""
    if mode != "cached" and entries[0].compiler is not None:
        return entries[:1]
    return [entries[0], *(other._replace(compiler=None) for other in entries)]


def _fetch(
    entries: list[Entry], make: Callable[[Path, Path | None], Built], compiler: str
) -> Stored:
    """One of the entries from the cache; else the first, built and kept if the mode allows it."""
    entry = entries[0]
    mode = setting("SPARSE_INDEXER_JIT") or "auto"
    rebuild = mode == "rebuild" and entry not in _rebuilt
    wanted = _wanted(entries, mode)
    stored = None if rebuild else cache.find(wanted, all_roots())
    if stored:
        return stored
    if mode == "cached":
        raise _not_cached(wanted)
    what = f"{entry.kernel} for {entry.target}"
    with workspace() as place:
        base = (place.root or place.staging) / SCHEMA
        name = f"{entry.kernel}-{entry.target}-{entry.source[:12]}"
        with lock(base / "locks" / f"{name}.lock", what):
            places = [*all_roots(), place.root or place.staging]
            stored = None if rebuild else cache.find([entry], places)
            if stored:
                return stored
            start = time.perf_counter()
            log = base / "logs" / f"{name}.log" if place.root else None
            built = make(place.staging, log)
            seconds = round(time.perf_counter() - start, 3)
            _log.info("built %s in %.2f s", what, seconds)
            meta = {
                "built_by": compiler,
                "seconds": seconds,
                "resources": parse_resources(built.output),
                "warnings": parse_warnings(built.output),
            }
            _rebuilt.add(entry)
            return cache.publish(place, entry, built.data, meta, replace=rebuild)


def _not_cached(wanted: list[Entry]) -> JitError:
    entry, there = wanted[0], set()
    damaged = {str(file) for file in cache.files(wanted, all_roots()) if file.parent.exists()}
    for file in (file for root in all_roots() for file in cache.entries(root)):
        own = (file.name, file.parents[1].name) == (entry.file, entry.kernel)
        stored = cache.read(file.parent, file.name) if own else None
        if stored:
            target = file.parents[2].name
            other = " of other sources or flags" if target == entry.target else ""
            there.add(f"{target} by {stored.meta['built_by']}{other}")
    state = "is damaged" if damaged else "is not"
    return JitError(
        f"{entry.kernel} for {entry.target} {state} in the cache, and SPARSE_INDEXER_JIT=cached\n"
        f"  in: {', '.join(sorted(damaged) or map(str, all_roots()))}\n"
        f"  of {entry.kernel} there is: {', '.join(sorted(there)) or 'nothing'}\n"
        "  hint: unset SPARSE_INDEXER_JIT, to compile it here, or to fill the cache with "
        "`python -m sparse_indexer compile` of this very version"
    )
