# SPDX-License-Identifier: Apache-2.0
"""Exact, ordered, deterministic selection out of tiles.

`torch.topk` promises no order among equal values and none for NaN. So a value and its index are
packed into one int64 that has no equals: the value's bits, made to order as integers, above the
complement of the index. The largest packed entries are then the rules' selection.
"""

from __future__ import annotations

import torch

UNUSED = -(2**63)  # packed entry of what must not be selected
FORCED = 2**31 - 1  # ordered value above +inf: selected whatever the others hold

_INDEX_MASK = 2**32 - 1


def ordered(values: torch.Tensor) -> torch.Tensor:
    """float32 to int32 of the same order: -0.0 as +0.0, NaN as -inf."""
    values = torch.where(values.isnan(), -torch.inf, values) + 0.0
    bits = values.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def pack(order: torch.Tensor, allowed: torch.Tensor, start: int) -> torch.Tensor:
    """Packed entries `[rows, n]` of ordered values for indices start ... start + n - 1.

    Args:
        order: `[rows, n]` int32 from `ordered`, or `FORCED`.
        allowed: `[rows, n]` bool; an entry that is not allowed becomes `UNUSED`.
    """
    index = torch.arange(start, start + order.shape[1], device=order.device)
    packed = (order.to(torch.int64) << 32) | (_INDEX_MASK - index)
    return torch.where(allowed, packed, UNUSED)


def merge(best: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The k largest of `best` (`[rows, k]`) and `packed` (`[rows, n]`), in no order."""
    joined = torch.cat((best, packed), 1)
    return joined.topk(best.shape[1], dim=1, sorted=False).values


def indices(best: torch.Tensor, unused: int) -> torch.Tensor:
    """Ascending int32 indices of `[rows, k]` packed entries, then `unused` for the rest."""
    index = torch.where(best == UNUSED, _INDEX_MASK, _INDEX_MASK - (best & _INDEX_MASK))
    index = index.sort(1).values
    return torch.where(index == _INDEX_MASK, unused, index).to(torch.int32)
