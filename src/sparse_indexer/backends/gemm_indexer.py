# SPDX-License-Identifier: Apache-2.0
"""The route of `sm70` through cuBLAS: any number of heads, scores of heads rounded to float16.

A tile of rows is scored densely over its request's context. A source that publishes only has block
keys of it; all else has the tile's logits in float32, of which a consumer gathers its candidates'.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sparse_indexer.backends.kernel_indexer import KernelIndexer
from sparse_indexer.formats import INT32_MAX
from sparse_indexer.gemm_scoring import GemmTile, gemm_tiles
from sparse_indexer.index_k import BLOCK_SIZE
from sparse_indexer.inputs import PrefillIndexerInputs
from sparse_indexer.jit.kernel import Kernel, all_kernels
from sparse_indexer.lasting import RowCandidates
from sparse_indexer.ops.topk import topk
from sparse_indexer.plan import HostInts, PrefillPlan
from sparse_indexer.protocol import (
    Candidates,
    expect_call,
    expect_candidates,
    expect_published,
    on_its_device,
)

_KERNELS = ("block_keys", "index_k", "relu_head_sum", "topk")


class GemmCandidates(RowCandidates):
    """Which route published them; see `Sm70Indexer`."""


class GemmIndexer(KernelIndexer):
    """`CandidateIndexer` by a GEMM and the op `relu_head_sum`; see `Sm70Indexer`."""

    name = "sm70"

    @classmethod
    def own_kernels(cls) -> list[Kernel]:
        """See `KernelIndexer.own_kernels`."""
        return [all_kernels()[name] for name in _KERNELS]

    @on_its_device
    def publish_prefill(
        self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor | None = None
    ) -> Candidates:
        """See `CandidateIndexer.publish_prefill`. Its own positions are of the same logits."""
        expect_call(self, inputs, out_positions)
        n, plan = self.topk_blocks, inputs.plan
        table = self._empty_table(plan.num_rows, n)
        # A row's best positions lie in as many blocks, and the newest one may displace one: with
        # fewer than it publishes they are the best of all.
        among = table if self.topk >= n else None
        own = out_positions is not None
        needed = min(n * BLOCK_SIZE, self.topk) if own else n * BLOCK_SIZE
        for tile in self._tiles(inputs, needed, logits=own):
            logits = None
            if out_positions is None:
                keys = tile.block_keys()
            else:
                logits = tile.logits()
                keys = tile.keys_of(logits)
            topk(
                keys,
                tile.lens,
                out=table,
                rows=tile.rows,
                per_column=BLOCK_SIZE,
                force_last=True,
                unused=INT32_MAX,
            )
            if out_positions is not None and logits is not None:
                _select(tile, plan, logits, among, out_positions)
        return GemmCandidates(plan, table)

    @on_its_device
    def select_prefill(
        self, candidates: Candidates, inputs: PrefillIndexerInputs, out_positions: torch.Tensor
    ) -> None:
        """See `CandidateIndexer.select_prefill`. Takes any backend's candidates."""
        expect_call(self, inputs, out_positions, candidates, wanted=True)
        blocks = expect_candidates(candidates, inputs, self.device)
        n = blocks.shape[1]
        needed = self.topk if self.topk < n * BLOCK_SIZE else INT32_MAX
        for tile in self._tiles(inputs, needed, blocks=n):
            _select(tile, inputs.plan, tile.logits(), blocks, out_positions)

    @on_its_device
    def prefill_tail(self, candidates: Candidates, tail_lens: HostInts) -> Candidates:
        """See `CandidateIndexer.prefill_tail`. Takes any backend's candidates."""
        source = expect_published(candidates, self.device)  # and wait, before the plan is read
        rows = candidates.plan.tail_rows(tail_lens)
        plan = candidates.plan.of_rows(rows, tail_lens)
        table = self._empty_table(plan.num_rows, source.shape[1])
        torch.index_select(source, 0, rows, out=table)
        return GemmCandidates(plan, table)

    @on_its_device
    def topk_prefill(self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor) -> None:
        """See `CandidateIndexer.topk_prefill`."""
        expect_call(self, inputs, out_positions, wanted=True)
        for tile in self._tiles(inputs, self.topk):
            _select(tile, inputs.plan, tile.logits(), None, out_positions)

    def _tiles(
        self,
        inputs: PrefillIndexerInputs,
        needed_beyond: int,
        *,
        logits: bool = True,
        blocks: int | None = None,
    ) -> Iterator[GemmTile]:
        """Of one shape for all that takes logits, and cuBLAS then sums alike."""
        return gemm_tiles(
            inputs,
            logits=logits,
            blocks=self.topk_blocks if blocks is None else blocks,
            needed_beyond=needed_beyond,
            budget=self.memory_budget,
        )

    def _empty_table(self, rows: int, n: int) -> torch.Tensor:
        with self._lasting():
            return torch.empty((rows, n), dtype=torch.int32, device=self.device)


def _select(
    tile: GemmTile,
    plan: PrefillPlan,
    logits: torch.Tensor,
    blocks: torch.Tensor | None,
    out_positions: torch.Tensor,
) -> None:
    """The best positions of a tile's rows, of all that they see or among `blocks`, by row."""
    listed = None
    if blocks is not None:
        logits, listed = tile.listed(logits, blocks)
    starts = plan.request_starts
    topk(
        logits,
        tile.lens,
        out=out_positions,
        rows=tile.rows,
        blocks=listed,
        request_of_row=None if starts is None else plan.request_of_row,
        request_starts=starts,
    )
