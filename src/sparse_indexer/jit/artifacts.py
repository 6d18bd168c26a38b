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
from sparse_indexer.jit.places import SCHEMA, roots, workspace
from sparse_indexer.jit.resources import parse_resources, parse_warnings
from sparse_indexer.jit.targets import target_of

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
    if target is None:
        target = target_of(capability, compiler.version if compiler else (12, 9))
    source = digest(
        *(SCHEMA, target, kernel.unit, *build.device_flags()),
        *_contents(kernel, (".h", ".cuh")),
    )
    entry = Entry(target, kernel.name, "kernel.cubin", source, compiler and compiler.identity)

    def make(staging: Path, log: Path | None) -> Built:
        if compiler is None:
            title = f"{kernel.name} for {target}: there is no device compiler"
            raise build.missing(title, search.places, hints.NO_DEVICE_COMPILER)
        return build.compile_device(kernel, target, compiler, staging, log)

    return _fetch(entry, make, compiler.label if compiler else "")


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
        kernel.host_source.read_text(),
    )
    entry = Entry(machine, kernel.name, "host.so", source, compiler and compiler.identity)

    def make(staging: Path, log: Path | None) -> Built:
        if compiler is None:
            title = f"the host entry of {kernel.name}: there is no C++ compiler"
            places = (f"tried {os.environ.get('CXX') or 'g++'} on the PATH",)
            raise build.missing(title, places, hints.NO_HOST_COMPILER)
        return build.compile_host(kernel, compiler, staging, log)

    return _fetch(entry, make, " ".join(compiler.command) if compiler else "")


def _fetch(entry: Entry, make: Callable[[Path, Path | None], Built], compiler: str) -> Stored:
    """The entry from the cache; else built and kept, as `SPARSE_INDEXER_JIT` allows."""
    mode = os.environ.get("SPARSE_INDEXER_JIT") or "auto"
    if mode not in _MODES:
        raise mismatch("SPARSE_INDEXER_JIT", " or ".join(map(repr, _MODES)), repr(mode))
    rebuild = mode == "rebuild" and entry not in _rebuilt
    stored = None if rebuild else cache.find(entry)
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
    writable, read_only = roots()
    places = ", ".join(map(str, (writable, *read_only)))
    return JitError(
        f"{entry.kernel} for {entry.target} is not in the cache, and SPARSE_INDEXER_JIT=cached\n"
        f"  looked for: {entry.target}/{entry.kernel}/{entry.source}-{entry.compiler}\n"
        f"  in: {places}\n"
        "  hint: fill it with `python -m sparse_indexer compile`, by the same version and compiler"
    )


def _contents(kernel: Kernel, suffixes: tuple[str, ...]) -> Iterable[str]:
    """Name and text of every source of these suffixes that a kernel may include."""
    for root in dict.fromkeys((kernel.root, SOURCES)):
        for path in sorted(root.rglob("*")):
            if path.suffix in suffixes and path.is_file():
                yield path.relative_to(root).as_posix()
                yield path.read_text()
