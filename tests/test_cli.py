# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, how it fails, and how long the demo takes."""

import importlib.util
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from jit_support import FakeToolkit, needs_nvrtc, use_empty_cache, use_fake_toolkit
from test_demo import RECALL
from test_trace import random_layer, saved
from typer.testing import CliRunner

import sparse_indexer
from sparse_indexer import cli
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.deep_gemm_report import DeepGemmReport
from sparse_indexer.factory import BACKENDS
from sparse_indexer.jit import commands
from sparse_indexer.jit.compilers import DeviceCompiler, Search
from sparse_indexer.trace import KEYS, load_trace

SECONDS = 20  # bound of a demo on two cores, imports included


def invoke(*arguments: str, code: int = 0, **environ: str | None) -> str:
    """All output of a command that ends with exit code `code`."""
    unset = dict.fromkeys(("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"))
    done = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "160", **unset, **environ})
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    """fp16 queries and keys, which the layers share, four tokens a position, no token text."""
    tensors = random_layer("source", "fp16", 150, 3, 250) | random_layer(
        "consumer", "fp16", 150, 5, 0
    )
    tensors["positions"] = torch.arange(801, 951, dtype=torch.int32)
    return saved(tmp_path, tensors, {"compress_ratio": "4", "model": "[bold]mine[/bold]"})


def test_help_names_the_commands() -> None:
    text = invoke("--help")
    assert re.findall(r"^  (\w+)  ", text, flags=re.MULTILINE) == [
        "demo",
        "doctor",
        "compile",
        "cache",
    ]


def test_version() -> None:
    assert invoke("--version") == f"sparse_indexer {sparse_indexer.__version__}\n"


def test_demo_help_is_the_format_of_a_trace() -> None:
    text = invoke("demo", "--help")
    for option in ("--input", "--topk", "--topk-blocks", "--device", "--backend", "--plot"):
        assert option in text
    for key in KEYS:
        assert key in text or key.replace("consumer", "source") in text
    for word in ("consumer.*", "compress_ratio", "model", "layers"):
        assert word in text


def test_demo_shows_what_it_measured() -> None:
    text = invoke("demo", "--device", "cpu")
    assert "\x1b" not in text
    assert "SmolLM2-135M-Instruct" in text
    assert re.search(r"^backend +mask on cpu, 128 blocks of 8 and 64 positions a row", text, re.M)
    for step in ("source +publish_prefill", "consumer +select_prefill", "full +topk_prefill"):
        assert re.search(rf"^{step} +256 ", text, re.M)
    assert re.search(rf"^recall +{RECALL:.2%} of the consumer: the mean of \|selected", text, re.M)
    assert re.search(r"^keys +each layer's own: .* not .* trained to share index keys", text, re.M)
    assert re.search(r"^tail +32 of 32 rows", text, re.M)
    assert re.search(r"^unwritten +8\.39 MB a layer: .* \[256, 8192\] float32", text, re.M)
    assert re.search(r"^written +131 kB of block ids, and 65\.5 kB of positions", text, re.M)


def test_demo_shows_the_text_that_was_selected() -> None:
    text = invoke("demo", "--device", "cpu")
    queries = re.findall(r"^query token (\d+) .*\[\w+\]$", text, re.M)
    assert len(queries) == 3
    trace = load_trace()
    passages = re.findall(r"^ +(\d+)-(\d+) +\d+\.\d\d  (.*)$", text, re.M)
    assert len(passages) == 12
    spans = [(int(first), int(last)) for first, last, _ in passages]
    for i, (first, last) in enumerate(spans):  # four of each query
        assert all(last < a or b < first for a, b in spans[i // 4 * 4 : i])
    for first, last, shown in passages:
        assert "[" in shown
        words = re.sub(r"[\[\] …]", "", trace.words(int(first), int(last) + 1))
        assert words.startswith(re.sub(r"[\[\] …]", "", shown))


def test_demo_marks_by_style_on_a_terminal() -> None:
    text = invoke("demo", "--device", "cpu", FORCE_COLOR="1", TERM="xterm-256color")
    assert re.search(r"query token \d+ .*\x1b\[1;4;32m *\w+\x1b\[0m", text)


def test_demo_runs_a_file_of_ones_own(user_file: Path) -> None:
    text = invoke("demo", "--device", "cpu", "--input", str(user_file), "--topk", "16")
    assert re.search(r"^model +\[bold\]mine\[/bold\]$", text, re.M)
    assert re.search(r"^queries +150 rows, tokens 801 to 950, 3 heads", text, re.M)
    assert re.search(r"^keys +237 positions of 4 tokens, fp16, in pages of 64", text, re.M)
    assert re.search(
        r"^recall +100\.00% of the consumer: .* top 16\| / 16 over the 150", text, re.M
    )
    assert "trained" not in text
    assert len(re.findall(r"^query token \d+  \d+, \d+,", text, re.M)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "none"], r"--input: expected a safetensors file, got no file 'none'"),
        (["--input", __file__], r"--input: expected a safetensors file, got '.*' \(.*\)"),
        (["--topk", "0"], r"--topk: expected an int of 1 to 16384, got 0"),
        (["--device", "gpu"], r"--device: expected a torch device, got 'gpu'"),
        (
            ["--device", "cpu", "--backend", "sm70"],
            r"sm70: (is not in this release|needs an NVIDIA GPU, .* cpu): use --backend mask",
        ),
        (
            ["--device", "cpu", "--backend", "sm100"],
            r"sm100: needs an NVIDIA GPU, .* cpu: use --backend mask, or Sm100Indexer with .*",
        ),
        (
            ["--plot", "none/x.png"],
            r"--plot: expected a file in a folder that exists, got none/x.png",
        ),
    ],
)
def test_demo_fails_in_one_line(arguments: list[str], message: str) -> None:
    text = invoke("demo", *arguments, code=1)
    assert re.fullmatch(rf"error: {message}\n", text)


def test_errors_are_red_on_a_terminal() -> None:
    text = invoke("demo", "--topk", "0", code=1, FORCE_COLOR="1", TERM="xterm-256color")
    assert text.startswith("\x1b[31merror: --topk: expected an int of 1 to 16384, got 0\x1b[0m")
    assert text.count("\n") == 1


def test_a_wrong_key_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, random_layer("source", "fp8", 3, 2, 8))
    text = invoke("demo", "--input", str(path), code=1)
    assert text == "error: positions: expected [rows] int32 or int64, got no such key\n"


def test_what_a_file_says_is_no_command_to_the_terminal(tmp_path: Path) -> None:
    tensors = random_layer("source", "fp16", 3, 2, 8) | {"positions": torch.arange(3)}
    hostile = {"model": "\x1b]0;title\x07\x1b[31mred\x9b2J", "text": "a\r\nb", "layers": "1"}
    path = saved(tmp_path, tensors, hostile)
    path = path.rename(path.with_name("\x1b[2Jfile"))
    text = invoke("demo", "--device", "cpu", "--input", str(path), "--topk", "4")
    assert re.search(r"^model +\?\]0;title\?\?\[31mred\?2J$", text, re.M)
    assert re.search(r"^text +a b$", text, re.M)
    assert re.search(r"^trace +\?\[2Jfile$", text, re.M)
    assert all(c.isprintable() or c == "\n" for c in text)
    text = invoke("demo", "--input", str(saved(tmp_path, {"\x1b[2J": torch.zeros(1)})), code=1)
    assert re.match(r"error: \?\[2J: expected a key of ", text)


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "sparse_indexer.plot", raising=False)
    monkeypatch.delattr(sparse_indexer, "plot", raising=False)
    text = invoke("demo", "--plot", str(tmp_path / "x.png"), code=1)
    want = "--plot: expected matplotlib, got none: pip install 'sparse-indexer[plot]'"
    assert text == f"error: {want}\n"


def test_plot_draws_both_layers(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "x.png"
    assert invoke("demo", "--device", "cpu", "--plot", str(path)).endswith(f"\nwrote {path}\n")
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert (width, height) == (1200, 816)
    pixels = torch.from_numpy(image.imread(path))[..., :3]
    shares = {
        color: (pixels - torch.tensor(rgb)).abs().amax(2).lt(0.02).double().mean().item()
        for color, rgb in {
            "published": (0xBC / 255, 0xD7 / 255, 0xEE / 255),
            "selected": (0x08 / 255, 0x30 / 255, 0x6B / 255),
            "white": (1.0, 1.0, 1.0),
        }.items()
    }
    assert 0.03 < shares["published"] < 0.2
    assert 0.01 < shares["selected"] < 0.1
    assert shares["white"] > 0.6


def test_plot_of_a_source_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tensors = random_layer("source", "fp16", 1, 1, 1) | {"positions": torch.tensor([0])}
    path = saved(tmp_path, tensors)
    invoke("demo", "--device", "cpu", "--input", str(path), "--plot", str(tmp_path / "x"))
    assert struct.unpack(">II", (tmp_path / "x").read_bytes()[16:24]) == (1200, 408)


def test_doctor_says_what_runs_here() -> None:
    text = invoke("doctor")
    assert text.startswith(
        f"sparse_indexer {sparse_indexer.__version__}, torch {torch.__version__}"
    )
    rows = re.findall(r"^ cpu +(\w+) +(.*?)  +(.*?) *$", text, re.M)
    assert [(name, capabilities) for name, capabilities, _ in rows] == [
        (name, spec.capabilities) for name, spec in BACKENDS.items()
    ]
    *others, (_, _, mask) = rows
    assert mask == "usable, auto takes it"
    for name, _, reason in others:
        why = "needs an NVIDIA GPU, the device is cpu"
        if BACKENDS[name].make is None:
            why = "is not in this release"
        assert reason == f"{why}: use backend='mask'"


def test_doctor_knows_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, total_memory = "Some GPU", 7, 5, 11 << 30

    monkeypatch.setitem(BACKENDS, "sm90", BACKENDS["sm90"]._replace(make=MaskIndexer))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = invoke("doctor")
    assert not re.search(r"^ fix +pip install 'sgl-deep-gemm", text, re.M)  # for no GPU here
    assert "cuda:0: Some GPU, compute capability 7.5, 11.8 GB\n" in text
    assert re.search(r"^ cuda:0 +sm90 +9\.0 +is for compute capability 9\.0, cuda:0", text, re.M)
    assert re.search(r"^ cuda:0 +mask .* usable", text, re.M)


class Gpu:
    """One that torch seems to see, and code for it in torch."""

    name, total_memory = "Some GPU", 16 << 30

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        self.major, self.minor = capability
        self.code = ["compute_50"]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: self)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: self.code)


def verdicts(text: str) -> dict[str, str]:
    """What doctor says of each backend on the GPU."""
    return dict(re.findall(r"^ cuda:0 +(\w+) +\S.*?  +(.*?) *$", text, re.M))


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeToolkit:
    use_empty_cache(tmp_path, monkeypatch)
    return use_fake_toolkit(tmp_path, monkeypatch)


COMPILERS = {  # (compute capability, CUDA): what is said of the backend for it
    ((7, 0), 12090): ("sm70", "usable, auto takes it"),
    ((7, 0), 13000): ("sm70", "not usable: nvcc 13.0: CUDA 13.0 has dropped sm_70: install the"),
    ((7, 5), 13000): ("sm70", "usable, auto takes it"),
    ((9, 0), 13000): ("sm90", "usable, auto takes it"),
    ((9, 0), 11080): ("sm90", "not usable: nvcc 11.8: CUDA 11.8 does not know sm_90a: update the"),
    ((10, 0), 12080): ("sm100", "usable, auto takes it"),
    ((10, 3), 12080): ("sm100", "not usable: nvcc 12.8: CUDA 12.8 does not know sm_103a: update"),
}


@pytest.mark.parametrize(("capability", "cuda"), COMPILERS)
def test_doctor_compares_the_compiler_with_the_gpu(
    toolkit: FakeToolkit,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    cuda: int,
) -> None:
    """Where no kernel can be built, `mask` is what `auto` takes."""
    Gpu(monkeypatch, capability)
    header = toolkit.home / "include/cuda_runtime_api.h"
    header.write_text(f"#define CUDART_VERSION  {cuda}\n")
    monkeypatch.setattr("sparse_indexer.jit.hints.find_nvrtc", lambda: Search(None, ()))
    usable = DeepGemmReport(True, [])
    monkeypatch.setattr("sparse_indexer.deep_gemm_report.deep_gemm_report", lambda: usable)
    name, want = COMPILERS[capability, cuda]
    found = verdicts(invoke("doctor", COLUMNS=None))
    assert found[name].startswith(want)
    assert found["mask"] == ("usable" if want.startswith("usable") else "usable, auto takes it")


def test_doctor_names_another_compiler_that_would_do(
    toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gpu(monkeypatch, (7, 0))
    header = toolkit.home / "include/cuda_runtime_api.h"
    header.write_text("#define CUDART_VERSION  13000\n")
    nvrtc = DeviceCompiler("nvrtc", Path("x"), (12, 9), "", ())
    monkeypatch.setattr("sparse_indexer.jit.hints.find_nvrtc", lambda: Search(nvrtc, ()))
    want = "set SPARSE_INDEXER_COMPILER=nvrtc, to take nvrtc 12.9"
    assert verdicts(invoke("doctor", COLUMNS=None))["sm70"].endswith(want)


def test_doctor_where_a_compiler_is_missing(
    toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For devices or hosts; and what it says to install knows this GPU."""
    Gpu(monkeypatch, (7, 0))
    text = invoke("doctor", COLUMNS=None, CXX="/nonexistent/g++")
    want = "not usable: no C++ compiler: CXX names what is not there: unset it"
    assert verdicts(text)["sm70"].startswith(want)
    monkeypatch.setattr("sparse_indexer.jit.hints.cupy_wheels", list)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = invoke("doctor", COLUMNS=None, SPARSE_INDEXER_COMPILER="nvrtc")
    want = "not usable: no nvrtc, which SPARSE_INDEXER_COMPILER names: pip install "
    assert verdicts(text)["sm70"].startswith(f"{want}'sparse-indexer[cuda12]'; or set CUDA_HOME")
    assert "[cuda13]" not in text
    assert verdicts(text)["mask"] == "usable, auto takes it"


def test_doctor_looks_into_a_cache_that_nothing_is_added_to(
    toolkit: FakeToolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the backend builds must be there, whichever compiler made it."""
    Gpu(monkeypatch, (7, 0))
    want = "not usable: its kernels are not all in the cache, and SPARSE_INDEXER_JIT=cached: unset"
    text = invoke("doctor", COLUMNS=None, SPARSE_INDEXER_JIT="cached")
    assert verdicts(text)["sm70"].startswith(want)
    kernels = BACKENDS["sm70"].kernels()
    commands.compile_kernels("7.0", kernels, jobs=1)
    text = invoke("doctor", COLUMNS=None, SPARSE_INDEXER_JIT="cached", CXX="/nonexistent/g++")
    assert verdicts(text)["sm70"] == "usable, auto takes it"
    for damaged in (tmp_path / "cache/v1/sm_70/topk").rglob("kernel.cubin"):
        damaged.write_bytes(b"half")
    text = invoke("doctor", COLUMNS=None, SPARSE_INDEXER_JIT="cached")
    assert verdicts(text)["sm70"].startswith(want)


def test_doctor_of_a_torch_without_code_for_the_gpu(
    toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gpu(monkeypatch, (7, 0)).code = ["sm_75", "sm_80", "sm_90"]
    found = verdicts(invoke("doctor", COLUMNS=None))
    why = f"not usable: torch {torch.__version__} has no code for cuda:0, of compute capability 7.0"
    assert found["sm70"] == found["mask"]
    assert found["mask"].startswith(f"{why}, only sm_75, sm_80, sm_90: pip install 'torch>=2.8,<2")
    assert "auto takes it" not in "".join(found.values())


DEEP_GEMM = {
    "0.2.5": (
        "from sparse_indexer.testing.deep_gemm import DeepGemmEmulator as E",
        r"usable, dense logits of fp4 keys in bfloat16, .* a stride of n \* 128 bytes",
        None,
    ),
    "0.2.3.post2": (
        "from sparse_indexer.testing.deep_gemm import OlderDeepGemmEmulator as E",
        r"usable, dense logits of fp4 and fp8 keys in float32, .* a stride of n \* 512 bytes",
        None,
    ),
    "0.1.5.post1": (
        "class E:\n fp8_fp4_mqa_logits = print\n __version__ = '0.1.5.post1'",
        "DeepGEMM 0.1.5.post1 has no fp8_fp4_paged_sparse_mqa_logits",
        "pip install 'sgl-deep-gemm>=0.2.0,<0.3'",
    ),
    "0.2.4": (
        "raise OSError('[/lib]/_C.so: undefined symbol: c10')",
        r"no DeepGEMM \(OSError: \[/lib\]/_C.so: undefined symbol: c10\)",
        "pip install -U torch 'sgl-deep-gemm>=0.2.0,<0.3', as a release is built for one torch",
    ),
    "0.2.2": (
        "import os; os.abort()",
        "its import ends the process, exit code -6",
        "pip install -U torch 'sgl-deep-gemm>=0.2.0,<0.3', as a release is built for one torch",
    ),
    "0.2.1": (
        "assert False",
        r"no DeepGEMM \(AssertionError:\)",
        "set CUDA_HOME to a toolkit, which its import looks for",
    ),
}


@pytest.mark.parametrize("version", DEEP_GEMM)
def test_doctor_tells_of_deep_gemm(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, finding, fix = DEEP_GEMM[version]
    package, metadata = tmp_path / "deep_gemm", tmp_path / f"sgl_deep_gemm-{version}.dist-info"
    for folder in (package, metadata):
        folder.mkdir()
    fake = f"import sys\n{source}\nif 'E' in dir(): sys.modules[__name__] = E()\n"
    (package / "__init__.py").write_text(fake)
    (metadata / "METADATA").write_text(f"Name: sgl-deep-gemm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = os.pathsep.join([str(tmp_path), str(Path(sparse_indexer.__file__).parents[1])])
    text = invoke("doctor", COLUMNS=None, PYTHONPATH=path)
    about = rf"sgl-deep-gemm {version}, torch {re.escape(torch.__version__)}: {finding}"
    assert re.search(rf"^ DeepGEMM +{about} *$", text, re.M), text
    assert fix is None or re.search(rf"^ fix +{re.escape(fix)} *$", text, re.M), text


def test_doctor_without_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, total_memory = "Some GPU", 10, 0, 180 << 30

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    text = invoke("doctor", COLUMNS=None)
    assert re.search(r"^ cuda:0 +sm100 +10\.x +needs DeepGEMM: see below *$", text, re.M)
    assert re.search(r"^ cuda:0 +mask .* usable, auto takes it *$", text, re.M)
    assert re.search(r"^ DeepGEMM +not installed *$", text, re.M)
    assert re.search(r"^ fix +pip install 'sgl-deep-gemm>=0\.2\.0,<0\.3' *$", text, re.M)


def test_doctor_tells_of_compilers_and_cache(tmp_path: Path) -> None:
    text = invoke("doctor", SPARSE_INDEXER_CACHE_DIR=str(tmp_path))
    for subject in ("NVRTC", "nvcc", "g\\+\\+", "tvm-ffi", "cache", "driver"):
        assert re.search(rf"^ {subject} +\S", text, re.M), subject
    assert str(tmp_path) in text


def test_no_file_or_pipe_cuts_a_table(tmp_path: Path) -> None:
    """And a terminal folds what is too long for it."""
    home = tmp_path / ("long" * 50)
    environ = {"SPARSE_INDEXER_CACHE_DIR": str(home), "CUDA_HOME": str(home)}
    text = invoke("doctor", COLUMNS=None, **environ)
    assert f"{home}: expected a toolkit, with bin/nvcc\n" in re.sub(" +$", "", text, flags=re.M)
    assert "\u2026" not in text
    assert "\u2026" not in invoke("doctor", COLUMNS="60", **environ)


def test_doctor_says_what_a_variable_should_be() -> None:
    text = invoke("doctor", SPARSE_INDEXER_JIT="never", CXX="g++ '-O2")
    assert re.search(r"SPARSE_INDEXER_JIT=never: expected 'auto' or 'cached' or 'rebuild'", text)
    assert re.search(r"CXX: expected a command, quoted as in a shell, got", text)


@needs_nvrtc
def test_compile_and_cache(tmp_path: Path) -> None:
    options = ("compile", "--arch", "9.0", "--kernels", "candidate_table")
    text = invoke(*options, SPARSE_INDEXER_CACHE_DIR=str(tmp_path))
    assert re.search(r"candidate_table +sm_90a", text)
    text = invoke("cache", SPARSE_INDEXER_CACHE_DIR=str(tmp_path))
    assert "candidate_table" in text
    assert list(tmp_path.rglob("kernel.cubin"))
    invoke("cache", "--clear", SPARSE_INDEXER_CACHE_DIR=str(tmp_path))
    assert not list(tmp_path.rglob("kernel.cubin"))
    several = ("compile", "--arch", "7.5", "--arch", "8.0", "--kernels", "row_quads")
    text = invoke(*several, "--kernels", "block_keys", SPARSE_INDEXER_CACHE_DIR=str(tmp_path))
    found = re.findall(r"(row_quads|block_keys) .*(sm_75|sm_80)", text)
    assert len(set(found)) == 4
    text = invoke("compile", "--arch", "6.1", code=1)
    assert text.startswith("error: --arch: expected ")
    text = invoke(*options, "--out", "", code=1)
    assert text == "error: --out: expected a folder, got ''\n"


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sparse_indexer.jit.commands.compile_command", interrupt)
    assert invoke("compile", "--arch", "8.0", code=130) == "interrupted\n"


@pytest.mark.parametrize("command", ["doctor", "cache"])
def test_a_terminal_of_no_columns_is_taken_for_one_of_80(command: str) -> None:
    assert invoke(command, COLUMNS="0") == invoke(command, COLUMNS="80") != ""


@pytest.mark.parametrize("command", ["doctor", "cache", "compile --arch 8.0 --kernels topk"])
def test_output_that_goes_nowhere(command: str, tmp_path: Path) -> None:
    """A closed one is none of ours; on one that is full, what went wrong is said in one line."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "SPARSE_INDEXER_CACHE_DIR": str(tmp_path)}
    program = f"{sys.executable} -m sparse_indexer {command}"
    full = r"error: .*No space left on device.*\n"
    for target, code, message in ((">&-", 0, ""), (">/dev/full", 1, full)):
        done = subprocess.run(
            f"{program} {target}", shell=True, env=environ, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        assert re.fullmatch(message, done.stderr)


def test_demo_is_quick_as_a_program() -> None:
    # A core that others use would make OpenMP's threads spin for each other; waiting is as exact.
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "sparse_indexer", "demo"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=3 * SECONDS,
    )
    seconds = time.perf_counter() - start
    assert (done.returncode, done.stderr) == (0, "")
    assert "mask on cpu" in done.stdout
    assert f"{RECALL:.2%} of the consumer" in done.stdout
    assert seconds < SECONDS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "meta"), "--device: expected a device that has values, got meta"),
        (("--topk", "100000000000"), "--topk: expected an int of 1 to 16384, got 100000000000"),
        (("--topk-blocks", "17000"), "--topk-blocks: expected an int of 1 to 16384, got 17000"),
        (("--plot", "x.jpg"), "--plot: expected a .png file, got x.jpg"),
        (("--plot", "."), "--plot: expected a file in a folder that exists, got ."),
    ],
)
def test_what_demo_cannot_do_is_one_line(options: tuple[str, ...], message: str) -> None:
    assert invoke("demo", *options, code=1) == f"error: {message}\n"
