# SPDX-License-Identifier: Apache-2.0
"""Which compilers are here: NVRTC or nvcc for devices, g++ for hosts.

The cache asks at every start which compiler it would use, so nothing here starts a process where
that can be avoided: a compiler is identified by fingerprints of its files, not by what it says of
itself. The one exception is an nvcc that is a script around an unknown toolkit, which is asked for
its version.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sparse_indexer.errors import mismatch
from sparse_indexer.jit.fingerprint import behind_script, digest, fingerprint, programs
from sparse_indexer.jit.headers import (
    HOMES,
    cuda_headers,
    cuda_version,
    version_files,
    wheel_folders,
)
from sparse_indexer.jit.settings import setting


class DeviceCompiler(NamedTuple):
    """What turns a unit into machine code."""

    name: str  # nvrtc or nvcc
    path: Path  # the library or the program
    version: tuple[int, int]  # of CUDA
    identity: str  # changes with its bytes, or its headers'
    include_dirs: tuple[Path, ...]  # CUDA's headers, where it does not find them by itself

    @property
    def label(self) -> str:
        """Name and version, for people."""
        return f"{self.name} {self.version[0]}.{self.version[1]}"


class HostCompiler(NamedTuple):
    """What turns a host entry into a module."""

    command: tuple[str, ...]  # the program and arguments that every call gets
    identity: str
    include_dirs: tuple[Path, ...]  # tvm-ffi's headers
    libraries: tuple[str, ...]  # all that a module may refer to


class Search(NamedTuple):
    """What was found, and where it was looked for, in words."""

    found: DeviceCompiler | None
    places: tuple[str, ...]


def find_device_compiler() -> Search:
    """NVRTC, else nvcc; `SPARSE_INDEXER_COMPILER` names the only one to take.

    Raises:
        ValueError: that names neither.
    """
    wish = setting("SPARSE_INDEXER_COMPILER")
    finders = {"nvrtc": find_nvrtc, "nvcc": find_nvcc}
    places: tuple[str, ...] = ()
    for name in [wish] if wish else finders:
        search = finders[name]()
        places += search.places
        if search.found:
            return Search(search.found, places)
    return Search(None, places)


def find_nvrtc() -> Search:
    """The NVRTC that CuPy would load."""
    if importlib.util.find_spec("cupy") is None:
        wheels = " and ".join(cupy_wheels())
        left = f", though pip lists {wheels}: the files went with another wheel" if wheels else ""
        return Search(None, (f"nvrtc: CuPy is not installed{left}",))
    try:
        from cuda import pathfinder
    except ImportError:
        return Search(None, ("nvrtc: cuda-pathfinder is not installed",))
    try:
        path = Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    except pathfinder.DynamicLibNotFoundError as error:
        return Search(None, (f"nvrtc: {' '.join(str(error).split())}",))
    major, minor = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(str(path)).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    headers = cuda_headers(major.value)
    files = [path, *sorted(path.parent.glob("libnvrtc-builtins.so*")), *version_files(headers)]
    identity = digest("nvrtc", *map(fingerprint, files))
    found = DeviceCompiler("nvrtc", path, (major.value, minor.value), identity, headers)
    return Search(found, (f"nvrtc: {path}",))


def cupy_wheels() -> list[str]:
    """Distributions of CuPy that pip lists; of two, which share files, one overwrote the other."""
    found = []
    for name in ("cupy-cuda12x", "cupy-cuda13x"):
        with suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.distribution(name)
            found.append(name)
    return found


def find_nvcc() -> Search:
    """The nvcc of CUDA_HOME or CUDA_PATH, the PATH, the nvcc wheel, or /usr/local/cuda."""
    homes = [Path(os.environ[name]) for name in HOMES if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    places = [home / "bin/nvcc" for home in homes]
    places += [Path(on_path)] if on_path else []
    places += [folder / "bin/nvcc" for folder in wheel_folders("cu13", "cuda_nvcc")]
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    tried = (f"nvcc: {', '.join(map(str, places))}{'' if on_path else ', the PATH'}",)
    path = next(filter(is_program, places), None)
    if path is None:
        return Search(None, tried)
    program = behind_script(path.resolve())
    root = program.parent.parent
    includes = [root / "include", *sorted(root.glob("targets/*/include"))]
    version = next(filter(None, map(cuda_version, includes)), None)
    own, text = version is not None, ""
    if version is None:
        text = _output_of(str(path), "--version")
        release = re.search(r"release (\d+)\.(\d+)", text)
        version = (int(release[1]), int(release[2])) if release else (0, 0)
    headers = () if own else cuda_headers(version[0])
    parts = [path, program, root / "bin/ptxas", root / "nvvm/bin/cicc", root / "bin/nvcc.profile"]
    parts += [*version_files((*includes, *(i / "cccl" for i in includes), *headers))]
    flags = (os.environ.get(f"NVCC_{place}_FLAGS", "") for place in ("PREPEND", "APPEND"))
    prints = (fingerprint(part) for part in parts if part.is_file())
    identity = digest("nvcc", text, *flags, *prints)
    return Search(DeviceCompiler("nvcc", path, version, identity, headers), tried)


def host_compiler_command() -> tuple[str, ...]:
    """`$CXX`, `ccache g++` for example, else g++.

    Raises:
        ValueError: CXX is no command line.
    """
    wish = os.environ.get("CXX") or "g++"
    try:
        return tuple(shlex.split(wish)) or ("g++",)
    except ValueError as error:  # a quotation without an end
        raise mismatch("CXX", "a command, quoted as in a shell", repr(wish)) from error


def find_host_compiler() -> HostCompiler | None:
    """What `host_compiler_command` names; `None` if it is not there.

    Raises:
        ValueError: CXX is no command line.
    """
    command = host_compiler_command()
    if shutil.which(command[0]) is None:
        return None
    from tvm_ffi.libinfo import find_libtvm_ffi, include_paths

    identity = digest(*(part for word in command for part in programs(word) or (word,)))
    folders = tuple(Path(p) for p in include_paths())
    return HostCompiler(command, identity, folders, (find_libtvm_ffi(), "-ldl", "-lpthread"))


def is_program(path: Path) -> bool:
    """Whether it can be started."""
    return os.access(path, os.X_OK) and path.is_file()


def _output_of(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return result.stdout
