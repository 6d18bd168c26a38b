# SPDX-License-Identifier: Apache-2.0
"""Dot products rounded to float64 once, whatever the range of their elements.

A matmul adds in an order of its own, which changes with its shape. Where no addition rounds, that
does not matter. So each vector is cut into slices of 21 bits, integers counted from its own largest
element, as many as it takes: two where elements lie close together, thirteen at worst in bfloat16.
All products of slices of one weight add up to an integer below 2^53. (After the error-free
splitting of Ozaki, Ogita, Oishi and Rump, Numerical Algorithms 59, 2012.)
"""

from __future__ import annotations

import torch

from sparse_indexer.formats import power_of_two

_SLICE_BITS = 21  # 2 * 21 + log2(128 dims) + log2(13 products of slices, and a carry) < 53
_BASE = 2.0**_SLICE_BITS
_ROWS_OF_MANY = 32  # queries at once where there are many slices, which take more temporaries


class Sliced:
    """Vectors `[n, 128]` float64, ready to be multiplied with others.

    How many slices there are is looked up, so a GPU waits; no result depends on it.
    """

    def __init__(self, vectors: torch.Tensor) -> None:
        self.vectors = vectors
        self.finite = vectors.isfinite().all(1)
        self.all_finite = bool(self.finite.all())
        rest = vectors if self.all_finite else torch.where(self.finite[:, None], vectors, 0.0)
        _, top = torch.frexp(rest.abs().amax(1, keepdim=True))
        rest = rest * power_of_two(_SLICE_BITS - top)
        self.slices: list[torch.Tensor | None] = []  # from the largest; float32 holds 21 bits
        while rest.any():
            part = rest.trunc()
            self.slices.append(part.to(torch.float32) if part.any() else None)
            rest = rest.sub_(part).mul_(_BASE)
        self.units = power_of_two(top - _SLICE_BITS * len(self.slices))  # `[n, 1]`, of the last


def relu_dots(queries: Sliced, keys: Sliced) -> torch.Tensor:
    """`relu` of `[n, 128]` with `[m, 128]`: `[n, m]` float64, the exact values rounded once.

    Infinities and NaN give what the formula gives: they do not depend on the order.
    """
    rows = len(queries.vectors)
    total = queries.vectors.new_zeros(rows, len(keys.vectors))
    levels = len(queries.slices) + len(keys.slices) - 1
    if queries.slices and keys.slices:
        step = rows if levels <= 3 else _ROWS_OF_MANY
        for first in range(0, rows, step):
            some = slice(first, first + step)
            total[some] = _relu_sums(queries.slices, keys.slices, some)
        total.mul_(queries.units).mul_(keys.units.t())
    if queries.all_finite and keys.all_finite:
        return total
    plain = (queries.vectors @ keys.vectors.t()).relu_()
    return torch.where(queries.finite[:, None] & keys.finite, total, plain)


def _relu_sums(
    queries: list[torch.Tensor | None], keys: list[torch.Tensor | None], rows: slice
) -> torch.Tensor:
    """In units of the last slices, from the least significant products up.

    What a digit in base 2^21 does not hold is carried, rounded down: then all digits but the first
    are positive, nothing cancels, and a negative first one makes the sum negative.
    """
    last = len(queries) + len(keys) - 2
    carry = rounded = lost = None  # the digits so far are `rounded` + `lost`
    for level in range(last, -1, -1):
        digit = carry
        for i, left in enumerate(queries):
            right = keys[level - i] if 0 <= level - i < len(keys) else None
            if left is not None and right is not None:
                a, b = left[rows].double(), right.t().double()
                digit = a @ b if digit is None else digit.addmm_(a, b)
        if digit is None:
            continue
        if level:
            carry = (digit / _BASE).floor_()
            digit.sub_(carry, alpha=_BASE)
        digit.mul_(_BASE ** (last - level))
        if rounded is None:
            rounded = digit
        elif last - level == 1 or (level == 0 and last == 2):  # 42 bits; one rounding
            rounded = digit.add_(rounded)
        else:
            total = digit + rounded
            error = rounded.sub_(total - digit)
            rounded, lost = total, error if lost is None else _add_to_odd(error, lost)
    assert rounded is not None  # the first slices are not empty
    return (rounded if lost is None else rounded.add_(lost)).clamp_min_(0.0)


def _add_to_odd(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a + b` rounded to the neighbor with an odd last bit, so that no tie comes of rounding."""
    total = a + b
    of_b = total - a
    error = (a - (total - of_b)).add_(b - of_b)
    even = (total.view(torch.int64) & 1) == 0
    toward = torch.where(error > 0, torch.inf, -torch.inf)
    return torch.where((error != 0) & even, torch.nextafter(total, toward), total)
