# SPDX-License-Identifier: Apache-2.0
"""Where and how an indexer's methods run; two GPUs are pretended."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.devices import forbids_loading, is_captured
from sparse_indexer.protocol import on_its_device


class TwoGpus:
    """What of `torch.cuda` is asked; `cuda:0` is the current one."""

    def __init__(self) -> None:
        self.current = 0
        self.entered: list[int] = []

    def current_device(self) -> int:
        return self.current

    @contextlib.contextmanager
    def device(self, where: torch.device) -> Iterator[None]:
        before, self.current = self.current, where.index
        self.entered.append(where.index)
        try:
            yield
        finally:
            self.current = before

    def is_current_stream_capturing(self) -> bool:
        return self.current == 1


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> TwoGpus:
    gpus = TwoGpus()
    for name in ("current_device", "device", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpus, name))
    return gpus


@on_its_device
def method(indexer: MaskIndexer, a: int, *, b: int) -> tuple[int, bool, bool]:
    return a + b, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@on_its_device
def device_of(indexer: MaskIndexer, *, fails: bool = False) -> int:
    if fails:
        raise ValueError("fails")
    return torch.cuda.current_device()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_methods_run_without_gradients(mode: Any) -> None:
    with mode():
        got = method(MaskIndexer("cpu"), 1, b=2)
        assert got == (3, False, mode is torch.inference_mode)
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)
    assert method.__name__ == "method"


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_methods_run_with_their_gpu_as_the_current_one(mode: Any, gpus: TwoGpus) -> None:
    for index, entered in ((0, []), (1, [1])):
        indexer = MaskIndexer("cpu")
        indexer.device = torch.device("cuda", index)
        gpus.entered.clear()
        with mode():
            assert device_of(indexer) == index
        assert gpus.entered == entered  # none where it is the current one
        with mode(), pytest.raises(ValueError, match="fails"):
            device_of(indexer, fails=True)
        assert gpus.current == 0


def test_a_capture_is_looked_for_on_the_device_that_is_named(gpus: TwoGpus) -> None:
    one, other = (torch.device("cuda", index) for index in range(2))
    assert is_captured(other)
    assert not is_captured(one)
    assert forbids_loading(other)
    assert not forbids_loading(one)
    gpus.current = 1
    assert forbids_loading(one)  # since the current one's capture would end
    assert not is_captured(one)
    assert gpus.current == 1
