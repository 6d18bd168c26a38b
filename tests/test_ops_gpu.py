# SPDX-License-Identifier: Apache-2.0
"""What holds for every op: any stream, captured graphs replayed with other lengths, no sync."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from sparse_indexer.jit import warmup
from sparse_indexer.ops.block_keys import block_keys
from sparse_indexer.ops.candidate_table import candidate_table
from sparse_indexer.ops.index_k import index_k
from sparse_indexer.ops.topk import topk
from sparse_indexer.testing import hostile_pool, random_keys

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
ROWS, WIDTH = 40, 4096


class Op(NamedTuple):
    call: Callable[[], None]
    lens: torch.Tensor  # read on the device
    outputs: list[torch.Tensor]


def make(name: str) -> Op:
    generator = torch.Generator(DEVICE).manual_seed(0)
    lens = torch.full((ROWS,), WIDTH, dtype=torch.int32, device=DEVICE)
    logits = torch.randn(ROWS, WIDTH, device=DEVICE, generator=generator)
    if name == "topk":
        out = torch.empty(ROWS, 300, dtype=torch.int32, device=DEVICE)
        return Op(lambda: topk(logits, lens, out=out), lens, [out])
    if name == "topk, of rows":
        rows = torch.arange(ROWS, dtype=torch.int32, device=DEVICE).flip(0)
        rows[::5] = -1
        out = torch.empty(ROWS, 300, dtype=torch.int32, device=DEVICE)
        return Op(lambda: topk(logits, lens, out=out, rows=rows, unused=9), lens, [out])
    if name == "block_keys":
        keys = torch.empty(ROWS, WIDTH // 8, device=DEVICE)
        return Op(lambda: block_keys(logits, lens, out=keys), lens, [keys])
    if name == "candidate_table":
        selected = torch.arange(64, dtype=torch.int32, device=DEVICE).repeat(ROWS, 1) * 3
        blocks, counts = torch.empty_like(selected), torch.empty_like(lens)
        return Op(
            lambda: candidate_table(selected, lens, out_blocks=blocks, out_lens=counts),
            lens,
            [blocks, counts],
        )
    stored = [random_keys(200, "fp4", seed=i, device=DEVICE) for i in range(ROWS)]
    pool, table = hostile_pool(stored, "planar")
    lens.fill_(200)
    starts = 200 * torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    if name == "index_k, packed":
        packed = torch.empty(25 * ROWS, 1088, dtype=torch.float16, device=DEVICE)
        first = starts // 8
        return Op(
            lambda: index_k(
                pool, table, lens=lens, max_len=200, out_starts=first, out_values=packed
            ),
            lens,
            [packed],
        )
    values = torch.empty(200 * ROWS, 128, dtype=torch.float16, device=DEVICE)
    scales = torch.empty(200 * ROWS, device=DEVICE)
    return Op(
        lambda: index_k(
            pool, table, lens=lens, max_len=200, out_starts=starts,
            out_values=values, out_scales=scales,
        ),
        lens,
        [values, scales],
    )  # fmt: skip


OPS = ["topk", "topk, of rows", "block_keys", "candidate_table", "index_k", "index_k, packed"]


def run(op: Op, call: Callable[[], None]) -> list[torch.Tensor]:
    for out in op.outputs:
        out.fill_(7)
    call()
    return [out.clone() for out in op.outputs]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    pairs = zip(got, want, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize("name", OPS)
def test_a_side_stream_gives_the_same(name: str) -> None:
    op = make(name)
    want = run(op, op.call)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run(op, op.call)
    torch.cuda.current_stream().wait_stream(stream)
    assert same(got, want)


@pytest.mark.parametrize("name", OPS)
def test_a_graph_replays_with_other_lengths(name: str) -> None:
    warmup(DEVICE)
    op = make(name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.call()
    most = int(op.lens[0])
    seen = []
    for longest in (0, 1, 7, 65, most // 2, most):
        op.lens.copy_(torch.arange(ROWS, device=DEVICE).mul(7).clamp(max=longest))
        op.lens[-1] = longest
        want = run(op, op.call)
        assert same(run(op, graph.replay), want)
        seen.append(want)
    assert not same(seen[0], seen[-1])


@pytest.mark.parametrize("name", OPS)
def test_twenty_runs_give_the_same_bits(name: str) -> None:
    op = make(name)
    want = run(op, op.call)
    for _ in range(20):
        assert same(run(op, op.call), want)


@pytest.mark.parametrize("name", OPS)
def test_no_op_synchronizes_or_allocates(name: str) -> None:
    op = make(name)
    op.call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        op.call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
