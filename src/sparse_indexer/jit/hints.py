# SPDX-License-Identifier: Apache-2.0
"""What a compiler's output means, and the command that mends it."""

from __future__ import annotations

import re

from sparse_indexer.jit.compilers import find_nvrtc
from sparse_indexer.jit.places import OTHER_FOLDER
from sparse_indexer.jit.settings import setting

NO_DEVICE_COMPILER = (
    "pip install 'sparse-indexer[cuda12]' (or [cuda13], for torch built with CUDA 13); "
    "or set CUDA_HOME to a toolkit that has bin/nvcc"
)
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
        return f"CuPy and NVRTC must be for one CUDA major: {NO_DEVICE_COMPILER}"
    if re.search(r"invalid value for --gpu-architecture|unsupported gpu arch", output, re.I):
        return _architecture_hint(target, compiler)
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


def _architecture_hint(target: str, compiler: tuple[int, int]) -> str:
    version = f"CUDA {compiler[0]}.{compiler[1]}"
    number = int(re.sub(r"\D", "", target) or 0)
    if number < 75 and compiler >= (13, 0):
        nvrtc = find_nvrtc().found
        if setting("SPARSE_INDEXER_COMPILER") == "nvcc" and nvrtc and nvrtc.version < (13, 0):
            return f"{version} has dropped {target}: unset SPARSE_INDEXER_COMPILER, to take NVRTC"
        return (
            f"{version} has dropped {target}: install the CUDA 12 compiler, "
            "pip uninstall cupy-cuda13x nvidia-cuda-nvrtc && pip install 'sparse-indexer[cuda12]'"
        )
    return (
        f"{version} does not know {target}: update the compiler, "
        f"pip install -U 'sparse-indexer[cuda{max(12, compiler[0])}]'"
    )


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
