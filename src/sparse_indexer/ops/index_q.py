# SPDX-License-Identifier: Apache-2.0
"""Convert queries, and pack them in the order in which tensor cores read them."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.inputs import IndexQ
from sparse_indexer.jit import Kernel, load
from sparse_indexer.ops.index_k import conversions

_NUMBERS = {  # as in host/index_q.cc
    torch.uint8: 0,
    torch.float8_e4m3fn: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
}

KERNEL = Kernel("index_q", conversions("index_q", "IndexQ"))


def index_q(
    queries: IndexQ,
    head_weights: torch.Tensor,
    *,
    rows: torch.Tensor,
    counts: torch.Tensor | None = None,
    out_values: torch.Tensor,
    out_weights: torch.Tensor,
) -> None:
    """Pack the queries of quads of rows (`row_quads`), converted as `index_k` converts keys.

    Args:
        queries: contiguous, of any format; at most 64 heads.
        head_weights: `[rows, heads]` float32 or bfloat16, contiguous.
        rows: `[quads, 4]` int32: the rows of each quad, -1: none.
        counts: `[quads, 2]` int32, as `candidate_quads` writes them: queries of quads with two
            lists are packed by pairs of rows, for `candidate_logits`.
        out_values: `[quads, 4 * out heads, 128]` uint8 (e4m3 codes, of fp8 and fp4), float16 (of
            any) or bfloat16 (of all but fp16), in core matrices: see `kernels/index_q.cuh`.
        out_weights: `[quads, 4, out heads]` float32: half the heads' weights times the queries'
            scales; 32 or 64 heads, those past the given ones zero.
    """
    try:
        values = queries.values
        load(KERNEL, values.device).index_q(
            values.view(torch.uint8) if values.itemsize == 1 else values,
            queries.scales,
            _NUMBERS[values.dtype],
            head_weights,
            rows,
            counts,
            out_values,
            out_weights,
        )
    except Exception as error:
        blame_argument(error, index_q, locals())
        raise
