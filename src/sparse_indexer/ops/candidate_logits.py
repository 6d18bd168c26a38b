# SPDX-License-Identifier: Apache-2.0
"""The logits of rows at their candidate blocks, scored on Hopper's tensor cores."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.jit import Kernel, load

KERNEL = Kernel(
    "candidate_logits",
    {
        f"candidate_logits_{name}_{heads}": (
            f"sparse_indexer::CandidateLogits<sparse_indexer::Element::{element}, {heads}>"
        )
        for name, element in (("e4m3", "kE4m3"), ("f16", "kF16"), ("bf16", "kBf16"))
        for heads in (32, 64)
    },
    capabilities=(90, 90),
)


def candidate_logits(
    keys: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
    *,
    entries: torch.Tensor,
    ranks: torch.Tensor,
    counts: torch.Tensor,
    quad_first: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Column `8 * i + j`: the row's logit at position j of its i-th candidate block.

    The bits are those whose maxima `dense_block_keys` writes. Past a row's candidates nothing is
    written; of its newest block, positions that it does not see are of no meaning.

    Args:
        keys: packed `[blocks, ...]`, as `index_k` writes them; uint8 (e4m3), float16 or bfloat16.
        queries: `[quads, 4 * heads, 128]` of that dtype, as `index_q` writes them.
        weights: `[quads, 4, heads]` float32, as `index_q` writes them; 32 or 64 heads.
        entries: `[quads, width]` int32, as `candidate_quads` writes them.
        ranks: `[quads, ceil(width / 32), 4]` int16, as `candidate_quads` writes them.
        counts: `[quads, 2]` int32, as `candidate_quads` writes them and the queries were packed
            with.
        quad_first: `[quads]` int32: first packed block of the quad's request.
        out: `[quads * 4, 8 * m]` float32, any row stride: row `4 * q + r` is row r of quad
            q; candidates of a row past its m-th are left out.
    """
    try:
        load(KERNEL, keys.device).candidate_logits(
            keys, queries, weights, entries, ranks, counts, quad_first, out
        )
    except Exception as error:
        blame_argument(error, candidate_logits, locals())
        raise
