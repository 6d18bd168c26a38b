# SPDX-License-Identifier: Apache-2.0
"""The keys of all blocks that rows see, scored on Hopper's tensor cores."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.jit import Kernel, load

KERNEL = Kernel(
    "dense_block_keys",
    {
        f"dense_block_keys_{name}_{heads}": (
            f"sparse_indexer::DenseBlockKeys<sparse_indexer::Element::{element}, {heads}>"
        )
        for name, element in (("e4m3", "kE4m3"), ("f16", "kF16"), ("bf16", "kBf16"))
        for heads in (32, 64)
    },
    capabilities=(90, 90),
)


def dense_block_keys(
    keys: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
    *,
    quad_lens: torch.Tensor,
    quad_first: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The largest logit of each block of 8 positions; no logit is written.

    NaN is ignored. The newest block's key may count positions that the row does not see (that block
    is published whatever its key: `topk` with `force_last`); past it keys are of no meaning.

    Args:
        keys: packed `[blocks, ...]`, as `index_k` writes them; uint8 (e4m3), float16 or bfloat16.
        queries: `[quads, 4 * heads, 128]` of that dtype, as `index_q` writes them; a multiple of
            128 / heads quads, those of a multiple of one request.
        weights: `[quads, 4, heads]` float32, as `index_q` writes them; 32 or 64 heads.
        quad_lens: `[quads]` int32: most positions a row of the quad sees.
        quad_first: `[quads]` int32: first packed block of the quad's request.
        out: `[quads * 4, width]` float32, any row stride; a multiple of 64 blocks.
    """
    try:
        load(KERNEL, keys.device).dense_block_keys(
            keys, queries, weights, quad_lens, quad_first, out
        )
    except Exception as error:
        blame_argument(error, dense_block_keys, locals())
        raise
