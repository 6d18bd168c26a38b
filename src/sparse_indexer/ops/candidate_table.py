# SPDX-License-Identifier: Apache-2.0
"""What a consumer reads of a row's selected blocks."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.jit import Kernel, load

KERNEL = Kernel("candidate_table", {"candidate_table": "sparse_indexer::CandidateTable"})


def candidate_table(
    selected: torch.Tensor,
    compressed_lens: torch.Tensor,
    *,
    out_blocks: torch.Tensor,
    out_lens: torch.Tensor,
    rows: torch.Tensor | None = None,
    request_of_row: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    page_size: int = 0,
    out_slots: torch.Tensor | None = None,
) -> None:
    """Ascending block ids, their slots in the pool and the length of each row's candidate logits.

    A row that sees at most n blocks has all of them as candidates, and `selected` is not read.

    Args:
        selected: `[source rows, n]` int32: block ids, ascending, as `topk` gives them, the newest
            block among them; any row stride.
        compressed_lens: `[source rows]` int32: positions the row sees.
        out_blocks: `[rows, n]` int32: block ids, then INT32_MAX.
        out_lens: `[rows]` int32: columns of the row's `n * 8` candidate logits that count.
        rows: `[rows]` int64: the source rows to keep, as of a tail; default: all.
        request_of_row: `[source rows]` int32, with `page_table`.
        page_table: `[requests, max_pages]` int32: pages of each request.
        page_size: positions a page, a multiple of 8, with `page_table`.
        out_slots: `[rows, n]` int32, with `page_table`: `page * (page_size / 8) + block within the
            page`; past the row's candidates 0, a slot that exists.
    """
    try:
        load(KERNEL, selected.device).candidate_table(
            selected,
            compressed_lens,
            rows,
            request_of_row,
            page_table,
            page_size,
            out_blocks,
            out_slots,
            out_lens,
        )
    except Exception as error:
        blame_argument(error, candidate_table, locals())
        raise
