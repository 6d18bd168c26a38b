# SPDX-License-Identifier: Apache-2.0
"""Dense logits by DeepGEMM, one tile of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch

from sparse_indexer.deep_gemm_api import (
    DeepGemm,
    Queries,
    aligned,
    padded_heads,
    queries_of,
    query_bytes,
)
from sparse_indexer.errors import mismatch
from sparse_indexer.formats import FORMATS
from sparse_indexer.index_k import BLOCK_SIZE, FlatIndexK, IndexKPool
from sparse_indexer.inputs import PrefillIndexerInputs
from sparse_indexer.tiling import even_tiles, request_groups

_ROWS = 8  # a tile's rows are a multiple; DeepGEMM pads them, too


class _Keys(NamedTuple):
    """Flat keys of some requests, and where those of each row begin and end."""

    values: torch.Tensor  # [n, 64] int8 (fp4) or [n, 128] float8_e4m3fn
    scales: torch.Tensor  # [n] int32 (fp4) or float32
    starts: torch.Tensor  # [rows] int32
    ends: torch.Tensor  # [rows] int32


class DenseTile(NamedTuple):
    """Rows that are scored at once."""

    rows: torch.Tensor | None  # [n] int32: which rows of the plan; None: those of `part`
    part: slice | None  # rows of the plan, one after the other; None: `rows`, or all of them
    lens: torch.Tensor  # [n] int32: positions each sees
    width: int  # columns of logits, at least what any of the rows sees
    api: DeepGemm
    queries: Queries | None  # of all rows of the plan
    keys: _Keys | None  # None: no logit is needed

    def logits(self) -> torch.Tensor:
        """`[n, width]`, whatever is there past a row's length; the caller lets go of it."""
        keys, queries = self.keys, self.queries
        if keys is None or queries is None:
            return unread_logits(self.lens, self.width)
        return self.api.dense_logits(
            queries.of(self.part if self.rows is None else self.rows),
            (keys.values, keys.scales),
            starts=keys.starts,
            ends=keys.ends,
            width=self.width,
        )

    def of(self, by_row: torch.Tensor) -> torch.Tensor:
        """What `rows` names the rows of: all of `by_row`; without `rows`, the tile's part of it."""
        return by_row if self.part is None else by_row[self.part]


def unread_logits(lens: torch.Tensor, width: int) -> torch.Tensor:
    """`[len(lens), width]` for rows of which all that they see is selected; of a row's memory."""
    return lens.new_zeros((1, width), dtype=torch.bfloat16).expand(len(lens), width)


def dense_tiles(
    api: DeepGemm,
    inputs: PrefillIndexerInputs,
    *,
    needed_beyond: int,
    budget: int,
    at_least: int = 0,
) -> Iterator[DenseTile]:
    """All rows, tile by tile; a pool's keys are gathered into flat ones.

    Rows of several requests are sorted by request, since neighbors are scored over all that any of
    them sees: a sort takes little beside that, and their order is not known on the host.

    Args:
        needed_beyond: rows that see at most so many positions need no logits.
        budget: bytes for gathered keys, a tile's logits and queries, and a float32 a block.
        at_least: bytes of the budget that the caller takes afterwards.

    Raises:
        ValueError: the budget is below what the longest request takes.
    """
    plan, keys = inputs.plan, inputs.index_k
    counts = plan.rows_per_request
    contexts = [n if rows else 0 for n, rows in zip(plan.context_lens, counts, strict=True)]
    spec = FORMATS[keys.format]
    key_bytes, page_size = 0, BLOCK_SIZE
    if isinstance(keys, IndexKPool):
        key_bytes, page_size = spec.payload_bytes + spec.scale_bytes, keys.page_size
    of_queries = query_bytes(padded_heads(inputs.num_heads)) + 64

    def row_bytes(width: int) -> int:
        return api.logits_bytes(width) + 4 * -(-width // BLOCK_SIZE) + of_queries

    def least(positions: int, longest: int) -> int:
        return max(positions * key_bytes + _ROWS * row_bytes(longest), at_least)

    sizes = [-(-n // page_size) * page_size for n in contexts]
    groups = list(
        request_groups(counts, sizes, unit_bytes=key_bytes, least=least, budget=budget, padded=True)
    )
    rows, lens, requests = None, plan.compressed_lens, plan.request_of_row
    several = sum(map(bool, counts)) > 1 and max(contexts) > needed_beyond
    if several or len(groups) > 1:
        order = plan.rows_by_request()
        rows = order.to(torch.int32)
        lens, requests = (torch.index_select(x, 0, rows) for x in (lens, requests))
    ends = list(accumulate(counts))
    queries: Queries | None = None
    for begin, end, positions, _ in groups:
        first, stop = ends[begin] - counts[begin], ends[end - 1]
        longest = max(contexts[begin:end])
        held = None
        if longest > needed_beyond:
            queries = queries or queries_of(inputs, api.logits_dtype)
            held = _flat_keys(inputs, requests, lens, begin, end, longest)
        free, width = budget - positions * key_bytes, max(longest, BLOCK_SIZE)
        most = max(free // row_bytes(width) // _ROWS, 1)
        for part in even_tiles(first, stop, unit=_ROWS, most=most):
            if rows is None and part.stop - part.start == plan.num_rows:
                yield DenseTile(None, None, lens, width, api, queries, held)
                continue
            its, its_lens = held, lens[part]
            if held is not None:
                its_ends = its_lens if held.ends is lens else held.ends[part]
                its = _Keys(held.values, held.scales, held.starts[part], its_ends)
            its_rows, its_part = (None, part) if rows is None else (rows[part], None)
            yield DenseTile(its_rows, its_part, its_lens, width, api, queries, its)
            del its
        del held  # before others are gathered


def _flat_keys(
    inputs: PrefillIndexerInputs,
    requests: torch.Tensor,
    lens: torch.Tensor,
    begin: int,
    end: int,
    longest: int,
) -> _Keys:
    """The keys of requests `begin` to `end - 1`, which see at most `longest` positions.

    Args:
        requests, lens: `[rows]` int32: of each row. Those of other requests are not to be scored.
    """
    keys, plan = inputs.index_k, inputs.plan
    if isinstance(keys, FlatIndexK):
        assert plan.key_starts is not None
        assert keys.scales is not None
        # A row that sees nothing begins anywhere, perhaps past the keys.
        starts = torch.index_select(plan.key_starts, 0, requests).masked_fill_(lens == 0, 0)
        return _Keys(_signed(aligned(keys.values)), aligned(keys.scales), starts, starts + lens)
    assert plan.page_table is not None
    if not keys.num_pages:
        raise mismatch("index_k pages", "at least 1 page", "none")
    columns = -(-longest // keys.page_size)
    table = plan.page_table[begin:end, :columns].flatten()
    pages = table.clamp(0, keys.num_pages - 1)
    values, scales = keys.gather_pages(pages)
    # Slots of no position hold anything; a position without a page has the scale NaN.
    missing = -1 if scales.dtype == torch.int32 else torch.nan  # ue8m0 255 is NaN
    scales.masked_fill_((table != pages).unsqueeze(1), missing)
    values, scales = _signed(values.flatten(0, 1)), scales.flatten()
    starts = requests - begin if begin else requests  # of requests; one alone begins at 0
    if end - begin == 1:
        return _Keys(values, scales, starts, lens)
    starts = starts * (columns * keys.page_size)
    return _Keys(values, scales, starts, starts + lens)


def _signed(values: torch.Tensor) -> torch.Tensor:
    """Packed e2m1 as DeepGEMM names it."""
    return values.view(torch.int8) if values.dtype == torch.uint8 else values
