# SPDX-License-Identifier: Apache-2.0
"""Dot products in float64 that depend on nothing but their two vectors.

A matmul adds in an order of its own, which changes with its shape. Where no addition rounds, that
does not matter. So each vector is cut into three slices of 23 bits, counted from its own largest
element: two slices' products and the sum of 128 of them fit the 53 bits of a float64. (After the
error-free splitting of Ozaki, Ogita, Oishi and Rump, Numerical Algorithms 59, 2012.)
"""

from __future__ import annotations

import torch

_SLICE_BITS = 23  # 2 * 23 + log2(128) = 53
_PAIRS = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))  # what is below 2^-68 is left out


class Sliced:
    """Vectors `[n, 128]` float64, ready to be multiplied with others."""

    def __init__(self, vectors: torch.Tensor) -> None:
        self.vectors = vectors
        self.finite = vectors.isfinite().all(1)
        rest = torch.where(self.finite[:, None], vectors, 0.0)
        _, top = torch.frexp(rest.abs().amax(1, keepdim=True))
        self.slices: list[torch.Tensor | None] = []
        for number in (1, 2, 3):
            shift = _SLICE_BITS * number - top
            part = torch.ldexp(torch.ldexp(rest, shift).trunc_(), -shift)
            rest = rest - part
            # On a CPU a look costs less than a product with zeros; on a GPU it would synchronize.
            empty = vectors.device.type == "cpu" and not part.any()
            self.slices.append(None if empty else part)


def dots(queries: Sliced, keys: Sliced) -> torch.Tensor:
    """`[n, 128]` with `[m, 128]` to `[n, m]` float64, rounded at most a few times, in one order.

    Infinities and NaN give what the formula gives: they do not depend on the order.
    """
    total = queries.vectors.new_zeros(len(queries.vectors), len(keys.vectors))
    for a, b in _PAIRS:
        left, right = queries.slices[a], keys.slices[b]
        if left is not None and right is not None:
            total += left @ right.t()
    if queries.vectors.device.type == "cpu" and queries.finite.all() and keys.finite.all():
        return total
    plain = queries.vectors @ keys.vectors.t()
    return torch.where(queries.finite[:, None] & keys.finite, total, plain)
