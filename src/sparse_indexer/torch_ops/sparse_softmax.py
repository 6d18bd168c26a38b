# SPDX-License-Identifier: Apache-2.0
"""Logits of a tile of rows to probabilities: scale, mask, sink, softmax."""

from __future__ import annotations

import torch


def sparse_softmax(
    logits: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_slots: int,
    scale: float,
    sink: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    """See `ops.sparse_softmax`; `logits` are overwritten, in any case."""
    unused = ((positions < 0) | (positions >= num_slots))[:, None]
    logits.mul_(scale).masked_fill_(unused, -torch.inf)
    top = logits.amax(2, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink[:, None])
    logits.sub_(top).exp_()
    total = logits.sum(2, keepdim=True)
    if sink is not None:
        total += (sink[:, None] - top).exp_()
    logits.div_(total).masked_fill_(unused, 0)
    if out is not logits:
        out.copy_(logits)
