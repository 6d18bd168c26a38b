# SPDX-License-Identifier: Apache-2.0
"""The logits of all positions that rows see, scored by the tensor cores of Volta or Turing."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.jit import Kernel, load


def variants(kernel: str, config: str) -> dict[str, str]:
    """Of a kernel that scores by mma.sync: the symbols and Configs of its variants."""
    return {
        f"{kernel}_{name}_{heads}{suffix}": (
            f"sparse_indexer::{config}<sparse_indexer::StoredKeys::{keys}, {heads}, {half}>"
        )
        for name, keys in (("e4m3", "kE4m3"), ("f16", "kF16"))
        for heads in (32, 64)
        for suffix, half in (("", "false"), ("_half", "true"))
    }


KERNEL = Kernel("fused_logits", variants("fused_logits", "FusedLogits"))


def fused_logits(
    keys: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
    *,
    slot_lens: torch.Tensor,
    quad_first: torch.Tensor,
    out: torch.Tensor,
    half_scores: bool = False,
) -> None:
    """The logit of each position that a row sees; scores of heads never leave their registers.

    Products are those of float16 (what e4m3 stores is widened exactly), all sums float32. Positions
    that a row does not see are not written. A logit has the same bits as in `fused_block_keys` and
    `fused_candidate_logits`; a NaN key, scale or query gives NaN.

    Args:
        keys: packed `[blocks, ...]`, as `index_k` writes them: uint8 (e4m3, of fp8 and fp4) or
            float16. Of bfloat16 keys, which float16 does not hold, `index_k` makes float16 with a
            scale a position; exact for elements within 2^-23 of the position's largest.
        queries: `[quads, 4 * heads, 128]` of that dtype, as `index_q` writes them without `counts`;
            32 heads: an even number of quads, each two of one request.
        weights: `[quads, 4, heads]` float32, as `index_q` writes them; 32 or 64 heads.
        slot_lens: `[quads, 4]` int32: positions that the slot's row sees.
        quad_first: `[quads]` int32: first packed block of the quad's request.
        out: `[quads * 4, width]` float32, any row stride; positions from `width` on are left out.
        half_scores: each head's score is rounded to float16, as by a GEMM that writes float16: the
            score of e4m3 values times 2^-16, that of float16 times 2^-8. Only given float16 can
            overflow then.
    """
    try:
        load(KERNEL, keys.device).fused_logits(
            keys, queries, weights, slot_lens, quad_first, out, half_scores
        )
    except Exception as error:
        blame_argument(error, fused_logits, locals())
        raise
