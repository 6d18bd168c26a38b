# SPDX-License-Identifier: Apache-2.0
"""Tensors decide where a call runs: with another current device, and after calls on that one."""

from collections.abc import Callable

import pytest
import sm90_support
import torch
from sm90_support import layers, needs_hopper, run

from sparse_indexer import CandidateIndexer, sparse_attention
from sparse_indexer.backends.sm70 import Sm70Indexer
from sparse_indexer.backends.sm90 import Sm90Indexer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

LENS = [[3000 + 5 * i for i in range(13)], [], [1900 - i for i in range(10)], [40, 0, 5000]]
ORDER = ("cuda:0", "cuda:1", "cuda:0", "cuda:1")
MAKE: dict[str, Callable[[str], CandidateIndexer]] = {
    "sm90": lambda device: Sm90Indexer(device, topk=64, topk_blocks=100),
    "sm70": lambda device: Sm70Indexer(device, topk=64, topk_blocks=100, route="fused"),
    "sm70, gemm": lambda device: Sm70Indexer(device, topk=64, topk_blocks=100, route="gemm"),
}


def on_the_host(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    assert torch.cuda.current_device() == 0
    return [tensor.cpu() for tensor in tensors]


@needs_hopper
@pytest.mark.parametrize("name", MAKE)
def test_a_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for device in ORDER:
        monkeypatch.setattr(sm90_support, "DEVICE", torch.device(device))
        found.append(on_the_host(run(MAKE[name](device), *layers(LENS, "fp8", palette=True))))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_sparse_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 8, 576, generator=generator).half()
    pool = torch.randn(300, 576, generator=generator).half()
    positions = torch.randint(-50, 300, (5, 70), generator=generator).int()
    found = []
    for device in ORDER:
        given = [tensor.to(device) for tensor in (q, pool, positions)]
        found.append(on_the_host((sparse_attention(*given, sink=None, scale=0.05),)))
    for other in found[1:]:
        assert torch.equal(found[0][0], other[0])
