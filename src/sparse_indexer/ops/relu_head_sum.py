# SPDX-License-Identifier: Apache-2.0
"""The epilogue of a GEMM that scores keys: ReLU, head weights, head sum, key scales."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.jit import Kernel, load

KERNEL = Kernel(
    "relu_head_sum",
    {
        "relu_head_sum_logits": "sparse_indexer::ReluHeadSum<false>",
        "relu_head_sum_keys": "sparse_indexer::ReluHeadSum<true>",
    },
)


def relu_head_sum(
    scores: torch.Tensor,
    weights: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    lens: torch.Tensor | None = None,
    start: int = 0,
    out_logits: torch.Tensor | None = None,
    out_keys: torch.Tensor | None = None,
) -> None:
    """Per-head scores of a tile of rows and positions to its logits, or at once to its block keys.

        logit[r, n] = key_scales[n] * sum over h of weights[r, h] * relu(scores[r * heads + h, n])

    In float32, heads ascending, one fused multiply-add each; ReLU keeps a NaN. Keys are those that
    `block_keys` makes of the logits, without the logits being written.

    Args:
        scores: `[rows * heads, positions]` float16, rows at multiples of 16 bytes.
        weights: `[rows, heads]` float32, any row stride.
        key_scales: `[positions]` float32; default: all 1.
        lens: `[rows]` int32: positions each row sees, counted from position 0 and not from the
            tile's first. Nothing of blocks of 8 that a row does not see is read. Default: the row
            sees all of the tile; `out_keys` needs it.
        start: the tile's first position, a multiple of 8.
        out_logits: `[rows, positions]` float32, any row stride. Blocks of 8 that the row does not
            see are left as they are.
        out_keys: `[rows, ceil(positions / 8)]` float32, any row stride: the largest logit of each
            block, NaN ignored; +inf for the one with the row's last position, -inf past it and for
            a block of NaN. One of the two outputs is given.
    """
    try:
        load(KERNEL, scores.device).relu_head_sum(
            scores, weights, key_scales, lens, start, out_logits, out_keys
        )
    except Exception as error:
        blame_argument(error, relu_head_sum, locals())
        raise
