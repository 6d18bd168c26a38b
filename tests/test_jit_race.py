# SPDX-License-Identifier: Apache-2.0
"""Several processes at one cache: who builds, who waits, and who must not be waited for."""

import fcntl
import logging
import os
import signal
import textwrap
import time
from pathlib import Path

import pytest
from jit_support import (
    FakeToolkit,
    finish,
    run_python,
    scale_kernel,
    start_python,
    use_empty_cache,
    use_fake_toolkit,
)

from sparse_indexer.jit import lock as locking
from sparse_indexer.jit.artifacts import device_artifact

BUILD = "print(device_artifact(kernel, (9, 0)).data.decode())"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_empty_cache(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def toolkit(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeToolkit:
    return use_fake_toolkit(tmp_path, monkeypatch)


def lock_file(root: Path) -> Path:
    """The lock of the one entry that these tests build, which is gone again."""
    device_artifact(scale_kernel(), (9, 0))
    (found,) = (root / "v1/locks").iterdir()
    for folder in root.glob("v1/sm_90a/scale/*"):
        folder.rename(root / folder.name)
    return found


def run_together(code: str, count: int, folder: Path) -> list[str]:
    """What several processes print that start `code` at the same moment."""
    wait = f"""
import os, time
Path({str(folder)!r}, f"ready-{{os.getpid()}}").touch()
while not Path({str(folder)!r}, "go").exists():
    time.sleep(0.001)
"""
    processes = [start_python(wait + textwrap.dedent(code)) for _ in range(count)]
    while len(list(folder.glob("ready-*"))) < count:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)
    (folder / "go").touch()
    return [finish(process) for process in processes]


def test_eight_cold_processes(toolkit: FakeToolkit, tmp_path: Path) -> None:
    toolkit.order("slow", "0.3")
    code = f"{BUILD}\nprint(host_artifact(kernel).data.decode())"
    outputs = set(run_together(code, 8, tmp_path))
    assert len(outputs) == 1  # all have the bytes of the one that built
    assert len(toolkit.calls) == 2  # one of nvcc, one of g++


def test_killed_builder(root: Path, toolkit: FakeToolkit) -> None:
    toolkit.order("slow", "60")
    builder = start_python(BUILD)
    while not toolkit.calls:
        assert builder.poll() is None
        time.sleep(0.02)
    builder.kill()
    builder.communicate()
    os.kill(int(toolkit.calls[0].split()[0]), signal.SIGKILL)  # its compiler
    assert list((root / "v1/staging").iterdir())
    (toolkit.bin / "slow").unlink()
    start = time.monotonic()
    assert device_artifact(scale_kernel(), (9, 0)).fresh
    assert time.monotonic() - start < 2
    assert not device_artifact(scale_kernel(), (9, 0)).fresh


def test_builder_that_fails_in_one_process_only(toolkit: FakeToolkit, tmp_path: Path) -> None:
    toolkit.order("slow", "0.3")
    toolkit.order("fail_once")
    code = """
    from sparse_indexer import JitError
    try:
        print("built", device_artifact(kernel, (9, 0)).data.decode())
    except JitError as error:
        print("failed", "the first time goes wrong" in str(error))
    """
    outputs = sorted(run_together(code, 3, tmp_path))
    assert [o.split()[0] for o in outputs] == ["built", "built", "failed"]
    assert outputs[0] == outputs[1]
    assert outputs[2].split()[1] == "True"
    assert len(toolkit.calls) == 2


def test_planted_lock_file(root: Path) -> None:
    path = lock_file(root)
    path.write_text("process 1 on somewhere else")
    os.utime(path, (0, 0))
    start = time.monotonic()
    assert device_artifact(scale_kernel(), (9, 0)).fresh
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("where", ["a folder for the lock", "a file for the folder of locks"])
def test_lock_that_cannot_be_opened(root: Path, where: str) -> None:
    path = lock_file(root)
    path.unlink()
    if where == "a folder for the lock":
        path.mkdir()
    else:
        path.parent.rmdir()
        path.parent.write_text("")
    assert device_artifact(scale_kernel(), (9, 0)).fresh


def test_file_system_without_locks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert device_artifact(scale_kernel(), (9, 0)).fresh
    assert not device_artifact(scale_kernel(), (9, 0)).fresh


def test_waits_says_for_whom_and_gives_up(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert (locking.WARN_AFTER, locking.GIVE_UP_AFTER) == (5.0, 600.0)
    monkeypatch.setattr(locking, "WARN_AFTER", 0.1)
    monkeypatch.setattr(locking, "GIVE_UP_AFTER", 0.5)
    path = lock_file(root)
    path.write_text("process 4711 on elsewhere")
    with path.open() as held, caplog.at_level(logging.WARNING, "sparse_indexer"):
        fcntl.flock(held, fcntl.LOCK_EX)
        assert device_artifact(scale_kernel(), (9, 0)).fresh
    waiting, giving_up = (record.message for record in caplog.records)
    assert waiting.startswith(
        "waiting for process 4711 on elsewhere, which builds scale for sm_90a"
    )
    assert str(path) in waiting
    assert "going on without" in giving_up


def test_holder_signs_its_lock(root: Path) -> None:
    code = f"{BUILD}\nimport os, socket\nprint(os.getpid(), socket.gethostname())"
    pid, host = run_python(code).splitlines()[-1].split()
    (path,) = (root / "v1/locks").iterdir()
    assert path.read_text() == f"process {pid} on {host}"


def test_reader_takes_no_lock(root: Path) -> None:
    path = lock_file(root)
    device_artifact(scale_kernel(), (9, 0))
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.monotonic()
        assert not device_artifact(scale_kernel(), (9, 0)).fresh
        assert time.monotonic() - start < 1
