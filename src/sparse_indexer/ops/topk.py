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
        for threads in (256, 512, 1024)
    },
)


def topk(
    keys: torch.Tensor,
    lens: torch.Tensor,
    *,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
    per_column: int = 1,
    force_last: bool = False,
    unused: int = -1,
    blocks: torch.Tensor | None = None,
    request_of_row: torch.Tensor | None = None,
    request_starts: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    page_size: int = 0,
) -> None:
    """The k best columns of each row, ascending, then `unused`.

    Larger key first, then lower column; -0 equals +0; NaN counts as -inf. A row with at most k
    columns selects all of them, and its keys are not read.

    Args:
        keys: `[key rows, width]` float32 or bfloat16, any row stride. Columns past a row's length
            are not read.
        lens: `[key rows]` int32; `ceil(lens / per_column)` columns of a row count.
        out: `[rows, k]` int32, any row stride; the rows that `rows` names, all without it, are
            fully written.
        rows: `[key rows]` int32: the row of `out` and `request_of_row` that row i of the others
            stands for, each named at most once; -1: none, nothing is written. Default: row i.
        per_column: of `lens`, what a column stands for, 1 to 8: 8 if columns are block keys and
            `lens` counts positions.
        force_last: the last column that counts is selected whatever the keys are.
        unused: int32, written past a row's count: `INT32_MAX` in lists of blocks.
        blocks: `[key rows, width / 8]` int32, ascending, with `per_column` 1: column j stands for
            position `blocks[row, j // 8] * 8 + j % 8`, as in candidate logits. Then
            `min(lens, width - -lens % 8)` columns count, so that `lens` is either the length of a
            row's candidate logits or its compressed_lens: a row that sees at most `width` positions
            has all its blocks as candidates, and one that sees more has `width / 8`, of which the
            last is its newest block and ends at its last visible position.
        request_of_row: `[rows]` int32, with one of the next two.
        request_starts: `[requests]` int32: added to the positions of a request.
        page_table: `[requests, max_pages]` int32: positions become pool slots,
            `page_table[request, position // page_size] * page_size + position % page_size`.
        page_size: positions a page, at least 8, with `page_table`.
    """
    try:
        load(KERNEL, keys.device).topk(
            keys,
            lens,
            out,
            rows,
            per_column,
            force_last,
            unused,
            blocks,
            request_of_row,
            request_starts,
            page_table,
            page_size,
        )
    except Exception as error:
        blame_argument(error, topk, locals())
        raise
