# SPDX-License-Identifier: Apache-2.0
"""What the `sm100` backend publishes: blocks, and DeepGEMM's schedules of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from sparse_indexer.deep_gemm_api import (
    CANDIDATE_HEADS,
    MAX_HEADS,
    MAX_ROWS,
    DeepGemm,
    query_bytes,
)
from sparse_indexer.errors import mismatch
from sparse_indexer.index_k import BLOCK_SIZE, IndexKPool
from sparse_indexer.lasting import Ready
from sparse_indexer.plan import PrefillPlan
from sparse_indexer.protocol import Candidates
from sparse_indexer.row_order import RowOrder

_ROWS = 8  # a tile's rows are a multiple


class Pages(NamedTuple):
    """The shape of a pool, which schedules are for."""

    page_size: int
    num_pages: int


class Schedules(NamedTuple):
    """What `DeepGemm.candidate_logits` scores by."""

    pages: Pages
    rows: int  # of a tile, at most
    tiles: list[tuple[slice, torch.Tensor]]  # rows in order, their metadata


class PairCandidates(Candidates):
    """A table in `RowOrder`. `blocks`, by row, is made anew for whoever asks."""

    def __init__(
        self, plan: PrefillPlan, order: RowOrder, table: torch.Tensor, schedules: Schedules | None
    ) -> None:
        self.plan = plan
        self.order = order
        self.table = table  # [rows, n] int32, contiguous: ascending block ids, then INT32_MAX
        self.schedules = schedules  # None: the source's keys cannot be scored as candidates
        self.ready = Ready(plan.device)

    @property
    def blocks(self) -> torch.Tensor:
        """See `Candidates.blocks`."""
        self.wait()
        return self.table[self.order.places]

    def wait(self) -> None:
        """Let the current stream read the table and the schedules."""
        metadata = [] if self.schedules is None else [held for _, held in self.schedules.tiles]
        self.ready.wait((self.table, *self.order, *metadata))


def pages_of(pool: IndexKPool) -> Pages:
    """The shape of a pool."""
    return Pages(pool.page_size, pool.num_pages)


def tile_rows(plan: PrefillPlan, page_size: int, n: int, budget: int) -> int:
    """Rows of a tile whose page table, or else whose queries and logits, the budget holds.

    Args:
        n: blocks of a row.

    Raises:
        ValueError: it does not hold those of 8 rows.
    """
    columns = -(-max(plan.context_lens, default=0) // page_size)
    logits = -(-n * BLOCK_SIZE // 512) * 512 * torch.bfloat16.itemsize
    scored = MAX_HEADS // CANDIDATE_HEADS * logits + query_bytes(MAX_HEADS)
    row = max(4 * columns, scored)
    if plan.num_rows and budget < _ROWS * row:
        raise mismatch("memory_budget", f"at least {_ROWS * row} bytes", f"{budget}")
    return max(min(budget // row, MAX_ROWS) // _ROWS, 1) * _ROWS


def make_schedules(
    api: DeepGemm,
    plan: PrefillPlan,
    order: RowOrder,
    table: torch.Tensor,
    pages: Pages,
    *,
    budget: int,
    lasting: Callable[[], AbstractContextManager[None]],
) -> Schedules:
    """Schedule each row's blocks.

    Args:
        table: `[rows, n]` int32, in order.
        budget: bytes for a tile of rows, now and when it is scored.
        lasting: what is allocated within outlives the call.

    Raises:
        ValueError: as `tile_rows`.
    """
    assert plan.page_table is not None
    rows = tile_rows(plan, pages.page_size, table.shape[1], budget)
    columns = -(-max(plan.context_lens, default=0) // pages.page_size)
    tiles = []
    for start in range(0, plan.num_rows, rows):
        part = slice(start, min(start + rows, plan.num_rows))
        # One row a query: neither a table by request nor a stride of 0 is taken. Slots that no
        # block uses hold anything.
        page_table = plan.page_table[:, : max(columns, 1)][order.requests[part]]
        page_table.clamp_(0, pages.num_pages - 1)
        with lasting():
            metadata = api.schedule(
                table[part],
                lens=order.lens[part],
                pairs=order.pairs[part],
                page_table=page_table,
                page_size=pages.page_size,
            )
        tiles.append((part, metadata))
    return Schedules(pages, rows, tiles)
