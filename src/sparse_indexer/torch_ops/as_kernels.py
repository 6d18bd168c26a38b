# SPDX-License-Identifier: Apache-2.0
"""The ops `block_keys` and `topk`, as the kernels take and write them, in plain torch."""

from __future__ import annotations

import torch

from sparse_indexer.inputs import BLOCK_SIZE
from sparse_indexer.torch_ops.block_keys import block_max
from sparse_indexer.torch_ops.topk import FORCED, UNUSED, indices, merge, ordered, pack


def block_keys(
    logits: torch.Tensor, lens: torch.Tensor, *, out: torch.Tensor, skip_blocks: int = -1
) -> None:
    """See `ops.block_keys`; rows that may be left alone are not."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    seen = (columns < lens[:, None]) & ~logits.isnan()
    values = torch.where(seen, logits.float(), -torch.inf)
    keys = block_max(values, -torch.inf)
    newest = torch.arange(keys.shape[1], device=keys.device) == (lens[:, None] - 1) // BLOCK_SIZE
    out.copy_(torch.where(newest, torch.inf, keys))


def topk(
    keys: torch.Tensor,
    lens: torch.Tensor,
    *,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
    per_column: int = 1,
    force_last: bool = False,
    unused: int = -1,
    blocks: torch.Tensor | None = None,
    request_of_row: torch.Tensor | None = None,
    request_starts: torch.Tensor | None = None,
) -> None:
    """See `ops.topk`, but for pool slots."""
    counts = -(-lens // per_column)
    if blocks is not None:
        counts = torch.minimum(lens, keys.shape[1] - -lens % BLOCK_SIZE)
    columns = torch.arange(keys.shape[1], device=keys.device)
    order = ordered(keys.float())
    if force_last:
        order = torch.where(columns == counts[:, None] - 1, FORCED, order)
    none = torch.full((len(keys), out.shape[1]), UNUSED, dtype=torch.int64, device=keys.device)
    picked = indices(merge(none, pack(order, columns < counts[:, None], 0)), -1)
    used, where = picked >= 0, picked
    if blocks is not None:
        of_block = blocks.gather(1, picked.clamp(min=0).long() // BLOCK_SIZE)
        where = of_block * BLOCK_SIZE + picked % BLOCK_SIZE
    if rows is None:
        rows = torch.arange(len(keys), device=keys.device)
    if request_starts is not None:
        assert request_of_row is not None
        where = where + request_starts[request_of_row[rows].long()][:, None]
    kept = rows >= 0
    out[rows[kept].long()] = torch.where(used, where, unused)[kept]
