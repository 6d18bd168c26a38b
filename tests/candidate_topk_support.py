# SPDX-License-Identifier: Apache-2.0
"""Candidates of quads for `candidate_topk`, and the two ops that it stands for."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from sm90_support import layers

from sparse_indexer.formats import INT32_MAX, KeyFormat
from sparse_indexer.inputs import BLOCK_SIZE
from sparse_indexer.ops.candidate_logits import candidate_logits
from sparse_indexer.ops.candidate_topk import SLOTS, candidate_topk
from sparse_indexer.ops.index_k import index_k
from sparse_indexer.ops.index_q import index_q
from sparse_indexer.ops.topk import topk
from sparse_indexer.plan import PrefillPlan
from sparse_indexer.quads import Quads, Tables, empty_tables, make_quads, merge_blocks

POISON = 7


class Case(NamedTuple):
    plan: PrefillPlan
    quads: Quads
    tables: Tables
    keys: torch.Tensor
    queries: torch.Tensor
    weights: torch.Tensor

    @property
    def columns(self) -> int:
        return min(self.tables.blocks.shape[2], self.quads.max_blocks) * BLOCK_SIZE

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        return {
            "keys": self.keys,
            "queries": self.queries,
            "weights": self.weights,
            "entries": self.tables.entries,
            "ranks": self.tables.ranks,
            "counts": self.tables.counts,
            "quad_first": self.quads.first,
        }

    @property
    def lens(self) -> torch.Tensor:
        return self.quads.slot_lens.view(-1)

    @property
    def rows(self) -> torch.Tensor:
        return self.quads.rows.view(-1)

    @property
    def blocks(self) -> torch.Tensor:
        return self.tables.blocks.flatten(0, 1)

    def poisoned(self, k: int) -> torch.Tensor:
        shape = (self.plan.num_rows, k)
        return torch.full(shape, POISON, dtype=torch.int32, device=self.plan.device)


def pick_blocks(quads: Quads, n: int, alike: float, seed: int) -> torch.Tensor:
    """`[quads, 4, n]`: of each slot's row n of its blocks, the newest among them, or all.

    Args:
        alike: how much of a block's chance is the same for all rows: 1: rows have the same blocks.
    """
    device, most = quads.rows.device, max(quads.max_blocks, 1)
    generator = torch.Generator(device).manual_seed(seed)
    shared = torch.rand(most, device=device, generator=generator)
    count = quads.rows.numel()
    found = torch.full((count, n), INT32_MAX, dtype=torch.int32, device=device)
    for begin in range(0, count, 512):
        lens = quads.slot_lens.view(-1)[begin : begin + 512].long()
        own = torch.rand(len(lens), most, device=device, generator=generator)
        chance = alike * shared + (1 - alike) * own
        blocks = torch.arange(most, device=device)
        there = (lens + BLOCK_SIZE - 1) // BLOCK_SIZE
        chance[blocks == there[:, None] - 1] = 2
        chance[blocks >= there[:, None]] = -1
        best = chance.topk(min(n, most), dim=1)
        ids = torch.where(best.values >= 0, best.indices.int(), INT32_MAX).sort(dim=1).values
        found[begin : begin + 512, : ids.shape[1]] = ids
    return found.view(-1, 4, n)


def make_case(
    lens: Sequence[Sequence[int]],
    form: KeyFormat = "fp8",
    *,
    heads: int = 32,
    n: int = 60,
    alike: float = 1.0,
    palette: bool = False,
    seed: int = 0,
) -> Case:
    """Per request, the lengths that its rows see; n blocks a row."""
    inputs, _ = layers(lens, form, heads=heads, palette=palette, seed=seed)
    quads = make_quads(inputs.plan)
    device, count = inputs.plan.device, len(quads.rows)
    tables = empty_tables(count, n, quads.max_blocks, quads.rows.new_empty)
    tables.blocks.copy_(pick_blocks(quads, n, alike, seed))
    merge_blocks(tables, quads.max_blocks, pairs=True)
    packed = sum(request.blocks for request in quads.requests)
    keys = torch.zeros(packed + 64, 1152, dtype=torch.uint8, device=device)
    index_k(
        inputs.index_k,
        inputs.plan.page_table,
        lens=quads.request_lens,
        max_len=quads.max_blocks * BLOCK_SIZE,
        out_starts=quads.request_first,
        out_values=keys,
    )
    queries = torch.empty(count, 4 * heads, 128, dtype=torch.uint8, device=device)
    weights = torch.empty(count, 4, heads, device=device)
    index_q(
        inputs.index_q,
        inputs.head_weights,
        rows=quads.rows,
        counts=tables.counts,
        out_values=queries,
        out_weights=weights,
    )
    return Case(inputs.plan, quads, tables, keys, queries, weights)


def two_kernels(case: Case, k: int, starts: torch.Tensor | None = None) -> torch.Tensor:
    """`candidate_logits`, then `topk`."""
    out = case.poisoned(k)
    logits = torch.full((len(case.rows), case.columns), torch.nan, device=case.plan.device)
    candidate_logits(**case.operands, out=logits)
    topk(
        logits,
        case.lens,
        out=out,
        rows=case.rows,
        blocks=case.blocks,
        request_of_row=None if starts is None else case.plan.request_of_row,
        request_starts=starts,
    )
    return out


class Scratch(NamedTuple):
    slots: torch.Tensor
    counters: torch.Tensor


def make_scratch(case: Case, ctas: int) -> Scratch:
    device = case.plan.device
    slots = torch.full((ctas, SLOTS, 4, case.columns), torch.nan, device=device)
    return Scratch(slots, torch.zeros(1 + ctas, dtype=torch.int32, device=device))


def one_kernel(
    case: Case,
    k: int,
    ctas: int,
    starts: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """`candidate_topk`; its counters are zeros again."""
    out = case.poisoned(k)
    slots, counters = scratch or make_scratch(case, ctas)
    run_into(case, out, slots, counters, starts)
    assert not counters.any()
    return out


def run_into(
    case: Case,
    out: torch.Tensor,
    slots: torch.Tensor,
    counters: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> None:
    candidate_topk(
        **case.operands,
        lens=case.lens,
        rows=case.rows,
        blocks=case.blocks,
        slots=slots,
        counters=counters,
        out=out,
        request_of_row=None if starts is None else case.plan.request_of_row,
        request_starts=starts,
    )


def descending(rows: int, longest: int, step: int = 1) -> list[int]:
    return [max(longest - step * i, 0) for i in range(rows)]
