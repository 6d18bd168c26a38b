# SPDX-License-Identifier: Apache-2.0
"""Scoring by quads, tile by tile: no matrix of logits beyond a tile's candidates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sparse_indexer.formats import HEAD_DIM, INT32_MAX
from sparse_indexer.index_k import BLOCK_SIZE
from sparse_indexer.inputs import IndexQ, PrefillIndexerInputs
from sparse_indexer.ops.candidate_logits import candidate_logits
from sparse_indexer.ops.candidate_topk import MOST, candidate_topk
from sparse_indexer.ops.dense_block_keys import dense_block_keys
from sparse_indexer.ops.fused_block_keys import fused_block_keys
from sparse_indexer.ops.fused_candidate_logits import fused_candidate_logits
from sparse_indexer.ops.index_q import index_q
from sparse_indexer.ops.topk import topk
from sparse_indexer.quad_scopes import UNIT_BLOCKS, Scoring, quad_scopes
from sparse_indexer.quads import Quads, Tables, empty_tables, merge_blocks

MAX_HEADS = 64


class QuadKernels(NamedTuple):
    """The kernels that score on some GPUs."""

    names: tuple[str, ...]
    bf16: bool  # bfloat16 is scored as it is, else as float16 with scales
    pairs: bool  # a quad may have two lists of candidates
    block_keys: Callable[..., None]  # of (keys, queries, weights, quads, first, out)
    candidate_logits: Callable[..., None]  # see ops.candidate_logits
    candidate_topk: Callable[..., None] | None  # see ops.candidate_topk; of e4m3


def _wgmma_block_keys(
    keys: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
    quads: Quads,
    first: torch.Tensor,
    out: torch.Tensor,
) -> None:
    dense_block_keys(keys, queries, weights, quad_lens=quads.lens, quad_first=first, out=out)


def _mma_sync_block_keys(
    keys: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
    quads: Quads,
    first: torch.Tensor,
    out: torch.Tensor,
) -> None:
    fused_block_keys(keys, queries, weights, slot_lens=quads.slot_lens, quad_first=first, out=out)


WGMMA = QuadKernels(
    ("candidate_logits", "candidate_topk", "dense_block_keys"),
    bf16=True,
    pairs=True,
    block_keys=_wgmma_block_keys,
    candidate_logits=candidate_logits,
    candidate_topk=candidate_topk,
)
"""Of Hopper."""
MMA_SYNC = QuadKernels(
    ("fused_block_keys", "fused_candidate_logits"),
    bf16=False,
    pairs=False,
    block_keys=_mma_sync_block_keys,
    candidate_logits=fused_candidate_logits,
    candidate_topk=None,
)
"""Of Volta and Turing."""


def score(
    inputs: PrefillIndexerInputs,
    quads: Quads,
    tables: Tables | None,
    out_positions: torch.Tensor | None,
    kernels: QuadKernels,
    *,
    n: int,
    dense: bool,
    budget: int,
) -> None:
    """Tile by tile: if `dense`, the best n blocks of each row; the best positions of those.

    If `dense`, positions are selected out of the `topk + 1` best blocks of a long context, which
    hold the best of all (`quad_indexer`); of a short one all blocks are scored, only once.

    Args:
        tables: of all quads, written if `dense`; `None`: in scratch.
        out_positions: `None`: no positions are selected.
    """
    plan, element = inputs.plan, _element(inputs, kernels)
    heads = 32 if inputs.num_heads <= 32 else MAX_HEADS
    queries = _contiguous(inputs.index_q)
    head_weights = inputs.head_weights.contiguous()
    starts = plan.request_starts
    call = Scoring(
        element,
        heads,
        n,
        few=out_positions.shape[1] + 1 if dense and out_positions is not None else n,
        tables=tables is not None,
        dense=dense,
        select=out_positions is not None,
        one_kernel=(
            kernels.candidate_topk is not None
            and element == torch.uint8
            and out_positions is not None
            and out_positions.shape[1] <= MOST[heads]
            and not dense
        ),
        budget=budget,
    )
    for scope in quad_scopes(inputs, quads, call):
        columns = min(scope.scored, scope.max_blocks)
        width = -(-scope.max_blocks // UNIT_BLOCKS) * UNIT_BLOCKS
        for tile in scope.tiles:
            count = tile.stop - tile.start
            whole = count == quads.lens.shape[0]
            scratch = scope.scratch.restart()
            values = scratch.take((count, 4 * heads, HEAD_DIM), element)
            weights = scratch.take((count, 4, heads), torch.float32)
            own, first = quads, scope.first
            if not whole:
                own, first = quads.part(tile), scope.first[tile]
            lens = own.slot_lens.view(-1)
            wanted = []  # tables of this tile
            if tables is not None:
                wanted.append(tables if whole else Tables(*(t[tile] for t in tables)))
            if scope.own_tables:
                wanted.append(empty_tables(count, scope.scored, scope.max_blocks, scratch.take))
            its = wanted[-1]  # candidates that are scored
            packed = {"rows": own.rows, "out_values": values, "out_weights": weights}
            if dense:
                keys = scratch.peek((count * 4, width), torch.float32)
                if scope.max_blocks > n:
                    index_q(queries, head_weights, **packed)
                    kernels.block_keys(scope.keys, values, weights, own, first, keys)
                for made in wanted:
                    topk(
                        keys,
                        lens,
                        out=made.blocks.flatten(0, 1),
                        per_column=BLOCK_SIZE,
                        force_last=True,
                        unused=INT32_MAX,
                    )
                    merge_blocks(made, scope.max_blocks, pairs=kernels.pairs)
            if out_positions is None:
                continue
            index_q(queries, head_weights, counts=its.counts, **packed)
            scored: dict[str, Any] = {
                "entries": its.entries,
                "ranks": its.ranks,
                "counts": its.counts,
                "quad_first": first,
            }
            selected: dict[str, Any] = {
                "out": out_positions,
                "rows": own.rows.view(-1),
                "blocks": its.blocks.flatten(0, 1),
                "request_of_row": None if starts is None else plan.request_of_row,
                "request_starts": starts,
            }
            if scope.slots is not None:
                assert kernels.candidate_topk is not None
                own_scratch = {"slots": scope.slots, "counters": scope.counters}
                kernels.candidate_topk(
                    scope.keys, values, weights, lens=lens, **scored, **selected, **own_scratch
                )
                continue
            logits = scratch.peek((count * 4, columns * BLOCK_SIZE), torch.float32)
            kernels.candidate_logits(scope.keys, values, weights, **scored, out=logits)
            topk(logits, lens, **selected)


def _element(inputs: PrefillIndexerInputs, kernels: QuadKernels) -> torch.dtype:
    """What is scored: uint8 stands for e4m3 codes."""
    queries, keys = inputs.index_q.values.dtype, inputs.index_k.format
    halves = {torch.float16, torch.bfloat16} & {
        queries,
        {"fp16": torch.float16, "bf16": torch.bfloat16}.get(keys),
    }
    if not halves:
        return torch.uint8
    return torch.bfloat16 if kernels.bf16 and halves == {torch.bfloat16} else torch.float16


def _contiguous(queries: IndexQ) -> IndexQ:
    if queries.values.is_contiguous() and (
        queries.scales is None or queries.scales.is_contiguous()
    ):
        return queries
    scales = queries.scales
    return IndexQ(queries.values.contiguous(), None if scales is None else scales.contiguous())
