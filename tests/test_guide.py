# SPDX-License-Identifier: Apache-2.0
"""The guide for authors of kernels, followed to the letter up to the launch."""

import importlib
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch
from jit_support import PretendCuda, needs_gxx, needs_nvcc, needs_nvrtc, use_empty_cache

from sparse_indexer import jit
from sparse_indexer.jit.commands import compile_kernels
from sparse_indexer.jit.kernel import all_kernels

FILES = re.findall(r"^`(\S+)`: (?:.+\n)+\n((?:    .*\n|\n)+)", jit.__doc__ or "", re.MULTILINE)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The files of the guide in a folder of their own."""
    use_empty_cache(tmp_path, monkeypatch)
    names = [name for name, _ in FILES]
    assert [Path(name).suffix for name in names] == [".h", ".cuh", ".cc", ".py"]
    for name, text in FILES:
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path / "mine")
    monkeypatch.delitem(sys.modules, "double_rows", raising=False)
    return importlib.import_module("double_rows")


@pytest.mark.parametrize(
    "compiler",
    [pytest.param("nvrtc", marks=needs_nvrtc), pytest.param("nvcc", marks=needs_nvcc)],
)
@needs_gxx
def test_it_compiles(example: ModuleType, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", compiler)
    outcomes = compile_kernels("8.0,9.0a", [example.KERNEL], jobs=1)
    assert [(o.error, o.warnings) for o in outcomes] == [(None, ())] * 3
    assert "double_rows" not in all_kernels()


@needs_gxx
def test_its_op_checks_and_launches(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = torch.zeros(3, 4).as_subclass(PretendCuda), torch.zeros(3, 4)
    wrong = r"^x: expected \[rows, columns\] float32 on cuda, got \[3, 4\] float32 on cpu$"
    with pytest.raises(ValueError, match=wrong):
        example.double_rows(out, times=2, out=out)
    monkeypatch.setitem(
        example.KERNEL.loaded, x.device, jit.load(example.KERNEL, torch.device("cpu"))
    )
    with pytest.raises(ValueError, match=r"^out: expected \[3, 4\] float32 on cuda:63, got"):
        example.double_rows(x, times=2, out=out)
    with pytest.raises(ValueError, match=r"^times: expected 2 or 4, got 3$"):
        example.double_rows(x, times=3, out=x)
    with pytest.raises(ValueError, match=r"^times: expected a 64-bit int, got 1\.5$"):
        example.double_rows(x, times=1.5, out=x)
    with pytest.raises(RuntimeError, match="kernels are not loaded on cuda:63"):
        example.double_rows(x, times=2, out=x)


@pytest.mark.gpu
def test_its_kernel_runs(example: ModuleType) -> None:
    x = torch.randn(3, 200, device="cuda")
    for times in (2, 4):
        out = torch.full_like(x, 7)
        example.double_rows(x, times=times, out=out)
        assert torch.equal(out, times * x)
