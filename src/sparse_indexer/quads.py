# SPDX-License-Identifier: Apache-2.0
"""Rows by request, four at a time, as kernels score them, and their candidates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from sparse_indexer.formats import INT32_MAX
from sparse_indexer.index_k import BLOCK_SIZE
from sparse_indexer.ops.candidate_quads import RANK_EVERY, candidate_quads
from sparse_indexer.ops.row_quads import row_quads
from sparse_indexer.plan import PrefillPlan

GROUP_QUADS = 4  # a request has a multiple of them: what a CTA scores together


class RequestQuads(NamedTuple):
    """Where a request's rows and packed keys are; all on the host."""

    first_quad: int
    quads: int
    first_block: int
    blocks: int  # packed, of 8 positions; 0 if the request has no rows


class Quads(NamedTuple):
    """A plan's rows in slots, four slots a quad; tensors are int32, on the plan's device."""

    requests: tuple[RequestQuads, ...]
    rows: torch.Tensor  # [quads, 4]: the row of each slot, -1: none
    slots: torch.Tensor  # [rows]: the slot of each row
    slot_lens: torch.Tensor  # [quads, 4]: positions the slot's row sees
    lens: torch.Tensor  # [quads]: the most of each quad's
    first: torch.Tensor  # [quads]: its request's first packed block
    request_lens: torch.Tensor  # [requests]: most positions a row of the request sees
    request_first: torch.Tensor  # [requests]: its first packed block

    def part(self, tile: slice) -> Quads:
        """Some of the quads; requests as they are."""
        return self._replace(
            rows=self.rows[tile],
            slot_lens=self.slot_lens[tile],
            lens=self.lens[tile],
            first=self.first[tile],
        )

    @property
    def max_blocks(self) -> int:
        """Most blocks of a request that has rows."""
        return max((request.blocks for request in self.requests), default=0)


class Tables(NamedTuple):
    """Candidates of quads, by slot."""

    blocks: torch.Tensor  # [quads, 4, n] int32: of each slot's row, ascending, then INT32_MAX
    entries: torch.Tensor  # [quads, width] int32: see candidate_quads, as for the next two
    ranks: torch.Tensor  # [quads, ceil(width / 32), 4] int16
    counts: torch.Tensor  # [quads, 2] int32


@functools.lru_cache(32)  # of a forward or two: a key is as long as there are requests
def _layout(rows: tuple[int, ...], contexts: tuple[int, ...]) -> tuple[RequestQuads, ...]:
    requests = []
    quad = block = 0
    for count, context in zip(rows, contexts, strict=True):
        quads = -(-count // (4 * GROUP_QUADS)) * GROUP_QUADS
        blocks = -(-context // BLOCK_SIZE) if count else 0
        requests.append(RequestQuads(quad, quads, block, blocks))
        quad, block = quad + quads, block + blocks
    return tuple(requests)


def make_quads(plan: PrefillPlan) -> Quads:
    """Sort the rows into quads, each of one request; reads nothing back from the device."""
    requests = _layout(tuple(plan.rows_per_request), tuple(plan.context_lens))
    count, quads = len(requests), sum(r.quads for r in requests)
    sizes = [4 * quads, 4 * quads, quads, quads, count, count, plan.num_rows]
    # One allocation, since those are slow.
    buffer = torch.empty(sum(sizes), dtype=torch.int32, device=plan.device)
    pieces = buffer.split_with_sizes(sizes)
    rows, slot_lens, lens, first, request_lens, request_first, slots = pieces
    made = Quads(
        requests,
        rows=rows.view(quads, 4),
        slots=slots,
        slot_lens=slot_lens.view(quads, 4),
        lens=lens,
        first=first,
        request_lens=request_lens,
        request_first=request_first,
    )
    row_quads(
        plan.request_of_row,
        plan.compressed_lens,
        requests=[(r.first_quad, r.quads, r.first_block, r.blocks * BLOCK_SIZE) for r in requests],
        out_rows=made.rows,
        out_slots=made.slots,
        out_slot_lens=made.slot_lens,
        out_lens=made.lens,
        out_first=made.first,
        out_request_lens=made.request_lens,
        out_request_first=made.request_first,
    )
    return made


def tables_bytes(n: int, max_blocks: int) -> int:
    """What a quad's tables take."""
    width = min(4 * n, max_blocks)
    return 4 * (4 * n + width + 2) + 8 * -(-width // RANK_EVERY)


def empty_tables(count: int, n: int, max_blocks: int, empty: Callable[..., torch.Tensor]) -> Tables:
    """Tables of `count` quads out of `empty(shape, dtype=...)`."""
    width = min(4 * n, max_blocks)
    return Tables(
        blocks=empty((count, 4, n), dtype=torch.int32),
        entries=empty((count, width), dtype=torch.int32),
        ranks=empty((count, -(-width // RANK_EVERY), 4), dtype=torch.int16),
        counts=empty((count, 2), dtype=torch.int32),
    )


def plan_tables(quads: Quads, n: int) -> Tables:
    """Empty tables of all quads."""
    return empty_tables(len(quads.rows), n, quads.max_blocks, quads.rows.new_empty)


def merge_blocks(tables: Tables, max_blocks: int, *, pairs: bool) -> None:
    """Fill the rest of the tables from their blocks; `pairs` is as of `candidate_quads`."""
    candidate_quads(
        tables.blocks,
        max_blocks=max_blocks,
        pairs=pairs,
        out_entries=tables.entries,
        out_ranks=tables.ranks,
        out_counts=tables.counts,
    )


def fill_tables(
    tables: Tables,
    quads: Quads,
    blocks: torch.Tensor,
    places: torch.Tensor | None = None,
    *,
    pairs: bool,
) -> None:
    """Row i's candidates are `blocks[places[i]]`, default `blocks[i]`; `[.., n]` int32."""
    rows = quads.rows.view(-1).long()
    if len(blocks) and len(rows):
        there = rows.clamp(min=0)
        picked = blocks[there if places is None else places[there]]
        picked.masked_fill_((rows < 0)[:, None], INT32_MAX)
        tables.blocks.copy_(picked.view_as(tables.blocks))
    merge_blocks(tables, quads.max_blocks, pairs=pairs)
