# SPDX-License-Identifier: Apache-2.0
"""What `compile`, `cache` and `doctor` do about kernels, with compilers that take no time."""

import dataclasses
import errno
import io
import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from jit_support import (
    PREAMBLE,
    FakeToolkit,
    needs_gxx,
    needs_nvrtc,
    scale_kernel,
    start_python,
    use_empty_cache,
    use_fake_toolkit,
)
from rich.console import Console

from sparse_indexer.jit import Kernel, cache, commands, compilers, doctor, places
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
    assert sorted((o.kernel, o.target, o.error) for o in outcomes) == sorted(
        ("scale", target, None) for target in ("sm_80", "sm_90a", platform.machine())
    )
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
    assert {o.target for o in outcomes} == {platform.machine(), "sm_90a"}
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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("file", "a folder that can be written, or made, got 'file' (Not a directory)"),
        ("file/below", "a folder that can be written, or made, got 'file/below' (Not a directory)"),
        ("/proc/self/out", "a folder that can be written, or made, got '/proc/self/out' ("),
        ("a:b", "a folder without ':' in its path, got '/"),
        ("", "a folder, got ''"),
    ],
)
def test_folder_that_cannot_be_filled(
    name: str,
    expected: str,
    tmp_path: Path,
    toolkit: FakeToolkit,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing goes elsewhere instead."""
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("not a folder")
    with pytest.raises(ValueError, match=f"^{re.escape(f'out: expected {expected}')}"):
        commands.compile_command(console, "8.0", "topk", 1, name)
    assert not toolkit.calls
    assert sorted(os.listdir()) == ["file", "toolkit"]
    assert os.environ == before


def test_compile_that_keeps_nothing(
    root: Path, toolkit: FakeToolkit, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_write", full)
    outcomes = commands.compile_kernels("8.0", [scale_kernel()], jobs=1)
    assert commands.print_outcomes(console, outcomes) == 1
    for target in ("sm_80", platform.machine()):
        wanted = f"cannot keep scale for {target}: {root} (No space left on device); set SPARSE_"
        assert wanted in text_of(console)


def test_compile_where_nothing_can_be_kept(
    tmp_path: Path, toolkit: FakeToolkit, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which folders were refused and why, in a process that says it once."""
    places._warn.cache_clear()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", "/proc/self/cache")
    private = tmp_path / f"sparse_indexer-{os.getuid()}"
    private.symlink_to(tmp_path)
    outcomes = commands.compile_kernels("8.0", [scale_kernel()], jobs=2)
    assert commands.print_outcomes(console, outcomes) == 1
    assert text_of(console).count("the cache folder /proc/self/cache cannot be written (") == 2
    assert text_of(console).count(f", nor can {private} (refused: a link): ") == 2


def test_compile_says_once_where_things_go(tmp_path: Path, toolkit: FakeToolkit) -> None:
    code = """
    from sparse_indexer.jit import commands
    for o in commands.compile_kernels("8.0,9.0", [kernel], jobs=2):
        print(o.error)
    """
    environ = {"SPARSE_INDEXER_CACHE_DIR": "/proc/self/cache", "TMPDIR": str(tmp_path)}
    process = start_python(code, environ)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "None\nNone\nNone\n")
    assert err.count("the cache folder /proc/self/cache cannot be written") == 1
    assert err.count("\n") == 1


def test_compile_finds_what_a_folder_has_that_is_now_read_only(
    root: Path, toolkit: FakeToolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a call does."""
    kernel = scale_kernel()
    commands.compile_kernels("8.0", [kernel], jobs=1)
    make = places.make_staging

    def refuse(folder: Path) -> Path:
        if folder == root:
            raise OSError(errno.EROFS, "Read-only file system")
        return make(folder)

    monkeypatch.setattr(places, "make_staging", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcomes = commands.compile_kernels("8.0,9.0", [kernel], jobs=1)
    assert [o.seconds is None for o in outcomes] == [True, False, True]
    assert {o.target: o.error for o in outcomes} == dict.fromkeys(
        ("sm_80", "sm_90a", platform.machine())
    )


def test_compile_with_nothing_but_the_cache(
    toolkit: FakeToolkit, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint is not to run what is running."""
    monkeypatch.setenv("SPARSE_INDEXER_JIT", "cached")
    outcomes = commands.compile_kernels("8.0", [scale_kernel()], jobs=1)
    assert commands.print_outcomes(console, outcomes) == 1
    assert text_of(console).count("hint: unset SPARSE_INDEXER_JIT") == 2


def start_compile(toolkit: FakeToolkit, jobs: int) -> tuple["subprocess.Popen[str]", list[int]]:
    """A `compile` whose compilers take a minute, in a group of its own, and their processes."""
    toolkit.order("slow", "60")
    command = ("-m", "sparse_indexer", "compile", "--arch", "8.0,9.0", "--kernels", "topk")
    process = subprocess.Popen(
        [sys.executable, *command, "-j", str(jobs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while len(toolkit.calls) < jobs:
        assert process.poll() is None
        time.sleep(0.02)
    return process, [int(call.split()[0]) for call in toolkit.calls]


def parent_of(process: int) -> int | None:
    """`None` if it has ended."""
    try:
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


@pytest.mark.parametrize(
    ("number", "jobs", "group"),
    [
        (signal.SIGINT, 1, True),
        (signal.SIGINT, 2, True),
        (signal.SIGINT, 2, False),
        (signal.SIGTERM, 2, False),
        (signal.SIGKILL, 2, False),
    ],
)
def test_compile_that_is_ended(
    number: signal.Signals, jobs: int, group: bool, toolkit: FakeToolkit
) -> None:
    """At once, and with it its workers and their compilers."""
    process, compilers = start_compile(toolkit, jobs)
    others = {*compilers, *(parent_of(compiler) for compiler in compilers)} - {process.pid}
    start = time.monotonic()
    (os.killpg if group else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=60)
    while any(parent_of(other) is not None for other in others if other is not None):
        assert time.monotonic() - start < 10
        time.sleep(0.02)
    assert time.monotonic() - start < 10
    if number == signal.SIGINT:
        assert (process.returncode, out, err) == (130, "", "interrupted\n")
    else:
        assert process.returncode == -number


def test_worker_that_is_killed(toolkit: FakeToolkit) -> None:
    process, compilers = start_compile(toolkit, 2)
    worker = parent_of(compilers[0])
    assert worker is not None
    os.kill(worker, signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert parent_of(compilers[1]) is None
    assert process.returncode == 1
    assert err.startswith("error: a process that compiled was killed, perhaps for want of memory\n")
    assert err.endswith("  hint: fewer at once, --jobs 1\n")
    os.killpg(worker, signal.SIGKILL)  # its compiler


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
        commands.Outcome("scale", "x86_64", 1.5, {}, (), None),
        commands.Outcome("scale", "sm_90a", 0.25, resources, (warning,), None),
        commands.Outcome("scale", "sm_80", None, resources, (), None),
    ]
    assert commands.print_outcomes(console, outcomes) == 0
    rows = [line.split() for line in text_of(console).splitlines()]
    assert ["scale", "x86_64", "1.50"] in rows
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
    with pytest.raises(ValueError, match="kernels: expected some of scale, got ''"):
        commands.compile_command(console, "8.0", "", None, None)
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
    assert commands.compile_command(console, "8.0,9.0,", " scale ,scale,", 1, None) == 0
    assert text_of(console).count("sm_90a") == 1


@pytest.mark.parametrize("out", ["~/shipped", Path("~/shipped")])
def test_folder_in_the_home(
    out: Path | str, tmp_path: Path, toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    commands.compile_kernels("8.0", [scale_kernel()], jobs=1, out=out)
    assert len(list((tmp_path / "home/shipped").rglob("meta.json"))) == 2


WRONG: list[tuple[dict[str, object], str]] = [
    ({"arch": 9.0}, "arch: expected a str of compute capabilities, got 9.0"),
    ({"kernels": "topk"}, "kernels: expected a list of Kernel, got 'topk'"),
    ({"kernels": scale_kernel()}, "kernels: expected a list of Kernel, got a Kernel"),
    ({"kernels": ["topk"]}, "kernels: expected a list of Kernel, got one with 'topk'"),
    ({"jobs": "2"}, "jobs: expected an int, got '2'"),
    ({"jobs": 1.5}, "jobs: expected an int, got 1.5"),
    ({"out": 7}, "out: expected a folder, got 7"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    good = {"arch": "8.0", "kernels": [scale_kernel()], "jobs": 1}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        commands.compile_kernels(**{**good, **arguments})  # type: ignore[arg-type]


@needs_nvrtc
@needs_gxx
def test_compile_in_processes(tmp_path: Path) -> None:
    """Real compilers, two at a time, of a script without a guard that has loaded the kernel."""
    script = tmp_path / "script.py"
    script.write_text(
        PREAMBLE.format(tests=str(Path(__file__).parent))
        + textwrap.dedent("""
    from sparse_indexer.jit import commands
    load(kernel, torch.device("cpu"))
    for o in commands.compile_kernels("8.0,9.0", [kernel], jobs=2):
        print(o.kernel, o.target, o.error, sorted(o.resources))
    print(__file__, sys.modules["__main__"].kernel is kernel)
    """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == sorted(
        [
            f"scale {platform.machine()} None []",
            "scale sm_80 None ['scale_1', 'scale_2']",
            "scale sm_90a None ['scale_1', 'scale_2']",
            f"{script} True",
        ]
    )


def test_cache_command(
    root: Path,
    tmp_path: Path,
    toolkit: FakeToolkit,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where nothing fell back to
    commands.compile_kernels("8.0,9.0", [scale_kernel()], jobs=1)
    assert commands.cache_command(console, clear=False) == 0
    lines = text_of(console).splitlines()
    assert lines[0] == f"{root}: 3 files, 0.0 MB"
    assert lines[1].startswith("  scale: sm_80 1, sm_90a 1, ")
    assert commands.cache_command(console, clear=True) == 0
    assert text_of(console).splitlines()[-1] == f"cleared {root}"
    assert not list(root.iterdir())
    assert commands.cache_command(console, clear=True) == 0
    assert text_of(console).splitlines()[-1] == f"nothing to clear in {root}"


def test_cache_command_shows_all_that_is_used(
    tmp_path: Path, toolkit: FakeToolkit, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `--clear` would clear, and read-only roots that are none."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", "/proc/self/cache")
    commands.compile_kernels("8.0", [scale_kernel()], jobs=1)
    fallback = tmp_path / f"sparse_indexer-{os.getuid()}"
    roots = f"/proc/self/cache:{fallback / 'v1'}:/nonexistent:{fallback}"
    for value, kinds in {
        "/proc/self/cache": ["", ", used where the first cannot be written"],
        roots: [
            "",
            ", read-only, but has no v1 in it",
            ", read-only, but there is no such folder",
            ", read-only",
        ],
    }.items():
        monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", value)
        console.file = io.StringIO()
        commands.cache_command(console, clear=False)
        lines = [line for line in text_of(console).splitlines() if not line.startswith("  ")]
        places = value.split(":") if value == roots else [value, str(fallback)]
        files = [2 if place == str(fallback) else 0 for place in places]
        assert lines == [
            f"{place}{kind}: {count} files, 0.0 MB"
            for place, kind, count in zip(places, kinds, files, strict=True)
        ]
    commands.cache_command(console, clear=True)
    assert text_of(console).splitlines()[-1] == f"cleared {fallback}"


def test_clear_leaves_what_is_not_used(
    root: Path,
    tmp_path: Path,
    toolkit: FakeToolkit,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The temporary root of another setting, and links, whatever they lead to."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", "/proc/self/cache")
    commands.compile_kernels("8.0", [scale_kernel()], jobs=1)
    fallback = tmp_path / f"sparse_indexer-{os.getuid()}"
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", str(root))
    commands.compile_kernels("8.0", [scale_kernel()], jobs=1)
    (root / "v1/aaa").symlink_to(fallback / "v1")
    (root / "v1/zzz").symlink_to(tmp_path / "nowhere")
    assert str(fallback) not in text_of(console)
    commands.cache_command(console, clear=True)
    links = f"{root}/v1/aaa, {root}/v1/zzz"
    assert text_of(console) == f"cleared {root}, left what is not of the cache (2): {links}\n"
    assert sorted(os.listdir(root / "v1")) == ["aaa", "zzz"]
    assert len(cache.entries(fallback)) == 2


def test_kernels_that_are_not_for_an_architecture_are_named(
    toolkit: FakeToolkit, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper = dataclasses.replace(scale_kernel(), capabilities=(90, 90))
    monkeypatch.setattr(commands, "all_kernels", lambda: {"scale": hopper})
    assert commands.compile_command(console, "8.0,9.0", None, 1, None) == 0
    assert text_of(console).splitlines()[-1] == "not for sm_80: scale"


def test_doctor_says_once_that_a_cache_cannot_be_written(
    tmp_path: Path, toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", "/proc/self/cache")
    lines = doctor.report()
    (fault,) = (text for subject, text in lines if subject == "cache")
    assert fault.startswith("the cache folder /proc/self/cache cannot be written (")
    assert ("set", "SPARSE_INDEXER_CACHE_DIR=/proc/self/cache") in lines


def test_doctor_says_what_variables_should_be(
    root: Path, toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = f"{root}:/nonexistent"
    values = {
        "COMPILER": ("clang", "'nvrtc' or 'nvcc'"),
        "JIT": ("never", "'auto' or 'cached' or 'rebuild'"),
        "LINEINFO": ("yes", "'0' or '1'"),
        "SYNC": ("on", "'0' or '1'"),
        "CACHE": ("x", "one of the names SPARSE_INDEXER_CACHE_DIR, SPARSE_INDEXER_COMPILER, "),
    }
    for name, (value, _) in values.items():
        monkeypatch.setenv(f"SPARSE_INDEXER_{name}", value)
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", folders)
    lines = [text for subject, text in doctor.report() if subject in ("set", "cache")]
    note = "/nonexistent is read-only, but there is no such folder"
    assert f"SPARSE_INDEXER_CACHE_DIR={folders}: {note}" in lines
    assert "/nonexistent, read-only, but there is no such folder" in lines
    for name, (value, expected) in values.items():
        wanted = f"SPARSE_INDEXER_{name}={value}: expected {expected}"
        assert any(line.startswith(wanted) for line in lines)
    for name, value in {"CACHE_DIR": f":{root}", "JIT": "cached", "COMPILER": "nvcc"}.items():
        monkeypatch.setenv(f"SPARSE_INDEXER_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(root.parent))
    (root / "v1").mkdir(parents=True, exist_ok=True)
    lines = [text for subject, text in doctor.report() if subject == "set"]
    for wanted in (f"CACHE_DIR=:{root}", "JIT=cached", "COMPILER=nvcc"):
        assert f"SPARSE_INDEXER_{wanted}" in lines


def test_doctor_of_an_nvcc_without_gxx(
    toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    lines = doctor.report()
    assert ("nvcc", "unusable without gcc and g++, not found on the PATH") in lines
    assert ("fix", doctor.hints.NVCC_WITHOUT_GXX) in lines
    monkeypatch.setenv("NVCC_CCBIN", "/opt/gcc")
    assert ("fix", doctor.hints.NVCC_WITHOUT_GXX) not in doctor.report()


def test_doctor_of_a_home_without_nvcc(
    root: Path, toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_PATH", str(root))
    lines = doctor.report()
    assert ("set", f"CUDA_PATH={root}: expected a toolkit, with bin/nvcc") in lines
    assert not any(text.startswith("CUDA_HOME=") for _, text in lines)
    (toolkit.bin / "nvcc").chmod(0o644)
    expected = f"CUDA_HOME={toolkit.home}: expected a toolkit, with bin/nvcc"
    assert ("set", expected) in doctor.report()
    (toolkit.bin / "nvcc").write_text("#!/bin/sh\necho no compiler\n")
    (toolkit.bin / "nvcc").chmod(0o755)
    (toolkit.home / "include/cuda_runtime_api.h").unlink()
    text = f"unusable, `{toolkit.bin}/nvcc --version` names no version"
    assert ("nvcc", text) in doctor.report()


def test_doctor(root: Path, toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(compilers, "cupy_wheels", list)
    monkeypatch.setattr(doctor, "driver_version", lambda: (12, 4))
    lines = dict(doctor.report())
    assert lines["NVRTC"] == "not found; nvrtc: CuPy is not installed"
    assert lines["nvcc"] == f"12.9, {toolkit.bin}/nvcc; headers: its own"
    assert lines[str(toolkit.bin / "g++")].startswith("release 12.9, V12.9.86")
    assert lines["cache"] == str(root)
    assert lines["set"].startswith("SPARSE_INDEXER_")
    assert lines["driver"] == "for CUDA up to 12.4"
    assert "fix" not in lines


def test_doctor_of_two_wheels_of_cupy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninstalling one takes the files of both."""
    wheels = ["cupy-cuda12x", "cupy-cuda13x"]
    monkeypatch.setattr(doctor, "cupy_wheels", lambda: wheels)
    monkeypatch.setattr(compilers, "cupy_wheels", lambda: wheels[:1])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lines = dict(doctor.report())
    assert lines["NVRTC"].endswith("is not installed, though pip lists cupy-cuda12x: the files "
                                   "went with another wheel")  # fmt: skip
    assert lines["CuPy"] == (
        "cupy-cuda12x and cupy-cuda13x are installed, which share files: pip uninstall "
        "cupy-cuda12x cupy-cuda13x, then install one again"
    )


def test_a_compiler_that_is_not_there_is_not_g_plus_plus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    assert doctor.hints.no_host_compiler().startswith("CXX names what is not there: unset it")
    lines = doctor.report()
    assert ("/nonexistent", "not found on the PATH") in lines
    assert ("fix", doctor.hints.no_host_compiler()) in lines
    monkeypatch.setenv("CXX", " ")  # g++
    assert doctor.hints.no_host_compiler() == doctor.hints.NO_HOST_COMPILER


def test_doctor_where_nothing_is_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr(doctor, "driver_version", lambda: None)
    lines = doctor.report()
    assert [text for name, text in lines if name == "fix"] == [
        doctor.hints.no_device_compiler(),
        doctor.hints.NO_HOST_COMPILER,
    ]
    assert ("driver", "none") in lines
