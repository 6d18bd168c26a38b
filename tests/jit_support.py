# SPDX-License-Identifier: Apache-2.0
"""What the tests of the kernel build share: a kernel, stand-ins for compilers, fresh processes."""

import ctypes
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.utils.dlpack import to_dlpack

from sparse_indexer.jit import Kernel
from sparse_indexer.jit.compilers import find_host_compiler, find_nvcc, find_nvrtc

CSRC = Path(__file__).parent / "jit_csrc"
VARIANTS = {"scale_1": "Scale<1>", "scale_2": "Scale<2>"}

NVRTC = find_nvrtc().found
NVCC = find_nvcc().found
needs_nvrtc = pytest.mark.skipif(
    NVRTC is None, reason="needs NVRTC: pip install 'sparse-indexer[cuda12]'"
)
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")
needs_gxx = pytest.mark.skipif(find_host_compiler() is None, reason="needs g++")


def scale_kernel(root: Path = CSRC) -> Kernel:
    """A new one: nothing is loaded yet."""
    return Kernel("scale", VARIANTS, root=root)


# Counts its calls in a file, takes its time, then does what the name of a file beside it says.
COMPILER = """\
#!/bin/sh
here=$(dirname "$0")
echo "$$ $*" >> "$here/calls"
if [ "$1" = --version ]; then echo "release 12.9, V12.9.86"; exit 0; fi
if [ -e "$here/slow" ]; then sleep "$(cat "$here/slow")"; fi
if [ -e "$here/fail_once" ]; then
    rm "$here/fail_once"
    echo "unit.cu(3): error: the first time goes wrong"
    exit 1
fi
if [ -e "$here/fail" ]; then cat "$here/fail"; exit 1; fi
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then out=$2; fi
    shift
done
if [ -e "$here/empty" ]; then : > "$out"; exit 0; fi
if [ -e "$here/nothing" ]; then exit 0; fi
echo "compiled by $$" > "$out"
"""


class FakeToolkit:
    """A CUDA_HOME whose nvcc is a shell script, and a g++ that is the same script."""

    def __init__(self, root: Path) -> None:
        self.home, self.bin = root, root / "bin"
        self.bin.mkdir(parents=True)
        (root / "include").mkdir()
        (root / "include/cuda_runtime_api.h").write_text("#define CUDART_VERSION  12090\n")
        for name in ("nvcc", "g++"):
            (self.bin / name).write_text(COMPILER)
            (self.bin / name).chmod(0o755)

    @property
    def environ(self) -> dict[str, str]:
        return {
            "CUDA_HOME": str(self.home),
            "CXX": str(self.bin / "g++"),
            "SPARSE_INDEXER_COMPILER": "nvcc",
        }

    @property
    def calls(self) -> list[str]:
        path = self.bin / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def order(self, what: str, text: str = "") -> None:
        (self.bin / what).write_text(text)


def use_fake_toolkit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeToolkit:
    fake = FakeToolkit(folder / "toolkit")
    for name, value in fake.environ.items():
        monkeypatch.setenv(name, value)
    return fake


def use_empty_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SPARSE_INDEXER_JIT", "SPARSE_INDEXER_COMPILER", "SPARSE_INDEXER_LINEINFO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", str(folder / "cache"))
    return folder / "cache"


PREAMBLE = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
from jit_support import scale_kernel
from sparse_indexer.jit import load
from sparse_indexer.jit.artifacts import device_artifact, host_artifact
kernel = scale_kernel()
"""


def start_python(code: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A fresh process that has a `kernel` and runs `code`."""
    text = PREAMBLE.format(tests=str(Path(__file__).parent)) + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", text],
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(code: str, environ: Mapping[str, str] | None = None) -> str:
    """What a fresh process prints, which has to succeed."""
    return finish(start_python(code, environ))


def finish(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, f"{out}\n{err}"
    return out


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Export:
    """A tensor of the CPU that says, in DLPack, that it is on a GPU."""

    def __init__(self, tensor: torch.Tensor, device: int) -> None:
        self.tensor, self.device = tensor, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device

    def __dlpack__(self, **_: object) -> object:
        capsule = to_dlpack(self.tensor)
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # The device is what follows the pointer to the data.
        device = address(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
        _Device.from_address(device).type, _Device.from_address(device).id = 2, self.device
        return capsule


class PretendCuda(torch.Tensor):
    """A tensor of the CPU that says, to Python and to host entries, that it is on a GPU.

    On one that no machine has, so that nothing can be launched there.
    """

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 63)

    def __tvm_ffi_object__(self) -> object:
        return pretend_cuda(self.as_subclass(torch.Tensor), self.device.index)


def pretend_cuda(tensor: torch.Tensor, device: int = 0) -> object:
    import tvm_ffi

    return tvm_ffi.from_dlpack(_Export(tensor, device))
