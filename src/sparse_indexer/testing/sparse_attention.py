# SPDX-License-Identifier: Apache-2.0
"""The reference of sparse attention: float64, row by row, and no code of the library's own."""

from __future__ import annotations

import torch

from sparse_indexer.kv_pool import KVPool


def sparse_attention_reference(
    q: torch.Tensor,
    kv_pool: torch.Tensor | KVPool,
    positions: torch.Tensor,
    *,
    sink: torch.Tensor | None = None,
    scale: float,
    value_dim: int | None = None,
) -> torch.Tensor:
    """`sparse_attention` in float64: `[rows, heads, value_dim]`, on the CPU.

    Takes what `sparse_attention` takes, of any device, and checks nothing.
    """
    rows, heads, dim = q.shape
    out = torch.zeros(rows, heads, value_dim or dim, dtype=torch.float64)
    for row, slots in enumerate(positions.tolist()):
        named = [slot for slot in slots if slot >= 0]
        if not named:
            continue
        kv = _rows(kv_pool, torch.tensor(named)).cpu()
        logits = q[row].detach().cpu().double() @ kv.t() * scale
        if sink is not None:
            logits = torch.cat((logits, sink.detach().cpu().double()[:, None]), 1)
        weights = torch.softmax(logits, 1)[:, : len(named)]
        out[row] = weights @ kv[:, : out.shape[2]]
    return out


def _rows(kv_pool: torch.Tensor | KVPool, slots: torch.Tensor) -> torch.Tensor:
    """KV rows of some slots, `[n, dim]` float64."""
    if isinstance(kv_pool, torch.Tensor):
        return kv_pool.detach()[slots.to(kv_pool.device)].double()
    slots = slots.to(kv_pool.values.device)
    values = kv_pool.values[slots].double()
    scales = kv_pool.scales[slots].double()
    groups = [
        values[:, 128 * group : 128 * group + 128] * scales[:, group, None]
        for group in range(scales.shape[1])
    ]
    return torch.cat((*groups, kv_pool.rope[slots].double()), 1)
