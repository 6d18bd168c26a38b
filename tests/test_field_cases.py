# SPDX-License-Identifier: Apache-2.0
"""Faults seen in indexers in the field, as inputs with their right answers, on the mask backend.

What the conformance kit covers already (edges, ties, NaN, hostile pools, ...) is not repeated.
"""

import pytest
import torch

from sparse_indexer import (
    FlatIndexK,
    IndexKPool,
    IndexQ,
    PrefillIndexerInputs,
    flat_index_k,
    plan_prefill,
)
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.formats import INT32_MAX
from sparse_indexer.testing import (
    dictated,
    index_q,
    make_inputs,
    oracle_logits,
    oracle_select,
    palette_keys,
    palette_queries,
    random_keys,
    random_queries,
)


def full(inputs: PrefillIndexerInputs, topk: int, **options: int) -> torch.Tensor:
    out = torch.full((inputs.plan.num_rows, topk), 7, dtype=torch.int32)
    MaskIndexer("cpu", topk=topk, **options).topk_prefill(inputs, out)
    return out


def publish(
    inputs: PrefillIndexerInputs, topk: int, topk_blocks: int, **options: int
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((inputs.plan.num_rows, topk), 7, dtype=torch.int32)
    indexer = MaskIndexer("cpu", topk=topk, topk_blocks=topk_blocks, **options)
    return indexer.publish_prefill(inputs, out).blocks, out


def one_request(
    integers: list[list[int]], lens: list[int], fmt: str = "fp8", **options: object
) -> PrefillIndexerInputs:
    queries, weights, keys = dictated(integers, fmt, **options)
    return make_inputs(queries, weights, [keys], [n - 1 for n in lens], [len(lens)])


def test_head_sum_before_the_block_maximum() -> None:
    """A maximum over heads would prefer block 0 (4 against 2.5); the sum prefers block 1."""
    queries = torch.zeros(2, 2, 128)
    queries[:, 0, 0] = queries[:, 1, 1] = 1.0
    keys = torch.zeros(24, 128)
    keys[3, 0] = 4.0
    keys[9, :2] = 2.5
    weights = torch.ones(2, 2)
    inputs = make_inputs(
        index_q(queries, "bf16"), weights, [flat_index_k(keys, "bf16")], [23, 15], [2]
    )
    blocks, own = publish(inputs, 1, 2)
    assert blocks.tolist() == [[1, 2], [0, 1]]
    assert own.tolist() == [[9], [9]]


def test_negative_totals_rank_below_exact_zeros() -> None:
    queries = torch.zeros(1, 2, 128)
    queries[:, 0, 0] = queries[:, 1, 1] = 1.0
    keys = torch.zeros(4, 128)
    keys[0, :2] = torch.tensor([1.0, 3.0])
    keys[1, :2] = torch.tensor([1.0, 0.0])
    weights = torch.tensor([[1.0, -2.0]])
    inputs = make_inputs(index_q(queries, "fp16"), weights, [flat_index_k(keys, "fp16")], [3], [1])
    assert inputs.dense_scores().tolist() == [[-5.0, 1.0, 0.0, 0.0]]
    assert full(inputs, 3).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("fmt", ["fp8", "fp4", "fp16", "bf16"])
def test_logits_one_part_in_4096_apart_keep_their_order(fmt: str) -> None:
    """In fp16 both values round to the same; in fp32 position 1 wins."""
    inputs = one_request([[4096, 4097, 4096]], [3], fmt, shift=0)
    assert full(inputs, 1).tolist() == [[1]]


@pytest.mark.parametrize("heads", [1, 4, 32, 33, 40, 64])
@pytest.mark.parametrize("fmt", ["fp8", "fp4", "fp16", "bf16"])
def test_any_head_count(fmt: str, heads: int) -> None:
    queries, weights = palette_queries(2, heads, fmt, seed=heads)
    inputs = make_inputs(queries, weights, [palette_keys(40, fmt, seed=1)], [39, 30], [2])
    assert inputs.dense_scores()[0].tolist() == oracle_logits(inputs)[0]


@pytest.mark.parametrize("dims", [32, 64, 96, 256])
def test_other_head_dims_are_refused_by_name(dims: int) -> None:
    with pytest.raises(ValueError, match=rf"index_q values: expected \[rows, heads, 128\].*{dims}"):
        IndexQ(torch.zeros(2, 4, dims, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=rf"values: expected \[columns, 128\].*{dims}"):
        FlatIndexK(torch.zeros(2, dims, dtype=torch.bfloat16), None, "bf16")
    with pytest.raises(ValueError, match=rf"keys: expected \[n, 128\].*{dims}"):
        flat_index_k(torch.zeros(2, dims), "fp8")


def test_twenty_runs_give_the_same_bits() -> None:
    queries, weights = random_queries(32, 64, "fp4", seed=1)
    keys = [random_keys(2048, "fp4", seed=2)]
    inputs = make_inputs(queries, weights, keys, list(range(2016, 2048)), [32])
    indexer = MaskIndexer("cpu")
    first = indexer.dense_logits(inputs)
    for _ in range(19):
        assert torch.equal(indexer.dense_logits(inputs), first)


def test_nan_rows_neither_look_normal_nor_touch_their_neighbors() -> None:
    queries, weights = palette_queries(3, 4, "fp8", seed=1)
    keys = [palette_keys(16_384, "fp8", seed=2)]
    good = full(make_inputs(queries, weights, keys, [16_383] * 3, [3]), 8)
    for nan in (torch.nan, -torch.nan):
        poisoned = weights.clone()
        poisoned[1] = nan
        out = full(make_inputs(queries, poisoned, keys, [16_383] * 3, [3]), 8)
        assert torch.equal(out[[0, 2]], good[[0, 2]])
        assert out[1].tolist() == list(range(8))  # all logits count as -inf


def test_values_that_differ_in_their_last_ten_bits_only() -> None:
    generator = torch.Generator().manual_seed(0)
    width = 32_768
    steps = torch.randint(0, 1024, (width,), generator=generator)
    integers = (131072 + 16 * steps).tolist()
    inputs = one_request([integers], [width])
    want = oracle_select([[float(i) for i in integers]], 512)
    assert full(inputs, 512).tolist() == want


def test_a_flat_range_selects_the_lowest_positions() -> None:
    inputs = one_request([[91_750] * 20_000], [20_000])  # 0.7 in units of 2^-17
    assert full(inputs, 512).tolist() == [list(range(512))]


@pytest.mark.parametrize("visible", [0, 1, 7, 8, 9, 511, 512, 513])
def test_a_context_shorter_than_topk(visible: int) -> None:
    inputs = one_request([list(range(1, 514))], [visible])
    got = full(inputs, 512).tolist()[0]
    kept = list(range(max(0, visible - 512), visible))
    assert got == kept + [-1] * (512 - len(kept))


def test_one_row_and_one_winner_are_not_confused() -> None:
    inputs = one_request([[3, 9, 4, 1]] * 5, [4, 3, 2, 1, 4])
    assert full(inputs, 1).tolist() == [[1], [1], [1], [0], [1]]
    assert full(one_request([[3, 9, 4, 1, 7, 8]], [6]), 5).tolist() == [[0, 1, 2, 4, 5]]


@pytest.mark.parametrize("topk", [0, 64, 500, 512, 1000, 2051])
def test_any_topk_stays_inside_its_output(topk: int) -> None:
    queries, weights = palette_queries(3, 4, "fp8", seed=1)
    keys = [palette_keys(2200, "fp8", seed=2)]
    inputs = make_inputs(queries, weights, keys, [2199, 2050, 600], [3])
    buffer = torch.full((4, topk + 3), 7, dtype=torch.int32)
    MaskIndexer("cpu", topk=topk).topk_prefill(inputs, buffer[:3, :topk])
    assert (buffer[3] == 7).all()
    assert (buffer[:, topk:] == 7).all()
    rows = [
        row[:n] for row, n in zip(inputs.dense_scores().tolist(), (2200, 2051, 601), strict=True)
    ]
    want = [row + [-1] * (topk - len(row)) for row in oracle_select(rows, topk)]
    assert buffer[:3, :topk].tolist() == want


@pytest.mark.parametrize("lens", [[], [0, 0, 0], [0] * 32])
def test_nothing_to_see(lens: list[int]) -> None:
    queries, weights = palette_queries(len(lens), 4, "fp8", seed=1)
    keys = [palette_keys(0, "fp8", seed=2)]
    for layout in ("planar", "flat"):
        inputs = make_inputs(queries, weights, keys, [-1] * len(lens), [len(lens)], layout=layout)
        blocks, own = publish(inputs, 4, 6)
        assert blocks.tolist() == [[INT32_MAX] * 6] * len(lens)
        assert own.tolist() == [[-1] * 4] * len(lens)
        assert inputs.dense_scores().shape == (len(lens), 0)


def test_no_requests_at_all() -> None:
    plan = plan_prefill([], [], page_table=torch.zeros(0, 4, dtype=torch.int32))
    pool = IndexKPool.empty(0, 64, "fp8")
    queries, weights = palette_queries(0, 4, "fp8", seed=1)
    blocks, own = publish(PrefillIndexerInputs(plan, queries, weights, pool), 4, 6)
    assert blocks.shape == (0, 6)
    assert own.shape == (0, 4)


def test_requests_without_new_rows() -> None:
    queries, weights = palette_queries(5, 4, "fp8", seed=1)
    keys = [palette_keys(n, "fp8", seed=n) for n in (70, 50, 0, 9)]
    alone = make_inputs(queries, weights, keys[1:2], [45, 46, 47, 48, 49], [5])
    inputs = make_inputs(queries, weights, keys, [45, 46, 47, 48, 49], [0, 5, 0, 0])
    for got, want in zip(publish(inputs, 4, 5), publish(alone, 4, 5), strict=True):
        assert torch.equal(got, want)


def test_windows_of_flat_keys_start_where_the_request_starts() -> None:
    """Prefixes 10 and 3, new rows 4 and 6: request 2 sees columns from 14 on, relative to it."""
    queries, weights, keys = dictated([list(range(100, 123))] * 10, "bf16")
    positions = [10, 11, 12, 13, 3, 4, 5, 6, 7, 8]
    plan = plan_prefill(positions, [4, 6])
    assert plan.key_starts is not None
    assert plan.key_starts.tolist() == [0, 14]
    inputs = PrefillIndexerInputs(plan, queries, weights, keys)
    dense = inputs.dense_scores() * 2**17
    for row, position in enumerate(positions):
        start = 0 if row < 4 else 14
        seen = [100.0 + start + n for n in range(position + 1)]
        assert dense[row].tolist() == seen + [float("-inf")] * (14 - len(seen))
    assert full(inputs, 2)[-1].tolist() == [7, 8]


def test_blocks_are_counted_from_the_request_start() -> None:
    """Contexts 13 and 21, packed, so that the second request starts inside a block of columns."""
    queries, weights = palette_queries(2, 4, "fp8", seed=1)
    keys = [palette_keys(n, "fp8", seed=n) for n in (13, 21)]
    inputs = make_inputs(queries, weights, keys, [12, 20], [1, 1], layout="flat")
    blocks, _ = publish(inputs, 2, 4)
    assert blocks.tolist() == [[0, 1, INT32_MAX, INT32_MAX], [0, 1, 2, INT32_MAX]]


@pytest.mark.parametrize(("visible", "count"), [(781, 98), (1267, 159), (16_391, 2048)])
def test_a_partial_last_block_is_one_block(visible: int, count: int) -> None:
    inputs = one_request([[1] * visible], [visible])
    blocks, _ = publish(inputs, 1, 2048)
    visible_blocks = -(-visible // 8)
    used = [b for b in blocks[0].tolist() if b != INT32_MAX]
    assert len(used) == count
    assert used[-1] == visible_blocks - 1
    if visible_blocks == 2049:  # exactly one old block is left out, the last of the tied ones
        assert used == [*range(2047), 2048]


@pytest.mark.parametrize("visible", range(1, 65))
def test_a_needle_is_found_at_every_length(visible: int) -> None:
    needle = (visible * 29) % visible
    integers = [5 if n == needle else 1 for n in range(64)]
    inputs = one_request([integers, integers], [visible, visible])
    blocks, own = publish(inputs, 1, 2)
    assert own.tolist() == [[needle]] * 2
    assert needle // 8 in blocks[0].tolist()


def test_a_needle_in_the_prefix_of_a_suffix_prefill() -> None:
    integers = [5 if n == 17 else 1 for n in range(4104)]
    inputs = one_request([integers] * 8, list(range(4097, 4105)))
    blocks, own = publish(inputs, 1, 2)
    assert own.tolist() == [[17]] * 8
    assert blocks[:, 0].tolist() == [2] * 8


def test_a_key_beyond_the_row_is_for_the_next_row_only() -> None:
    integers = [9 if n == 100 else 1 for n in range(128)]
    inputs = one_request([integers, integers], [100, 101])
    assert full(inputs, 1).tolist() == [[0], [100]]


def test_draft_rows_over_interleaved_key_shards() -> None:
    """Each shard's rows see their own shard; the union of shards is the whole context."""
    width, shards = 400, 4
    keys = palette_keys(width, "fp8", seed=3)
    queries, weights = palette_queries(4, 4, "fp8", seed=4)
    whole = make_inputs(queries, weights, [keys], [396, 397, 398, 399], [4]).dense_scores()
    parts = torch.full_like(whole, -torch.inf)
    for shard in range(shards):
        assert keys.scales is not None
        scales = keys.scales[shard::shards].contiguous()
        own = FlatIndexK(keys.values[shard::shards], scales, "fp8")
        seen = [len(range(shard, n, shards)) for n in (397, 398, 399, 400)]
        part = make_inputs(queries, weights, [own], [n - 1 for n in seen], [4]).dense_scores()
        parts[:, shard::shards] = part
    assert torch.equal(parts, whole)


def test_ragged_long_requests_equal_their_own_runs() -> None:
    lens = (5001, 4983)
    keys = [random_keys(n, "fp8", seed=n) for n in lens]
    queries, weights = random_queries(4, 8, "fp8", seed=1)
    positions = [n - 1 - i for n in lens for i in (1, 0)]
    together = publish(make_inputs(queries, weights, keys, positions, [2, 2]), 64, 100)
    for request in (0, 1):
        rows = slice(2 * request, 2 * request + 2)
        assert queries.scales is not None
        q = IndexQ(queries.values[rows], queries.scales[rows])
        alone = make_inputs(q, weights[rows], [keys[request]], positions[rows], [2])
        for got, want in zip(together, publish(alone, 64, 100), strict=True):
            assert torch.equal(got[rows], want)


def test_many_requests_in_a_small_budget() -> None:
    """A workspace smaller than the batch must split it, not skip what lies past its end."""
    requests = 200
    keys = [palette_keys(300, "fp8", seed=i) for i in range(requests)]
    queries, weights = palette_queries(requests, 4, "fp8", seed=1)
    inputs = make_inputs(queries, weights, keys, [299] * requests, [1] * requests)
    small = publish(inputs, 16, 20, memory_budget=1 << 21)
    for got, want in zip(small, publish(inputs, 16, 20, memory_budget=1 << 30), strict=True):
        assert torch.equal(got, want)
    assert (small[1] >= 0).all()


def test_non_contiguous_inputs_and_outputs() -> None:
    queries, weights = palette_queries(3, 4, "fp8", seed=1)
    keys = [palette_keys(257, "fp8", seed=2)]
    want = publish(make_inputs(queries, weights, keys, [256, 255, 254], [3]), 16, 20)
    wide = torch.zeros(6, 9, 128, dtype=torch.float8_e4m3fn)
    wide[::2, 1:5] = queries.values
    scales = torch.zeros(3, 9)
    assert queries.scales is not None
    scales[:, 2:6] = queries.scales
    wide_weights = torch.zeros(6, 4)
    wide_weights[::2] = weights
    strided = make_inputs(
        IndexQ(wide[::2, 1:5], scales[:, 2:6]), wide_weights[::2], keys, [256, 255, 254], [3]
    )
    for got, expected in zip(publish(strided, 16, 20), want, strict=True):
        assert torch.equal(got, expected)


def test_65537_rows_and_65536_blocks() -> None:
    rows = 65_537
    queries, weights = palette_queries(rows, 1, "fp8", seed=1)
    keys = [palette_keys(8, "fp8", seed=2)]
    inputs = make_inputs(queries, weights, keys, [7] * rows, [rows])
    blocks, own = publish(inputs, 2, 3)
    assert (blocks[:, 0] == 0).all()
    one = make_inputs(
        IndexQ(queries.values[-1:], queries.scales[-1:]), weights[-1:], keys, [7], [1]
    )
    assert torch.equal(own[-1:], full(one, 2))

    width = 524_288
    integers = torch.zeros(width, dtype=torch.int64)
    integers[[3, 262_144, width - 9]] = torch.tensor([5, 6, 7])
    inputs = one_request([integers.tolist()], [width])
    blocks, own = publish(inputs, 3, 4)
    assert own.tolist() == [[3, 262_144, width - 9]]
    assert blocks.tolist() == [[0, 32_768, 65_534, 65_535]]


@pytest.mark.parametrize("visible", range(510, 516))
def test_one_row_calls_and_batches_select_alike_around_topk(visible: int) -> None:
    queries, weights = palette_queries(4, 4, "fp8", seed=1)
    keys = [palette_keys(600, "fp8", seed=2)]
    batch = make_inputs(queries, weights, keys, [599, visible - 1, 100, visible - 1], [4])
    assert queries.scales is not None
    single = make_inputs(
        IndexQ(queries.values[1:2], queries.scales[1:2]), weights[1:2], keys, [visible - 1], [1]
    )
    for got, want in zip(publish(batch, 512, 2048), publish(single, 512, 2048), strict=True):
        assert torch.equal(got[1:2], want)
