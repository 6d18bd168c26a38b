# SPDX-License-Identifier: Apache-2.0
"""A kernel's two compiled files, from the cache or built: its cubin and its host module.

Both keys are hashes of contents, never of paths or times: an untouched tree copied elsewhere hits.
The cubin's source key covers every .h and .cuh of jit_csrc, the generated unit, the flags and the
target; the module's covers every .h, its .cc file, the flags, tvm-ffi's version and the machine.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from sparse_indexer.errors import JitError, mismatch
from sparse_indexer.jit import build, cache, hints
from sparse_indexer.jit.build import Built
from sparse_indexer.jit.cache import Entry, Stored
from sparse_indexer.jit.compilers import find_device_compiler, find_host_compiler
from sparse_indexer.jit.fingerprint import digest
from sparse_indexer.jit.kernel import SOURCES, Kernel
from sparse_indexer.jit.lock import lock
from sparse_indexer.jit.places import SCHEMA, all_roots, workspace
from sparse_indexer.jit.resources import parse_resources, parse_warnings
from sparse_indexer.jit.targets import targets_of

_log = logging.getLogger("sparse_indexer")
_MODES = ("auto", "cached", "rebuild")
_rebuilt: set[Entry] = set()  # in this process, which is often enough


def device_artifact(
    kernel: Kernel, capability: tuple[int, int], target: str | None = None
) -> Stored:
    """The cubin of `kernel` for GPUs of this capability.

    Args:
        target: instead of the one that the capability takes.

    Raises:
        JitError: it is not there and could not be built.
    """
    search = find_device_compiler()
    compiler = search.found
    version = compiler.version if compiler else (12, 9)
    targets = [target] if target else targets_of(capability, version)
    contents = [kernel.unit, *build.device_flags(), *_contents(kernel, (".h", ".cuh"))]
    entries = [
        Entry(
            name,
            kernel.name,
            "kernel.cubin",
            digest(SCHEMA, name, *contents),
            compiler and compiler.identity,
        )
        for name in targets
    ]

    def make(staging: Path, log: Path | None) -> Built:
        if compiler is None:
            title = f"{kernel.name} for {targets[0]}: there is no device compiler"
            raise build.missing(title, search.places, hints.NO_DEVICE_COMPILER)
        return build.compile_device(kernel, targets[0], compiler, staging, log)

    return _fetch(entries, make, compiler.label if compiler else "")


def host_artifact(kernel: Kernel) -> Stored:
    """The module of the host entry of `kernel`.

    Raises:
        JitError: it is not there and could not be built.
    """
    import tvm_ffi

    compiler, machine = find_host_compiler(), platform.machine()
    source = digest(
        *(SCHEMA, machine, tvm_ffi.__version__, *build.HOST_FLAGS),
        *_contents(kernel, (".h",)),
        _text(kernel.host_source),
    )
    entry = Entry(machine, kernel.name, "host.so", source, compiler and compiler.identity)

    def make(staging: Path, log: Path | None) -> Built:
        if compiler is None:
            title = f"the host entry of {kernel.name}: there is no C++ compiler"
            places = (f"tried {os.environ.get('CXX') or 'g++'} on the PATH",)
            raise build.missing(title, places, hints.NO_HOST_COMPILER)
        return build.compile_host(kernel, compiler, staging, log)

    return _fetch([entry], make, " ".join(compiler.command) if compiler else "")


def _fetch(
    entries: list[Entry], make: Callable[[Path, Path | None], Built], compiler: str
) -> Stored:
    """The first entry from the cache; else built and kept, as `SPARSE_INDEXER_JIT` allows.

    Where nothing can be built, any of them will do, whichever compiler it is from.
    """
    entry = entries[0]
    mode = os.environ.get("SPARSE_INDEXER_JIT") or "auto"
    if mode not in _MODES:
        raise mismatch("SPARSE_INDEXER_JIT", " or ".join(map(repr, _MODES)), repr(mode))
    rebuild = mode == "rebuild" and entry not in _rebuilt
    wanted = [entry]
    if mode == "cached" or entry.compiler is None:
        wanted += [other._replace(compiler=None) for other in entries]
    stored = None if rebuild else cache.find(*wanted)
    if stored:
        return stored
    if mode == "cached":
        raise _not_cached(entry)
    what = f"{entry.kernel} for {entry.target}"
    with workspace() as place:
        base = (place.root or place.staging) / SCHEMA
        name = f"{entry.kernel}-{entry.target}-{entry.source[:12]}"
        with lock(base / "locks" / f"{name}.lock", what):
            stored = None if rebuild else cache.find(entry)
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


def _not_cached(entry: Entry) -> JitError:
    there = set()
    for file in (file for root in all_roots() for file in cache.entries(root)):
        own = (file.name, file.parents[1].name) == (entry.file, entry.kernel)
        stored = cache.read(file.parent, file.name) if own else None
        if stored:
            target = file.parents[2].name
            other = " of other sources or flags" if target == entry.target else ""
            there.add(f"{target} by {stored.meta['built_by']}{other}")
    return JitError(
        f"{entry.kernel} for {entry.target} is not in the cache, and SPARSE_INDEXER_JIT=cached\n"
        f"  in: {', '.join(map(str, all_roots()))}\n"
        f"  of {entry.kernel} there is: {', '.join(sorted(there)) or 'nothing'}\n"
        "  hint: unset SPARSE_INDEXER_JIT, to compile it here, or to fill the cache with "
        "`python -m sparse_indexer compile` of this very version"
    )


def _contents(kernel: Kernel, suffixes: tuple[str, ...]) -> Iterable[str]:
    """Name and text of every source of these suffixes that a kernel may include."""
    for root in dict.fromkeys((kernel.root, SOURCES)):
        for path in sorted(root.rglob("*")):
            if path.suffix in suffixes and path.is_file():
                yield path.relative_to(root).as_posix()
                yield _text(path)


def _text(source: Path) -> str:
    """All of a source, in any encoding."""
    try:
        return source.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise JitError(f"cannot read the source {source}: {error.strerror}") from error
