# SPDX-License-Identifier: Apache-2.0
"""Logits of a tile: the lightning indexer's formula."""

from __future__ import annotations

import torch

from sparse_indexer.devices import no_autocast
from sparse_indexer.formats import dequantize_fp4
from sparse_indexer.inputs import IndexQ
from sparse_indexer.torch_ops.dots import Sliced, relu_dots

QUERIES_AT_ONCE = 128
"""Queries (rows x heads) multiplied at once, unless one head of the tile has more: with the 1024
positions of a tile their fp64 dot products are 1 MiB, about an L2."""


def logits(
    index_q: IndexQ,
    head_weights: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    k_scales: torch.Tensor,
    *,
    stored_e4m3: bool,
) -> torch.Tensor:
    """`k_scale[n] * sum_h w[r, h] * relu(q[r, h] . k[n])` of some rows, rounded once to float32.

    The heads are summed one after the other by separate multiplications and additions, so that a
    logit does not depend on the shape of its tile. In float64 its dot products do not either: those
    of stored e4m3 values are exact, the others are rounded once.

    Args:
        rows: `[n]` int64: which rows of `index_q` and `head_weights`.
        keys: `[positions, 128]` and k_scales: `[positions]`, float64 or float32, from `index_k`.
        stored_e4m3: the keys are stored e4m3 values.

    Returns:
        `[n, positions]` float32.
    """
    total = torch.zeros(len(rows), len(keys), dtype=keys.dtype, device=keys.device)
    group = max(1, QUERIES_AT_ONCE // len(rows))
    direct = keys.dtype == torch.float32 or (
        stored_e4m3 and index_q.values.dtype == torch.float8_e4m3fn
    )
    sliced = None if direct else Sliced(keys)
    for first in range(0, index_q.values.shape[1], group):
        some = slice(first, first + group)
        queries, weights = _widen(index_q, head_weights, rows, some, keys.dtype)
        flat = queries.flatten(0, 1)
        with no_autocast(keys.device):
            products = (
                (flat @ keys.t()).relu_() if sliced is None else relu_dots(Sliced(flat), sliced)
            )
        for head, weight in zip(products.view(-1, *total.shape), weights, strict=True):
            total += head.mul_(weight[:, None])
    return total.mul_(k_scales).to(torch.float32)


def _widen(
    index_q: IndexQ,
    head_weights: torch.Tensor,
    rows: torch.Tensor,
    heads: slice,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact queries `[heads, n, 128]` and weights `[heads, n]`, an fp8 scale in the weights."""
    values, weights = index_q.values[:, heads][rows], head_weights[:, heads][rows].to(dtype)
    if values.dtype == torch.uint8:
        assert index_q.scales is not None
        widened = dequantize_fp4(values, index_q.scales[:, heads][rows], dtype=dtype)
    else:
        widened = values.to(dtype)
        if index_q.scales is not None:
            weights = weights * index_q.scales[:, heads][rows].to(dtype)
    return widened.transpose(0, 1).contiguous(), weights.t().contiguous()
