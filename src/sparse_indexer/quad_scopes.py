# SPDX-License-Identifier: Apache-2.0
"""How quads are scored within a budget: whose keys are packed at a time, and tiles of quads."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from sparse_indexer.formats import HEAD_DIM
from sparse_indexer.index_k import BLOCK_SIZE
from sparse_indexer.inputs import PrefillIndexerInputs
from sparse_indexer.ops.candidate_topk import SLOTS
from sparse_indexer.ops.index_k import index_k
from sparse_indexer.quads import GROUP_QUADS, Quads, RequestQuads, tables_bytes
from sparse_indexer.scratch import Scratch
from sparse_indexer.tiling import RequestGroup, even_tiles, request_groups

UNIT_BLOCKS = 64  # what dense_block_keys scores at least
# Quads an SM, at least, that are scored and selected by one kernel: the last ones' selection has
# nothing beside it.
_ONE_KERNEL_QUADS = 8


class Scoring(NamedTuple):
    """What a call scores, and in how much scratch."""

    element: torch.dtype  # of packed keys and queries
    heads: int  # 32 or 64
    n: int  # blocks of a row in the tables; all are scored as candidates
    few: int  # but at most so many in a context of more than n
    tables: bool  # those of n blocks are not in scratch
    dense: bool  # the whole context is scored first, for block keys
    select: bool  # candidates are scored
    one_kernel: bool  # and may be selected by the same kernel, where that pays and fits
    budget: int  # bytes


class Scope(NamedTuple):
    """Requests whose keys are packed at the same time, and tiles of their quads."""

    keys: torch.Tensor  # [packed blocks, ...]
    first: torch.Tensor  # [quads] int32: a quad's first block in `keys`; of all the plan's quads
    max_blocks: int  # of one request
    scored: int  # candidate blocks of a row
    own_tables: bool  # which are in tables of their own, in scratch
    tiles: tuple[slice, ...]  # of quads
    scratch: Scratch  # for one tile at a time
    slots: torch.Tensor | None  # of candidate_topk, with its counters; None: it is not called
    counters: torch.Tensor | None


class _Planned(NamedTuple):
    """A `Scope` to be made."""

    group: RequestGroup
    scored: int
    own_tables: bool
    tiles: tuple[slice, ...]
    slots: tuple[int, ...] | None  # the shape of those


def quad_scopes(inputs: PrefillIndexerInputs, quads: Quads, call: Scoring) -> Iterator[Scope]:
    """As many requests at a time as half the budget holds the keys of, but at least one."""
    plan = inputs.plan
    where = plan.page_table if plan.page_table is not None else plan.key_starts
    assert where is not None
    ctas = _sm_count(plan.device) if call.one_kernel else 0
    planned, nbytes = _planned(
        tuple(plan.rows_per_request), quads.requests, call, ctas, _ONE_KERNEL_QUADS * ctas
    )
    if not planned:
        return
    # One for all groups: two of them would be two budgets while the second is made.
    scratch = Scratch(nbytes, call.budget, plan.device)
    elements = _block_elements(call.element)
    for (begin, end, blocks, longest), scored, own_tables, tiles, shape in planned:
        base = quads.requests[begin]
        keys = scratch.clear().take((blocks + UNIT_BLOCKS, elements), call.element)
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
        yield Scope(keys, first, longest, scored, own_tables, tiles, scratch, slots, counters)


@functools.lru_cache(64)  # as `quads` keeps layouts, for a few kinds of calls
def _planned(
    rows: tuple[int, ...],
    requests: tuple[RequestQuads, ...],
    call: Scoring,
    ctas: int,
    least_quads: int,
) -> tuple[tuple[_Planned, ...], int]:
    """What of `quad_scopes` no tensor is needed for, and the scratch that it takes.

    Args:
        rows: of each request.
        ctas: of the one kernel; 0: it is not to be taken.
        least_quads: of a tile, for it to pay.
    """
    element, n, budget = call.element, call.n, call.budget
    block_bytes = _block_elements(element) * element.itemsize
    query_bytes = 4 * call.heads * (HEAD_DIM * element.itemsize + 4)

    def candidates(longest: int) -> tuple[int, bool]:
        """How many are scored, and whether their tables are in scratch."""
        scored = min(n, call.few) if longest > n else n
        return scored, not call.tables or scored < n

    def quad_bytes(longest: int) -> int:
        width = -(-longest // UNIT_BLOCKS) * UNIT_BLOCKS if call.dense else 0
        scored, own_tables = candidates(longest)
        columns = min(scored, longest) * BLOCK_SIZE if call.select else 0
        of_tables = tables_bytes(scored, longest) if own_tables else 0
        return query_bytes + 16 * max(width, columns) + of_tables

    def least(blocks: int, longest: int) -> int:
        packed = (blocks + UNIT_BLOCKS) * block_bytes
        return packed + Scratch.SLACK + GROUP_QUADS * quad_bytes(longest)

    sizes = [request.blocks for request in requests]
    planned, most = [], 0
    for group in request_groups(rows, sizes, unit_bytes=block_bytes, least=least, budget=budget):
        base, last = requests[group.begin], requests[group.stop - 1]
        stop = last.first_quad + last.quads
        packed = (group.size + UNIT_BLOCKS) * block_bytes + Scratch.SLACK
        shape, of_quad = None, quad_bytes(group.longest)
        if ctas:
            shape = (ctas, SLOTS, 4, min(n, group.longest) * BLOCK_SIZE)
            kept = 4 * (math.prod(shape) + ctas + 1)
            tiles = _tiles(base.first_quad, stop, (budget - packed - kept) // query_bytes)
            if tiles and tiles[0].stop - tiles[0].start >= least_quads:
                packed, of_quad = packed + kept, query_bytes
            else:
                shape = None
        if shape is None:
            tiles = _tiles(base.first_quad, stop, (budget - packed) // of_quad)
        tile = tiles[0].stop - tiles[0].start
        planned.append(_Planned(group, *candidates(group.longest), tuple(tiles), shape))
        most = max(most, packed + tile * of_quad)
    return tuple(planned), most


def _block_elements(element: torch.dtype) -> int:
    """Of a packed block: values of 8 positions, then 128 bytes that hold their scales."""
    return BLOCK_SIZE * HEAD_DIM + 128 // element.itemsize


def _tiles(first: int, stop: int, most: int) -> list[slice]:
    """Quads from `first` to `stop - 1`, at most so many at a time; none if that is too few."""
    most //= GROUP_QUADS
    return even_tiles(first, stop, unit=GROUP_QUADS, most=most) if most > 0 else []


@functools.cache
def _sm_count(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
