# SPDX-License-Identifier: Apache-2.0
"""The `mask` backend: plain torch on any device, the oracle and the fallback.

It scores every visible position, tile by tile, and masks what a selection must not see. Candidates
are block ids; a mask over positions exists for one tile at a time, and so do the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from sparse_indexer.devices import resolve_device
from sparse_indexer.errors import expect_int, mismatch
from sparse_indexer.formats import HEAD_DIM, INT32_MAX
from sparse_indexer.inputs import BLOCK_SIZE, PrefillIndexerInputs
from sparse_indexer.plan import HostInts
from sparse_indexer.protocol import (
    Candidates,
    expect_call,
    expect_candidates,
    expect_published,
    on_its_device,
)
from sparse_indexer.torch_ops.block_keys import block_keys, published
from sparse_indexer.torch_ops.index_k import index_k
from sparse_indexer.torch_ops.logits import QUERIES_AT_ONCE, logits
from sparse_indexer.torch_ops.topk import UNUSED, indices, merge, ordered, pack

_MOST = 1 << 20  # positions or blocks a row
_MAX_TILE_POSITIONS = 1024
_MAX_TILE_ROWS = {"cpu": 256}  # beyond that a tile leaves a CPU's caches


class _Tile(NamedTuple):
    """Rows of one request that are scored together."""

    rows: torch.Tensor  # [n] int64, ascending
    request: int
    lens: torch.Tensor  # [n] int32: positions each row sees
    context: int  # host: at least their maximum
    step: int  # positions scored at a time


class MaskIndexer:
    """`CandidateIndexer` in plain torch. A selection has no gradient; none is recorded.

    Args:
        device: where inputs and outputs are.
        topk: positions a row selects, at most 2^20.
        topk_blocks: blocks of 8 positions a row publishes, at most 2^20.
        memory_budget: bytes of scratch beside inputs and outputs, at most.
        accumulate: `torch.float64` (default on a CPU): a logit is computed in fp64 from the exact
            dequantized operands and rounded to float32 once, so its bits depend on nothing but its
            row and position; a GPU is waited for at each tile unless all is e4m3. `torch.float32`
            (default elsewhere): faster, but a logit's last bits may change with the shape of a
            call.

    Raises:
        ValueError: an option is out of range; from the methods also: the budget is below what one
            row takes (the message says how much that is).
    """

    name = "mask"

    def __init__(
        self,
        device: torch.device | str,
        *,
        topk: int = 512,
        topk_blocks: int = 2048,
        memory_budget: int = 256 << 20,
        accumulate: torch.dtype | None = None,
    ) -> None:
        self.device = resolve_device(device)
        if self.device.type == "meta":
            raise mismatch("device", "a device that has values", "meta")
        self.topk = expect_int("topk", topk, 0, _MOST)
        self.topk_blocks = expect_int("topk_blocks", topk_blocks, 1, _MOST)
        self.memory_budget = expect_int("memory_budget", memory_budget, 1)
        if accumulate is None:
            accumulate = torch.float64 if self.device.type == "cpu" else torch.float32
        if accumulate not in (torch.float32, torch.float64):
            raise mismatch("accumulate", "torch.float32 or torch.float64", str(accumulate))
        self.accumulate = accumulate

    @on_its_device
    def publish_prefill(
        self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor | None = None
    ) -> Candidates:
        """See `CandidateIndexer.publish_prefill`."""
        expect_call(self, inputs, out_positions)
        # A row's best `topk` positions lie in its first `topk` blocks by rule 3, and the newest
        # block may displace one: with one block to spare, the blocks and the source's own positions
        # come out of the same logits.
        together = out_positions is not None and self.topk < self.topk_blocks
        shape = (inputs.plan.num_rows, self.topk_blocks)
        blocks = torch.full(shape, INT32_MAX, dtype=torch.int32, device=self.device)
        for tile in self._tiles(inputs):
            best_blocks = self._unused(tile, self.topk_blocks)
            best = self._unused(tile, self.topk)
            for start, order in self._ordered_logits(inputs, tile):
                keys, visible = block_keys(order, tile.lens, start)
                best_blocks = merge(best_blocks, pack(keys, visible, start // BLOCK_SIZE))
                if together:
                    best = merge(best, pack(order, _visible(tile, start, order), start))
            blocks[tile.rows] = indices(best_blocks, INT32_MAX)
            if together and out_positions is not None:
                self._write(inputs, tile, best, out_positions)
        candidates = Candidates(blocks, inputs.plan)
        if out_positions is not None and not together:
            self.select_prefill(candidates, inputs, out_positions)
        return candidates

    @on_its_device
    def select_prefill(
        self, candidates: Candidates, inputs: PrefillIndexerInputs, out_positions: torch.Tensor
    ) -> None:
        """See `CandidateIndexer.select_prefill`. Takes any backend's candidates."""
        expect_call(self, inputs, out_positions, candidates, wanted=True)
        blocks = expect_candidates(candidates, inputs, self.device)
        for tile in self._tiles(inputs):
            best = self._unused(tile, self.topk)
            tile_blocks = blocks[tile.rows]
            for start, order in self._ordered_logits(inputs, tile):
                allowed = published(tile_blocks, start, order.shape[1])
                allowed &= _visible(tile, start, order)
                best = merge(best, pack(order, allowed, start))
            self._write(inputs, tile, best, out_positions)

    @on_its_device
    def prefill_tail(self, candidates: Candidates, tail_lens: HostInts) -> Candidates:
        """See `CandidateIndexer.prefill_tail`."""
        blocks = expect_published(candidates, self.device)
        rows = candidates.plan.tail_rows(tail_lens)
        return Candidates(blocks[rows], candidates.plan.of_rows(rows, tail_lens))

    @on_its_device
    def topk_prefill(self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor) -> None:
        """See `CandidateIndexer.topk_prefill`."""
        expect_call(self, inputs, out_positions, wanted=True)
        for tile in self._tiles(inputs):
            best = self._unused(tile, self.topk)
            for start, order in self._ordered_logits(inputs, tile):
                best = merge(best, pack(order, _visible(tile, start, order), start))
            self._write(inputs, tile, best, out_positions)

    @on_its_device
    def dense_logits(self, inputs: PrefillIndexerInputs) -> torch.Tensor:
        """The matrix `[rows, max(context_lens)]` float32, -inf where a row sees nothing."""
        expect_call(self, inputs, None)
        shape = (inputs.plan.num_rows, max(inputs.plan.context_lens, default=0))
        out = torch.full(shape, -torch.inf, dtype=torch.float32, device=self.device)
        for tile in self._tiles(inputs):
            for start, values in self._logits(inputs, tile):
                values = torch.where(_visible(tile, start, values), values, -torch.inf)
                out[tile.rows, start : start + values.shape[1]] = values
        return out

    def workspace_bytes(self, rows: int, positions: int) -> int:
        """Scratch of one tile of `rows` x `positions`, in bytes; calls keep it in the budget."""
        size = self.accumulate.itemsize
        widening = HEAD_DIM * 9 * size  # of a key, or of one head of a query, and slicing it
        queries = max(rows, QUERIES_AT_ONCE)
        scoring = queries * (4 * positions * size + widening) + positions * widening
        selecting = rows * (positions * (size + 48) + 64 * (self.topk + self.topk_blocks))
        return scoring + selecting

    def _tile_shape(self) -> tuple[int, int]:
        """(rows, positions) of the largest tile that the budget allows."""
        positions = _MAX_TILE_POSITIONS
        while positions > 64 and self.workspace_bytes(1, positions) > self.memory_budget:
            positions //= 2
        one = self.workspace_bytes(1, positions)
        if one > self.memory_budget:
            raise mismatch("memory_budget", f"at least {one} bytes", str(self.memory_budget))
        rows = _MAX_TILE_ROWS.get(self.device.type, 4096)
        while rows > 1 and self.workspace_bytes(rows, positions) > self.memory_budget:
            rows -= 1
        return rows, positions

    def _tiles(self, inputs: PrefillIndexerInputs) -> Iterator[_Tile]:
        plan = inputs.plan
        max_rows, step = self._tile_shape()
        by_request = plan.rows_by_request()
        first = 0
        for request, count in enumerate(plan.rows_per_request):
            for start in range(first, first + count, max_rows):
                rows = by_request[start : min(start + max_rows, first + count)]
                lens = plan.compressed_lens[rows]
                yield _Tile(rows, request, lens, plan.context_lens[request], step)
            first += count

    def _logits(
        self, inputs: PrefillIndexerInputs, tile: _Tile
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(first position, logits `[rows, n]` float32), position tile after position tile."""
        if not len(tile.rows) or not tile.context:
            return
        length = tile.lens.amax()
        for start in range(0, tile.context, tile.step):
            stop = min(start + tile.step, tile.context)
            keys, scales = index_k(
                inputs.index_k, inputs.plan, tile.request, start, stop, length, self.accumulate
            )
            yield (
                start,
                logits(
                    inputs.index_q,
                    inputs.head_weights,
                    tile.rows,
                    keys,
                    scales,
                    stored_e4m3=inputs.index_k.format == "fp8",
                ),
            )

    def _ordered_logits(
        self, inputs: PrefillIndexerInputs, tile: _Tile
    ) -> Iterator[tuple[int, torch.Tensor]]:
        for start, values in self._logits(inputs, tile):
            yield start, ordered(values)

    def _unused(self, tile: _Tile, width: int) -> torch.Tensor:
        shape = (len(tile.rows), width)
        return torch.full(shape, UNUSED, dtype=torch.int64, device=self.device)

    def _write(
        self, inputs: PrefillIndexerInputs, tile: _Tile, best: torch.Tensor, out: torch.Tensor
    ) -> None:
        positions = indices(best, -1)
        starts = inputs.plan.request_starts
        if starts is not None:
            positions = torch.where(positions >= 0, positions + starts[tile.request], positions)
        out[tile.rows] = positions


def _visible(tile: _Tile, start: int, values: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(start, start + values.shape[1], device=values.device)
    return positions < tile.lens[:, None]
