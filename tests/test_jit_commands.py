# SPDX-License-Identifier: Apache-2.0
"""What `compile`, `cache` and `doctor` do about kernels, with compilers that take no time."""

import io
from pathlib import Path

import pytest
from jit_support import (
    FakeToolkit,
    needs_gxx,
    needs_nvrtc,
    run_python,
    scale_kernel,
    use_empty_cache,
    use_fake_toolkit,
)
from rich.console import Console

from sparse_indexer.jit import Kernel, commands, doctor
from sparse_indexer.jit.resources import Resources


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_empty_cache(tmp_path, monkeypatch)


@pytest.fixture
def toolkit(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeToolkit:
    return use_fake_toolkit(tmp_path, monkeypatch)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=100, color_system=None)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_compile(root: Path, toolkit: FakeToolkit) -> None:
    outcomes = commands.compile_kernels("8.0, 9.0,9.0a", [scale_kernel()], jobs=1)
    assert [(o.kernel, o.target, o.error) for o in outcomes] == [
        ("scale", "host", None),
        ("scale", "sm_80", None),
        ("scale", "sm_90a", None),
    ]
    assert all(o.seconds is not None for o in outcomes)
    assert len(list((root / "v1").glob("sm_*/scale/*/kernel.cubin"))) == 2
    assert len(list((root / "v1").glob("*/scale/*/host.so"))) == 1
    again = commands.compile_kernels("8.0,9.0", [scale_kernel()], jobs=1)
    assert [o.seconds for o in again] == [None] * 3
    assert len(toolkit.calls) == 3


def test_compile_only_what_a_kernel_is_for(toolkit: FakeToolkit) -> None:
    root = scale_kernel().root
    hopper = Kernel("scale", {"scale_1": "Scale<1>"}, capabilities=(90, 90), root=root)
    outcomes = commands.compile_kernels("8.0,9.0", [hopper], jobs=1)
    assert [o.target for o in outcomes] == ["host", "sm_90a"]
    assert commands.compile_kernels("8.0", [hopper], jobs=1) == []


def test_compile_to_a_folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be shipped: as a read-only root it is all that a machine without compilers needs."""
    use_fake_toolkit(tmp_path, monkeypatch)
    out = tmp_path / "shipped"
    commands.compile_kernels("8.0", [scale_kernel()], jobs=1, out=out)
    assert not root.exists()
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", f"{root}:{out}")
    monkeypatch.setenv("SPARSE_INDEXER_JIT", "cached")
    outcomes = commands.compile_kernels("8.0", [scale_kernel()], jobs=1)
    assert [(o.seconds, o.error) for o in outcomes] == [(None, None)] * 2


def test_compile_that_fails(toolkit: FakeToolkit, console: Console) -> None:
    toolkit.order("fail", "nvcc fatal   : Unsupported gpu architecture 'sm_70'")
    outcomes = commands.compile_kernels("7.0", [scale_kernel()], jobs=1)
    assert commands.print_outcomes(console, outcomes) == 1
    text = text_of(console)
    assert text.count("failed") == 2
    assert "cannot build scale for sm_70, with nvcc 12.9: nvcc fatal" in text
    assert "hint: CUDA 12.9 does not know sm_70" in text


def test_table(console: Console) -> None:
    resources = {"scale_1": Resources(32, 0, 0), "scale_2": Resources(168, 24, 4096)}
    warning = "ptxas warning : Value of threads per SM for entry scale_2 is out of range"
    outcomes = [
        commands.Outcome("scale", "host", 1.5, {}, (), None),
        commands.Outcome("scale", "sm_90a", 0.25, resources, (warning,), None),
        commands.Outcome("scale", "sm_80", None, resources, (), None),
    ]
    assert commands.print_outcomes(console, outcomes) == 0
    rows = [line.split() for line in text_of(console).splitlines()]
    assert ["scale", "host", "1.50"] in rows
    assert ["scale", "scale_1", "sm_90a", "0.25", "32", "0", "0"] in rows
    assert ["scale", "scale_2", "sm_90a", "168", "24", "4096"] in rows
    assert ["scale", "scale_1", "sm_80", "cached", "32", "0", "0"] in rows
    assert f"scale for sm_90a: {warning}" in text_of(console)


def test_compile_command_names_what_it_does_not_know(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "all_kernels", lambda: {"scale": scale_kernel()})
    with pytest.raises(ValueError, match="kernels: expected some of scale, got 'sale'"):
        commands.compile_command(console, "8.0", "sale", None, None)
    with pytest.raises(ValueError, match="arch: expected compute capabilities like"):
        commands.compile_command(console, "sm_80", None, None, None)
    with pytest.raises(ValueError, match="arch: expected compute capabilities like"):
        commands.compile_command(console, ",", None, None, None)
    with pytest.raises(ValueError, match="jobs: expected an int of at least 1, got 0"):
        commands.compile_command(console, "8.0", None, 0, None)


def test_compile_command(
    toolkit: FakeToolkit, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "all_kernels", lambda: {"scale": scale_kernel()})
    assert commands.compile_command(console, "8.0,9.0", " scale ", 1, None) == 0
    assert "sm_90a" in text_of(console)


@needs_nvrtc
@needs_gxx
def test_compile_in_processes() -> None:
    """Real compilers, two at a time."""
    code = """
    from sparse_indexer.jit import commands
    if __name__ == "__main__":
        for o in commands.compile_kernels("8.0,9.0", [kernel], jobs=2):
            print(o.kernel, o.target, o.error, sorted(o.resources))
    """
    assert run_python(code).splitlines() == [
        "scale host None []",
        "scale sm_80 None ['scale_1', 'scale_2']",
        "scale sm_90a None ['scale_1', 'scale_2']",
    ]


def test_cache_command(root: Path, tmp_path: Path, toolkit: FakeToolkit, console: Console) -> None:
    commands.compile_kernels("8.0,9.0", [scale_kernel()], jobs=1)
    assert commands.cache_command(console, clear=False) == 0
    lines = text_of(console).splitlines()
    assert lines[0] == f"{root}: 3 files, 0.0 MB"
    assert lines[1].startswith("  scale: sm_80 1, sm_90a 1, ")
    assert commands.cache_command(console, clear=True) == 0
    assert text_of(console).splitlines()[-1] == f"cleared {root}"
    assert not list(root.iterdir())


def test_doctor(root: Path, toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "driver_version", lambda: (12, 4))
    lines = dict(doctor.report())
    assert lines["NVRTC"] == "not found; nvrtc: CuPy is not installed"
    assert lines["nvcc"] == f"12.9, {toolkit.bin}/nvcc; headers: its own"
    assert lines[str(toolkit.bin / "g++")].startswith("release 12.9, V12.9.86")
    assert lines["cache"] == str(root)
    assert lines["set"].startswith("SPARSE_INDEXER_")
    assert lines["driver"] == "for CUDA up to 12.4"
    assert "fix" not in lines


def test_doctor_where_nothing_is_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr(doctor, "driver_version", lambda: None)
    lines = doctor.report()
    assert [text for name, text in lines if name == "fix"] == [
        doctor.hints.NO_DEVICE_COMPILER,
        doctor.hints.NO_HOST_COMPILER,
    ]
    assert ("driver", "none") in lines
