# SPDX-License-Identifier: Apache-2.0
"""The best positions of rows among their candidates, scored and selected in one kernel."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.jit import Kernel, load

SLOTS = 3  # of a CTA, as in kernels/candidate_topk.h
MOST = {32: 640, 64: 2048}
"""Of so many heads, positions a row up to which the selection of 16,384 columns keeps a list."""

KERNEL = Kernel(
    "candidate_topk",
    {f"candidate_topk_{heads}": f"sparse_indexer::CandidateTopk<{heads}>" for heads in (32, 64)},
    capabilities=(90, 90),
)


def candidate_topk(
    keys: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
    *,
    entries: torch.Tensor,
    ranks: torch.Tensor,
    counts: torch.Tensor,
    quad_first: torch.Tensor,
    lens: torch.Tensor,
    rows: torch.Tensor,
    blocks: torch.Tensor,
    slots: torch.Tensor,
    counters: torch.Tensor,
    out: torch.Tensor,
    request_of_row: torch.Tensor | None = None,
    request_starts: torch.Tensor | None = None,
) -> None:
    """What `topk` selects of what `candidate_logits` writes, bit for bit.

    The logits of a quad are in memory only until its rows are selected. One CTA runs on an SM, so
    as many as there are SMs are best; any number does.

    Args:
        keys: packed `[blocks, 1152]` uint8 (e4m3), as `index_k` writes them.
        queries: `[quads, 4 * heads, 128]` uint8, as `index_q` writes them.
        weights: as in `candidate_logits`, like the next four.
        entries: `[quads, width]` int32.
        ranks: `[quads, ceil(width / 32), 4]` int16.
        counts: `[quads, 2]` int32.
        quad_first: `[quads]` int32.
        lens: `[quads * 4]` int32: of each slot of a quad, as in `topk` with `blocks`.
        rows: `[quads * 4]` int32: its row of `out`; -1: none, nothing is written.
        blocks: `[quads * 4, m]` int32, any row stride: its candidates, ascending.
        slots: `[ctas, 3, 4, 8 * n]` float32: for the logits; candidates of a row past its n-th, at
            most m, are left out.
        counters: `[ctas + 1]` int32, zeros; zeros again when the kernel is done.
        out: `[rows, k]` int32, any row stride: ascending positions, then -1; rows that `rows`
            names are fully written.
        request_of_row: `[rows]` int32, with `request_starts`.
        request_starts: `[requests]` int32: added to the positions of a request.
    """
    try:
        load(KERNEL, keys.device).candidate_topk(
            keys,
            queries,
            weights,
            entries,
            ranks,
            counts,
            quad_first,
            lens,
            rows,
            blocks,
            slots,
            counters,
            out,
            request_of_row,
            request_starts,
        )
    except Exception as error:
        blame_argument(error, candidate_topk, locals())
        raise
