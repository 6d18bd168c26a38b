# SPDX-License-Identifier: Apache-2.0
"""An engine's page table in units of the index pool's pages."""

from __future__ import annotations

import torch

from sparse_indexer.errors import expect_int, expect_tensor, mismatch
from sparse_indexer.formats import INT32_MAX


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
