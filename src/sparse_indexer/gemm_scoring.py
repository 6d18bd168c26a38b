# SPDX-License-Identifier: Apache-2.0
"""Scoring by a GEMM: each head's score in float16, then `relu_head_sum`; any number of heads.

A request at a time: its keys are widened to float16 once, its rows are scored in tiles, a tile in
chunks of positions that share the memory of their scores. Nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from sparse_indexer.errors import mismatch
from sparse_indexer.formats import HEAD_DIM
from sparse_indexer.gemm_operands import (
    KEY_BYTES,
    query_bytes,
    score_factor,
    widen_keys,
    widen_queries,
)
from sparse_indexer.index_k import BLOCK_SIZE
from sparse_indexer.inputs import PrefillIndexerInputs
from sparse_indexer.ops.block_keys import block_keys
from sparse_indexer.ops.relu_head_sum import relu_head_sum
from sparse_indexer.scratch import Scratch
from sparse_indexer.tiling import even_tiles

_UNIT = 64  # positions: a chunk has a multiple of them, unless it is the last one
_WANTED = 1024  # positions that a chunk has at least, where the budget holds a row of them


class _Operands(NamedTuple):
    """What a tile is scored from."""

    keys: torch.Tensor  # [width, 128] float16
    key_scales: torch.Tensor  # [width] float32
    queries: torch.Tensor  # [rows * heads, 128] float16
    weights: torch.Tensor  # [rows, heads] float32: times the scales of queries, over `factor`
    factor: float  # of the GEMM, a power of two: keeps scores within float16
    chunks: list[slice]  # of positions, the first one the longest


class GemmTile(NamedTuple):
    """Rows of one request that are scored together; its tensors are good until the next tile."""

    rows: torch.Tensor  # [n] int32: which rows of the plan
    row_index: torch.Tensor  # [n] int64: the same
    lens: torch.Tensor  # [n] int32: positions each sees
    width: int  # columns of logits: at least what any of the rows sees, a multiple of 8
    scratch: Scratch  # what the caller takes of it is counted in `gemm_tiles`
    operands: _Operands | None  # None: no logit is needed

    def logits(self) -> torch.Tensor:
        """`[n, width]` float32; past a row's length whatever is there."""
        out = self.scratch.take((len(self.lens), self.width), torch.float32)
        self._score(out, 1)
        return out

    def block_keys(self) -> torch.Tensor:
        """`[n, width / 8]` float32, as the op `block_keys` makes them, without logits."""
        out = self.scratch.take((len(self.lens), self.width // BLOCK_SIZE), torch.float32)
        self._score(out, BLOCK_SIZE)
        return out

    def keys_of(self, logits: torch.Tensor) -> torch.Tensor:
        """The same out of the tile's logits."""
        out = self.scratch.take((len(self.lens), self.width // BLOCK_SIZE), torch.float32)
        if self.operands is not None:
            block_keys(logits, self.lens, out=out)
        return out

    def listed(
        self, logits: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of the blocks that each row has, one block after the other.

        Args:
            logits: the tile's.
            blocks: `[rows of the plan, n]` int32: ascending, then `INT32_MAX`.

        Returns:
            `[n, 8 * columns]` float32, and the tile's rows of `blocks`, `[n, columns]`.
        """
        last = self.width // BLOCK_SIZE - 1
        shape = (len(self.lens), min(blocks.shape[1], last + 1))
        own = self.scratch.take(shape, torch.int32)
        torch.index_select(blocks[:, : shape[1]], 0, self.row_index, out=own)
        there = self.scratch.take(shape, torch.int64).copy_(own).clamp_(0, last)
        of_blocks = self.scratch.take((*shape, BLOCK_SIZE), torch.float32)
        if self.operands is not None:
            every = there[:, :, None].expand_as(of_blocks)
            torch.gather(logits.view(len(own), -1, BLOCK_SIZE), 1, every, out=of_blocks)
        return of_blocks.flatten(1), own

    def _score(self, out: torch.Tensor, per_column: int) -> None:
        """Logits, or keys of 8 of them."""
        if self.operands is None:
            return
        keys, key_scales, queries, weights, factor, chunks = self.operands
        for chunk in chunks:
            # The memory of the chunk before, whose scores are read by then.
            shape = (len(queries), chunk.stop - chunk.start)
            scores = self.scratch.peek(shape, torch.float16)
            # In place, so that autocast lets it be.
            scores.addmm_(queries, keys[chunk].t(), beta=0, alpha=factor)
            its = out[:, chunk.start // per_column : chunk.stop // per_column]
            relu_head_sum(
                scores,
                weights,
                key_scales=key_scales[chunk],
                lens=self.lens,
                start=chunk.start,
                out_logits=its if per_column == 1 else None,
                out_keys=None if per_column == 1 else its,
            )


class _Request(NamedTuple):
    """A request that has rows, and what scoring them takes of a scratch."""

    number: int
    rows: slice  # of all rows sorted by request
    width: int  # positions, a multiple of 8
    scored: bool  # False: no logit is needed
    key_bytes: int
    row_bytes: int  # of a row without its scores
    unit_bytes: int  # of a row's scores of a unit of positions

    @property
    def least(self) -> int:
        """Bytes of a row, a unit at a time."""
        return self.key_bytes + self.row_bytes + self.unit_bytes

    def tiling(self, budget: int) -> tuple[list[slice], list[slice], int]:
        """Tiles of rows, chunks of positions, and the bytes for one of either."""
        free, units = budget - self.key_bytes, -(-self.width // _UNIT)
        wanted = self.unit_bytes * min(units, _WANTED // _UNIT)
        most = max(free // (self.row_bytes + wanted), 1)
        tiles = even_tiles(self.rows.start, self.rows.stop, unit=1, most=most)
        rows = tiles[0].stop - tiles[0].start
        most = min((free - rows * self.row_bytes) // (rows * self.unit_bytes), units)
        chunks = even_tiles(0, self.width, unit=_UNIT, most=most)
        taken = -(-chunks[0].stop // _UNIT) * self.unit_bytes
        return tiles, chunks, self.key_bytes + rows * (self.row_bytes + taken)


def gemm_tiles(
    inputs: PrefillIndexerInputs, *, logits: bool, blocks: int, needed_beyond: int, budget: int
) -> Iterator[GemmTile]:
    """All rows, tile by tile, request after request.

    Args:
        logits: the caller takes `logits` of each tile, and may take `keys_of` and `listed` them;
            otherwise `block_keys`.
        blocks: columns of the tables that it takes `listed` logits of.
        needed_beyond: rows that see at most so many positions need no logits.
        budget: bytes of scratch. Which rows are whose is not of it: some 30 bytes a row.

    Raises:
        ValueError: the budget is below what the longest request takes.
    """
    plan, requests, first = inputs.plan, [], 0
    for number, count in enumerate(plan.rows_per_request):
        if count:
            width = -(-max(plan.context_lens[number], 1) // BLOCK_SIZE) * BLOCK_SIZE
            scored = plan.context_lens[number] > needed_beyond
            row_bytes = width // 2 + (query_bytes(inputs) if scored else 0)
            if logits:
                row_bytes += 4 * width + 44 * min(blocks, width // BLOCK_SIZE)
            request = _Request(
                number,
                slice(first, first + count),
                width,
                scored,
                (width * KEY_BYTES if scored else 0) + Scratch.SLACK,
                row_bytes,
                2 * inputs.num_heads * _UNIT,
            )
            requests.append(request)
        first += count
    if not requests:
        return
    least = max(request.least for request in requests)
    if least > budget:
        raise mismatch("memory_budget", f"at least {least} bytes", f"{budget}")
    order = plan.rows_by_request()
    rows, lens = order.to(torch.int32), plan.compressed_lens[order]
    nbytes = max(request.tiling(budget)[2] for request in requests)
    scratch, factor = Scratch(nbytes, budget, plan.device), score_factor(inputs)
    for request in requests:
        scratch.clear()
        width, (tiles, chunks, _) = request.width, request.tiling(budget)
        if request.scored:
            keys = scratch.take((width, HEAD_DIM), torch.float16)
            scales = scratch.take((width,), torch.float32)
            seen = lens[request.rows].amax(0, keepdim=True)
            widen_keys(inputs, request.number, seen, out_values=keys, out_scales=scales)
            scratch.keep()
        for tile in tiles:
            scratch.restart()
            operands = None
            if request.scored:
                queries, weights = widen_queries(inputs, order[tile], scratch)
                operands = _Operands(keys, scales, queries, weights.div_(factor), factor, chunks)
            yield GemmTile(rows[tile], order[tile], lens[tile], width, scratch, operands)
