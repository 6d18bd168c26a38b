# SPDX-License-Identifier: Apache-2.0
"""The `sm100` backend: datacenter Blackwell, scored by DeepGEMM.

A source's logits are written a tile of rows at a time, and read twice: for the key of each block,
and for its own selection. Consumers' logits are those of candidates only, in pages where they lie.
A source's rows are scored request by request, candidates in the plan's order: neighbors of one
request in pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sparse_indexer.deep_gemm_api import (
    EMULATED,
    MAX_BLOCKS,
    DeepGemm,
    Pages,
    aligned,
    queries_of,
)
from sparse_indexer.dense_tiles import DenseTile, dense_tiles, unread_logits
from sparse_indexer.devices import resolve_device
from sparse_indexer.errors import BackendUnavailable, expect_int, mismatch
from sparse_indexer.formats import INT32_MAX
from sparse_indexer.index_k import IndexKPool
from sparse_indexer.inputs import BLOCK_SIZE, PrefillIndexerInputs
from sparse_indexer.lasting import LastingMemory
from sparse_indexer.pair_candidates import (
    PairCandidates,
    Schedules,
    least_bytes,
    scheduled_tiles,
)
from sparse_indexer.plan import HostInts, PrefillPlan
from sparse_indexer.protocol import (
    Candidates,
    expect_call,
    expect_candidates,
    expect_published,
    on_its_device,
)
from sparse_indexer.row_ops import row_ops

_COLUMNS = f"a multiple of 4 of at most {MAX_BLOCKS}"


class Sm100Indexer:
    """`CandidateIndexer` on datacenter Blackwell (compute capability 10.x), by DeepGEMM.

    fp4 keys with fp4 queries, at most 64 heads. Consumers read a pool of planar pages, where they
    lie: their stride is a multiple of 128 bytes, or of 512 before DeepGEMM 0.2.5. Sources take flat
    keys, too, and before 0.2.5 fp8 keys with fp8 queries, which no consumer here reads, nor the
    source for its own positions if topk >= topk_blocks; full layers also any pages. A source
    whose dense logits are rounded otherwise than those of candidates (before 0.2.5, or more than 32
    heads) selects its own positions as a consumer does.

    Logits are rounded as DeepGEMM does: those of candidates to bfloat16 in each step of the sum of
    heads (so a sum that cancels has few bits left), dense ones likewise, but before 0.2.5 to
    float32.

    On a GPU nobody looks at the page table: a slot that is used and names no page of the pool (see
    `PrefillIndexerInputs.check`) is NaN to sources and full layers; consumers read another page.

    DeepGEMM allocates a workspace of 8 MiB at its first call on a stream, which must not be in a
    capture: publish or select once on a stream before a graph is captured on it.

    Args:
        device: a CUDA device; a CPU with an emulator.
        topk: positions a row selects.
        topk_blocks: blocks of 8 positions a row publishes, a multiple of 4 of at most 4096.
        memory_budget: bytes of scratch beside inputs, outputs and what a publish returns, at most.
            That is a table of 4 bytes a block, and what DeepGEMM takes to schedule it, which is
            about 9 bytes a block; some 30 bytes a row, its head weights in DeepGEMM's dtype, and
            DeepGEMM's workspace are not counted.
        deep_gemm: the module or an emulator of it; `None`: the package `deep_gemm`.

    Raises:
        ValueError: an option is out of range; from the methods also: keys, pages or queries that
            the installed version does not read (the message says what fits), or a budget below
            what the longest request takes.
        BackendUnavailable: DeepGEMM is missing or too old, a CPU has no emulator, or a kernel can
            be neither built nor loaded.
    """

    name = "sm100"

    def __init__(
        self,
        device: torch.device | str,
        *,
        topk: int = 512,
        topk_blocks: int = 2048,
        memory_budget: int = 256 << 20,
        deep_gemm: Any = None,
    ) -> None:
        self.device = resolve_device(device)
        if self.device.type not in ("cuda", "cpu"):
            raise mismatch("device", "a CUDA device", str(self.device))
        if self.device.type == "cpu" and deep_gemm is None:
            raise BackendUnavailable(f"sm100: needs a GPU, the device is a CPU: use {EMULATED}")
        self.topk = expect_int("topk", topk, 0, 1 << 15)
        self.topk_blocks = expect_int("topk_blocks", topk_blocks, 1, MAX_BLOCKS)
        if self.topk_blocks % 4:
            raise mismatch("topk_blocks", _COLUMNS, f"{topk_blocks}")
        self.memory_budget = expect_int("memory_budget", memory_budget, 1)
        self._deep_gemm = DeepGemm(deep_gemm)
        self._ops = row_ops(self.device, self.name)
        self._lasting = LastingMemory(self.device)

    def check_pool(self, pool: IndexKPool) -> None:
        """Can consumers read such a pool? Call it where an engine makes its cache.

        Raises:
            ValueError: no; the message says what the installed version reads.
        """
        self._deep_gemm.check_pool(pool)

    @on_its_device
    def publish_prefill(
        self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor | None = None
    ) -> Candidates:
        """See `CandidateIndexer.publish_prefill`. Tables live in a pool of their own.

        A pool of fp4 keys must be one that consumers can read.
        """
        expect_call(self, inputs, out_positions)
        api, plan, pool, n = self._deep_gemm, inputs.plan, inputs.index_k, self.topk_blocks
        api.expect_dense(inputs)
        paged = isinstance(pool, IndexKPool) and pool.format == "fp4"  # as candidates are read
        # Its own positions are what it would select as a consumer: out of the same logits if those
        # of candidates are no others, and of as many blocks as may be needed.
        alike = not paged or api.rounds_alike(inputs.num_heads)
        together = out_positions is not None and alike and self.topk < n
        pages = None  # of candidates that are scored, not all selected
        if paged or (out_positions is not None and not together):
            _, pages = api.expect_pool(inputs)
        if self._selects_all(plan, n):
            pages = None
        at_least = 0 if pages is None else least_bytes(plan, n, pages)
        table = self._empty_table(plan.num_rows, n)
        needed = self.topk if together else n * BLOCK_SIZE
        for tile in self._tiles(inputs, needed, at_least):
            self._publish(plan, tile, table, out_positions if together else None)
            del tile  # its keys, before others are gathered
        schedules = None if pages is None else self._schedules(plan, table, pages)
        candidates = PairCandidates(plan, table, schedules)
        if out_positions is not None and not together:
            self.select_prefill(candidates, inputs, out_positions)
        return candidates

    @on_its_device
    def select_prefill(
        self, candidates: Candidates, inputs: PrefillIndexerInputs, out_positions: torch.Tensor
    ) -> None:
        """See `CandidateIndexer.select_prefill`. Takes any backend's candidates.

        Their blocks a row are a multiple of 4 of at most 4096, as here; others are refused.
        The publish made their schedules for its plan: with that plan object, or another one with
        the same `page_table` tensor, none is made here.
        """
        expect_call(self, inputs, out_positions, candidates, wanted=True)
        api, plan = self._deep_gemm, inputs.plan
        api.expect_dense(inputs)
        keys, pages = api.expect_pool(inputs)
        own = candidates if isinstance(candidates, PairCandidates) else None
        if own is not None and own.plan is plan:
            table = own.blocks
        else:
            table = expect_candidates(candidates, inputs, self.device)
            table = aligned(_expect_columns(table))
        if not plan.num_rows:
            return
        n = table.shape[1]
        if self._selects_all(plan, n):
            logits = unread_logits(plan.compressed_lens, n * BLOCK_SIZE)
            self._select(logits, plan, None, plan.compressed_lens, out_positions, blocks=table)
            return
        budget, tiles = self.memory_budget, None
        if own is not None:
            tiles = own.tiles_for(plan, pages, budget=budget, num_sms=api.num_sms)
        queries = queries_of(inputs, torch.bfloat16)
        for tile in tiles or scheduled_tiles(api, plan, table, pages, budget=budget):
            its = queries.of(tile.part)
            logits = api.candidate_logits(its, keys, tile.metadata, n)
            self._select(logits, plan, tile.part, tile.lens, out_positions, blocks=tile.table)
            del its, logits, tile  # before the next are made

    @on_its_device
    def prefill_tail(self, candidates: Candidates, tail_lens: HostInts) -> Candidates:
        """See `CandidateIndexer.prefill_tail`. A schedule cannot be sliced: it is made anew.

        Takes the candidates that `select_prefill` takes.
        """
        source = expect_published(candidates, self.device)  # and wait, before the plan is read
        _expect_columns(source)
        rows = candidates.plan.tail_rows(tail_lens)
        plan = candidates.plan.of_rows(rows, tail_lens)
        table = self._empty_table(plan.num_rows, source.shape[1])
        torch.index_select(source, 0, rows, out=table)
        held = candidates.schedules if isinstance(candidates, PairCandidates) else None
        schedules = None if held is None else self._schedules(plan, table, held.pages)
        return PairCandidates(plan, table, schedules)

    @on_its_device
    def topk_prefill(self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor) -> None:
        """See `CandidateIndexer.topk_prefill`."""
        expect_call(self, inputs, out_positions, wanted=True)
        self._deep_gemm.expect_dense(inputs)
        for tile in self._tiles(inputs, self.topk):
            part, rows = tile.part, tile.rows
            self._select(tile.logits(), inputs.plan, part, tile.lens, out_positions, rows=rows)
            del tile

    def _selects_all(self, plan: PrefillPlan, n: int) -> bool:
        """Does each row select all that it sees in its n blocks?"""
        return min(n * BLOCK_SIZE, max(plan.context_lens, default=0)) <= self.topk

    def _tiles(
        self, inputs: PrefillIndexerInputs, needed_beyond: int, at_least: int = 0
    ) -> Iterator[DenseTile]:
        api, budget = self._deep_gemm, self.memory_budget
        return dense_tiles(
            api, inputs, needed_beyond=needed_beyond, budget=budget, at_least=at_least
        )

    def _publish(
        self,
        plan: PrefillPlan,
        tile: DenseTile,
        table: torch.Tensor,
        out_positions: torch.Tensor | None,
    ) -> None:
        """The blocks of a tile's rows, and if wanted their positions, out of the same logits."""
        logits, lens = tile.logits(), tile.lens
        shape = (lens.shape[0], -(-tile.width // BLOCK_SIZE))
        keys = torch.empty(shape, dtype=torch.float32, device=self.device)
        if shape[1] > self.topk_blocks:
            self._ops.block_keys(logits, lens, out=keys, skip_blocks=self.topk_blocks)
        self._ops.topk(
            keys,
            lens,
            out=tile.of(table),
            rows=tile.rows,
            per_column=BLOCK_SIZE,
            force_last=True,
            unused=INT32_MAX,
        )
        if out_positions is not None:
            self._select(logits, plan, tile.part, lens, out_positions, rows=tile.rows)

    def _select(
        self,
        logits: torch.Tensor,
        plan: PrefillPlan,
        part: slice | None,
        lens: torch.Tensor,
        out_positions: torch.Tensor,
        *,
        rows: torch.Tensor | None = None,
        blocks: torch.Tensor | None = None,
    ) -> None:
        """Positions of some rows, of dense logits or of those of their blocks."""
        starts, requests = plan.request_starts, None
        if starts is not None:
            requests = plan.request_of_row if part is None else plan.request_of_row[part]
        self._ops.topk(
            logits,
            lens,
            out=out_positions if part is None else out_positions[part],
            rows=rows,
            blocks=blocks,
            request_of_row=requests,
            request_starts=starts,
        )

    def _empty_table(self, rows: int, n: int) -> torch.Tensor:
        """DeepGEMM has a kernel for each width of a table, so contexts must not change it."""
        with self._lasting():
            return torch.empty((rows, n), dtype=torch.int32, device=self.device)

    def _schedules(self, plan: PrefillPlan, table: torch.Tensor, pages: Pages) -> Schedules:
        """Made once, for all that select."""
        api, budget = self._deep_gemm, self.memory_budget
        tiles = scheduled_tiles(api, plan, table, pages, budget=budget, lasting=self._lasting)
        return Schedules(pages, budget, tiles=list(tiles), num_sms=api.num_sms)


def _expect_columns(table: torch.Tensor) -> torch.Tensor:
    """Candidates of any backend, of a width that has a kernel."""
    if table.shape[1] % 4 or not 0 < table.shape[1] <= MAX_BLOCKS:
        raise mismatch("candidates.blocks", f"{_COLUMNS} columns", table)
    return table
