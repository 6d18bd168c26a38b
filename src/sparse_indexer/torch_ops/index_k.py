# SPDX-License-Identifier: Apache-2.0
"""Gather a tile of one request's index keys and widen them to what a matmul takes."""

from __future__ import annotations

import torch

from sparse_indexer.formats import dequantize_fp4
from sparse_indexer.inputs import FlatIndexK, IndexKPool, PrefillPlan


def index_k(
    keys: IndexKPool | FlatIndexK,
    plan: PrefillPlan,
    request: int,
    start: int,
    stop: int,
    length: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of positions [start, stop) of `request`.

    Positions at or past `length` (0-d, on the device) are not looked up: their page-table slots
    hold anything. A position below it whose page or column does not exist gets a NaN scale.

    Returns:
        values: `[stop - start, 128]` of `dtype`, exact; for fp8 the stored e4m3 values.
        scales: `[stop - start]` of `dtype`: the fp8 scale, else 1.
    """
    positions = torch.arange(start, stop, device=plan.device)
    if isinstance(keys, IndexKPool):
        assert plan.page_table is not None
        size = keys.page_size
        pages = plan.page_table[request, start // size : -(-stop // size)].long()
        page = pages[positions // size - start // size]
        slots = page * size + positions % size
        exists = (page >= 0) & (page < keys.num_pages)
        total = keys.num_pages * size
    else:
        assert plan.key_starts is not None
        slots = plan.key_starts[request].long() + positions
        total = len(keys.values)
        exists = (slots >= 0) & (slots < total)
    if not total:
        shape = (stop - start, 128)
        return plan.compressed_lens.new_zeros(shape, dtype=dtype), positions.to(dtype) * torch.nan
    read = exists & (positions < length)
    stored = keys.read(torch.where(read, slots, 0))
    if keys.format == "fp4":
        assert stored.scales is not None
        values, scales = dequantize_fp4(stored.values, stored.scales, dtype=dtype), None
    else:
        values, scales = stored.values.to(dtype), stored.scales
    ones = torch.ones(stop - start, dtype=dtype, device=plan.device)
    widened = ones if scales is None else scales.to(dtype)
    return values, torch.where(exists | ~read, widened, torch.nan)
