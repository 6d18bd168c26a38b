# SPDX-License-Identifier: Apache-2.0
"""A kernel before it is compiled, its targets, and what is read from a compiler's output."""

import re

import numpy as np
import pytest
import torch
from jit_support import CSRC, scale_kernel

from sparse_indexer.errors import blame_argument
from sparse_indexer.jit import Kernel, hints
from sparse_indexer.jit.compilers import Search
from sparse_indexer.jit.hints import first_error, hint_for
from sparse_indexer.jit.kernel import SOURCES, all_kernels
from sparse_indexer.jit.parallel import max_jobs
from sparse_indexer.jit.resources import Resources, parse_resources, parse_warnings
from sparse_indexer.jit.targets import parse_arch, target_of, targets_of

EXPECTED = "capabilities: expected (first, last), each 10 * major + minor of 7.0 or later"


def test_unit() -> None:
    kernel = Kernel("topk", {"topk_512": "Topk<512, float>", "topk_1024": "Topk<1024, float>"})
    assert kernel.unit == (
        '#include "kernels/topk.cuh"\n'
        '#include "sparse_indexer/entry.cuh"\n'
        "SPARSE_INDEXER_ENTRY(topk_512, Topk<512, float>)\n"
        "SPARSE_INDEXER_ENTRY(topk_1024, Topk<1024, float>)\n"
    )
    assert kernel.host_source == SOURCES / "host" / "topk.cc"
    assert SOURCES in kernel.include_dirs


def test_names_are_c_identifiers() -> None:
    for word in ("top-k", "top k", "t\u00f6pk", "7", ""):
        with pytest.raises(ValueError, match=f"^name: expected a C identifier, got '{word}'$"):
            Kernel(word, {"a": "A"})
        with pytest.raises(ValueError, match=f"^variants: expected a C identifier, got '{word}'$"):
            Kernel("topk", {"a": "A", word: "A"})
    with pytest.raises(ValueError, match=r"^variants: expected at least one of topk, got none$"):
        Kernel("topk", {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": 7}, "name: expected a C identifier, got 7"),
        ({"variants": ["a"]}, "variants: expected a mapping of symbols to Configs, got a list"),
        ({"variants": {7: "A"}}, "variants: expected a C identifier, got 7"),
        ({"variants": {"a": None}}, "variants: expected Configs in C++, as str, got None"),
        ({"root": "here"}, "root: expected a pathlib.Path, got 'here'"),
        *(
            ({"capabilities": capabilities}, f"{EXPECTED}, got {capabilities!r}")
            for capabilities in [(100, 90), (9.0, 9.0), (90.0, 90.0), (9, 0), (8, 9), (90,), 90]
        ),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Kernel(**{"name": "topk", "variants": {"a": "A"}, **arguments})  # type: ignore[arg-type]


def test_a_flag_of_numpy_is_called_so() -> None:
    def op(force_last: bool) -> None: ...

    with pytest.raises(ValueError, match=r"^force_last: expected a Python bool, got a numpy bool"):
        blame_argument(TypeError(), op, {"force_last": np.True_})


def test_sources_of_a_test_kernel_come_before_the_library_s() -> None:
    assert scale_kernel().include_dirs[0] == CSRC


def test_kernels_of_the_library_have_their_files() -> None:
    for name, kernel in all_kernels().items():
        assert kernel.name == name
        assert (SOURCES / "kernels" / f"{name}.cuh").is_file()
        assert kernel.host_source.is_file()


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((7, 0), "sm_70"),
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120f"),
        ((12, 1), "sm_121a"),
    ],
)
def test_target_of_a_capability(capability: tuple[int, int], target: str) -> None:
    assert target_of(capability, (12, 9)) == target
    assert target_of(capability, (13, 0)) == target


def test_family_target_needs_a_new_compiler() -> None:
    assert target_of((12, 0), (12, 8)) == "sm_120a"


def test_arch_as_people_write_it() -> None:
    assert parse_arch("9.0", (12, 9)) == ((9, 0), "sm_90a")
    assert parse_arch(" 10.0a", (12, 9)) == ((10, 0), "sm_100a")
    assert parse_arch("12.0f", (12, 8)) == ((12, 0), "sm_120f")
    assert parse_arch("compute_75", (12, 9)) == ((7, 5), "compute_75")
    assert parse_arch("compute_120", (12, 9)) == ((12, 0), "compute_120")
    for text in (
        "sm_90",
        "compute_76",
        "compute_90a",
        "compute_7.5",
        "9",
        "9.0x",
        "",
        "7.0a",
        "9.0f",
        "9.9",
        "6.1",
        "09.0",
        "\u0669.0",
    ):
        with pytest.raises(ValueError, match=r"arch: expected compute capabilities like") as caught:
            parse_arch(text, (12, 9))
        assert "8.9, 9.0, 10.0, " in str(caught.value)
        assert f"`a` from 9.0 on, `f` from 10.0 on, got {text!r}" in str(caught.value)


def test_all_targets_that_a_gpu_takes() -> None:
    assert targets_of((8, 6), (12, 8)) == ["sm_86"]
    assert targets_of((12, 0), (12, 8)) == ["sm_120a", "sm_120f"]
    assert targets_of((12, 0), (12, 9)) == ["sm_120f", "sm_120a"]


def test_kernel_is_for_some_capabilities() -> None:
    kernel = Kernel("logits", {"logits": "Logits"}, capabilities=(90, 90))
    assert kernel.is_for((9, 0))
    assert not kernel.is_for((8, 9))
    assert not kernel.is_for((10, 0))


LOG = """\
nvrtc: warning: Architectures prior to '<compute/sm>_75' are deprecated and may be removed in a
ptxas warning : Value of threads per SM for entry a is out of range. .minnctapersm will be ignored
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 132 bytes smem
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas info    : Function properties for b
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 0 barriers
"""


def test_resources_and_warnings_of_a_log() -> None:
    assert parse_resources(LOG) == {"a": Resources(40, 20, 132), "b": Resources(14, 0, 0)}
    (warning,) = parse_warnings(LOG)
    assert "minnctapersm" in warning
    assert parse_resources("") == {}


@pytest.mark.parametrize(
    ("output", "target", "compiler", "hint"),
    [
        (
            "nvrtc: error: invalid value for --gpu-architecture (-arch)",
            "sm_70",
            (13, 0),
            "has dropped sm_70: install the CUDA 12 compiler, pip uninstall cupy-cuda13x nvidia-"
            "cuda-nvrtc && pip install 'sparse-indexer[cuda12]'",
        ),
        (
            "nvrtc: error: invalid value for --gpu-architecture (-arch)",
            "sm_88",
            (12, 9),
            "does not know sm_88, CUDA 13 does: pip uninstall cupy-cuda12x && pip install "
            "'sparse-indexer[cuda13]'",
        ),
        (
            "nvrtc: error: invalid value for --gpu-architecture (-arch)",
            "sm_110a",
            (12, 9),
            "does not know sm_110a, CUDA 13 does: pip uninstall cupy-cuda12x && pip install ",
        ),
        (
            "nvcc fatal   : Unsupported gpu architecture 'sm_101a'",
            "sm_101a",
            (13, 0),
            "has dropped sm_101a, which it calls sm_110: compile for 11.0",
        ),
        (
            "nvcc fatal   : Unsupported gpu architecture 'sm_103a'",
            "sm_103a",
            (12, 8),
            "does not know sm_103a: update the compiler, pip install -U 'sparse-indexer[cuda12]'",
        ),
        (
            "nvcc fatal   : Unsupported gpu architecture 'sm_100a'",
            "sm_100a",
            (12, 4),
            "CUDA 12.4 does not know sm_100a",
        ),
        (
            'a.cu(1): catastrophic error: cannot open source file "cuda/std/cstdint"',
            "sm_80",
            (12, 9),
            "pip install 'nvidia-cuda-cccl-cu12==12.*'",
        ),
        (
            'a.cu(1): catastrophic error: cannot open source file "cuda_fp16.h"',
            "sm_80",
            (13, 0),
            "pip install 'nvidia-cuda-runtime==13.*'",
        ),
        (
            "ptxas fatal   : Unsupported .version 8.8; current version is '8.5'",
            "sm_80",
            (12, 9),
            "of different versions",
        ),
        (
            "error: CuPy cannot use NVRTC: libnvrtc.so.13: cannot open shared object file",
            "sm_80",
            (12, 9),
            "must be for one CUDA major: pip install 'sparse-indexer[cuda12]'",
        ),
        (
            "error: CuPy cannot use NVRTC: [Errno 13] Permission denied: '/root'",
            "sm_80",
            (12, 9),
            "set CUPY_CACHE_DIR",
        ),
        (
            "sh: 1: gcc: not found",
            "sm_80",
            (12, 9),
            "apt-get install g++ (dnf install gcc-c++), or set NVCC_CCBIN",
        ),
        ("g++: error: unrecognized command-line option '-std=c++17'", "", None, "older than C++17"),
        ("a.cc:1: fatal error: tvm/ffi/any.h: No such file", "", None, "apache-tvm-ffi"),
        ("a.cc(1): error: something of our own", "sm_80", (12, 9), None),
    ],
)
def test_hints(
    output: str,
    target: str,
    compiler: tuple[int, int] | None,
    hint: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("find_nvrtc", "find_nvcc"):
        monkeypatch.setattr(hints, name, lambda: Search(None, ()))
    found = hint_for(output, target, compiler)
    assert (hint in found) if hint and found else hint == found


@pytest.mark.parametrize("cuda", [None, "12.8", "13.0"])
def test_a_torch_that_needs_the_other_compiler_is_changed_too(
    cuda: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(hints, "cupy_wheels", list)
    for name in ("find_nvrtc", "find_nvcc"):
        monkeypatch.setattr(hints, name, lambda: Search(None, ()))
    for text in (hints.architecture_hint("sm_70", (13, 0)), hints.no_device_compiler((7, 0))):
        assert "pip install 'sparse-indexer[cuda12]'" in text
        assert "[cuda13]" not in text
        assert ("'torch>=2.8,<2.11', as this torch is built for CUDA 13" in text) is (
            cuda == "13.0"
        )


@pytest.mark.parametrize(
    ("target", "compiler", "gone", "kept"),
    [
        ("sm_70", (13, 0), "cupy-cuda13x nvidia-cuda-nvrtc", "cupy-cuda12x"),
        ("sm_88", (12, 9), "cupy-cuda12x", "cupy-cuda13x"),
    ],
)
def test_a_wheel_whose_files_went_with_another_is_installed_again(
    target: str, compiler: tuple[int, int], gone: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip takes it for installed, and the extra does nothing."""
    monkeypatch.setattr(hints, "cupy_wheels", lambda: ["cupy-cuda12x", "cupy-cuda13x"])
    for name in ("find_nvrtc", "find_nvcc"):
        monkeypatch.setattr(hints, name, lambda: Search(None, ()))
    text = hints.architecture_hint(target, compiler)
    first, second, third = text.partition("pip")[2].split(" && pip")
    assert first == f" uninstall {gone}"
    assert second.startswith(" install 'sparse-indexer[cuda")
    assert third.startswith(f" install --force-reinstall --no-deps {kept}")


def test_what_to_install_knows_the_gpu() -> None:
    assert "[cuda12]' (or [cuda13]" in hints.no_device_compiler()
    assert "[cuda12]' (or [cuda13]" in hints.no_device_compiler((9, 0))
    assert "[cuda13]" not in hints.no_device_compiler((7, 0))
    assert "[cuda12]" not in hints.no_device_compiler((8, 8))


def test_first_error() -> None:
    output = "a.cu(1): warning: x\n\na.cu(2): error: identifier y is undefined\nz.cu(3): error: z\n"
    assert first_error(output) == "a.cu(2): error: identifier y is undefined"
    assert first_error("Killed\n") == "Killed"
    assert first_error("") == "no output"


def test_compilers_are_capped_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr("sparse_indexer.jit.parallel._available_memory", lambda: 9 << 30)
    assert max_jobs() == 4
    monkeypatch.setattr("sparse_indexer.jit.parallel._available_memory", lambda: 1 << 20)
    assert max_jobs() == 1
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("sparse_indexer.jit.parallel._available_memory", lambda: 1 << 40)
    assert max_jobs() == 2
