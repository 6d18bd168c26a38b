# SPDX-License-Identifier: Apache-2.0
"""Loading and launching with a driver that runs nothing: what it is asked for, in which order."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jit_support import CSRC, needs_gxx, run_python

from sparse_indexer.jit.headers import cuda_headers
from sparse_indexer.jit.kernel import SOURCES

# Runs in a process of its own, whose libcuda.so.1 is tests/jit_csrc/fake_cuda.cc.
SCRIPT = """
import ctypes, json, os, timeit
import tvm_ffi
from jit_support import pretend_cuda
import sparse_indexer.jit.loading as loading
from sparse_indexer.errors import JitError

cuda = ctypes.CDLL("libcuda.so.1")
cuda.fake_calls.restype = ctypes.c_char_p
cuda.fake_current.restype = ctypes.c_size_t
facts = {}

def record(name, call, *arguments, fail=""):
    cuda.fake_forget()
    os.environ["FAKE_CUDA_FAIL"] = fail
    try:
        call(*arguments)
        error = None
    except Exception as caught:
        error = f"{type(caught).__name__} {caught}"
    facts[name] = {
        "calls": cuda.fake_calls().decode().splitlines(),
        "current": cuda.fake_current(),
        "error": error,
    }

devices = [torch.device("cuda", i) for i in range(3)]
loading.device_artifact = lambda kernel, capability: loading.Stored(b"ELF.", None, {}, False)
torch.cuda.get_device_capability = lambda device: (9 - device.index, 0)
torch.cuda.device_count = lambda: 3
capturing = True
loading.forbids_loading = lambda device: capturing

record("capture", load, kernel, devices[0])
capturing = False
record("load fails", load, kernel, devices[0], fail="cuLibraryLoadData")
record("symbol missing", load, kernel, devices[0], fail="cuLibraryGetKernel")
record("load", load, kernel, devices[0])
record("load again", load, kernel, devices[0])
capturing = True
record("loaded before a capture", load, kernel, devices[0])
capturing = False
record("load on 1", load, kernel, devices[1])
record("no such device", load, kernel, devices[2])

entries = load(kernel, devices[0])
x, factor = torch.zeros(3, 4), torch.zeros(3)

def scale(rows=3, power=1, pdl=False, device=0, factor_device=None):
    a = pretend_cuda(x[:rows], device)
    b = pretend_cuda(factor[:rows], device if factor_device is None else factor_device)
    entries.scale(a, b, power, pdl, a)

facts["address"] = x.data_ptr()
record("launch", scale)
cuda.fake_set_current(100)
record("launch in its context", scale)
cuda.fake_set_current(101)
record("launch in another device's context", scale)
cuda.fake_set_current(200)
record("launch in another context of the device", scale)
record("other variant", lambda: scale(power=2))
record("pdl", lambda: scale(pdl=True))
record("pdl on 8.0", lambda: scale(pdl=True, device=1))
record("zero rows", lambda: scale(rows=0))
record("launch fails", scale, fail="cuLaunchKernelEx")
record("devices differ", lambda: scale(factor_device=1))
with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 1), 0x4D):
    record("stream", lambda: scale(device=1))

record("grid", lambda: entries.grid(0, 1, 1, 0))
record("grid y", lambda: entries.grid(0, 1, 65536, 0))
record("grid x", lambda: entries.grid(0, 1 << 31, 1, 0))
record("grid negative", lambda: entries.grid(0, -1, 1, 0))
record("cluster", lambda: entries.grid(0, 8, 1, 2))
record("cluster on 8.0", lambda: entries.grid(1, 8, 1, 2))
record("no such variant", lambda: entries.wrong(0))
facts["info"] = list(entries.info(0))

cuda.fake_set_current(100)
arguments = pretend_cuda(x), pretend_cuda(factor), 1, False, pretend_cuda(x)
call = entries.scale
facts["call_us"] = min(timeit.repeat(lambda: call(*arguments), number=2000, repeat=5)) / 2e-3
device = devices[0]
look_up = lambda: load(kernel, device).scale
facts["look_up_us"] = min(timeit.repeat(look_up, number=2000, repeat=5)) / 2e-3
print(json.dumps(facts))
"""

SYNC = """
import ctypes, os
from jit_support import pretend_cuda
entries = load(kernel, torch.device("cpu"))
entries.load("scale", 0, b"ELF.", ["scale_1"])
cuda = ctypes.CDLL("libcuda.so.1")
cuda.fake_calls.restype = ctypes.c_char_p
cuda.fake_forget()
x, factor = pretend_cuda(torch.zeros(3, 4)), pretend_cuda(torch.zeros(3))
entries.scale(x, factor, 1, False, x)
print(cuda.fake_calls().decode())
os.environ["FAKE_CUDA_FAIL"] = "cuStreamSynchronize"
try:
    entries.scale(x, factor, 1, False, x)
except RuntimeError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("fake")
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(CSRC / "fake_cuda.cc")], check=True)
    cache = {"SPARSE_INDEXER_CACHE_DIR": str(folder / "cache"), "SPARSE_INDEXER_JIT": ""}
    return {"LD_LIBRARY_PATH": str(folder), "SPARSE_INDEXER_SYNC": "", **cache}


@pytest.fixture(scope="module")
def facts(environ: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_python(SCRIPT, environ))
    return found


LAUNCH = "cuLaunchKernelEx scale_1 context 100 stream 0 grid 3 1 1 block 128 1 1 shared 16 first {}"


def launch_of(facts: dict[str, Any]) -> str:
    return LAUNCH.format(hex(facts["address"]))


@needs_gxx
def test_load(facts: dict[str, Any]) -> None:
    """In the primary context, all variants, all the shared memory, nothing left for later."""
    a_variant = ["cuKernelSetAttribute 8 231424", "cuKernelGetFunction", "cuFuncLoad"]
    assert facts["load"]["error"] is None
    assert facts["load"]["calls"] == [
        *("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent 100"),
        "cuLibraryLoadData ELF.",
        *("cuLibraryGetKernel scale_1", *a_variant),
        *("cuLibraryGetKernel scale_2", *a_variant),
        "cuCtxSetCurrent 0",
    ]
    assert facts["load again"]["calls"] == []
    assert "cuCtxSetCurrent 101" in facts["load on 1"]["calls"]
    assert facts["load on 1"]["error"] is None


@needs_gxx
def test_load_that_fails(facts: dict[str, Any]) -> None:
    assert facts["load fails"]["error"] == (
        "JitError cannot load scale on cuda:0: cuLibraryLoadData: CUDA_ERROR_INVALID_VALUE "
        "(invalid argument)"
    )
    assert facts["load fails"]["current"] == 0
    assert facts["symbol missing"]["error"] == (
        "JitError cannot load scale, variant scale_1, on cuda:0: cuLibraryGetKernel: "
        "CUDA_ERROR_INVALID_VALUE (invalid argument)"
    )
    assert "JitError cannot load scale on cuda:2: cuDeviceGet" in facts["no such device"]["error"]


@needs_gxx
def test_capture_of_what_is_not_loaded(facts: dict[str, Any]) -> None:
    assert facts["capture"]["calls"] == []
    assert facts["capture"]["error"] == (
        "JitError scale is not loaded on cuda:0, and a CUDA graph is being captured\n"
        "  hint: call sparse_indexer.jit.warmup('cuda:0') before the capture"
    )
    assert facts["loaded before a capture"] == {"calls": [], "current": 0, "error": None}


@needs_gxx
def test_launch_and_context(facts: dict[str, Any]) -> None:
    """The context that was current before is current after."""
    launch = launch_of(facts)
    assert facts["launch"]["calls"] == ["cuCtxSetCurrent 100", launch, "cuCtxSetCurrent 0"]
    own = facts["launch in its context"]
    assert (own["calls"], own["current"]) == ([launch], 100)
    other = facts["launch in another device's context"]
    assert other["calls"] == ["cuCtxSetCurrent 100", launch, "cuCtxSetCurrent 101"]
    assert other["current"] == 101
    green = facts["launch in another context of the device"]
    assert green["calls"] == [launch.replace("context 100", "context 200")]


@needs_gxx
def test_variants_attributes_and_streams(facts: dict[str, Any]) -> None:
    def launched(name: str) -> str:
        (call,) = [c for c in facts[name]["calls"] if c.startswith("cuLaunchKernelEx")]
        return str(call)

    assert "cuLaunchKernelEx scale_2 " in launched("other variant")
    assert " attribute 6=1 " in launched("pdl")
    assert "attribute" not in launched("pdl on 8.0")
    assert "attribute 4=2" in launched("cluster")
    assert "context 101 stream 0x4d" in launched("stream")
    assert "context 101 stream 0 " in launched("pdl on 8.0")


@needs_gxx
def test_zero_rows_launch_nothing(facts: dict[str, Any]) -> None:
    assert facts["zero rows"] == {"calls": [], "current": 200, "error": None}


@needs_gxx
def test_launch_that_fails(facts: dict[str, Any]) -> None:
    assert facts["launch fails"]["error"] == (
        "RuntimeError scale, variant scale_1, on cuda:0: cuLaunchKernelEx: "
        "CUDA_ERROR_INVALID_VALUE (invalid argument); grid [3, 1, 1], block [128, 1, 1], "
        "16 bytes of shared memory"
    )
    assert facts["no such variant"]["error"] == (
        "RuntimeError scale, variant wrong, on cuda:0: no such variant"
    )


@needs_gxx
def test_limits_of_a_grid(facts: dict[str, Any]) -> None:
    assert facts["grid"]["error"] is None
    at = "scale, variant scale_1, on cuda:0: expected a grid of"
    assert facts["grid y"]["error"] == f"ValueError {at} at most 65535 CTAs along y, got 65536"
    assert facts["grid x"]["error"] == (
        f"ValueError {at} at most 2147483647 CTAs along x, got 2147483648"
    )
    assert facts["grid negative"]["error"].endswith("along x, got -1")
    assert facts["cluster"]["error"] is None
    assert facts["cluster on 8.0"]["error"] == (
        "RuntimeError scale, variant scale_1, on cuda:1: clusters need compute capability 9.0"
    )


@needs_gxx
def test_tensors_of_two_devices(facts: dict[str, Any]) -> None:
    assert facts["devices differ"]["calls"] == []
    assert facts["devices differ"]["error"] == (
        "ValueError factor: expected [3] float32 on cuda:0, got [3] float32 on cuda:1"
    )


@needs_gxx
def test_what_an_entry_can_ask_of_a_device(facts: dict[str, Any]) -> None:
    assert facts["info"] == [90, 132]


@needs_gxx
def test_a_call_is_cheap(facts: dict[str, Any]) -> None:
    """Without a GPU, and with room for a slow machine: 0.9 us and 0.1 us were measured."""
    assert facts["call_us"] < 20
    assert facts["look_up_us"] < 5


@needs_gxx
def test_debug_mode_waits_for_each_kernel(environ: dict[str, str]) -> None:
    lines = run_python(SYNC, {**environ, "SPARSE_INDEXER_SYNC": "1"}).splitlines()
    assert lines[2:4] == ["cuStreamIsCapturing", "cuStreamSynchronize"]
    assert lines[-1].startswith(
        "scale, variant scale_1, on cuda:0: cuStreamSynchronize: CUDA_ERROR"
    )


LAYOUT = """
#include <cuda.h>
#include <cstddef>
#include "sparse_indexer/host/driver.h"
using namespace sparse_indexer;
#define SAME(ours, theirs) static_assert(int(ours) == int(theirs), #theirs)
SAME(sizeof(CudaLaunchConfig), sizeof(CUlaunchConfig));
SAME(offsetof(CudaLaunchConfig, grid), offsetof(CUlaunchConfig, gridDimX));
SAME(offsetof(CudaLaunchConfig, block), offsetof(CUlaunchConfig, blockDimX));
SAME(offsetof(CudaLaunchConfig, shared_bytes), offsetof(CUlaunchConfig, sharedMemBytes));
SAME(offsetof(CudaLaunchConfig, stream), offsetof(CUlaunchConfig, hStream));
SAME(offsetof(CudaLaunchConfig, attributes), offsetof(CUlaunchConfig, attrs));
SAME(offsetof(CudaLaunchConfig, num_attributes), offsetof(CUlaunchConfig, numAttrs));
SAME(sizeof(CudaLaunchAttribute), sizeof(CUlaunchAttribute));
SAME(offsetof(CudaLaunchAttribute, value), offsetof(CUlaunchAttribute, value));
SAME(kClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(kProgrammaticSerialization, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME(kStaticSharedBytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
SAME(kMaxDynamicSharedBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(kSmCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(kCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(kCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(kMaxSharedBytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
"""
HEADERS = [f for major in (12, 13) for f in cuda_headers(major) if (f / "cuda.h").is_file()]


@needs_gxx
@pytest.mark.skipif(not HEADERS, reason="needs cuda.h: pip install 'sparse-indexer[cuda12]'")
@pytest.mark.parametrize("headers", HEADERS, ids=str)
def test_declarations_are_those_of_cuda_h(headers: Path, tmp_path: Path) -> None:
    from tvm_ffi.libinfo import include_paths

    path = tmp_path / "layout.cc"
    path.write_text(LAYOUT)
    folders = [f"-I{folder}" for folder in (SOURCES / "include", headers, *include_paths())]
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", *folders, str(path)], check=True)
