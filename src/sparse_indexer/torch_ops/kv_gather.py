# SPDX-License-Identifier: Apache-2.0
"""Gather and dequantize the KV rows that a tile of rows attends to."""

from __future__ import annotations

import torch

from sparse_indexer.errors import expect_tensor
from sparse_indexer.kv_pool import (
    KV_DTYPES,
    KVPool,
    expect_kv_pool,
    expect_positions,
    num_slots,
    read_slots,
)


@torch.no_grad()
def kv_gather(
    kv_pool: torch.Tensor | KVPool, positions: torch.Tensor, *, out: torch.Tensor
) -> None:
    """Write the KV row of each slot, zeros for those that are unused.

    Takes up to 10 bytes of memory an element of `out` while it runs, beside `out`.

    Args:
        kv_pool: `[slots, dim]` float16, bfloat16 or float32, or a `KVPool`.
        positions: `[rows, k]` int32 slots; negative: unused, and nothing of it is looked up.
        out: `[rows, k, dim]` float16, bfloat16 or float32, any strides of rows and slots; fully
            written, rounded as by `KVPool.read`.

    Raises:
        ValueError: a wrong shape, dtype or device; on a CPU also a slot beyond the pool (on a GPU
            it is unused: seeing it would take a synchronization).
    """
    expect_tensor("out", out, ("rows", "k", "dim"), KV_DTYPES)
    rows, k, dim = out.shape
    expect_kv_pool(kv_pool, dim, out.device)
    expect_positions(positions, (rows, k), num_slots(kv_pool), out.device)
    if not num_slots(kv_pool):
        out.zero_()
        return
    used = (positions >= 0) & (positions < num_slots(kv_pool))
    slots = torch.where(used, positions, 0).flatten().to(torch.int64)
    out.copy_(read_slots(kv_pool, slots, out.dtype).view(rows, k, dim))
    out.masked_fill_(~used[..., None], 0)  # not a product: slot 0 may hold NaN
