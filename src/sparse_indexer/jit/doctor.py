# SPDX-License-Identifier: Apache-2.0
"""What `doctor` says about building kernels here: compilers, cache, driver."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sparse_indexer.errors import JitError
from sparse_indexer.jit import hints
from sparse_indexer.jit.artifacts import is_cached
from sparse_indexer.jit.compilers import (
    Search,
    cupy_wheels,
    find_device_compiler,
    find_host_compiler,
    find_nvcc,
    find_nvrtc,
    is_program,
)
from sparse_indexer.jit.driver import driver_version
from sparse_indexer.jit.headers import HOMES
from sparse_indexer.jit.kernel import Kernel
from sparse_indexer.jit.parallel import max_jobs
from sparse_indexer.jit.places import read_only_note, roots, workspace
from sparse_indexer.jit.settings import VALUES, setting
from sparse_indexer.jit.targets import is_known, target_of

_FOLDERS = "SPARSE_INDEXER_CACHE_DIR"
_NOT_CACHED = (
    "its kernels are not all in the cache, and SPARSE_INDEXER_JIT=cached: unset that, or take a "
    "cache that `python -m sparse_indexer compile` of this very version has filled"
)


def why_no_kernels(kernels: Sequence[Kernel], capability: tuple[int, int]) -> str | None:
    """Why a GPU of this capability cannot have these kernels, with the fix; `None`: it can.

    Builds nothing: they are in the cache, or there are compilers that know such a GPU.
    """
    try:
        faults = ((capability, _device_fault(capability)), (None, _host_fault()))
        for where, fault in faults:
            if fault and not all(is_cached(kernel, where) for kernel in kernels):
                return fault
    except (JitError, ValueError) as error:
        return str(error)
    return None


def _device_fault(capability: tuple[int, int]) -> str | None:
    """Why no kernel can be compiled for such a GPU, with the fix."""
    if setting("SPARSE_INDEXER_JIT") == "cached":
        return _NOT_CACHED
    compiler = find_device_compiler().found
    if compiler is None:
        wish = setting("SPARSE_INDEXER_COMPILER")
        what = f"no {wish}, which SPARSE_INDEXER_COMPILER names" if wish else "no device compiler"
        return f"{what}: {hints.no_device_compiler(capability)}"
    if compiler.version == (0, 0):
        return f"{compiler.path} names no version"
    if not is_known(capability, compiler.version):
        target = target_of(capability, compiler.version)
        return f"{compiler.label}: {hints.architecture_hint(target, compiler.version)}"
    if compiler.name == "nvcc":
        return ": ".join(text for _, text in _nvcc_lines(find_nvcc())) or None
    return None


def _host_fault() -> str | None:
    if setting("SPARSE_INDEXER_JIT") == "cached":
        return _NOT_CACHED
    return None if find_host_compiler() else f"no C++ compiler: {hints.no_host_compiler()}"


def report(capabilities: Sequence[tuple[int, int]] = ()) -> list[tuple[str, str]]:
    """(subject, finding) lines, in the order in which a call needs them; starts processes.

    `capabilities` are those of the GPUs that are here.
    """
    device = {"NVRTC": find_nvrtc(), "nvcc": find_nvcc()}
    lines = [(name, _describe(search)) for name, search in device.items()]
    wheels = cupy_wheels()
    if len(wheels) > 1:
        both = f"{' and '.join(wheels)} are installed, which share files"
        lines.append(("CuPy", f"{both}: pip uninstall {' '.join(wheels)}, then install one again"))
    lines += _nvcc_lines(device["nvcc"])
    if not any(search.found for search in device.values()):
        fixes = [hints.no_device_compiler(cc) for cc in capabilities]
        lines += [("fix", fix) for fix in dict.fromkeys(fixes or [hints.no_device_compiler()])]
    lines += _host_lines()
    writable, read_only = roots()
    with workspace() as place:
        lines.append(("cache", place.fault or str(writable)))
    notes = {root: read_only_note(root) for root in read_only}
    lines += [("cache", f"{root}, {note}") for root, note in notes.items()]
    faults = [f"{root} is {note}" for root, note in notes.items() if note != "read-only"]
    for name, value in sorted(os.environ.items()):
        if name.startswith("SPARSE_INDEXER_") and value:
            fault = "; ".join(faults) if name == _FOLDERS else _fault(name, value)
            lines.append(("set", f"{name}={value}{fault and ': '}{fault}"))
        elif name in HOMES and value and not is_program(Path(value) / "bin/nvcc"):
            lines.append(("set", f"{name}={value}: expected a toolkit, with bin/nvcc"))
    lines.append(("compilers", f"at most {max_jobs()} at once, for cores and memory"))
    driver = driver_version()
    lines.append(("driver", f"for CUDA up to {driver[0]}.{driver[1]}" if driver else "none"))
    return lines


def _describe(search: Search) -> str:
    if search.found is None:
        return "not found; " + "; ".join(search.places)
    found = search.found
    if found.version == (0, 0):
        return f"unusable, `{found.path} --version` names no version"
    headers = ", ".join(map(str, found.include_dirs)) or "its own"
    return f"{found.version[0]}.{found.version[1]}, {found.path}; headers: {headers}"


def _fault(name: str, value: str) -> str:
    """What was expected of a variable of ours, if not this."""
    if name not in VALUES:
        return f"expected one of the names {', '.join((_FOLDERS, *VALUES))}"
    return "" if value in VALUES[name] else f"expected {' or '.join(map(repr, VALUES[name]))}"


def _nvcc_lines(search: Search) -> list[tuple[str, str]]:
    if search.found is None or os.environ.get("NVCC_CCBIN"):
        return []
    absent = [name for name in ("gcc", "g++") if shutil.which(name) is None]
    if not absent:
        return []
    text = f"unusable without {' and '.join(absent)}, not found on the PATH"
    return [("nvcc", text), ("fix", hints.NVCC_WITHOUT_GXX)]


def _host_lines() -> list[tuple[str, str]]:
    name = os.environ.get("CXX") or "g++"
    try:
        compiler = find_host_compiler()
    except ValueError as error:
        return [("g++", str(error))]
    if compiler is None:
        return [(name, "not found on the PATH"), ("fix", hints.no_host_compiler())]
    command = (*compiler.command, "--version")
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    first = (text.splitlines() or ["says nothing"])[0]
    ffi = importlib.metadata.version("apache-tvm-ffi")
    return [(name, f"{first}, {shutil.which(compiler.command[0])}"), ("tvm-ffi", ffi)]
