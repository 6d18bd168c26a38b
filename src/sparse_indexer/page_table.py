# SPDX-License-Identifier: Apache-2.0
"""Page tables: an engine's in units of the index pool's pages, and the slots that one leads to."""

from __future__ import annotations

import torch

from sparse_indexer.errors import expect_int, expect_tensor, mismatch
from sparse_indexer.formats import INT32_MAX
from sparse_indexer.plan import PrefillPlan


def expand_index_page_table(
    page_table: torch.Tensor, *, kv_page_size: int, index_page_size: int, compress_ratio: int = 1
) -> torch.Tensor:
    """The engine's KV page table in units of the index pool's pages.

    A KV page of `kv_page_size` tokens holds `kv_page_size / compress_ratio` compressed positions,
    that is `m` pages of the index pool: KV page p becomes index pages `p * m ... p * m + m - 1`.

    Args:
        page_table: `[requests, max_pages]` int32 or int64 KV page ids; unused slots hold anything.

    Returns:
        `[requests, max_pages * m]` int32; -1 where a KV page id is negative or its index pages do
        not fit an int32.

    Raises:
        ValueError: a wrong shape or dtype, or a KV page that is not a whole number of index pages.
    """
    expect_tensor("page_table", page_table, ("requests", "max_pages"), (torch.int32, torch.int64))
    per_page = expect_int("index_page_size", index_page_size, 8, INT32_MAX)
    if per_page % 8:
        raise mismatch("index_page_size", "a multiple of 8", str(per_page))
    ratio = expect_int("compress_ratio", compress_ratio, 1, INT32_MAX)
    kv_page_size = expect_int("kv_page_size", kv_page_size, 1, INT32_MAX)
    if kv_page_size % (per_page * ratio):
        want = f"a multiple of index_page_size * compress_ratio = {per_page * ratio}"
        raise mismatch("kv_page_size", want, str(kv_page_size))
    m = kv_page_size // (per_page * ratio)
    first = page_table.to(torch.int64).clamp(-1, INT32_MAX + 1)[..., None] * m
    pages = first + torch.arange(m, device=page_table.device)
    pages = torch.where((first >= 0) & (pages <= INT32_MAX), pages, torch.full_like(pages, -1))
    return pages.flatten(1).to(torch.int32)


def pool_slots(positions: torch.Tensor, plan: PrefillPlan, page_size: int) -> torch.Tensor:
    """Selected positions as slots of the pool that the plan's page table leads to.

    That is `page_table[request, p // page_size] * page_size + p % page_size` of each position p.

    Args:
        positions: `[rows, k]` int32, request-relative, as an indexer writes them; negative: unused.
        plan: of these rows, paged, without `request_starts`.
        page_size: positions a page.

    Returns:
        `[rows, k]` int32; -1 where a position is unused, has no page, or its slot fits no int32.

    Raises:
        ValueError: a wrong shape, dtype or device, or another plan.
    """
    if not isinstance(plan, PrefillPlan):
        raise mismatch("plan", "a PrefillPlan", plan)
    table, device = plan.page_table, plan.device
    if table is None or plan.request_starts is not None:
        got = "no page table" if table is None else "request_starts"
        raise mismatch("plan", "a page table and no request_starts", got)
    expect_tensor("positions", positions, (plan.num_rows, "k"), (torch.int32,), device)
    size = expect_int("page_size", page_size, 1, INT32_MAX)
    if not table.numel():
        return torch.full_like(positions, -1)
    column = positions // size
    there = (positions >= 0) & (column < table.shape[1])
    column = torch.where(there, column, 0).long()
    page = table[plan.request_of_row.long()[:, None], column].long()
    slots = page * size + positions % size
    there &= (page >= 0) & (slots <= INT32_MAX)
    return torch.where(there, slots, -1).to(torch.int32)
