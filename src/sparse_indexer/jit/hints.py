# SPDX-License-Identifier: Apache-2.0
"""What a compiler's output means, and the command that mends it."""

from __future__ import annotations

import os
import re

import torch

from sparse_indexer.jit.compilers import cupy_wheels, find_nvcc, find_nvrtc
from sparse_indexer.jit.places import OTHER_FOLDER
from sparse_indexer.jit.targets import capability_of, compilers_of, is_known

VOLTA_TORCH = "'torch>=2.8,<2.11'"
"""What pip installs that still has code for 7.0: builds for CUDA 12.8."""

INSTALL_GXX = "apt-get install g++ (dnf install gcc-c++)"
NO_HOST_COMPILER = f"{INSTALL_GXX}, or set CXX to a C++17 compiler"
NVCC_WITHOUT_GXX = f"{INSTALL_GXX}, or set NVCC_CCBIN to a compiler that nvcc supports"

NEWER_CPP_LIBRARY = (
    "the C++ compiler is newer than the libstdc++ that this Python has loaded: set CXX to an older "
    "one, or to that of the same environment (conda install gxx)"
)


def first_error(output: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = (
        line
        for line in lines
        if re.search(r"\b(error|fatal|unsupported|undefined (?:reference|symbol))\b", line, re.I)
    )
    return next(errors, lines[-1] if lines else "no output")


def no_host_compiler() -> str:
    """What to do where there is no C++ compiler."""
    if os.environ.get("CXX", "").strip():
        return "CXX names what is not there: unset it, to take g++, or set it to a C++17 compiler"
    return NO_HOST_COMPILER


def no_device_compiler(capability: tuple[int, int] | None = None) -> str:
    """What to install where there is no compiler, for GPUs of this capability or for any."""
    first, end = compilers_of(capability or (0, 0))
    nvcc = "toolkit that has bin/nvcc"
    if end <= (13, 0):
        return f"{_cuda_12(remove=False)}; or set CUDA_HOME to a CUDA 12 {nvcc}"
    if first >= (13, 0):
        return f"pip install 'sparse-indexer[cuda13]'; or set CUDA_HOME to a CUDA 13 {nvcc}"
    also = "(or [cuda13], for torch built with CUDA 13)"
    return f"pip install 'sparse-indexer[cuda12]' {also}; or set CUDA_HOME to a {nvcc}"


def hint_for(output: str, target: str, compiler: tuple[int, int] | None) -> str | None:
    """What to do about it, where that is known.

    `compiler` is the CUDA version of a device compiler, `None` for a host compiler.
    """
    if "No space left on device" in output:
        return f"free some space, or {OTHER_FOLDER}"
    if compiler is None:
        return _host_hint(output)
    if "CuPy cannot use NVRTC: [Errno" in output:
        return "CuPy needs a folder that can be written: set CUPY_CACHE_DIR to one"
    if "CuPy cannot use NVRTC" in output:
        fix = no_device_compiler(capability_of(target))
        return f"CuPy and NVRTC must be for one CUDA major: {fix}"
    if re.search(r"invalid value for --gpu-architecture|unsupported gpu arch", output, re.I):
        return architecture_hint(target, compiler)
    major = compiler[0]
    if re.search(r"(cannot|could not) open source file \"(cuda/std|nv/)", output):
        package = "nvidia-cuda-cccl-cu12" if major == 12 else "nvidia-cuda-cccl"
        return f"CUDA's C++ headers are missing: pip install '{package}=={major}.*'"
    if re.search(r"(cannot|could not) open source file \"cuda_", output):
        package = "nvidia-cuda-runtime-cu12" if major == 12 else "nvidia-cuda-runtime"
        return f"CUDA's headers are missing: pip install '{package}=={major}.*'"
    if re.search(r"Unsupported \.version|nvvm|cicc|bitcode version", output, re.I):
        return (
            "nvcc, nvvm and ptxas seem to be of different versions: install one toolkit, or the "
            "wheels nvidia-cuda-nvcc, nvidia-nvvm and nvidia-cuda-crt in one and the same version"
        )
    if re.search(r"host compiler|unsupported GNU version|gcc: (not found|No such file)", output):
        return f"nvcc needs a host compiler that it supports: {NVCC_WITHOUT_GXX}"
    return None


def architecture_hint(target: str, compiler: tuple[int, int]) -> str:
    """What to do about a compiler of this CUDA version that does not know `target`."""
    version, capability = f"CUDA {compiler[0]}.{compiler[1]}", capability_of(target)
    first, end = compilers_of(capability)
    what = f"{version} {'has dropped' if compiler >= end else 'does not know'} {target}"
    for name, search in (("nvrtc", find_nvrtc()), ("nvcc", find_nvcc())):
        other = search.found
        if other and other.version != compiler and is_known(capability, other.version):
            return f"{what}: set SPARSE_INDEXER_COMPILER={name}, to take {other.label}"
    if capability == (10, 1) and compiler >= end:
        return f"{what}, which it calls sm_110: compile for 11.0, where the driver is for CUDA 13"
    if compiler >= end:
        return f"{what}: install the CUDA 12 compiler, {_cuda_12(remove=True)}"
    if first >= (13, 0) and compiler < (13, 0):
        fix = "pip uninstall cupy-cuda12x && pip install 'sparse-indexer[cuda13]'"
        return f"{what}, CUDA 13 does: {fix}{_restored('cupy-cuda13x')}"
    extra = f"cuda{max(12, compiler[0])}"
    return f"{what}: update the compiler, pip install -U 'sparse-indexer[{extra}]'"


def _cuda_12(*, remove: bool) -> str:
    """To install the compiler of CUDA 12; a torch built for CUDA 13 needs the other."""
    torch_13 = (torch.version.cuda or "").startswith("13")
    fix = "pip install 'sparse-indexer[cuda12]'"
    if torch_13:
        fix += f" {VOLTA_TORCH}"
    fix += _restored("cupy-cuda12x")
    if torch_13:
        fix += ", as this torch is built for CUDA 13 and needs its NVRTC"
    if remove or torch_13:
        fix = f"pip uninstall cupy-cuda13x nvidia-cuda-nvrtc && {fix}"
    return fix


def _restored(wheel: str) -> str:
    """Its files again, if pip takes it for installed: they go with those of the other wheel."""
    again = f" && pip install --force-reinstall --no-deps {wheel}"
    return again if wheel in cupy_wheels() else ""


def _host_hint(output: str) -> str | None:
    if re.search(r"(-std=|std=c\+\+17)", output) and "unrecognized" in output:
        return f"this compiler is older than C++17: {NO_HOST_COMPILER}"
    if re.search(r"tvm/ffi/\S+: No such file|dlpack/\S+: No such file", output):
        return "tvm-ffi's headers are missing: pip install --force-reinstall apache-tvm-ffi"
    if re.search(r"fatal error: \w+: No such file", output):
        return f"the C++ standard library's headers are missing: {NO_HOST_COMPILER}"
    if re.search(r"undefined (reference|symbol)", output):
        return "define it in the host entry or in what that includes: nothing else is linked to it"
    if re.search(r"No such file or directory: |not found|[Cc]ould not find", output):
        return NO_HOST_COMPILER
    return None
