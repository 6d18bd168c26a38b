# SPDX-License-Identifier: Apache-2.0
"""`load` and `warmup` without a GPU: what is built when, once, and what is refused."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from jit_support import VARIANTS, scale_kernel, use_empty_cache

from sparse_indexer.errors import JitError
from sparse_indexer.jit import Kernel, load, loading, warmup
from sparse_indexer.jit.cache import Stored


class Host:
    """Stands in for a host module, and counts."""

    def __init__(self) -> None:
        self.loads: list[tuple[Any, ...]] = []
        self.error: str | None = None

    def load(self, *arguments: Any) -> None:
        if self.error:
            raise RuntimeError(self.error)
        self.loads.append(arguments)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Two GPUs, of 9.0 and 8.0, that are not there; compilers that take no time."""
    use_empty_cache(tmp_path, monkeypatch)
    host = Host()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 - device.index, 0))
    monkeypatch.setattr(loading, "forbids_loading", lambda device: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(loading, "host_artifact", lambda kernel: Stored(b"", None, {}, False))
    monkeypatch.setattr(loading, "device_artifact", _cubin)
    monkeypatch.setattr(loading, "_open", lambda kernel, stored: host)
    return host


def _cubin(kernel: Kernel, capability: tuple[int, int]) -> Stored:
    return Stored(b"cubin of %d.%d" % capability, None, {"built_by": "nvrtc 12.9"}, False)


GPU = [torch.device("cuda", index) for index in range(2)]


def test_wrong_arguments_are_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: Any = scale_kernel()
    cases: list[tuple[Any, tuple[Any, ...], str]] = [
        (load, ("scale", GPU[0]), "kernel: expected a Kernel, got 'scale'"),
        (load, (None, GPU[0]), "kernel: expected a Kernel, got None"),
        (load, (kernel, []), "device: expected a torch device, got a list"),
        (load, (kernel, None), "device: expected a torch device, got None"),
        (load, (kernel, "meta"), "device: expected a CUDA device or the CPU, got meta"),
        (warmup, ([],), "device: expected a torch device, got a list"),
        (warmup, (GPU[0], kernel), "kernels: expected a list of Kernel, got a Kernel"),
        (warmup, (GPU[0], ["scale"]), "kernels: expected a list of Kernel, got one with 'scale'"),
    ]
    for call, arguments, message in cases:
        with pytest.raises(ValueError, match=f"^{message}$"):
            call(*arguments)
    assert load(kernel, "cuda:0") is host  # type: ignore[arg-type]
    monkeypatch.setenv("SPARSE_INDEXER_SYNC", "yes")
    with pytest.raises(ValueError, match=r"^SPARSE_INDEXER_SYNC: expected '0' or '1', got 'yes'$"):
        load(scale_kernel(), GPU[0])


def test_loads_once_a_device(host: Host) -> None:
    kernel = scale_kernel()
    for _ in range(3):
        assert load(kernel, GPU[0]) is host
        assert load(kernel, GPU[1]) is host
    symbols = list(VARIANTS)
    assert host.loads == [
        ("scale", 0, b"cubin of 9.0", symbols),
        ("scale", 1, b"cubin of 8.0", symbols),
    ]


def test_kernels_of_one_name_are_apart(host: Host) -> None:
    load(scale_kernel(), GPU[0])
    load(scale_kernel(), GPU[0])
    assert len(host.loads) == 2


def test_many_threads_load_once(host: Host) -> None:
    kernel, barrier = scale_kernel(), threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        assert load(kernel, GPU[0]) is host

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(host.loads) == 1


def test_capture_on_a_miss(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, ready = scale_kernel(), scale_kernel()
    warmup(GPU[0], [ready])
    monkeypatch.setattr(loading, "forbids_loading", lambda device: device == GPU[0])
    assert load(ready, GPU[0]) is host
    with pytest.raises(JitError, match="scale is not loaded on cuda:0, and a CUDA graph") as caught:
        load(kernel, GPU[0])
    assert "call sparse_indexer.jit.warmup('cuda:0') before the capture" in str(caught.value)
    assert load(kernel, GPU[1]) is host
    monkeypatch.setattr(loading, "forbids_loading", lambda device: False)
    assert load(kernel, GPU[0]) is host


def test_warmup(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all kernels that are for the GPU, or of those that are named."""
    everywhere = scale_kernel()
    hopper = Kernel("hopper", {"hopper": "Hopper"}, capabilities=(90, 90))
    kernels = {"scale": everywhere, "hopper": hopper}
    monkeypatch.setattr(loading, "all_kernels", lambda: kernels)
    warmup("cuda")  # the current device, cuda:1
    assert [call[:2] for call in host.loads] == [("scale", 1)]
    warmup(GPU[0])
    assert [call[:2] for call in host.loads[1:]] == [("scale", 0), ("hopper", 0)]
    with pytest.raises(JitError, match=r"hopper is for compute capability 9\.0, cuda:1 has 8\.0"):
        warmup(GPU[1], [hopper])
    with pytest.raises(ValueError, match="device: expected a CUDA device, got cpu"):
        warmup("cpu")


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device in ("cuda", GPU[0], "cpu"):
        message = f"^device: expected an NVIDIA GPU that torch can use, got {device}$"
        with pytest.raises(ValueError, match=message):
            warmup(device)
    with pytest.raises(ValueError, match=r"^device: expected an NVIDIA GPU .* got cuda:0$"):
        load(scale_kernel(), GPU[0])


@pytest.mark.parametrize("error", [JitError("no luck"), KeyboardInterrupt()])
def test_warmup_that_fails_does_not_build_the_rest(
    host: Host, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def host_artifact(kernel: Kernel) -> Stored:
        built.append(kernel.name)
        if kernel.name == "first":
            raise error
        time.sleep(0.2)  # until the others are called off
        return Stored(b"", None, {}, False)

    monkeypatch.setattr(loading, "max_jobs", lambda: 1)
    monkeypatch.setattr(loading, "host_artifact", host_artifact)
    names = ("first", "second", "third", "fourth")
    with pytest.raises(type(error)):
        warmup(GPU[0], [Kernel(name, {"a": "A"}) for name in names])
    assert built in (["first"], ["first", "second"])


def test_range_of_capabilities_in_the_message(host: Host) -> None:
    turing = Kernel("turing", {"turing": "Turing"}, capabilities=(70, 75))
    with pytest.raises(JitError, match=r"is for compute capability 7\.0 to 7\.5, cuda:0 has 9\.0"):
        load(turing, GPU[0])


@pytest.mark.parametrize(
    ("driver", "hint"),
    [
        ((12, 4), "take its compiler, pip install 'nvidia-cuda-nvrtc-cu12==12.4.*'"),
        ((12, 9), None),
        (None, None),
    ],
)
def test_driver_older_than_the_compiler(
    host: Host,
    driver: tuple[int, int] | None,
    hint: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "driver_version", lambda: driver)
    host.error = "scale on cuda:0: cuLibraryLoadData: CUDA_ERROR_INVALID_IMAGE (...)"
    kernel = scale_kernel()
    with pytest.raises(
        JitError, match=r"^cannot load scale on cuda:0: cuLibraryLoadData"
    ) as caught:
        load(kernel, GPU[0])
    assert ("hint" in str(caught.value)) is (hint is not None)
    if hint:
        assert "this driver is for CUDA up to 12.4, and nvrtc 12.9 compiled" in str(caught.value)
        assert hint in str(caught.value)
    host.error = None
    assert load(kernel, GPU[0]) is host  # nothing was left half loaded


def test_module_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is tried, then the error says what dlopen says."""
    use_empty_cache(tmp_path, monkeypatch)
    broken = tmp_path / "host.so"
    broken.write_bytes(b"no shared library")
    stored = Stored(b"no shared library", broken, {}, False)
    with pytest.raises(JitError, match=r"cannot load the host entry of scale: .*(invalid|short)"):
        loading._open(scale_kernel(), stored)


def test_module_built_for_a_newer_libstdcpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise RuntimeError("libstdc++.so.6: version `GLIBCXX_3.4.32' not found")

    use_empty_cache(tmp_path, monkeypatch)
    monkeypatch.setattr("tvm_ffi.load_module", refuse)
    with pytest.raises(JitError, match=r"hint: the C.. compiler is newer than the libstdc"):
        loading._open(scale_kernel(), Stored(b"module", None, {}, False))
