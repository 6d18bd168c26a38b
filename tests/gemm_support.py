# SPDX-License-Identifier: Apache-2.0
"""What the tests of the sm70 backend's GEMM route share: its logits, and what rounds as it does."""

import torch

from sparse_indexer import PrefillIndexerInputs
from sparse_indexer.gemm_operands import score_factor
from sparse_indexer.gemm_scoring import gemm_tiles
from sparse_indexer.inputs import BLOCK_SIZE

POISON = 7.0
KERNELS = ["index_k", "relu_head_sum", "block_keys", "topk"]
TOLERANCE = 2.0**-9
"""Of a row's largest |logit|, on the conformance kit's data.

A head's score is off by at most 2^-11 of it. What a row adds up, without signs, is at most 8 times
its largest |logit| there, so 8 x 2^-11 if all roundings had one direction; of 32 or more that have
not, half (2.4 x 2^-11 were seen). `test_random_data` holds each logit to its own bound.
"""


def gemm_logits(inputs: PrefillIndexerInputs, budget: int = 256 << 20) -> torch.Tensor:
    """`[rows, max(context_lens)]` float32 of the route; what a row does not see is poison."""
    longest = max(inputs.plan.context_lens, default=0)
    out = inputs.head_weights.new_full((inputs.plan.num_rows, longest), POISON, dtype=torch.float32)
    for tile in gemm_tiles(inputs, logits=True, blocks=0, needed_beyond=0, budget=budget):
        logits = tile.logits()[:, :longest]
        columns = torch.arange(logits.shape[1], device=logits.device)
        kept = torch.where(columns < tile.lens[:, None], logits, POISON)
        out[tile.row_index, : logits.shape[1]] = kept
    return out


def gemm_block_keys(inputs: PrefillIndexerInputs, budget: int = 256 << 20) -> torch.Tensor:
    """`[rows, blocks]` float32, made without logits; blocks of other requests' width are -inf."""
    blocks = -(-max(inputs.plan.context_lens, default=0) // BLOCK_SIZE)
    out = inputs.head_weights.new_full(
        (inputs.plan.num_rows, blocks), -torch.inf, dtype=torch.float32
    )
    for tile in gemm_tiles(inputs, logits=False, blocks=0, needed_beyond=0, budget=budget):
        if tile.operands is not None:
            keys = tile.block_keys()
            out[tile.row_index, : keys.shape[1]] = keys
    return out


def rounded_logits(
    scores: torch.Tensor, weights: torch.Tensor, inputs: PrefillIndexerInputs, unit: float = 1.0
) -> torch.Tensor:
    """In float64, of scores `[rows, heads, n]` that are rounded to float16 as the GEMM's are.

    `unit` is what a score of 1 is of the operands that are multiplied.
    """
    factor = score_factor(inputs) * unit
    of_heads = (scores.double() * factor).half().double().relu() / factor
    return (of_heads * weights.double()[:, :, None]).sum(1)
