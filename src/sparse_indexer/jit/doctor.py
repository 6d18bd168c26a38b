# SPDX-License-Identifier: Apache-2.0
"""What `doctor` says about building kernels here: compilers, cache, driver."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess

from sparse_indexer.jit import hints
from sparse_indexer.jit.compilers import Search, find_host_compiler, find_nvcc, find_nvrtc
from sparse_indexer.jit.driver import driver_version
from sparse_indexer.jit.parallel import max_jobs
from sparse_indexer.jit.places import roots, usable_root


def report() -> list[tuple[str, str]]:
    """(subject, finding) lines, in the order in which a call needs them; starts processes."""
    device = {"NVRTC": find_nvrtc(), "nvcc": find_nvcc()}
    lines = [(name, _describe(search)) for name, search in device.items()]
    if not any(search.found for search in device.values()):
        lines.append(("fix", hints.NO_DEVICE_COMPILER))
    lines += _host_lines()
    writable, read_only = roots()
    usable = usable_root()
    state = "" if usable == writable else f", not writable: {usable or 'nothing'} instead"
    lines.append(("cache", f"{writable}{state}"))
    lines += [("cache", f"{root}, read-only") for root in read_only]
    names = ("SPARSE_INDEXER_JIT", "SPARSE_INDEXER_COMPILER", "SPARSE_INDEXER_CACHE_DIR")
    lines += [("set", f"{name}={os.environ[name]}") for name in names if os.environ.get(name)]
    lines.append(("compilers", f"at most {max_jobs()} at once, for cores and memory"))
    driver = driver_version()
    lines.append(("driver", f"for CUDA up to {driver[0]}.{driver[1]}" if driver else "none"))
    return lines


def _describe(search: Search) -> str:
    if search.found is None:
        return "not found; " + "; ".join(search.places)
    found = search.found
    headers = ", ".join(map(str, found.include_dirs)) or "its own"
    return f"{found.version[0]}.{found.version[1]}, {found.path}; headers: {headers}"


def _host_lines() -> list[tuple[str, str]]:
    compiler = find_host_compiler()
    name = os.environ.get("CXX") or "g++"
    if compiler is None:
        return [(name, "not found on the PATH"), ("fix", hints.NO_HOST_COMPILER)]
    command = (*compiler.command, "--version")
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    first = (text.splitlines() or ["says nothing"])[0]
    ffi = importlib.metadata.version("apache-tvm-ffi")
    return [(name, f"{first}, {shutil.which(compiler.command[0])}"), ("tvm-ffi", ffi)]
