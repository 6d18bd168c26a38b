# SPDX-License-Identifier: Apache-2.0
"""Dense logits by DeepGEMM, one tile of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch

from sparse_indexer.deep_gemm_api import DeepGemm, gather_queries, padded_heads, query_bytes
from sparse_indexer.errors import mismatch
from sparse_indexer.formats import FORMATS
from sparse_indexer.index_k import BLOCK_SIZE, FlatIndexK, IndexKPool
from sparse_indexer.inputs import PrefillIndexerInputs
from sparse_indexer.row_order import RowOrder
from sparse_indexer.tiling import even_tiles, request_groups

_GATHERED = 1 << 15  # positions of a pool that are gathered at once
_GATHER_BYTES = 256  # beside its key, of each of them
_ROWS = 8  # a tile's rows are a multiple; DeepGEMM pads them, too


class _Keys(NamedTuple):
    """Flat keys of some requests."""

    values: torch.Tensor  # [n, 64] int8 (fp4) or [n, 128] float8_e4m3fn
    scales: torch.Tensor  # [n] int32 (fp4) or float32
    starts: torch.Tensor  # [requests] int32: where each request of the plan begins


class DenseTile(NamedTuple):
    """Rows that are scored at once."""

    part: slice  # of the row order
    width: int  # columns of logits, at least what any of the rows sees
    api: DeepGemm
    inputs: PrefillIndexerInputs
    order: RowOrder
    keys: _Keys | None  # None: no logit is needed

    def logits(self) -> torch.Tensor:
        """`[rows, width]`, whatever is there past a row's length; the caller lets go of it."""
        rows, lens = self.order.rows[self.part], self.order.lens[self.part]
        keys = self.keys
        if keys is None:
            return unread_logits(rows, self.width)
        return self.api.dense_logits(
            gather_queries(self.inputs, rows),
            (keys.values, keys.scales),
            starts=keys.starts[self.order.requests[self.part]],
            lens=lens,
            width=self.width,
        )


def unread_logits(rows: torch.Tensor, width: int) -> torch.Tensor:
    """`[rows, width]` for rows of which all that they see is selected; takes a row's memory."""
    return rows.new_zeros((1, width), dtype=torch.bfloat16).expand(len(rows), width)


def dense_tiles(
    api: DeepGemm,
    inputs: PrefillIndexerInputs,
    order: RowOrder,
    *,
    needed_beyond: int,
    budget: int,
) -> Iterator[DenseTile]:
    """All rows, tile by tile, in order; a pool's keys are gathered into flat ones.

    Args:
        needed_beyond: rows that see at most so many positions need no logits.
        budget: bytes for gathered keys, a tile's logits and queries, and a float32 a block.

    Raises:
        ValueError: the budget is below what the longest request takes.
    """
    plan = inputs.plan
    contexts = [
        n if rows else 0 for n, rows in zip(plan.context_lens, plan.rows_per_request, strict=True)
    ]
    flat = isinstance(inputs.index_k, FlatIndexK)
    spec = FORMATS[inputs.index_k.format]
    key_bytes = 0 if flat else spec.payload_bytes + spec.scale_bytes
    of_queries = query_bytes(padded_heads(inputs.num_heads)) + 64

    def row_bytes(width: int) -> int:
        return api.logits_bytes(width) + 4 * -(-width // BLOCK_SIZE) + of_queries

    def least(positions: int, longest: int) -> int:
        gathering = 0 if flat else min(positions, _GATHERED) * (_GATHER_BYTES + key_bytes)
        return positions * key_bytes + max(gathering, _ROWS * row_bytes(longest))

    ends = list(accumulate(plan.rows_per_request))
    groups = request_groups(
        plan.rows_per_request, contexts, unit_bytes=key_bytes, least=least, budget=budget
    )
    for begin, end, positions, longest in groups:
        first, stop = ends[begin] - plan.rows_per_request[begin], ends[end - 1]
        keys = None
        if longest > needed_beyond:
            keys = _flat_keys(inputs, order, slice(begin, end), positions)
        free, width = budget - positions * key_bytes, max(longest, BLOCK_SIZE)
        most = max(free // row_bytes(width) // _ROWS, 1)
        for part in even_tiles(first, stop, unit=_ROWS, most=most):
            yield DenseTile(part, width, api, inputs, order, keys)


def _flat_keys(
    inputs: PrefillIndexerInputs, order: RowOrder, requests: slice, positions: int
) -> _Keys:
    """The keys of these requests; `positions` is at least how many their rows see."""
    keys, plan = inputs.index_k, inputs.plan
    if isinstance(keys, FlatIndexK):
        assert plan.key_starts is not None
        assert keys.scales is not None
        return _Keys(_signed(_aligned(keys.values)), _aligned(keys.scales), plan.key_starts)
    assert plan.page_table is not None
    if not keys.num_pages:
        raise mismatch("index_k pages", "at least 1 page", "none")
    seen = order.lens.new_zeros(plan.num_requests)
    seen = seen.scatter_reduce_(0, order.requests.long(), order.lens, "amax")
    within = torch.zeros_like(seen)
    within[requests] = seen[requests]
    ends = within.cumsum(0)
    starts = ends - within
    spec = FORMATS[keys.format]
    assert spec.scales_dtype is not None
    # A kernel reads scales by fours.
    shape = (-(-positions // 4) * 4, spec.values_width)
    values = torch.empty(shape, dtype=spec.values_dtype, device=plan.device)
    scales = torch.empty(shape[:1], dtype=spec.scales_dtype, device=plan.device)
    for first in range(0, len(values), _GATHERED):
        index = torch.arange(first, min(first + _GATHERED, len(values)), device=plan.device)
        slots, exists = _slots(keys, plan.page_table, index, starts, ends)
        stored = keys.read(slots)
        assert stored.scales is not None
        values[first : first + len(index)] = stored.values
        missing = -1 if spec.scales_dtype == torch.int32 else torch.nan  # ue8m0 255 is NaN
        scales[first : first + len(index)] = torch.where(exists, stored.scales, missing)
    return _Keys(_signed(values), scales, starts.to(torch.int32))


def _slots(
    keys: IndexKPool,
    page_table: torch.Tensor,
    index: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of flat columns, 0 where there is none, and whether there is one."""
    request = torch.searchsorted(ends, index, right=True).clamp(max=len(ends) - 1)
    used = index < ends[-1]
    position = torch.where(used, index - starts[request], 0)
    page = page_table[request, position // keys.page_size].long()
    exists = used & (page >= 0) & (page < keys.num_pages)
    return torch.where(exists, page * keys.page_size + position % keys.page_size, 0), exists


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, at a multiple of 16 bytes, as kernels read it; as a rule it is that already."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _signed(values: torch.Tensor) -> torch.Tensor:
    """Packed e2m1 as DeepGEMM names it."""
    return values.view(torch.int8) if values.dtype == torch.uint8 else values
