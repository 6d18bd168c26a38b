# SPDX-License-Identifier: Apache-2.0
"""amax8: one key per candidate block of 8 positions."""

from __future__ import annotations

import torch

from sparse_indexer.inputs import BLOCK_SIZE
from sparse_indexer.torch_ops.topk import FORCED


def block_max(values: torch.Tensor, lowest: float) -> torch.Tensor:
    """The max of each 8 columns, `[rows, n]` to `[rows, blocks]`; `lowest` fills a last block."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK_SIZE), value=lowest)
    return padded.view(len(values), -1, BLOCK_SIZE).amax(2)


def block_keys(
    order: torch.Tensor, lens: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of the blocks of a tile whose first position is `start`, a multiple of 8.

    Args:
        order: `[rows, n]` int32 from `topk.ordered`; a last block may be shorter than 8.
        lens: `[rows]` positions each row sees.

    Returns:
        keys: `[rows, blocks]` int32: max over the visible positions; `FORCED` for the block of the
            row's last visible position.
        visible: `[rows, blocks]` bool: the row sees some position of the block.
    """
    n = order.shape[1]
    positions = torch.arange(start, start + n, device=order.device)
    lowest = torch.iinfo(torch.int32).min
    seen = torch.where(positions < lens[:, None], order, lowest)
    keys = block_max(seen, lowest)
    first = torch.arange(start, start + n, BLOCK_SIZE, device=order.device)
    visible = first < lens[:, None]
    newest = visible & (first + BLOCK_SIZE >= lens[:, None])
    return torch.where(newest, FORCED, keys), visible


def published(blocks: torch.Tensor, start: int, n: int) -> torch.Tensor:
    """Which positions start ... start + n - 1 lie in a row's blocks: the mask of one tile.

    Args:
        blocks: `[rows, topk_blocks]` int32 block ids in any order, others ignored.
        start: a multiple of 8.

    Returns:
        `[rows, n]` bool.
    """
    count = -(-n // BLOCK_SIZE)
    local = blocks.to(torch.int64) - start // BLOCK_SIZE
    local = torch.where((local >= 0) & (local < count), local, count)
    hit = torch.zeros(len(blocks), count + 1, dtype=torch.bool, device=blocks.device)
    hit.scatter_(1, local, True)
    return hit[:, :count].repeat_interleave(BLOCK_SIZE, 1)[:, :n]
