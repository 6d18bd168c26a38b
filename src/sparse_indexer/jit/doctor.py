# SPDX-License-Identifier: Apache-2.0
"""What `doctor` says about building kernels here: compilers, cache, driver."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

from sparse_indexer.jit import hints
from sparse_indexer.jit.compilers import (
    Search,
    find_host_compiler,
    find_nvcc,
    find_nvrtc,
    is_program,
)
from sparse_indexer.jit.driver import driver_version
from sparse_indexer.jit.headers import HOMES
from sparse_indexer.jit.parallel import max_jobs
from sparse_indexer.jit.places import read_only_note, roots, workspace
from sparse_indexer.jit.settings import VALUES

_FOLDERS = "SPARSE_INDEXER_CACHE_DIR"


def report() -> list[tuple[str, str]]:
    """(subject, finding) lines, in the order in which a call needs them; starts processes."""
    device = {"NVRTC": find_nvrtc(), "nvcc": find_nvcc()}
    lines = [(name, _describe(search)) for name, search in device.items()]
    lines += _nvcc_lines(device["nvcc"])
    if not any(search.found for search in device.values()):
        lines.append(("fix", hints.NO_DEVICE_COMPILER))
    lines += _host_lines()
    writable, read_only = roots()
    with workspace() as place:
        lines.append(("cache", place.fault or str(writable)))
    notes = {root: read_only_note(root) for root in read_only}
    lines += [("cache", f"{root}, {note}") for root, note in notes.items()]
    faults = [place.fault] if place.fault else []
    faults += [f"{root} is {note}" for root, note in notes.items() if note != "read-only"]
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
        return [(name, "not found on the PATH"), ("fix", hints.NO_HOST_COMPILER)]
    command = (*compiler.command, "--version")
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    first = (text.splitlines() or ["says nothing"])[0]
    ffi = importlib.metadata.version("apache-tvm-ffi")
    return [(name, f"{first}, {shutil.which(compiler.command[0])}"), ("tvm-ffi", ffi)]
