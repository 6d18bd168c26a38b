# SPDX-License-Identifier: Apache-2.0
"""Where emulated logits go, and where keys of pages come from."""

from __future__ import annotations

import torch

CELLS = 1 << 22
"""Dot products at once."""

_ROW_BYTES = 1024  # rows of logits are a multiple of this apart


def poison(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is not written: NaN and the largest finite number, by turns."""
    out = torch.full(shape, torch.nan, dtype=dtype, device=device)
    out[:, ::2] = torch.finfo(dtype).max
    return out


def logits_buffer(
    rows: int, columns: int, padded: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Poisoned `[rows, columns]`, the row stride `padded` up to a multiple of 1024 bytes."""
    step = _ROW_BYTES // dtype.itemsize
    stride = -(-padded // step) * step
    return poison((rows, stride), dtype, device)[:, :columns]


def read_cache(
    kv_cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of `slots` (`[...]` int64, page * page_kv + position) and their int32 group scales.

    A page of `kv_cache` (`[pages, page_kv, 1, bytes]` uint8) holds all its values, then all its
    scales.
    """
    pages, page_kv, _, width = kv_cache.shape
    payload, start, stride = width - 4, kv_cache.storage_offset(), kv_cache.stride(0)
    values = kv_cache.as_strided((pages, page_kv, payload), (stride, payload, 1), start)
    scales = kv_cache.as_strided((pages, page_kv, 4), (stride, 4, 1), start + page_kv * payload)
    page, offset = slots // page_kv, slots % page_kv
    stored = scales[page, offset].view(torch.int32)[..., 0]
    return values[page, offset].view(dtype), stored
