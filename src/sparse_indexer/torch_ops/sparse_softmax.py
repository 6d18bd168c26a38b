# SPDX-License-Identifier: Apache-2.0
"""Logits of a tile of rows to probabilities: scale, mask, sink, softmax."""

from __future__ import annotations

import torch


def sparse_softmax(
    logits: torch.Tensor, used: torch.Tensor, *, scale: float, sink: torch.Tensor | None
) -> None:
    """Softmax of each row and head over its used entries and the sink, in place.

    NaN and infinities of used entries give what the formula gives.

    Args:
        logits: `[rows, heads, k]` float32, k >= 1; becomes probabilities, 0 where unused, NaN or
            not.
        used: `[rows, k]` bool.
        scale: multiplies the logits, not the sink.
        sink: `[heads]` float32, the logit of one more entry whose probability is not written.
    """
    unused = ~used[:, None, :]
    logits.mul_(scale).masked_fill_(unused, -torch.inf)
    top = logits.amax(2, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink[:, None])
    logits.sub_(top).exp_()
    total = logits.sum(2, keepdim=True)
    if sink is not None:
        total += (sink[:, None] - top).exp_()
    logits.div_(total).masked_fill_(unused, 0)
