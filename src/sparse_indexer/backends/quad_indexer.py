# SPDX-License-Identifier: Apache-2.0
"""What the backends share that score quads of rows: `sm90`, and `sm70` with other kernels.

A source scores its context densely and keeps one key per block of 8 positions; its own selection,
and those of consumers, score candidate blocks only. Rows are scored by quads, four of one request,
whose candidates are gathered once; tables are kept by slot, a row's place in its quad.

The best `topk` positions of all that a row sees lie in `topk + 1` blocks: a block that holds one
comes before all that hold none, in the order of rule 3, and the newest block, always published, may
displace one. So `topk_prefill` selects among as many, and a source its own positions, too, if it
publishes more, but not all.
"""

from __future__ import annotations

from typing import ClassVar, TypeGuard

import torch

from sparse_indexer.backends.kernel_indexer import KernelIndexer
from sparse_indexer.errors import mismatch
from sparse_indexer.inputs import PrefillIndexerInputs
from sparse_indexer.jit.kernel import Kernel, all_kernels
from sparse_indexer.lasting import Ready
from sparse_indexer.plan import HostInts, PrefillPlan
from sparse_indexer.protocol import (
    Candidates,
    expect_call,
    expect_candidates,
    expect_published,
    on_its_device,
)
from sparse_indexer.quad_scoring import MAX_HEADS, QuadKernels, score
from sparse_indexer.quads import Quads, Tables, fill_tables, make_quads, plan_tables

_TABLES = ("candidate_quads", "index_k", "index_q", "row_quads", "topk")


class _QuadCandidates(Candidates):
    """Tables by slot. `blocks`, by row, is made anew for whoever asks."""

    def __init__(
        self, plan: PrefillPlan, quads: Quads, tables: Tables, kernels: QuadKernels
    ) -> None:
        self.plan = plan
        self.quads = quads
        self.tables = tables
        self.kernels = kernels  # that read the tables
        self.ready = Ready(plan.device, (*tables, *quads[1:], *plan.tensors))

    @property
    def blocks(self) -> torch.Tensor:
        self.wait()
        return self.tables.blocks.flatten(0, 1)[self.quads.slots.long()]

    def wait(self) -> None:
        """Let the current stream read the tables and the plan."""
        self.ready.wait()


class QuadIndexer(KernelIndexer):
    """`CandidateIndexer` on a GPU, by the kernels of its subclass, which says what they are for."""

    kernels: ClassVar[QuadKernels]

    @classmethod
    def own_kernels(cls) -> list[Kernel]:
        """See `KernelIndexer.own_kernels`."""
        return [all_kernels()[name] for name in (*_TABLES, *cls.kernels.names)]

    @on_its_device
    def publish_prefill(
        self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor | None = None
    ) -> Candidates:
        """See `CandidateIndexer.publish_prefill`. The tables live in a pool of their own."""
        self._expect(inputs, out_positions)
        together = out_positions is not None and self.topk < self.topk_blocks
        with self._lasting():
            quads = make_quads(inputs.plan)
            tables = plan_tables(quads, self.topk_blocks)
        out = out_positions if together else None
        self._score(inputs, quads, tables, out, n=self.topk_blocks, dense=True)
        candidates = _QuadCandidates(inputs.plan, quads, tables, self.kernels)
        if out_positions is not None and not together:
            self.select_prefill(candidates, inputs, out_positions)
        return candidates

    @on_its_device
    def select_prefill(
        self, candidates: Candidates, inputs: PrefillIndexerInputs, out_positions: torch.Tensor
    ) -> None:
        """See `CandidateIndexer.select_prefill`. Takes any backend's candidates."""
        self._expect(inputs, out_positions, candidates, wanted=True)
        if self._made(candidates) and candidates.plan is inputs.plan:
            candidates.wait()
            quads, tables = candidates.quads, candidates.tables
        else:
            blocks = expect_candidates(candidates, inputs, self.device)
            quads = make_quads(inputs.plan)
            tables = plan_tables(quads, blocks.shape[1])
            fill_tables(tables, quads, blocks, pairs=self.kernels.pairs)
        n = tables.blocks.shape[2]
        self._score(inputs, quads, tables, out_positions, n=n, dense=False)

    @on_its_device
    def prefill_tail(self, candidates: Candidates, tail_lens: HostInts) -> Candidates:
        """See `CandidateIndexer.prefill_tail`."""
        slots = None
        if self._made(candidates):
            candidates.wait()  # before the plan is read, too
            source, slots = candidates.tables.blocks.flatten(0, 1), candidates.quads.slots
        else:
            source = expect_published(candidates, self.device)
        rows = candidates.plan.tail_rows(tail_lens)
        plan = candidates.plan.of_rows(rows, tail_lens)
        if slots is not None:
            rows = slots[rows].long()
        with self._lasting():
            quads = make_quads(plan)
            tables = plan_tables(quads, source.shape[1])
        fill_tables(tables, quads, source, rows, pairs=self.kernels.pairs)
        return _QuadCandidates(plan, quads, tables, self.kernels)

    @on_its_device
    def topk_prefill(self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor) -> None:
        """See `CandidateIndexer.topk_prefill`."""
        self._expect(inputs, out_positions, wanted=True)
        quads, n = make_quads(inputs.plan), self.topk + 1
        self._score(inputs, quads, None, out_positions, n=n, dense=True)

    def _score(
        self,
        inputs: PrefillIndexerInputs,
        quads: Quads,
        tables: Tables | None,
        out_positions: torch.Tensor | None,
        *,
        n: int,
        dense: bool,
    ) -> None:
        budget = self.memory_budget
        score(inputs, quads, tables, out_positions, self.kernels, n=n, dense=dense, budget=budget)

    def _made(self, candidates: Candidates) -> TypeGuard[_QuadCandidates]:
        """Whether they have tables as these kernels read them."""
        return isinstance(candidates, _QuadCandidates) and candidates.kernels is self.kernels

    def _expect(
        self,
        inputs: PrefillIndexerInputs,
        out_positions: torch.Tensor | None,
        candidates: Candidates | None = None,
        *,
        wanted: bool = False,
    ) -> None:
        expect_call(self, inputs, out_positions, candidates, wanted=wanted)
        if inputs.num_heads > MAX_HEADS:
            most = f'at most {MAX_HEADS} heads (backend="mask" takes any number)'
            raise mismatch("index_q values", most, f"{inputs.num_heads}")
