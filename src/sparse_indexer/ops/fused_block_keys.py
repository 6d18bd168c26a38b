# SPDX-License-Identifier: Apache-2.0
"""The keys of all blocks that rows see, scored by the tensor cores of Volta or Turing."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.jit import Kernel, load
from sparse_indexer.ops.fused_logits import variants

KERNEL = Kernel("fused_block_keys", variants("fused_block_keys", "FusedBlockKeys"))


def fused_block_keys(
    keys: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
    *,
    slot_lens: torch.Tensor,
    quad_first: torch.Tensor,
    out: torch.Tensor,
    half_scores: bool = False,
) -> None:
    """The largest of the `fused_logits` of each block of 8 positions; no logit is written.

    As `block_keys` has it: NaN is ignored, a block of NaN has -inf, the block of the row's last
    position has +inf. Blocks past that one are not written.

    Args:
        keys, queries, weights, slot_lens, quad_first, half_scores: as of `fused_logits`.
        out: `[quads * 4, width]` float32, any row stride; blocks from `width` on are left out.
    """
    try:
        load(KERNEL, keys.device).fused_block_keys(
            keys, queries, weights, slot_lens, quad_first, out, half_scores
        )
    except Exception as error:
        blame_argument(error, fused_block_keys, locals())
        raise
