# SPDX-License-Identifier: Apache-2.0
"""amax8: one key per candidate block of 8 positions."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.jit import Kernel, load

KERNEL = Kernel(
    "block_keys",
    {
        "block_keys_f32": "sparse_indexer::BlockKeys<float>",
        "block_keys_bf16": "sparse_indexer::BlockKeys<sparse_indexer::BFloat16>",
    },
)


def block_keys(
    logits: torch.Tensor, lens: torch.Tensor, *, out: torch.Tensor, skip_blocks: int = -1
) -> None:
    """The key of each block of 8 columns: the max of the logits that the row sees.

    NaN is ignored; a block of NaN has -inf. The block of the row's last column has +inf, blocks
    past it -inf.

    Args:
        logits: `[rows, width]` float32 or bfloat16, rows at multiples of 16 bytes. Columns past a
            row's length are not read.
        lens: `[rows]` int32: columns the row sees.
        out: `[rows, ceil(width / 8)]` float32, any row stride.
        skip_blocks: rows that see at most so many blocks are left alone: neither read nor written.
    """
    try:
        load(KERNEL, logits.device).block_keys(logits, lens, out, skip_blocks)
    except Exception as error:
        blame_argument(error, block_keys, locals())
        raise
