# SPDX-License-Identifier: Apache-2.0
"""The rules of a selection as properties of the tile-wise torch ops and of whole calls."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.formats import INT32_MAX
from sparse_indexer.inputs import IndexQ, PrefillIndexerInputs, flat_index_k, plan_prefill
from sparse_indexer.testing import (
    dictated,
    index_q,
    make_inputs,
    oracle_publish,
    oracle_select,
    palette_keys,
    palette_queries,
)
from sparse_indexer.torch_ops.block_keys import block_keys, published
from sparse_indexer.torch_ops.topk import UNUSED, indices, merge, ordered, pack

SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 2.0**-149, -(2.0**-149)]
LOGIT = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))
ROWS = st.integers(1, 60).flatmap(
    lambda n: st.lists(st.lists(LOGIT, min_size=n, max_size=n), min_size=1, max_size=4)
)


@st.composite
def rows_and_lens(draw: st.DrawFn) -> tuple[list[list[float]], list[int]]:
    rows = draw(ROWS)
    return rows, [draw(st.integers(0, len(row))) for row in rows]


def unused_entries(rows: int, width: int) -> torch.Tensor:
    return torch.full((rows, width), UNUSED, dtype=torch.int64)


@given(st.lists(LOGIT, min_size=2, max_size=40))
def test_ordered_is_the_order_of_floats(values: list[float]) -> None:
    order = ordered(torch.tensor(values, dtype=torch.float32)).tolist()
    ranks = [float("-inf") if v != v else v for v in values]
    for a, b, x, y in zip(order, order[1:], ranks, ranks[1:], strict=False):
        assert (a < b, a == b) == (x < y, x == y)


@given(rows_and_lens(), st.integers(0, 20), st.integers(1, 7))
def test_selection_of_any_floats_in_any_tiles(
    data: tuple[list[list[float]], list[int]], topk: int, tile_blocks: int
) -> None:
    rows, lens = data
    logits = torch.tensor(rows, dtype=torch.float32)
    best = unused_entries(len(rows), topk)
    lengths = torch.tensor(lens, dtype=torch.int32)
    step = 8 * tile_blocks
    for start in range(0, logits.shape[1], step):
        tile = logits[:, start : start + step]
        positions = torch.arange(start, start + tile.shape[1])
        best = merge(best, pack(ordered(tile), positions < lengths[:, None], start))
    got = indices(best, -1).tolist()
    want = oracle_select([r[:n] for r, n in zip(logits.tolist(), lens, strict=True)], topk)
    assert got == [row + [-1] * (topk - len(row)) for row in want]


@given(rows_and_lens(), st.integers(1, 9), st.integers(1, 7))
def test_publication_of_any_floats_in_any_tiles(
    data: tuple[list[list[float]], list[int]], topk_blocks: int, tile_blocks: int
) -> None:
    rows, lens = data
    logits = torch.tensor(rows, dtype=torch.float32)
    best = unused_entries(len(rows), topk_blocks)
    step = 8 * tile_blocks
    for start in range(0, logits.shape[1], step):
        order = ordered(logits[:, start : start + step])
        keys, visible = block_keys(order, torch.tensor(lens, dtype=torch.int32), start)
        best = merge(best, pack(keys, visible, start // 8))
    got = indices(best, INT32_MAX).tolist()
    want = oracle_publish([r[:n] for r, n in zip(logits.tolist(), lens, strict=True)], topk_blocks)
    assert got == [row + [INT32_MAX] * (topk_blocks - len(row)) for row in want]


@given(
    st.lists(st.lists(st.integers(-2, 40), min_size=6, max_size=6), min_size=1, max_size=4),
    st.integers(0, 12),
    st.integers(1, 70),
)
def test_mask_of_a_tile_is_its_published_blocks(
    blocks: list[list[int]], first_block: int, n: int
) -> None:
    got = published(torch.tensor(blocks, dtype=torch.int32), 8 * first_block, n)
    positions = range(8 * first_block, 8 * first_block + n)
    assert got.tolist() == [[p // 8 in row for p in positions] for row in blocks]


@st.composite
def batches(draw: st.DrawFn) -> dict:
    requests = draw(st.integers(1, 4))
    mapping = draw(st.lists(st.integers(0, requests - 1), max_size=12))
    return {
        "lens": [draw(st.integers(0, 90)) for _ in mapping],
        "mapping": mapping,
        "requests": requests,
        "fmt": draw(st.sampled_from(["fp8", "fp4", "fp16", "bf16"])),
        "layout": draw(st.sampled_from(["planar", "interleaved", "flat"])),
        "page_size": draw(st.sampled_from([8, 16, 64])),
        "heads": draw(st.integers(1, 5)),
        "topk": draw(st.integers(0, 40)),
        "topk_blocks": draw(st.integers(1, 12)),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=60, deadline=None)
@given(batches())
def test_a_call_is_the_rules_applied_row_by_row(batch: dict) -> None:
    mapping, lens, requests = batch["mapping"], batch["lens"], batch["requests"]
    counts = [mapping.count(i) for i in range(requests)]
    longest = [
        max([n for n, r in zip(lens, mapping, strict=True) if r == i], default=0)
        for i in range(requests)
    ]
    keys = [palette_keys(n, batch["fmt"], seed=batch["seed"] + i) for i, n in enumerate(longest)]
    queries, weights = palette_queries(
        len(mapping), batch["heads"], batch["fmt"], seed=batch["seed"]
    )
    inputs = make_inputs(
        queries,
        weights,
        keys,
        [n - 1 for n in lens],
        counts,
        request_of_row=mapping,
        layout=batch["layout"],
        page_size=batch["page_size"],
        seed=batch["seed"],
    )
    topk, topk_blocks = batch["topk"], batch["topk_blocks"]
    indexer = MaskIndexer("cpu", topk=topk, topk_blocks=topk_blocks)
    own, full = (torch.full((len(mapping), topk), 7, dtype=torch.int32) for _ in range(2))
    candidates = indexer.publish_prefill(inputs, own)
    indexer.topk_prefill(inputs, full)

    dense = inputs.dense_scores().tolist()
    logits = [row[:n] for row, n in zip(dense, lens, strict=True)]
    blocks = oracle_publish(logits, topk_blocks)
    assert candidates.blocks.tolist() == [r + [INT32_MAX] * (topk_blocks - len(r)) for r in blocks]
    for out, among in ((own, blocks), (full, None)):
        want = oracle_select(logits, topk, among)
        assert out.tolist() == [row + [-1] * (topk - len(row)) for row in want]
    if topk < topk_blocks:
        assert torch.equal(own, full)  # a row's best topk lie in its best topk + 1 blocks


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["fp8", "fp4", "fp16", "bf16"]),
    st.integers(1, 3).flatmap(
        lambda rows: st.integers(1, 80).flatmap(
            lambda n: st.lists(
                st.lists(st.integers(0, (1 << 18) - 1), min_size=n, max_size=n),
                min_size=rows,
                max_size=rows,
            )
        )
    ),
)
def test_dictated_logits_arrive_exactly(fmt: str, integers: list[list[int]]) -> None:
    queries, weights, keys = dictated(integers, fmt, heads=9)
    width = len(integers[0])
    inputs = make_inputs(queries, weights, [keys], [width - 1] * len(integers), [len(integers)])
    assert inputs.dense_scores().tolist() == [[i / 2**17 for i in row] for row in integers]


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp4", "fp8"])
def test_a_row_keeps_its_bits_whatever_else_is_in_the_call(fmt: str) -> None:
    """Terms that cancel and leave what is far below them: any other order of summation shows."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(9, 3, 128, generator=generator)
    keys = torch.randn(600, 128, generator=generator)
    if fmt == "bf16":
        queries, keys = queries * 2.0**15, keys * 2.0**50
        queries[:, :, [0, 77]], keys[:, 0], keys[:, 77] = 2.0**60, 2.0**58, -(2.0**58)
    elif fmt == "fp16":
        queries, keys = queries * 2.0**-10, keys * 2.0**-10
        queries[:, :, [0, 77]], keys[:, 0], keys[:, 77] = 2.0**14, 2.0**15, -(2.0**15)
    elif fmt == "fp4":
        queries[:, :, 0:32] *= 2.0**60
        queries[:, :, 64:96] = queries[:, :, 0:32]
        keys[:, 64:96] = -keys[:, 0:32]
    q, k = index_q(queries, fmt), flat_index_k(keys, fmt)
    weights = torch.ones(9, 3)

    def logits(rows: slice, budget: int) -> torch.Tensor:
        scales = None if q.scales is None else q.scales[rows]
        count = len(weights[rows])
        plan = plan_prefill([599] * count, [count])
        inputs = PrefillIndexerInputs(plan, IndexQ(q.values[rows], scales), weights[rows], k)
        return MaskIndexer("cpu", topk=5, topk_blocks=6, memory_budget=budget).dense_logits(inputs)

    least = MaskIndexer("cpu", topk=5, topk_blocks=6).workspace_bytes(1, 64)
    whole = logits(slice(0, 9), 1 << 28)
    assert torch.equal(logits(slice(0, 9), least), whole)
    for row in range(9):
        assert torch.equal(logits(slice(row, row + 1), 1 << 28), whole[row : row + 1])
