# SPDX-License-Identifier: Apache-2.0
"""What needs two GPUs, on one: the second is another context; see jit_csrc/one_gpu_as_two.cc.

Launches, torch's too, are asked whether they are given memory of the other one.
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jit_support import needs_gxx

from sparse_indexer.jit import warmup
from sparse_indexer.jit.compilers import find_host_compiler

TESTS = Path(__file__).parent
# Of a pytest that runs this one; expandable segments are of no context.
OURS_ALONE = ("PYTEST_XDIST", "PYTEST_ADDOPTS", "PYTEST_CURRENT", "PYTORCH_ALLOC", "PYTORCH_CUDA_A")
MISTAKE = """
import torch
from sparse_indexer.ops.topk import topk
torch.cuda.device_count = lambda: 2
before = torch.ones(1000, device="cuda:0")  # no address of `a` ends in zeros: it would be none
a = torch.ones(1000, device="cuda:0")
b = torch.ones(1000, device="cuda:1")
print(a.sum().item(), b.sum().item(), torch.cuda.current_device())
storage = torch._C._construct_storage_from_data_pointer(a.data_ptr(), b.device, 4000)
b.set_(storage, 0, (1000,))
lens = torch.tensor([1000], dtype=torch.int32, device=b.device)
topk(b[None], lens, out=torch.empty(1, 64, dtype=torch.int32, device=b.device))
b.add_(1)
torch.cuda.synchronize(1)
"""


# Wraps a function of the C library, as others do that are preloaded.
WRAPPER = """
#include <clocale>
#include <cstdio>
#include <dlfcn.h>
extern "C" char* setlocale(int category, const char* locale) noexcept {
  auto next = reinterpret_cast<decltype(&setlocale)>(dlsym(RTLD_NEXT, "setlocale"));
  std::puts(next == setlocale ? "itself" : "the next one");
  return next == setlocale ? nullptr : next(category, locale);
}
"""
PROGRAM = '#include <clocale>\nint main() { return setlocale(LC_ALL, "C") == nullptr; }'


def compiled(source: Path, out: Path, *flags: str) -> Path:
    compiler = find_host_compiler()
    assert compiler is not None
    command = [*compiler.command, "-std=c++17", "-O2", str(source), *flags]
    subprocess.run([*command, "-ldl", "-lpthread", "-o", str(out)], check=True)
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("library") / "one_gpu_as_two.so"
    return compiled(TESTS / "jit_csrc" / "one_gpu_as_two.cc", out, "-shared", "-fPIC")


@pytest.fixture(scope="module")
def library(built: Path) -> Path:
    if not hasattr(ctypes.CDLL("libcuda.so.1"), "cuKernelGetParamInfo"):
        pytest.skip("needs a driver for CUDA 12.4")
    warmup("cuda:0")
    return built


@needs_gxx
def test_what_else_is_preloaded_finds_what_it_wraps(built: Path, tmp_path: Path) -> None:
    (tmp_path / "wrapper.cc").write_text(WRAPPER)
    (tmp_path / "program.cc").write_text(PROGRAM)
    wrapper = compiled(tmp_path / "wrapper.cc", tmp_path / "wrapper.so", "-shared", "-fPIC")
    program = compiled(tmp_path / "program.cc", tmp_path / "program")
    for order in ([wrapper], [built, wrapper], [wrapper, built]):
        preload = " ".join(map(str, order))
        done = subprocess.run(
            [program], env={"LD_PRELOAD": preload}, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (0, "the next one\n")


def run(library: Path, log: Path, *arguments: str) -> tuple[str, list[str]]:
    """Output of a Python that sees two GPUs, and the lines of the log."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(OURS_ALONE)}
    preload = " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
    environ |= {"LD_PRELOAD": preload, "ONE_GPU_AS_TWO": str(log)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=300
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    return output, log.read_text().splitlines()


@pytest.mark.gpu
def test_a_mistake_is_found(library: Path, tmp_path: Path) -> None:
    output, log = run(library, tmp_path / "log", "-c", MISTAKE)
    assert "1000.0 1000.0 0" in output
    *wrong, _ = log
    assert all(line.startswith("wrong: memory of cuda:0 on cuda:1: ") for line in wrong)
    assert any("topk" in line for line in wrong)  # as we launch
    assert any("elementwise" in line for line in wrong)  # as torch does


@pytest.mark.gpu
def test_all_that_needs_two_gpus(library: Path, tmp_path: Path) -> None:
    options = ["-q", "-m", "two_gpus", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    output, log = run(library, tmp_path / "log", "-m", "pytest", str(TESTS), *options)
    passed = re.search(r"(\d+) passed", output)
    assert passed, output
    assert int(passed[1]) >= 10
    assert "needs two GPUs" not in output
    assert [line for line in log if line.startswith("wrong")] == []
    (counted,) = re.findall(r"^(\d+) launches, (\d+) pointers$", "\n".join(log), re.MULTILINE)
    assert min(map(int, counted)) > 1000
