# SPDX-License-Identifier: Apache-2.0
"""Scoring by quads, tile by tile: no matrix of logits beyond a tile's candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from sparse_indexer.formats import HEAD_DIM, INT32_MAX
from sparse_indexer.index_k import BLOCK_SIZE
from sparse_indexer.inputs import IndexQ, PrefillIndexerInputs
from sparse_indexer.ops.candidate_logits import candidate_logits
from sparse_indexer.ops.candidate_topk import MOST, SLOTS, candidate_topk
from sparse_indexer.ops.dense_block_keys import dense_block_keys
from sparse_indexer.ops.fused_block_keys import fused_block_keys
from sparse_indexer.ops.fused_candidate_logits import fused_candidate_logits
from sparse_indexer.ops.index_k import index_k
from sparse_indexer.ops.index_q import index_q
from sparse_indexer.ops.topk import topk
from sparse_indexer.quads import (
    GROUP_QUADS,
    Quads,
    Tables,
    empty_tables,
    merge_blocks,
    tables_bytes,
)
from sparse_indexer.scratch import Scratch
from sparse_indexer.tiling import even_tiles, request_groups

MAX_HEADS = 64
_UNIT_BLOCKS = 64  # what dense_block_keys scores at least
# Quads an SM, at least, that are scored and selected by one kernel: the last ones' selection has
# nothing beside it.
_ONE_KERNEL_QUADS = 8


class QuadKernels(NamedTuple):
    """The kernels that score on some GPUs."""

    names: tuple[str, ...]
    bf16: bool  # bfloat16 is scored as it is, else as float16 with scales
    pairs: bool  # a quad may have two lists of candidates
    block_keys: Callable[..., None]  # of (keys, queries, weights, quads, first, out)
    candidate_logits: Callable[..., None]  # see ops.candidate_logits
    candidate_topk: Callable[..., None] | None  # see ops.candidate_topk; of e4m3


def _wgmma_block_keys(
    keys: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
    quads: Quads,
    first: torch.Tensor,
    out: torch.Tensor,
) -> None:
    dense_block_keys(keys, queries, weights, quad_lens=quads.lens, quad_first=first, out=out)


def _mma_sync_block_keys(
    keys: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
    quads: Quads,
    first: torch.Tensor,
    out: torch.Tensor,
) -> None:
    fused_block_keys(keys, queries, weights, slot_lens=quads.slot_lens, quad_first=first, out=out)


WGMMA = QuadKernels(
    ("candidate_logits", "candidate_topk", "dense_block_keys"),
    bf16=True,
    pairs=True,
    block_keys=_wgmma_block_keys,
    candidate_logits=candidate_logits,
    candidate_topk=candidate_topk,
)
"""Of Hopper."""
MMA_SYNC = QuadKernels(
    ("fused_block_keys", "fused_candidate_logits"),
    bf16=False,
    pairs=False,
    block_keys=_mma_sync_block_keys,
    candidate_logits=fused_candidate_logits,
    candidate_topk=None,
)
"""Of Volta and Turing."""


class _Scope(NamedTuple):
    """Requests whose keys are packed at the same time, and tiles of their quads."""

    keys: torch.Tensor  # [packed blocks, ...]
    first: torch.Tensor  # [quads] int32: a quad's first block in `keys`; of all the plan's quads
    max_blocks: int  # of one request
    tiles: list[slice]  # of quads
    scratch: Scratch  # for one tile at a time
    slots: torch.Tensor | None  # of candidate_topk, with its counters; None: it is not called
    counters: torch.Tensor | None


def score(
    inputs: PrefillIndexerInputs,
    quads: Quads,
    tables: Tables | None,
    out_positions: torch.Tensor | None,
    kernels: QuadKernels,
    *,
    n: int,
    dense: bool,
    budget: int,
) -> None:
    """Tile by tile: if `dense`, the best n blocks of each row; the best positions of those.

    Args:
        tables: of all quads, written if `dense`; `None`: in scratch.
        out_positions: `None`: no positions are selected.
    """
    plan, element = inputs.plan, _element(inputs, kernels)
    heads = 32 if inputs.num_heads <= 32 else MAX_HEADS
    queries = _contiguous(inputs.index_q)
    head_weights = inputs.head_weights.contiguous()
    starts = plan.request_starts
    scopes = _scopes(
        inputs,
        quads,
        n,
        element,
        heads,
        own_tables=tables is None,
        dense=dense,
        select=out_positions is not None,
        one_kernel=(
            kernels.candidate_topk is not None
            and element == torch.uint8
            and out_positions is not None
            and out_positions.shape[1] <= MOST[heads]
            and not dense
        ),
        budget=budget,
    )
    for scope in scopes:
        columns = min(n, scope.max_blocks)
        width = -(-scope.max_blocks // _UNIT_BLOCKS) * _UNIT_BLOCKS
        for tile in scope.tiles:
            count = tile.stop - tile.start
            whole = count == quads.lens.shape[0]
            scratch = scope.scratch.restart()
            values = scratch.take((count, 4 * heads, HEAD_DIM), element)
            weights = scratch.take((count, 4, heads), torch.float32)
            own, first, its = quads, scope.first, tables
            if not whole:
                own, first = quads.part(tile), scope.first[tile]
            if tables is None:
                its = empty_tables(count, n, scope.max_blocks, scratch.take)
            elif not whole:
                its = Tables(*(t[tile] for t in tables))
            assert its is not None
            packed = {"rows": own.rows, "out_values": values, "out_weights": weights}
            if dense:
                keys = scratch.peek((count * 4, width), torch.float32)
                if scope.max_blocks > n:
                    index_q(queries, head_weights, **packed)
                    kernels.block_keys(scope.keys, values, weights, own, first, keys)
                topk(
                    keys,
                    own.slot_lens.view(-1),
                    out=its.blocks.view(count * 4, n),
                    per_column=BLOCK_SIZE,
                    force_last=True,
                    unused=INT32_MAX,
                )
                merge_blocks(its, scope.max_blocks, pairs=kernels.pairs)
            if out_positions is None:
                continue
            index_q(queries, head_weights, counts=its.counts, **packed)
            scored: dict[str, Any] = {
                "entries": its.entries,
                "ranks": its.ranks,
                "counts": its.counts,
                "quad_first": first,
            }
            selected: dict[str, Any] = {
                "out": out_positions,
                "rows": own.rows.view(-1),
                "blocks": its.blocks.view(count * 4, n),
                "request_of_row": None if starts is None else plan.request_of_row,
                "request_starts": starts,
            }
            lens = own.slot_lens.view(-1)
            if scope.slots is not None:
                assert kernels.candidate_topk is not None
                own_scratch = {"slots": scope.slots, "counters": scope.counters}
                kernels.candidate_topk(
                    scope.keys, values, weights, lens=lens, **scored, **selected, **own_scratch
                )
                continue
            logits = scratch.peek((count * 4, columns * BLOCK_SIZE), torch.float32)
            kernels.candidate_logits(scope.keys, values, weights, **scored, out=logits)
            topk(logits, lens, **selected)


def _scopes(
    inputs: PrefillIndexerInputs,
    quads: Quads,
    n: int,
    element: torch.dtype,
    heads: int,
    *,
    own_tables: bool,
    dense: bool,
    select: bool,
    one_kernel: bool,
    budget: int,
) -> Iterator[_Scope]:
    """As many requests at a time as half the budget holds the keys of, but at least one.

    Args:
        one_kernel: candidates may be scored and selected by one, where that pays and fits.
    """
    plan = inputs.plan
    where = plan.page_table if plan.page_table is not None else plan.key_starts
    assert where is not None
    # Of a packed block: values of 8 positions, then 128 bytes that hold their scales.
    elements = BLOCK_SIZE * HEAD_DIM + 128 // element.itemsize
    block_bytes = elements * element.itemsize

    query_bytes = 4 * heads * (HEAD_DIM * element.itemsize + 4)

    def quad_bytes(longest: int) -> int:
        width = -(-longest // _UNIT_BLOCKS) * _UNIT_BLOCKS if dense else 0
        columns = min(n, longest) * BLOCK_SIZE if select else 0
        tables = tables_bytes(n, longest) if own_tables else 0
        return query_bytes + 16 * max(width, columns) + tables

    def least(blocks: int, longest: int) -> int:
        packed = (blocks + _UNIT_BLOCKS) * block_bytes
        return packed + Scratch.SLACK + GROUP_QUADS * quad_bytes(longest)

    groups = request_groups(
        plan.rows_per_request,
        [request.blocks for request in quads.requests],
        unit_bytes=block_bytes,
        least=least,
        budget=budget,
    )
    planned = []
    for group in groups:
        base, last = quads.requests[group.begin], quads.requests[group.stop - 1]
        stop = last.first_quad + last.quads
        packed = (group.size + _UNIT_BLOCKS) * block_bytes + Scratch.SLACK
        shape, of_quad = None, quad_bytes(group.longest)
        if one_kernel:
            ctas = _sm_count(plan.device)
            shape = (ctas, SLOTS, 4, min(n, group.longest) * BLOCK_SIZE)
            kept = 4 * (math.prod(shape) + ctas + 1)
            tiles = _tiles(base.first_quad, stop, (budget - packed - kept) // query_bytes)
            if tiles and tiles[0].stop - tiles[0].start >= _ONE_KERNEL_QUADS * ctas:
                packed, of_quad = packed + kept, query_bytes
            else:
                shape = None
        if shape is None:
            tiles = _tiles(base.first_quad, stop, (budget - packed) // of_quad)
        tile = tiles[0].stop - tiles[0].start
        planned.append((group, tiles, shape, packed + tile * of_quad))
    if not planned:
        return
    # One for all groups: two of them would be two budgets while the second is made.
    scratch = Scratch(max(nbytes for *_, nbytes in planned), budget, plan.device)
    for (begin, end, blocks, longest), tiles, shape, _ in planned:
        base = quads.requests[begin]
        keys = scratch.clear().take((blocks + _UNIT_BLOCKS, elements), element)
        slots = counters = None
        if shape is not None:
            slots = scratch.take(shape, torch.float32)
            counters = scratch.take((shape[0] + 1,), torch.int32).zero_()
        scratch.keep()
        request_first, request_lens, first = quads.request_first, quads.request_lens, quads.first
        if end - begin < len(quads.requests):
            where_from, request_lens = where[begin:end], request_lens[begin:end]
            request_first = request_first[begin:end] - base.first_block
            first = first - base.first_block
        else:
            where_from = where
        index_k(
            inputs.index_k,
            where_from,
            lens=request_lens,
            max_len=longest * BLOCK_SIZE,
            out_starts=request_first,
            out_values=keys,
            out_scales=None,
        )
        yield _Scope(keys, first, longest, tiles, scratch, slots, counters)


def _tiles(first: int, stop: int, most: int) -> list[slice]:
    """Quads from `first` to `stop - 1`, at most so many at a time; none if that is too few."""
    most //= GROUP_QUADS
    return even_tiles(first, stop, unit=GROUP_QUADS, most=most) if most > 0 else []


def _sm_count(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _element(inputs: PrefillIndexerInputs, kernels: QuadKernels) -> torch.dtype:
    """What is scored: uint8 stands for e4m3 codes."""
    queries, keys = inputs.index_q.values.dtype, inputs.index_k.format
    halves = {torch.float16, torch.bfloat16} & {
        queries,
        {"fp16": torch.float16, "bf16": torch.bfloat16}.get(keys),
    }
    if not halves:
        return torch.uint8
    return torch.bfloat16 if kernels.bf16 and halves == {torch.bfloat16} else torch.float16


def _contiguous(queries: IndexQ) -> IndexQ:
    if queries.values.is_contiguous() and (
        queries.scales is None or queries.scales.is_contiguous()
    ):
        return queries
    scales = queries.scales
    return IndexQ(queries.values.contiguous(), None if scales is None else scales.contiguous())
