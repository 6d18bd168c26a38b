# SPDX-License-Identifier: Apache-2.0
"""Do tensors share memory? By addresses: no value is read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Place = tuple[int, int, torch.Tensor]
"""A tensor, and the addresses of its first byte and of what follows the last one."""


def place(tensor: torch.Tensor) -> Place:
    """Where a tensor is; asked once for what is read often."""
    first, shape, elements = tensor.data_ptr(), tensor.shape, 1
    if 0 in shape:
        return 0, 0, tensor
    for n, step in zip(shape, tensor.stride(), strict=True):
        elements += (n - 1) * step
    return first, first + elements * tensor.itemsize, tensor


def shares_memory(tensor: torch.Tensor, *places: Sequence[Place]) -> bool:
    """Whether it has an element in common with any of them.

    All have one or two dimensions, of which the last is contiguous.
    """
    first, stop, _ = place(tensor)
    for some in places:
        for other_first, other_stop, other in some:
            if first < other_stop and other_first < stop and _overlap(tensor, other):
                return True
    return False


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    a_first, b_first = _rows(a), _rows(b)  # ascending
    a_bytes, b_bytes = (x.shape[-1] * x.itemsize for x in (a, b))
    # Of b's rows that begin before one of a's ends, the last, which reaches the furthest.
    last = np.searchsorted(b_first, a_first + a_bytes) - 1
    return bool(((last >= 0) & (b_first[last] + b_bytes > a_first)).any())


def _rows(tensor: torch.Tensor) -> npt.NDArray[np.int64]:
    """The address of each row's first byte."""
    first = np.full(1, tensor.data_ptr(), np.int64)
    for n, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        first = (first[:, None] + np.arange(n) * step * tensor.itemsize).ravel()
    return first
