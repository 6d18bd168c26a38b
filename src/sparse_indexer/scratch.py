# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of one call: one allocation, handed out in pieces."""

from __future__ import annotations

import functools
import math

import torch

_ALIGNMENT = 256


class Scratch:
    """`take` gives the next piece; `restart` takes back all pieces but those before `keep`.

    Sizes go up to powers of two, at most `limit`: the caching allocator then serves calls of
    growing chunks from the same few blocks.
    """

    SLACK = 16 * _ALIGNMENT
    """What alignment may take beyond the bytes of 16 pieces."""

    def __init__(self, nbytes: int, limit: int, device: torch.device) -> None:
        needed = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        size = max(
            needed, min(1 << max(needed - 1, 1).bit_length(), limit // _ALIGNMENT * _ALIGNMENT)
        )
        self._size = size
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._as = {torch.uint8: self._memory}  # the same as other dtypes
        self._kept = self._next = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of whatever is there, until the next restart."""
        piece = self.peek(shape, dtype)
        self._next += -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
        return piece

    def peek(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What `take` would give; the next piece shares its memory."""
        elements, strides = _contiguous(shape)
        assert self._next + elements * dtype.itemsize <= self._size
        if dtype not in self._as:
            self._as[dtype] = self._memory.view(dtype)
        return self._as[dtype].as_strided(shape, strides, self._next // dtype.itemsize)

    def keep(self) -> None:
        """Pieces taken so far survive `restart`."""
        self._kept = self._next

    def restart(self) -> Scratch:
        """Itself, with what is not kept free again."""
        self._next = self._kept
        return self

    def clear(self) -> Scratch:
        """Itself, with all of it free again, what was kept, too."""
        self._next = self._kept = 0
        return self


@functools.lru_cache(1024)
def _contiguous(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Elements and strides."""
    return math.prod(shape), tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
