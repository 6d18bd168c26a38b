# SPDX-License-Identifier: Apache-2.0
"""The logits of rows at their candidate blocks, scored by the tensor cores of Volta or Turing."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.jit import Kernel, load
from sparse_indexer.ops.fused_logits import variants

KERNEL = Kernel(
    "fused_candidate_logits", variants("fused_candidate_logits", "FusedCandidateLogits")
)


def fused_candidate_logits(
    keys: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
    *,
    entries: torch.Tensor,
    ranks: torch.Tensor,
    counts: torch.Tensor,
    quad_first: torch.Tensor,
    out: torch.Tensor,
    half_scores: bool = False,
) -> None:
    """Column `8 * i + j`: the row's logit at position j of its i-th candidate block.

    The bits are those of `fused_logits`. Past a row's candidates nothing is written; of its newest
    block, positions that it does not see are of no meaning.

    Args:
        keys, queries, weights, quad_first, half_scores: as of `fused_logits`, of any number of
            quads.
        entries: `[quads, width]` int32, as `candidate_quads` writes them without `pairs`.
        ranks: `[quads, ceil(width / 32), 4]` int16, likewise.
        counts: `[quads, 2]` int32, likewise.
        out: `[quads * 4, 8 * m]` float32, any row stride: row `4 * q + r` is row r of quad
            q; candidates of a row past its m-th are left out.
    """
    try:
        load(KERNEL, keys.device).fused_candidate_logits(
            keys, queries, weights, entries, ranks, counts, quad_first, out, half_scores
        )
    except Exception as error:
        blame_argument(error, fused_candidate_logits, locals())
        raise
