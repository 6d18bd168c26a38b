# SPDX-License-Identifier: Apache-2.0
"""Named cases: inputs that have broken indexers, sized for a backend's topk and topk_blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch

from sparse_indexer.formats import HEAD_DIM, KeyFormat
from sparse_indexer.inputs import (
    BLOCK_SIZE,
    FlatIndexK,
    IndexQ,
    PrefillIndexerInputs,
    PrefillPlan,
    flat_index_k,
)
from sparse_indexer.testing.data import (
    Layout,
    dictated,
    hostile_pool,
    index_q,
    make_inputs,
    palette_keys,
    palette_queries,
    random_keys,
    random_queries,
    with_queries,
)
from sparse_indexer.testing.overlap import overlapping_queries


class CaseConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a case is sized and stored for."""

    topk: int
    topk_blocks: int
    format: KeyFormat = "fp8"
    layout: Layout = "planar"
    heads: int = 32
    page_size: int = 64
    device: torch.device = torch.device("cpu")

    @property
    def full(self) -> int:
        """Positions of as many blocks as a row publishes."""
        return self.topk_blocks * BLOCK_SIZE

    @property
    def long(self) -> int:
        """Positions beyond all published blocks and beyond topk."""
        return max(self.full, self.topk) + 200


class Case(msgspec.Struct, frozen=True, eq=False):
    """A source layer's inputs and a consumer layer's, with other queries over the same keys."""

    source: PrefillIndexerInputs
    consumer: PrefillIndexerInputs
    exact: bool = True
    """Every logit is exact in fp32 in any order of summation, so all backends must agree."""


def edges(c: CaseConfig) -> Case:
    """Rows that see 0, 1, a block, topk, a page, all blocks: one less, just that, one more."""
    marks = (0, BLOCK_SIZE, c.page_size, c.topk, c.full, c.full + BLOCK_SIZE)
    lens = sorted({max(0, mark + step) for mark in marks for step in (-1, 0, 1)})
    lens += [c.full + 100 + i for i in range(len(lens))]
    return _palette(c, [lens])


def every_length(c: CaseConfig) -> Case:
    """All lengths 1 to 64, so all residues of a block."""
    return _palette(c, [list(range(1, 65))])


def ragged(c: CaseConfig) -> Case:
    """Requests without rows, without keys, and of lengths that end inside blocks and pages."""
    long = c.full + 300
    return _palette(c, [[], [long + i for i in range(5)], [0, 0], [], [13, 21], [long - 3], []])


def interleaved(c: CaseConfig) -> Case:
    """Rows of three requests in turn, padding rows that see nothing between them."""
    lens = [[c.full + 40, 0, c.full + 90], [c.topk + 9, c.full + 17, 0], [c.full + 64, 5, 77]]
    return _palette(c, lens, request_of_row=[0, 1, 2] * 3, request_starts=[5, 70000, 900000])


def equal_logits(c: CaseConfig) -> Case:
    """All logits alike: the lowest positions and blocks win, and the newest block."""
    lens = [c.topk + 1, c.full, c.full + 1, c.full + 100]
    return _dictated(c, [[7] * max(lens)] * len(lens), lens)


def two_values(c: CaseConfig) -> Case:
    """Two values, the larger one rarer and more frequent than topk."""
    width = c.long
    rows = [
        [int(n % (width // keep) == 0) for n in range(width)] for keep in (3, c.topk + 5, width)
    ]
    return _dictated(c, rows, [width, width - 1, width - 7])


def close_logits(c: CaseConfig) -> Case:
    """Logits that differ in the last bit of fp32, all in one bin of a histogram.

    They grow with the position, or with the block. Of two lengths, the worst that is selected has
    a last bit of 1 in one, so it is the last bit that tells it from the best that is not, which
    would win a tie. Whatever other bits are ignored, too, that pair is one of those that tie.
    """
    width = min(c.long, 60_000)
    first = 1 << 23
    rising = [first + n for n in range(width)]
    one_a_block = [first + n // BLOCK_SIZE if n % BLOCK_SIZE == 3 else 0 for n in range(width)]
    turned = [[first + n * step % width for n in range(width)] for step in (7919, 104729)]
    rows = [rising, rising, one_a_block, one_a_block, *turned]
    return _dictated(c, rows, [width, width - 1, width, width - BLOCK_SIZE, width, width - 5])


def signed_zeros(c: CaseConfig) -> Case:
    """-0.0 in the even blocks, +0.0 in the odd ones: equal, so the lowest positions win."""
    lens = [c.topk + 2 * BLOCK_SIZE, c.full + 2 * BLOCK_SIZE, c.full + 100]
    width = max(lens)
    negative = (torch.arange(width, device=c.device) // BLOCK_SIZE) % 2 == 0
    # A head's dot product is 1/4 or 0; a quarter of -2^-149 rounds to -0.0 whoever rounds it.
    queries = torch.zeros(len(lens), c.heads, HEAD_DIM, device=c.device)
    weights = torch.zeros(len(lens), c.heads, device=c.device)
    elements = torch.zeros(width, HEAD_DIM, device=c.device)
    queries[:, 0, 0] = 0.5
    weights[:, 0] = -(2.0**-149)
    elements[:, 0] = torch.where(negative, 0.5, 0.0)
    keys = flat_index_k(elements, c.format)
    if keys.scales is not None and c.format == "fp8":  # or by the scale of the key
        keys = FlatIndexK(keys.values, torch.where(negative, -0.0, 0.0), "fp8")
        weights = weights.ne(0).to(torch.float32)
    return _single(c, index_q(queries, c.format), weights, keys, lens)


def future(c: CaseConfig) -> Case:
    """Logits that grow with the position: what a row must not see would win."""
    width = c.long
    lens = [1, 8, 9, c.topk, c.full - 1, c.full + 3, width - 9, width]
    return _dictated(c, [list(range(width))] * len(lens), lens)


def old_newest(c: CaseConfig) -> Case:
    """Logits that fall with the position: the newest block is published though it is the worst."""
    width = c.full + 200
    lens = [c.full + 1, c.full + 8, c.full + 9, width - 3, width]
    return _dictated(c, [list(range(width, 0, -1))] * len(lens), lens)


def infinite_rivals(c: CaseConfig) -> Case:
    """+inf everywhere but in the newest block, whose NaN logits count as -inf: it is published."""
    lens = [c.full + 1, c.full + 64, c.full + 130]
    width = lens[-1]
    rows = [[int(n // BLOCK_SIZE < (s - 1) // BLOCK_SIZE) for n in range(width)] for s in lens]
    queries, weights, keys = dictated(rows, c.format, heads=c.heads, device=c.device)
    infinite = torch.where(weights > 0, torch.inf, weights)
    return _single(c, queries, infinite, keys, lens)


def minus_infinity(c: CaseConfig) -> Case:
    """All logits -inf: still as many positions as topk, the lowest."""
    lens = [5, c.topk + 88, c.full + 90]
    ones = [[1] * max(lens)] * len(lens)
    queries, weights, keys = dictated(ones, c.format, heads=c.heads, device=c.device)
    infinite = torch.where(weights > 0, -torch.inf, weights)
    return _single(c, queries, infinite, keys, lens)


def nan_and_minus_infinity(c: CaseConfig) -> Case:
    """NaN in the even blocks, -inf in the odd ones: equal, so the lowest positions win."""
    lens = [c.topk + 2 * BLOCK_SIZE, c.full + 2 * BLOCK_SIZE, c.full + 100]
    rows = [[n // BLOCK_SIZE % 2 for n in range(max(lens))]] * len(lens)
    queries, weights, keys = dictated(rows, c.format, heads=c.heads, device=c.device)
    infinite = torch.where(weights > 0, -torch.inf, weights)  # times 0: NaN
    return _single(c, queries, infinite, keys, lens)


def no_rows(c: CaseConfig) -> Case:
    """An empty batch: requests, but no row of any."""
    return _palette(c, [[], []])


def bf16_weights(c: CaseConfig) -> Case:
    """Head weights in bfloat16."""
    case = _palette(c, [[c.full + 50 + i for i in range(4)]])
    source, consumer = case.source, case.consumer
    return Case(
        with_queries(source, source.index_q, source.head_weights.bfloat16()),
        with_queries(source, consumer.index_q, consumer.head_weights.bfloat16()),
    )


def own_keys(c: CaseConfig) -> Case:
    """A consumer that scores keys of its own, in a pool of its own, at the same positions."""
    lens = [[c.full + 50 + i for i in range(3)], [c.topk + 20]]
    return Case(_palette(c, lens).source, _palette(c, lens, seed=7).consumer)


def nans(c: CaseConfig) -> Case:
    """NaN keys at 83 % of the positions, and a row whose NaN weight makes all its logits NaN."""
    lens = [c.topk + 50, c.full + 5, c.full + 100, c.full + 200]
    width = max(lens)
    keys = palette_keys(width, c.format, seed=31, device=c.device)
    bad = (torch.rand(width, generator=torch.Generator().manual_seed(32)) < 0.83).to(c.device)
    if keys.scales is not None:
        nan_scale = torch.nan if c.format == "fp8" else -1  # four ue8m0 codes 255
        keys = FlatIndexK(keys.values, keys.scales.masked_fill(bad, nan_scale), c.format)
    else:
        keys = FlatIndexK(keys.values.masked_fill(bad[:, None], torch.nan), None, c.format)
    queries, weights = palette_queries(len(lens), c.heads, c.format, seed=33, device=c.device)
    weights[1, 0] = torch.nan
    return _single(c, queries, weights, keys, lens)


def shared_prefix(c: CaseConfig) -> Case:
    """Two requests whose page tables share the pages of a prefix and part after it."""
    prefix = 5 * c.page_size
    lens = (prefix, c.full, c.full + 77)
    parts = [palette_keys(n, c.format, seed=41 + i, device=c.device) for i, n in enumerate(lens)]
    if c.layout == "flat":
        return _palette(c, [[c.full + 9], [c.full + 30]])
    pool, table = hostile_pool(parts, c.layout, page_size=c.page_size, seed=44)
    joined = torch.cat((table[:1, :5].expand(2, 5), table[1:]), 1).contiguous()
    seen = [prefix + lens[1], prefix + lens[2], prefix + lens[1] - 9, prefix + lens[2] - 1]
    plan = PrefillPlan(
        compressed_lens=torch.tensor(seen, dtype=torch.int32, device=c.device),
        request_of_row=torch.tensor([0, 1, 0, 1], dtype=torch.int32, device=c.device),
        rows_per_request=[2, 2],
        context_lens=seen[:2],
        page_table=joined,
    )
    queries, weights = palette_queries(4, c.heads, c.format, seed=45, device=c.device)
    return _with_consumer(c, PrefillIndexerInputs(plan, queries, weights, pool))


def normal(c: CaseConfig) -> Case:
    """Unit-normal queries and keys."""
    lens = [c.topk + 3, *(c.full + 37 * i for i in range(1, 8))]
    queries, weights = random_queries(len(lens), c.heads, c.format, seed=51, device=c.device)
    keys = random_keys(max(lens), c.format, seed=52, device=c.device)
    source = _single(c, queries, weights, keys, lens).source
    consumer = random_queries(len(lens), c.heads, c.format, seed=53, device=c.device)
    return Case(source, with_queries(source, *consumer), exact=False)


def overlapping(c: CaseConfig) -> Case:
    """Consecutive rows that share 0.86 of their blocks, as on text; blocks are 1/4 of all."""
    if c.topk_blocks < 4:
        return normal(c)  # the newest block is most of what such rows have in common
    rows, width = 12, 4 * c.full
    keys = random_keys(width, c.format, seed=61, device=c.device)
    queries, weights = overlapping_queries(
        rows, c.heads, keys, overlap=0.86, topk_blocks=c.topk_blocks, seed=62
    )
    lens = [width - rows + 1 + row for row in range(rows)]
    source = _single(c, queries, weights, keys, lens).source
    consumer = random_queries(rows, c.heads, c.format, seed=63, device=c.device)
    return Case(source, with_queries(source, *consumer), exact=False)


CASES: dict[str, Callable[[CaseConfig], Case]] = {
    make.__name__: make
    for make in (
        edges,
        every_length,
        ragged,
        interleaved,
        equal_logits,
        two_values,
        close_logits,
        signed_zeros,
        future,
        old_newest,
        infinite_rivals,
        minus_infinity,
        nan_and_minus_infinity,
        no_rows,
        bf16_weights,
        own_keys,
        nans,
        shared_prefix,
        normal,
        overlapping,
    )
}
"""All case makers, by name."""


def _palette(
    c: CaseConfig,
    lens: Sequence[Sequence[int]],
    *,
    request_of_row: Sequence[int] | None = None,
    request_starts: Sequence[int] | None = None,
    seed: int = 0,
) -> Case:
    """Exact random logits; per request, the lengths its rows see."""
    rows_per_request = [len(request) for request in lens]
    if request_of_row is None:
        flat = [n for request in lens for n in request]
    else:
        left = [list(request) for request in lens]
        flat = [left[request].pop(0) for request in request_of_row]
    keys = [
        palette_keys(max(request, default=0), c.format, seed=100 * seed + i, device=c.device)
        for i, request in enumerate(lens)
    ]
    queries, weights = palette_queries(len(flat), c.heads, c.format, seed=99, device=c.device)
    source = make_inputs(
        queries,
        weights,
        keys,
        [n - 1 for n in flat],
        rows_per_request,
        layout=c.layout,
        page_size=c.page_size,
        request_of_row=request_of_row,
        request_starts=request_starts,
        seed=seed,
    )
    return _with_consumer(c, source)


def _dictated(c: CaseConfig, integers: Sequence[Sequence[int]], lens: Sequence[int]) -> Case:
    queries, weights, keys = dictated(integers, c.format, heads=c.heads, device=c.device)
    return _single(c, queries, weights, keys, lens)


def _single(
    c: CaseConfig, queries: IndexQ, weights: torch.Tensor, keys: FlatIndexK, lens: Sequence[int]
) -> Case:
    """One request whose rows see `lens` positions; the consumer is the source, rows reversed."""
    source = make_inputs(
        queries,
        weights,
        [keys],
        [n - 1 for n in lens],
        [len(lens)],
        layout=c.layout,
        page_size=c.page_size,
    )
    values = queries.values.flip(0)
    scales = None if queries.scales is None else queries.scales.flip(0)
    return Case(source, with_queries(source, IndexQ(values, scales), weights.flip(0)))


def _with_consumer(c: CaseConfig, source: PrefillIndexerInputs) -> Case:
    rows = source.plan.num_rows
    queries, weights = palette_queries(rows, c.heads, c.format, seed=98, device=c.device)
    return Case(source, with_queries(source, queries, weights))
