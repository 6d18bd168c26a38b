# SPDX-License-Identifier: Apache-2.0
"""The real compilers: both make machine code for every target, and fail with a useful word."""

import os
import re
import struct
from pathlib import Path

import pytest
import torch
from jit_support import (
    NVCC,
    NVRTC,
    VARIANTS,
    needs_gxx,
    needs_nvcc,
    needs_nvrtc,
    run_python,
    scale_kernel,
    use_empty_cache,
)

from sparse_indexer.errors import JitError
from sparse_indexer.jit import Kernel, compilers, load
from sparse_indexer.jit.artifacts import device_artifact, host_artifact
from sparse_indexer.jit.commands import compile_kernels
from sparse_indexer.jit.kernel import SOURCES, all_kernels

TARGETS = {
    (7, 0): "sm_70",
    (7, 5): "sm_75",
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120f",
    (12, 1): "sm_121a",
}
# Bytes at most: of the warpgroup that selects, which has few registers.
SPILLS = {"candidate_topk_32": 560, "candidate_topk_64": 128}
VOLTA = pytest.param(
    (7, 0),
    marks=pytest.mark.skipif(
        NVRTC is None or NVRTC.version >= (13, 0), reason="needs the NVRTC of CUDA 12"
    ),
)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_empty_cache(tmp_path, monkeypatch)


def check_elf(data: bytes) -> None:
    """All that its headers promise is there: both tables, and what is in its sections."""
    assert data[:5] == b"\x7fELF\2"
    programs, sections = struct.unpack_from("<QQ", data, 32)
    size_p, count_p, size_s, count_s = struct.unpack_from("<4H", data, 54)
    ends = [programs + size_p * count_p, sections + size_s * count_s]
    for start in range(sections, ends[1], size_s):
        (kind,) = struct.unpack_from("<I", data, start + 4)
        offset, size = struct.unpack_from("<QQ", data, start + 24)
        ends.append(0 if kind == 8 else offset + size)  # 8: without bytes in the file
    assert max(ends) == len(data)


def check_cubin(cubin: bytes, target: str) -> None:
    """An ELF for NVIDIA's GPUs with our symbols and this architecture."""
    check_elf(cubin)
    assert struct.unpack_from("<H", cubin, 18) == (190,)
    for symbol in VARIANTS:
        assert f".text.{symbol}\0".encode() in cubin
    (flags,) = struct.unpack_from("<I", cubin, 48)
    number = int(re.sub(r"\D", "", target))
    assert number in (flags & 0xFF, flags >> 8 & 0xFF)
    assert b".target sm_" not in cubin  # machine code only, no PTX


@needs_nvrtc
@pytest.mark.parametrize("capability", [VOLTA, *list(TARGETS)[1:]])
def test_nvrtc(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", "nvrtc")
    stored = device_artifact(scale_kernel(), capability)
    assert stored.meta["target"] == TARGETS[capability]
    check_cubin(stored.data, TARGETS[capability])
    assert set(stored.meta["resources"]) == set(VARIANTS)
    assert not stored.meta["warnings"]


@needs_nvcc
@pytest.mark.parametrize("capability", list(TARGETS)[1:])
def test_nvcc(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", "nvcc")
    stored = device_artifact(scale_kernel(), capability)
    check_cubin(stored.data, TARGETS[capability])
    assert set(stored.meta["resources"]) == set(VARIANTS)
    assert stored.meta["built_by"].startswith("nvcc ")


@pytest.mark.parametrize(
    ("compiler", "capability"),
    [
        pytest.param("nvrtc", (7, 5), marks=needs_nvrtc),
        pytest.param("nvcc", (7, 5), marks=needs_nvcc),
        pytest.param("nvrtc", *VOLTA.values, marks=VOLTA.marks),
    ],
)
def test_ptx_where_it_is_named(
    compiler: str, capability: tuple[int, int], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the driver of a newer GPU, in the cache beside the machine code of the same number."""
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", compiler)
    target = f"compute_{capability[0]}{capability[1]}"
    stored = device_artifact(scale_kernel(), capability, target)
    assert f".target sm_{capability[0]}{capability[1]}".encode() in stored.data
    for symbol in VARIANTS:
        assert f".visible .entry {symbol}(".encode() in stored.data
    assert stored.data.rstrip(b"\n").endswith(b"}")  # a text, without NVRTC's zero at its end
    assert stored.path is not None
    assert stored.path.relative_to(root / "v1" / target / "scale").name == "kernel.ptx"
    assert not device_artifact(scale_kernel(), capability, target).fresh
    check_cubin(device_artifact(scale_kernel(), capability).data, TARGETS[capability])


@pytest.fixture(scope="module")
def host_entries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that keeps what both compilers of kernels have in common."""
    return tmp_path_factory.mktemp("shared")


@pytest.mark.parametrize(
    ("compiler", "capability"),
    [
        *(pytest.param("nvrtc", cc, marks=needs_nvrtc) for cc in TARGETS if cc != (7, 0)),
        pytest.param("nvrtc", *VOLTA.values, marks=VOLTA.marks),
        *(pytest.param("nvcc", cc, marks=needs_nvcc) for cc in TARGETS if cc != (7, 0)),
    ],
)
def test_every_kernel_of_the_library(
    compiler: str,
    capability: tuple[int, int],
    host_entries: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a warning or a spill (but see `SPILLS`), by both compilers, for what it is for."""
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", compiler)
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", str(host_entries))
    kernels = {name: k for name, k in all_kernels().items() if k.is_for(capability)}
    outcomes = compile_kernels("{}.{}".format(*capability), list(kernels.values()))
    assert [(o.kernel, o.target, o.error) for o in outcomes if o.error] == []
    made = {o.kernel: o for o in outcomes if o.target == TARGETS[capability]}
    assert made.keys() == kernels.keys()
    for name, outcome in made.items():
        assert set(outcome.resources) == set(kernels[name].variants)
        assert not outcome.warnings
        for symbol, used in outcome.resources.items():
            assert used.spill_bytes <= SPILLS.get(symbol, 0), symbol


@needs_nvcc
@pytest.mark.skipif(NVCC is None or NVCC.version < (13, 0), reason="needs CUDA 13")
def test_volta_with_cuda_13(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", "nvcc")
    with pytest.raises(JitError, match="cannot build scale for sm_70, with nvcc 13") as caught:
        device_artifact(scale_kernel(), (7, 0))
    hint = "install the CUDA 12 compiler, pip uninstall"
    if NVRTC is not None and NVRTC.version < (13, 0):
        hint = f"set SPARSE_INDEXER_COMPILER=nvrtc, to take {NVRTC.label}"
    assert f"has dropped sm_70: {hint}" in str(caught.value)


def write_kernel(folder: Path, text: str) -> Kernel:
    (folder / "kernels").mkdir(exist_ok=True)
    (folder / "kernels/odd.cuh").write_text(text)
    return Kernel("odd", {"odd": "Odd<1, 2>"}, root=folder)


ODD = """
struct OddParams { float* x; };
template <int A, int B>
struct Odd {
  static constexpr int kThreads = 32, kMinBlocks = 1;
  using Params = OddParams;
  static __device__ void run(const Params& p) { BODY }
};
"""
both = pytest.mark.parametrize(
    "compiler", [pytest.param("nvrtc", marks=needs_nvrtc), pytest.param("nvcc", marks=needs_nvcc)]
)


@both
@pytest.mark.parametrize(
    "headers", ["cuda_fp16.h", "cuda_fp8.h", "cuda/std/cstdint", "sparse_indexer/cstdint.h"]
)
def test_headers(
    compiler: str, headers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of CUDA, of libcu++ and our own, which has the same integers in either order."""
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", compiler)
    lines = [
        f"#include <{headers}>",
        '#include "sparse_indexer/cstdint.h"',
        f"#include <{headers}>",
    ]
    body = "int64_t i = threadIdx.x; p.x[i] = sizeof(int64_t) == 8 && sizeof(uint8_t) == 1;"
    kernel = write_kernel(tmp_path, "\n".join(lines) + ODD.replace("BODY", body))
    assert device_artifact(kernel, (8, 0)).fresh


@both
def test_current_folder_decides_nothing(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", compiler)
    monkeypatch.chdir(tmp_path)
    names = ["kernels/scale.cuh", "kernels/scale.h", "kernels/scale.cu", "host/scale.cc"]
    library = (path for path in SOURCES.joinpath("include").rglob("*") if path.is_file())
    names += [path.relative_to(SOURCES / "include").as_posix() for path in library]
    for path in (tmp_path / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#error of the current folder\n")
    assert device_artifact(scale_kernel(), (8, 0)).fresh
    assert host_artifact(scale_kernel()).fresh


@both
def test_includes_from_anywhere(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found where the compiler finds them: what was compiled is what counts."""
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", compiler)
    (tmp_path / "mine/include").mkdir(parents=True)
    (tmp_path / "outside.inc").write_text("#define OUTSIDE 1\n")
    text = '#include "../../outside.inc"\n#include "beside.hpp"\n#include <types.hh>\n'
    text += ODD.replace("BODY", "p.x[0] = OUTSIDE + BESIDE + TYPES;")
    kernel = write_kernel(tmp_path / "mine", text)
    wrong = "#error the wrong one\n"
    files = {
        "kernels/beside.hpp": "#define BESIDE 1\n",
        "beside.hpp": wrong,
        "include/types.hh": "#define TYPES 1\n",
        "kernels/types.hh": wrong,
    }
    for name, content in files.items():
        (tmp_path / "mine" / name).write_text(content)
    first = device_artifact(kernel, (8, 0))
    files = {name: content.replace(" 1", " 2") for name, content in files.items()}
    for path in (tmp_path / "outside.inc", *(tmp_path / "mine" / name for name in files)):
        counts = "1" in path.read_text()
        path.write_text(path.read_text().replace(" 1", " 2") + "// changed\n")
        stored = device_artifact(kernel, (8, 0))
        assert stored.fresh is counts
        assert (stored.data != first.data) or not counts
        first = stored


@both
def test_error_in_a_kernel(
    compiler: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", compiler)
    kernel = write_kernel(tmp_path, ODD.replace("BODY", "p.x[0] = nowhere;"))
    with pytest.raises(JitError) as caught:
        device_artifact(kernel, (9, 0))
    first, command, log = str(caught.value).splitlines()
    assert first.startswith(f"cannot build odd for sm_90a, with {compiler} ")
    assert 'odd.cuh(7): error: identifier "nowhere" is undefined' in first
    assert "-arch=sm_90a" in command
    path = Path(log.removeprefix("  log: "))
    assert path.is_relative_to(root)
    text = path.read_text()
    assert 'identifier "nowhere" is undefined' in text
    assert "SPARSE_INDEXER_ENTRY(odd, Odd<1, 2>)" in text


@both
def test_shared_functions_and_generic_lambdas(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", compiler)
    shared = "constexpr int twice(int x) { return 2 * x; }\n"
    body = "auto set = [&](auto value) { p.x[twice(A + threadIdx.x)] = value; }; set(1); set(2.0f);"
    kernel = write_kernel(tmp_path, shared + ODD.replace("BODY", body))
    assert device_artifact(kernel, (8, 0)).fresh


@both
def test_params_are_limited(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", compiler)
    text = ODD.replace("float* x;", "float x[1025];").replace("BODY", "")
    with pytest.raises(JitError, match="odd: Params exceed 4 KB"):
        device_artifact(write_kernel(tmp_path, text), (8, 0))


@both
def test_floats_are_exact(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No fast math: a division is a division, and subnormals stay."""
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", compiler)
    body = """
#if defined(__FAST_MATH__) || defined(__CUDA_FTZ) && __CUDA_FTZ
#error fast math
#endif
    """
    kernel = write_kernel(tmp_path, ODD.replace("BODY", body + "p.x[0] = p.x[1] / p.x[2];"))
    assert device_artifact(kernel, (8, 0)).fresh


@both
def test_machine_code_is_reproducible(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", compiler)
    first = device_artifact(scale_kernel(), (8, 0))
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", str(tmp_path / "another"))
    second = device_artifact(scale_kernel(), (8, 0))
    assert second.fresh
    assert first.data == second.data


@needs_nvrtc
def test_missing_libcu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an install: CUDA's headers without those of libcu++."""
    (runtime,) = [f for f in NVRTC.include_dirs if (f / "cuda_fp16.h").is_file()]  # type: ignore[union-attr]
    if (runtime / "cuda/std/cstdint").is_file():
        pytest.skip("this toolkit has both in one folder")
    monkeypatch.setattr(compilers, "cuda_headers", lambda major: (runtime,))
    kernel = write_kernel(tmp_path, "#include <cuda/std/cstdint>" + ODD.replace("BODY", ""))
    with pytest.raises(JitError, match="cannot open source file") as caught:
        device_artifact(kernel, (8, 0))
    assert "hint: CUDA's C++ headers are missing: pip install 'nvidia-cuda-cccl" in str(
        caught.value
    )


def test_no_device_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither CuPy nor nvcc: what was tried, and what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(compilers, "cupy_wheels", list)
    monkeypatch.setenv("CUDA_HOME", "/nonexistent/cuda")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(JitError) as caught:
        device_artifact(scale_kernel(), (9, 0))
    lines = str(caught.value).splitlines()
    assert lines[0] == "cannot build scale for sm_90a: there is no device compiler"
    assert lines[1] == "  nvrtc: CuPy is not installed"
    assert lines[2].startswith("  nvcc: /nonexistent/cuda/bin/nvcc, ")
    assert lines[2].endswith("/usr/local/cuda/bin/nvcc, the PATH")
    assert "pip install 'sparse-indexer[cuda12]'" in lines[3]


def test_wished_compiler_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", "nvrtc")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(compilers, "cupy_wheels", list)
    search = compilers.find_device_compiler()
    assert search.found is None
    assert search.places == ("nvrtc: CuPy is not installed",)
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", "clang")
    with pytest.raises(ValueError, match="SPARSE_INDEXER_COMPILER: expected 'nvrtc' or 'nvcc'"):
        compilers.find_device_compiler()


@needs_nvrtc
def test_home_that_cannot_be_written(tmp_path: Path) -> None:
    """CuPy wants a folder below it, in which nothing of ours is kept."""
    code = """
    import os
    before = dict(os.environ)
    print(device_artifact(kernel, (9, 0)).fresh, dict(os.environ) == before)
    """
    environ = {"HOME": "/dev/null", "TMPDIR": str(tmp_path), "SPARSE_INDEXER_COMPILER": "nvrtc"}
    assert run_python(code, environ) == "True True\n"
    assert [f.name for f in tmp_path.glob("sparse_indexer-*/*")] == ["cupy"]
    own = {**environ, "CUPY_CACHE_DIR": str(tmp_path / "own"), "SPARSE_INDEXER_JIT": "rebuild"}
    assert run_python(code, own) == "True True\n"
    assert (tmp_path / "own").is_dir()


@both
def test_source_that_is_not_utf_8(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", compiler)
    kernel, text = write_kernel(tmp_path, ""), ODD.replace("BODY", "BODY  // caf\u00e9\n")
    path = tmp_path / "kernels/odd.cuh"
    path.write_bytes(text.replace("BODY", "p.x[0] = 1;").encode("latin-1"))
    assert device_artifact(kernel, (8, 0)).fresh
    path.write_bytes(text.replace("BODY", "p.x[0] = nowhere;").encode("latin-1"))
    with pytest.raises(JitError, match='identifier "nowhere" is undefined'):
        device_artifact(kernel, (8, 0))


def test_kernel_without_its_host_entry(tmp_path: Path) -> None:
    path = re.escape(str(tmp_path / "host/odd.cc"))
    with pytest.raises(JitError, match=f"^cannot read the source {path}: No such file"):
        host_artifact(write_kernel(tmp_path, ""))


@pytest.mark.parametrize("command", ["g++ '-O2", 'g++ "-O2', "g++ \\"])
def test_quotation_without_an_end(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", command)
    message = re.escape(f"CXX: expected a command, quoted as in a shell, got {command!r}")
    with pytest.raises(ValueError, match=f"^{message}$"):
        host_artifact(scale_kernel())


@pytest.mark.parametrize(
    ("wish", "tried", "hint"),
    [("/nonexistent/c++", "/nonexistent/c++", "unset it"), (None, "g++", "apt-get install g++")],
)
def test_no_host_compiler(
    wish: str | None, tried: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if wish:
        monkeypatch.setenv("CXX", wish)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(JitError) as caught:
        host_artifact(scale_kernel())
    lines = str(caught.value).splitlines()
    assert lines[0] == "cannot build the host entry of scale: there is no C++ compiler"
    assert lines[1] == f"  tried {tried} on the PATH"
    assert hint in lines[2]


def write_host(folder: Path, text: str) -> Kernel:
    (folder / "host").mkdir()
    path = folder / "host/odd.cc"
    path.write_text(f'#include "sparse_indexer/host/launch.h"\n{text}')
    return Kernel("odd", {"odd": "Odd"}, root=folder)


@needs_gxx
def test_function_that_is_nowhere(tmp_path: Path) -> None:
    """Told when it is compiled, not by the end of the process that calls it."""
    text = "int nowhere(int);\nint odd(int x) { return nowhere(x); }\n"
    text += "SPARSE_INDEXER_MODULE();\nSPARSE_INDEXER_EXPORT(odd);\n"
    with pytest.raises(JitError, match=r"undefined reference to `nowhere\(int\)") as caught:
        host_artifact(write_host(tmp_path, text))
    assert "hint: define it in the host entry" in str(caught.value)


@needs_gxx
@pytest.mark.parametrize(
    ("exports", "macro"),
    [
        ("SPARSE_INDEXER_MODULE();", "EXPORT(odd)"),
        ("SPARSE_INDEXER_EXPORT(odd);", "MODULE()"),
        ("", "MODULE()"),
    ],
)
def test_forgotten_export(exports: str, macro: str, tmp_path: Path) -> None:
    kernel = write_host(tmp_path, f"int odd(int x) {{ return x; }}\n{exports}\n")
    hint = re.escape(f"hint: add SPARSE_INDEXER_{macro}; at the end of {kernel.host_source}")
    with pytest.raises(JitError, match=f"(?s)^cannot load the host entry of odd: .*{hint}$"):
        load(kernel, torch.device("cpu"))


@needs_gxx
def test_launcher_of_the_host_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "ccache"
    launcher.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/calls\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CXX", "ccache g++")
    assert host_artifact(scale_kernel()).meta["built_by"] == "ccache g++"
    assert (tmp_path / "calls").read_text() == "g++\n"
    monkeypatch.setenv("CXX", "no-ccache g++")
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", str(tmp_path / "another"))
    with pytest.raises(JitError, match="\n  tried no-ccache on the PATH\n"):
        host_artifact(scale_kernel())


@needs_gxx
def test_old_host_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "g++"
    old.write_text(
        "#!/bin/sh\necho \"g++: error: unrecognized command line option '-std=c++17'\"; exit 1"
    )
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(
        JitError, match=r"(?s)cannot build the host entry of scale, with .*older than C"
    ):
        host_artifact(scale_kernel())


HIT = """
import time
events = []
names = ("subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "fcntl.", "os.rename")
sys.addaudithook(lambda name, _: events.append(name) if name.startswith(names) else None)
import tvm_ffi
start = time.perf_counter()
stored = device_artifact(kernel, (9, 0))
module = load(kernel, torch.device("cpu"))
print(stored.fresh, module.scale is not None, "cupy" in sys.modules, events)
print(time.perf_counter() - start)
"""


@needs_nvrtc
@needs_gxx
def test_hit_in_a_fresh_process(root: Path) -> None:
    """It starts no process, takes no lock, imports no compiler, and takes no time to speak of."""
    assert run_python(HIT).startswith("True True True")
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    facts, seconds = run_python(HIT).splitlines()
    assert facts == "False True False []"
    assert float(seconds) < 0.5
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
