# SPDX-License-Identifier: Apache-2.0
"""Attention of each query row over the KV rows that were selected for it."""

from __future__ import annotations

import math

import torch

from sparse_indexer.errors import describe, expect_int, expect_tensor, mismatch
from sparse_indexer.kv_pool import (
    KV_DTYPES,
    KVPool,
    expect_kv_pool,
    expect_positions,
    num_slots,
)
from sparse_indexer.torch_ops.kv_gather import kv_gather, used_slots
from sparse_indexer.torch_ops.sparse_softmax import sparse_softmax

_ALIGNMENT = 16  # float32 elements, 64 bytes


@torch.no_grad()
def sparse_attention(
    q: torch.Tensor,
    kv_pool: torch.Tensor | KVPool,
    positions: torch.Tensor,
    *,
    sink: torch.Tensor | None = None,
    scale: float,
    value_dim: int | None = None,
    memory_budget: int = 256 << 20,
) -> torch.Tensor:
    """Attention over each row's selected KV rows, each one shared by all heads as key and value.

    With `kv[j]` the KV row of slot `positions[r, j]`:

        p[r, h] = softmax over used j, and the sink, of (scale * q[r, h] . kv[j], sink[h])
        out[r, h] = sum_j p[r, h, j] * kv[j, :value_dim]

    Products, softmax and sums are float32 (on a GPU as torch's float32 matmuls are set), and the
    result is rounded once. A slot that is named twice counts twice; a row without used slots gives
    zeros. Nothing of pool rows that a row does not name reaches its result, NaN included; NaN and
    infinities of those that it does give what the formula gives. No gradient is recorded.

    A row's result depends on that row alone; on a CPU to the bit, whatever the budget, while on a
    GPU the last bits may depend on how many rows a tile has.

    Args:
        q: `[rows, heads, dim]` float16, bfloat16 or float32 queries, any row and head strides.
        kv_pool: `[slots, dim]` float16, bfloat16 or float32, any row stride, or a `KVPool`.
        positions: `[rows, k]` int32 slots of the pool, in any order; negative ones, anywhere in
            the row, are unused.
        sink: `[heads]` float32 logits of the attention sink, which takes part in the softmax and
            contributes no value; not scaled.
        scale: of the logits.
        value_dim: leading elements of a KV row that are its value; default all.
        memory_budget: bytes of scratch, at most, beside the result.

    Returns:
        `[rows, heads, value_dim]` of q's dtype.

    Raises:
        ValueError: a wrong shape, dtype, device or number; a budget below what one row takes. On a
            CPU also a slot beyond the pool (on a GPU it is unused: seeing it would take a
            synchronization).
    """
    expect_tensor("q", q, ("rows", "heads", "dim"), KV_DTYPES)
    rows, heads, dim = q.shape
    if not heads or not dim:
        raise mismatch("q", "at least 1 head and 1 element", q)
    expect_kv_pool(kv_pool, dim, q.device)
    expect_positions(positions, (rows, "k"), num_slots(kv_pool), q.device)
    if sink is not None:
        expect_tensor("sink", sink, (heads,), (torch.float32,), q.device)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise mismatch("scale", "a finite number", describe(scale))
    value_dim = dim if value_dim is None else expect_int("value_dim", value_dim, 1, dim)
    k = positions.shape[1]
    least = _row_bytes(heads, dim, k, value_dim)
    if expect_int("memory_budget", memory_budget, 0) < least:
        raise mismatch("memory_budget", f"at least {least} bytes", str(memory_budget))
    out = q.new_zeros(rows, heads, value_dim)
    if k:
        tile = memory_budget // least
        for start in range(0, rows, tile):
            some = slice(start, start + tile)
            _attend(q[some], kv_pool, positions[some], sink, float(scale), out[some])
    return out


def _row_bytes(heads: int, dim: int, k: int, value_dim: int) -> int:
    """Scratch of a row of a tile: its KV rows, reading them, queries, logits, sums."""
    gathered = k * (4 * _padded(dim) + 10 * dim + 32)
    return gathered + 4 * heads * (dim + 2 * k + value_dim + 8)


def _padded(dim: int) -> int:
    return -(-dim // _ALIGNMENT) * _ALIGNMENT


def _attend(
    q: torch.Tensor,
    kv_pool: torch.Tensor | KVPool,
    positions: torch.Tensor,
    sink: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
) -> None:
    """One tile of rows; its scratch is freed on return.

    On a CPU the last bits of a product depend on how many rows are multiplied at once and on their
    addresses modulo 64 bytes. So there it is one row at a time, at aligned addresses.
    """
    (rows, k), dim = positions.shape, q.shape[2]
    used = used_slots(kv_pool, positions)
    padded = q.new_empty(rows, k, _padded(dim), dtype=torch.float32)
    kv = padded[..., :dim]
    kv_gather(kv_pool, positions, kv)
    step = 1 if q.device.type == "cpu" else rows
    for start in range(0, rows, step):
        some = slice(start, start + step)
        queries = q[some].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        logits = torch.bmm(queries, kv[some].transpose(1, 2))
        sparse_softmax(logits, used[some], scale=scale, sink=sink)
        out[some] = torch.bmm(logits, kv[some, :, : out.shape[2]])
