# SPDX-License-Identifier: Apache-2.0
"""What holds for every op: any stream, captured graphs replayed with other lengths, no sync."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from gpu_support import no_synchronization

from sparse_indexer import KVPool, quantize_fp8
from sparse_indexer.jit import warmup
from sparse_indexer.jit.kernel import all_kernels
from sparse_indexer.ops.block_keys import block_keys
from sparse_indexer.ops.candidate_logits import candidate_logits
from sparse_indexer.ops.candidate_quads import candidate_quads
from sparse_indexer.ops.candidate_table import candidate_table
from sparse_indexer.ops.candidate_topk import candidate_topk
from sparse_indexer.ops.dense_block_keys import dense_block_keys
from sparse_indexer.ops.fused_block_keys import fused_block_keys
from sparse_indexer.ops.fused_candidate_logits import fused_candidate_logits
from sparse_indexer.ops.fused_logits import fused_logits
from sparse_indexer.ops.index_k import index_k
from sparse_indexer.ops.index_q import index_q
from sparse_indexer.ops.kv_gather import kv_gather
from sparse_indexer.ops.relu_head_sum import relu_head_sum
from sparse_indexer.ops.row_quads import row_quads
from sparse_indexer.ops.sparse_softmax import sparse_softmax
from sparse_indexer.ops.topk import topk
from sparse_indexer.testing import hostile_pool, random_keys, random_queries

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
ROWS, WIDTH = 40, 4096


class Op(NamedTuple):
    call: Callable[[], None]
    lens: torch.Tensor  # [ROWS] int32, lengths or ids that it reads on the device
    outputs: list[torch.Tensor]


def ints(*shape: int, fill: int = 0) -> torch.Tensor:
    return torch.full(shape, fill, dtype=torch.int32, device=DEVICE)


def make_row_quads() -> Op:
    lens = ints(ROWS, fill=WIDTH)
    of_row = torch.arange(ROWS, dtype=torch.int32, device=DEVICE) % 2
    outputs = [ints(16, 4), ints(ROWS), ints(16, 4), ints(16), ints(16), ints(2), ints(2)]
    names = ("rows", "slots", "slot_lens", "lens", "first", "request_lens", "request_first")
    named = {f"out_{name}": out for name, out in zip(names, outputs, strict=True)}
    requests = [(0, 8, 0, WIDTH), (8, 8, 100, WIDTH // 4)]
    return Op(lambda: row_quads(of_row, lens, requests=requests, **named), lens, outputs)


def make_index_q() -> Op:
    """Of 40 slots, whose rows change."""
    queries, weights = random_queries(ROWS * 7, 32, "fp4", seed=1, device=DEVICE)
    rows = ints(ROWS, fill=ROWS * 7 - 1)
    values = torch.empty(ROWS // 4, 128, 128, dtype=torch.uint8, device=DEVICE)
    out_weights = torch.empty(ROWS // 4, 4, 32, device=DEVICE)
    return Op(
        lambda: index_q(
            queries, weights, rows=rows.view(-1, 4), out_values=values, out_weights=out_weights
        ),
        rows,
        [values, out_weights],
    )


def make_candidate_quads() -> Op:
    """Of 40 rows, each with one block, which changes."""
    blocks = ints(ROWS, fill=WIDTH)
    ranks = torch.empty(ROWS // 4, 2, 4, dtype=torch.int16, device=DEVICE)
    outputs = [ints(ROWS // 4, 64), ranks, ints(ROWS // 4, 2)]
    return Op(
        lambda: candidate_quads(
            blocks.view(-1, 4, 1),
            max_blocks=WIDTH + 1,
            pairs=True,
            out_entries=outputs[0],
            out_ranks=outputs[1],
            out_counts=outputs[2],
        ),
        blocks,
        outputs,
    )


def packed_keys(positions: int) -> torch.Tensor:
    keys = torch.zeros(positions // 8, 1152, dtype=torch.uint8, device=DEVICE)
    index_k(
        random_keys(positions, "fp8", seed=2, device=DEVICE),
        ints(1),
        lens=ints(1, fill=positions),
        max_len=positions,
        out_starts=ints(1),
        out_values=keys,
    )
    return keys


def make_scored(name: str) -> Op:
    """40 quads of one request; how many keys or candidates each has changes."""
    keys, blocks = packed_keys(WIDTH), WIDTH // 8
    queries, weights = random_queries(4 * ROWS, 32, "fp8", seed=1, device=DEVICE)
    values = torch.empty(ROWS, 128, 128, dtype=torch.uint8, device=DEVICE)
    out_weights = torch.empty(ROWS, 4, 32, device=DEVICE)
    rows = torch.arange(4 * ROWS, dtype=torch.int32, device=DEVICE).view(ROWS, 4)
    first = ints(ROWS)
    if name == "dense_block_keys":
        index_q(queries, weights, rows=rows, out_values=values, out_weights=out_weights)
        lens = ints(ROWS, fill=WIDTH)
        out = torch.empty(4 * ROWS, blocks, device=DEVICE)
        return Op(
            lambda: dense_block_keys(
                keys, values, out_weights, quad_lens=lens, quad_first=first, out=out
            ),
            lens,
            [out],
        )
    if name in ("fused_logits", "fused_block_keys"):
        index_q(queries, weights, rows=rows, out_values=values, out_weights=out_weights)
        lens = ints(4 * ROWS, fill=WIDTH)
        op = fused_logits if name == "fused_logits" else fused_block_keys
        out = torch.empty(4 * ROWS, WIDTH if name == "fused_logits" else blocks, device=DEVICE)
        return Op(
            lambda: op(
                keys, values, out_weights, slot_lens=lens.view(-1, 4), quad_first=first, out=out
            ),
            lens[::4],
            [out],
        )
    score = candidate_logits if name == "candidate_logits" else fused_candidate_logits
    candidates = torch.arange(blocks, dtype=torch.int32, device=DEVICE).repeat(ROWS, 4, 1)
    entries, counts = ints(ROWS, blocks), ints(ROWS, 2)
    ranks = torch.empty(ROWS, -(-blocks // 32), 4, dtype=torch.int16, device=DEVICE)
    candidate_quads(
        candidates, max_blocks=blocks, out_entries=entries, out_ranks=ranks, out_counts=counts
    )
    index_q(queries, weights, rows=rows, out_values=values, out_weights=out_weights)
    if name == "candidate_topk":
        out = ints(4 * ROWS, 300)
        slots, counters = torch.empty(20, 3, 4, WIDTH, device=DEVICE), ints(21)
        lens = ints(4 * ROWS, fill=WIDTH)
        return Op(
            lambda: candidate_topk(
                keys,
                values,
                out_weights,
                entries=entries,
                ranks=ranks,
                counts=counts,
                quad_first=first,
                lens=lens,
                rows=rows.view(-1),
                blocks=candidates.flatten(0, 1),
                slots=slots,
                counters=counters,
                out=out,
            ),
            lens[::4],
            [out],
        )
    out = torch.empty(4 * ROWS, WIDTH, device=DEVICE)
    return Op(
        lambda: score(
            keys,
            values,
            out_weights,
            entries=entries,
            ranks=ranks,
            counts=counts,
            quad_first=first,
            out=out,
        ),
        counts[:, 0],
        [out],
    )


def make_kv_gather(name: str) -> Op:
    """Of a slot a row, which changes; beyond the pool it is unused."""
    slots = ints(ROWS, fill=WIDTH)
    rows = torch.randn(WIDTH, 576, device=DEVICE).half()
    pool: torch.Tensor | KVPool = rows
    if name == "kv_gather":
        values, scales = quantize_fp8(rows[:, :512].unflatten(1, (4, 128)))
        pool = KVPool(values.flatten(1), scales, rows[:, 512:].bfloat16())
    out = torch.empty(ROWS, 1, 576, dtype=torch.float16, device=DEVICE)
    return Op(lambda: kv_gather(pool, slots.view(ROWS, 1), out=out), slots, [out])


def make_sparse_softmax(name: str) -> Op:
    """Of 5 rows, whose slots change; those from 100 on are unused."""
    k = 640 if name == "sparse_softmax" else 3000
    slots, logits = ints(ROWS, fill=WIDTH), torch.randn(5, 16, k, device=DEVICE)
    positions, sink = ints(5, k), torch.zeros(16, device=DEVICE)
    out = torch.empty(5, 16, k, dtype=torch.float16, device=DEVICE)

    def call() -> None:
        positions[:, :8].copy_(slots.view(5, 8))
        sparse_softmax(logits, positions, num_slots=100, scale=0.1, sink=sink, out=out)

    return Op(call, slots, [out])


def make_relu_head_sum(name: str) -> Op:
    scores = torch.randn(ROWS * 32, WIDTH, device=DEVICE).half()
    weights, lens = torch.randn(ROWS, 32, device=DEVICE), ints(ROWS, fill=WIDTH)
    keys = name == "relu_head_sum"
    out = torch.empty(ROWS, WIDTH // 8 if keys else WIDTH, device=DEVICE)
    given = {"out_keys" if keys else "out_logits": out}
    return Op(lambda: relu_head_sum(scores, weights, lens=lens, **given), lens, [out])


def make(name: str) -> Op:
    kernel = all_kernels()[name.partition(",")[0]]
    if not kernel.is_for(torch.cuda.get_device_capability(DEVICE)):
        pytest.skip(f"{name} is not for this GPU")
    if name == "row_quads":
        return make_row_quads()
    if name == "index_q":
        return make_index_q()
    if name == "candidate_quads":
        return make_candidate_quads()
    if name.startswith("kv_gather"):
        return make_kv_gather(name)
    if name.startswith("sparse_softmax"):
        return make_sparse_softmax(name)
    if name.startswith("relu_head_sum"):
        return make_relu_head_sum(name)
    if name.endswith(("block_keys", "logits", "candidate_topk")) and name != "block_keys":
        return make_scored(name)
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


OPS = [
    "topk",
    "topk, of rows",
    "block_keys",
    "candidate_table",
    "index_k",
    "index_k, packed",
    "row_quads",
    "index_q",
    "candidate_quads",
    "dense_block_keys",
    "candidate_logits",
    "candidate_topk",
    "kv_gather",
    "kv_gather, plain",
    "sparse_softmax",
    "sparse_softmax, long",
    "relu_head_sum",
    "relu_head_sum, logits",
    "fused_logits",
    "fused_block_keys",
    "fused_candidate_logits",
]


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
    with no_synchronization():
        op.call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("blocks", [1, 63, 64, 65, 70, 100])
def test_dense_block_keys_of_the_last_keys_that_there_are(blocks: int) -> None:
    """No block behind them is read, and none is taken for another."""
    queries, weights = random_queries(16, 32, "fp8", seed=1, device=DEVICE)
    values = torch.empty(4, 128, 128, dtype=torch.uint8, device=DEVICE)
    out_weights = torch.empty(4, 4, 32, device=DEVICE)
    rows = torch.arange(16, dtype=torch.int32, device=DEVICE).view(4, 4)
    index_q(queries, weights, rows=rows, out_values=values, out_weights=out_weights)
    padded = torch.cat((packed_keys(8 * blocks), packed_keys(512).fill_(0x7F)))
    options = {"quad_lens": ints(4, fill=8 * blocks), "quad_first": ints(4)}
    found = []
    for keys in (padded, padded[:blocks].clone()):
        out = torch.zeros(16, 128, device=DEVICE)
        dense_block_keys(keys, values, out_weights, **options, out=out)
        found.append(out[:, :blocks])
    assert found[0].isfinite().all()
    assert torch.equal(*found)
