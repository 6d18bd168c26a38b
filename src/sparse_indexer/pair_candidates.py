# SPDX-License-Identifier: Apache-2.0
"""What the `sm100` backend publishes: blocks, and DeepGEMM's schedules of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from sparse_indexer.deep_gemm_api import (
    CANDIDATE_HEADS,
    MAX_HEADS,
    MAX_ROWS,
    DeepGemm,
    Pages,
    query_bytes,
    schedule_bytes,
)
from sparse_indexer.errors import mismatch
from sparse_indexer.index_k import BLOCK_SIZE
from sparse_indexer.lasting import RowCandidates
from sparse_indexer.plan import PrefillPlan
from sparse_indexer.tiling import even_tiles

_ROWS = 8  # a tile's rows are a multiple


class ScheduledTile(NamedTuple):
    """Rows whose candidates are scored at once, and all that does not depend on a layer."""

    part: slice | None  # of the plan's rows; None: all
    lens: torch.Tensor  # [rows] int32: positions each sees
    table: torch.Tensor  # [rows, n] int32: its blocks
    metadata: torch.Tensor  # for `DeepGemm.candidate_logits`


class Schedules(NamedTuple):
    """What a plan's candidates are scored by."""

    pages: Pages
    budget: int  # bytes that a tile takes, at most
    num_sms: int  # SMs that they are for
    tiles: list[ScheduledTile]


class PairCandidates(RowCandidates):
    """Blocks, row by row, and how DeepGEMM scores them."""

    def __init__(self, plan: PrefillPlan, table: torch.Tensor, schedules: Schedules | None) -> None:
        """`schedules`: `None` if the source's keys cannot be scored as candidates."""
        self.schedules = schedules
        tiles = [] if schedules is None else schedules.tiles
        super().__init__(plan, table, (tile.metadata for tile in tiles))

    def tiles_for(
        self, plan: PrefillPlan, pages: Pages, *, budget: int, num_sms: int
    ) -> list[ScheduledTile] | None:
        """What is scheduled, if for such rows and pages, and in tiles that are small enough."""
        own, held = self.plan, self.schedules
        if held is None or held.pages != pages or held.budget > budget or held.num_sms != num_sms:
            return None
        return held.tiles if own is plan or own.page_table is plan.page_table else None


def least_bytes(plan: PrefillPlan, n: int, pages: Pages) -> int:
    """What `scheduled_tiles` with `lasting` memory takes for the fewest rows."""
    return _ROWS * _row_bytes(plan, n, pages)


def scheduled_tiles(
    api: DeepGemm,
    plan: PrefillPlan,
    table: torch.Tensor,
    pages: Pages,
    *,
    budget: int,
    lasting: Callable[[], AbstractContextManager[None]] | None = None,
) -> Iterator[ScheduledTile]:
    """Schedule each row's blocks, tile by tile.

    Args:
        table: `[rows, n]` int32.
        budget: bytes for a tile of rows: its page table now, its queries and logits when it is
            scored.
        lasting: what is allocated within outlives the call; `None`: a tile's schedule is of the
            budget, too, and the caller lets go of it before the next one.

    Raises:
        ValueError: the budget does not hold 8 rows.
    """
    assert plan.page_table is not None
    if not plan.num_rows:
        return
    n = table.shape[1]
    once, a_row = 0, _row_bytes(plan, n, pages)
    if lasting is None:
        once = schedule_bytes(0, n)
        a_row += schedule_bytes(1, n) - once
    least = once + _ROWS * a_row
    if budget < least:
        raise mismatch("memory_budget", f"at least {least} bytes", f"{budget}")
    most = min((budget - once) // a_row, MAX_ROWS) // _ROWS
    page_table, pairs = plan.page_table[:, : _columns(plan, pages)], row_pairs(plan)
    for part in even_tiles(0, plan.num_rows, unit=_ROWS, most=most):
        whole = part.stop - part.start == plan.num_rows
        requests, ids, lens, blocks = (
            x if whole else x[part]
            for x in (plan.request_of_row, pairs, plan.compressed_lens, table)
        )
        # One row a query: neither a table by request nor a stride of 0 is taken. Slots that no
        # block uses hold anything.
        of_rows = torch.index_select(page_table, 0, requests).clamp_(0, pages.num_pages - 1)
        with contextlib.nullcontext() if lasting is None else lasting():
            metadata = api.schedule(
                blocks, lens=lens, pairs=ids, page_table=of_rows, page_size=pages.page_size
            )
            if lasting is not None and not metadata.untyped_storage().resizable():
                metadata = metadata.clone()  # record_stream does nothing for memory of DLPack's
        del of_rows
        yield ScheduledTile(None if whole else part, lens, blocks, metadata)
        del metadata


def _columns(plan: PrefillPlan, pages: Pages) -> int:
    return max(-(-max(plan.context_lens, default=0) // pages.page_size), 1)


def _row_bytes(plan: PrefillPlan, n: int, pages: Pages) -> int:
    """A row's page table, or its logits and queries."""
    logits = -(-n * BLOCK_SIZE // 512) * 512 * torch.bfloat16.itemsize
    scored = MAX_HEADS // CANDIDATE_HEADS * logits + query_bytes(MAX_HEADS)
    return max(4 * _columns(plan, pages), scored)


def row_pairs(plan: PrefillPlan) -> torch.Tensor:
    """`[rows]` int32: an id that at most two rows share, neighbors of one request.

    A run of rows of one request is paired from its first row on; reads nothing back.
    """
    index = torch.arange(plan.num_rows, dtype=torch.int32, device=plan.device)
    if sum(map(bool, plan.rows_per_request)) == 1:
        return index >> 1
    requests = plan.request_of_row
    first = (index * (requests != requests.roll(1, 0))).cummax(0).values  # row 0 is one anyway
    return (index + first) >> 1  # which is first + (index - first) // 2
