# SPDX-License-Identifier: Apache-2.0
"""Exact, ordered, deterministic selection out of each row."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.jit import Kernel, load

KERNEL = Kernel(
    "topk",
    {
        f"topk_{name}_{threads}": f"sparse_indexer::Topk<{key}, {threads}>"
        for name, key in (("f32", "float"), ("bf16", "sparse_indexer::BFloat16"))
        for threads in (512, 1024)
    },
)


def topk(
    keys: torch.Tensor,
    lens: torch.Tensor,
    *,
    out: torch.Tensor,
    per_column: int = 1,
    force_last: bool = False,
    blocks: torch.Tensor | None = None,
    request_of_row: torch.Tensor | None = None,
    request_starts: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    page_size: int = 0,
) -> None:
    """The k best columns of each row, ascending, then -1.

    Larger key first, then lower column; -0 equals +0; NaN counts as -inf. A row with at most k
    columns selects all of them, and its keys are not read.

    Args:
        keys: `[rows, width]` float32 or bfloat16, any row stride. Columns past a row's length are
            not read.
        lens: `[rows]` int32; `ceil(lens / per_column)` columns of a row count.
        out: `[rows, k]` int32, fully written, any row stride.
        per_column: 1, or 8 if columns are block keys and `lens` counts positions.
        force_last: the last column that counts is selected whatever the keys are.
        blocks: `[rows, width / 8]` int32: column j stands for position
            `blocks[row, j // 8] * 8 + j % 8`, as in candidate logits.
        request_of_row: `[rows]` int32, with one of the next two.
        request_starts: `[requests]` int32: added to the positions of a request.
        page_table: `[requests, max_pages]` int32: positions become pool slots,
            `page_table[request, position // page_size] * page_size + position % page_size`.
        page_size: positions a page, with `page_table`.
    """
    try:
        load(KERNEL, keys.device).topk(
            keys,
            lens,
            out,
            per_column,
            force_last,
            blocks,
            request_of_row,
            request_starts,
            page_table,
            page_size,
        )
    except Exception as error:
        blame_argument(error, topk, locals())
        raise
