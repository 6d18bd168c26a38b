# SPDX-License-Identifier: Apache-2.0
"""Tensors decide where a call runs: with another current device, and after calls on that one."""

from collections.abc import Callable, Iterable

import pytest
import sm90_support
import torch
from sm90_support import layers, needs_hopper, run

from sparse_indexer import (
    CandidateIndexer,
    IndexKPool,
    KVPool,
    dequantize_fp4,
    dequantize_fp8,
    flat_index_k,
    make_candidate_indexer,
    plan_prefill,
    pool_slots,
    sparse_attention,
)
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.backends.sm70 import Sm70Indexer
from sparse_indexer.backends.sm90 import Sm90Indexer
from sparse_indexer.formats import FORMATS
from sparse_indexer.testing import check_backend

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

LENS = [[3000 + 5 * i for i in range(13)], [], [1900 - i for i in range(10)], [40, 0, 5000]]
ORDER = ("cuda:0", "cuda:1", "cuda:0", "cuda:1")
MAKE: dict[str, Callable[[str], CandidateIndexer]] = {
    "sm90": lambda device: Sm90Indexer(device, topk=64, topk_blocks=100),
    "sm70": lambda device: Sm70Indexer(device, topk=64, topk_blocks=100, route="fused"),
    "sm70, gemm": lambda device: Sm70Indexer(device, topk=64, topk_blocks=100, route="gemm"),
    "mask": lambda device: MaskIndexer(device, topk=64, topk_blocks=100),
}
SM90 = pytest.param("sm90", marks=needs_hopper)


def expect_alike(of_device: Callable[[str], Iterable[torch.Tensor]]) -> None:
    """The same tensors on all devices, whatever ran on another one before."""
    found = []
    for device in ORDER:
        tensors = list(of_device(device))
        assert torch.cuda.current_device() == 0
        assert all(tensor.device == torch.device(device) for tensor in tensors)
        found.append([tensor.cpu() for tensor in tensors])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", [SM90, *sorted(MAKE.keys() - {"sm90"})])
def test_a_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def results(device: str) -> Iterable[torch.Tensor]:
        monkeypatch.setattr(sm90_support, "DEVICE", torch.device(device))
        return run(MAKE[name](device), *layers(LENS, "fp8", palette=True))

    expect_alike(results)


@pytest.mark.parametrize("name", [SM90, "mask"])
def test_the_conformance_kit(name: str) -> None:
    tolerance = 5e-4 if name == "sm90" else 5e-6
    indexer = make_candidate_indexer("cuda:1", topk=8, topk_blocks=12, backend=name)
    report = check_backend(indexer, formats=["fp4", "bf16"], tolerance=tolerance)
    report.raise_if_failed()
    assert report.backend == name
    assert report.selecting_rows > 40
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("fmt", FORMATS)
def test_formats_and_pools(fmt: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 128, generator=generator) * torch.rand(300, 1, generator=generator)

    def results(device: str) -> Iterable[torch.Tensor]:
        keys = flat_index_k(x.to(device), fmt)
        pool = IndexKPool.empty(6, 64, fmt, device=device)
        table = torch.tensor([[3, 0, 5, 1, 4]], dtype=torch.int32, device=device)
        plan = plan_prefill(range(300), [300], page_table=table)
        positions = torch.arange(300, dtype=torch.int32, device=device)
        slots = pool_slots(positions[:, None], plan, 64)[:, 0]
        pool.write(slots, x.to(device))
        yield from (slots, pool.pages.view(torch.uint8), pool.read(slots).values.view(torch.uint8))
        if keys.scales is not None:
            dequantize = dequantize_fp4 if fmt == "fp4" else dequantize_fp8
            yield dequantize(keys.values, keys.scales)

    expect_alike(results)


def test_sparse_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 8, 576, generator=generator).half()
    pool = torch.randn(300, 576, generator=generator)
    scales = torch.rand(300, 4, generator=generator)
    positions = torch.randint(-50, 300, (5, 70), generator=generator).int()

    def results(device: str) -> Iterable[torch.Tensor]:
        queries, plain, picked = q.to(device), pool.half().to(device), positions.to(device)
        parts = pool[:, :512].to(torch.float8_e4m3fn), scales, pool[:, 512:].bfloat16()
        packed = KVPool(*(part.to(device) for part in parts))
        for rows in (plain, packed):
            yield sparse_attention(queries, rows, picked, sink=None, scale=0.05)
        yield packed.read(picked.flatten().clamp(min=0))

    expect_alike(results)
