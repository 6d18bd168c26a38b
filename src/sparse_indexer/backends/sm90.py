# SPDX-License-Identifier: Apache-2.0
"""The `sm90` backend: Hopper's tensor cores score, no matrix of logits is ever written.

A source scores its context densely and keeps one key per block of 8 positions; its own selection,
and those of consumers, score candidate blocks only. Rows are scored by quads, four of one request,
whose candidates are gathered once; tables are kept by slot, a row's place in its quad.

`topk_prefill` is a publish of `topk + 1` blocks and a selection among them: at most `topk` blocks
hold a key that reaches the topk-th logit, and the newest block, always published, may displace one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from sparse_indexer.devices import resolve_device
from sparse_indexer.errors import BackendUnavailable, JitError, describe, expect_int, mismatch
from sparse_indexer.formats import HEAD_DIM, INT32_MAX
from sparse_indexer.index_k import BLOCK_SIZE
from sparse_indexer.inputs import IndexQ, PrefillIndexerInputs, expect_out_positions
from sparse_indexer.jit import warmup
from sparse_indexer.jit.kernel import all_kernels
from sparse_indexer.ops.candidate_logits import candidate_logits
from sparse_indexer.ops.candidate_quads import RANK_EVERY, candidate_quads
from sparse_indexer.ops.dense_block_keys import dense_block_keys
from sparse_indexer.ops.index_k import index_k
from sparse_indexer.ops.index_q import index_q
from sparse_indexer.ops.topk import topk
from sparse_indexer.plan import PrefillPlan
from sparse_indexer.protocol import Candidates, expect_candidates
from sparse_indexer.quads import GROUP_QUADS, Quads, make_quads
from sparse_indexer.scratch import Scratch

_KERNELS = (
    "candidate_logits",
    "candidate_quads",
    "dense_block_keys",
    "index_k",
    "index_q",
    "row_quads",
    "topk",
)
_MAX_HEADS = 64
_UNIT_BLOCKS = 64  # what dense_block_keys scores at least


class _Tables(NamedTuple):
    """Candidates of quads."""

    blocks: torch.Tensor  # [quads, 4, n] int32: of each slot's row, ascending, then INT32_MAX
    entries: torch.Tensor  # [quads, width] int32: see candidate_quads
    ranks: torch.Tensor  # [quads, ceil(width / 32), 4] int16: see candidate_quads
    counts: torch.Tensor  # [quads, 2] int32: entries of each list, see candidate_quads


class _Sm90Candidates(Candidates):
    """Tables by slot. `blocks`, by row, is made when somebody asks."""

    def __init__(self, plan: PrefillPlan, quads: Quads, tables: _Tables) -> None:
        self.plan = plan
        self.quads = quads
        self.tables = tables
        self.stream = torch.cuda.current_stream(plan.device)
        self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.ready.record(self.stream)
        self._by_row: torch.Tensor | None = None

    @property
    def blocks(self) -> torch.Tensor:
        if self._by_row is None:
            self.wait()
            self._by_row = self.tables.blocks.flatten(0, 1)[self.quads.slots.long()]
        return self._by_row

    def wait(self) -> None:
        """Let the current stream read the tables."""
        stream = torch.cuda.current_stream(self.plan.device)
        if stream == self.stream or torch.cuda.is_current_stream_capturing():
            return
        stream.wait_event(self.ready)
        for tensor in (*self.tables, *self.quads[1:]):
            tensor.record_stream(stream)


class _Scope(NamedTuple):
    """Requests whose keys are packed at the same time, and tiles of their quads."""

    keys: torch.Tensor  # [packed blocks, ...]
    first: torch.Tensor  # [quads] int32: a quad's first block in `keys`; of all the plan's quads
    max_blocks: int  # of one request
    tiles: list[slice]  # of quads
    scratch: Scratch  # for one tile at a time


class Sm90Indexer:
    """`CandidateIndexer` on Hopper (compute capability 9.0).

    fp8 and fp4 keys and queries are scored in e4m3, exactly what they store (`index_k` says when
    fp4 is rounded); if one of them is fp16 or bf16, both are scored in halves. At most 64 heads.

    Args:
        device: a CUDA device.
        topk: positions a row selects.
        topk_blocks: blocks of 8 positions a row publishes.
        memory_budget: bytes of scratch beside inputs, outputs and published tables, at most. The
            keys of a request are packed in it: 144 bytes a position, 272 in halves.

    Its kernels are built and loaded here, so that calls need no compiler and can be captured.

    Raises:
        ValueError: an option is out of range; from the methods also: more than 64 heads, or a
            budget below what the longest request takes (the message says how much that is).
        BackendUnavailable: a kernel can be neither built nor loaded.
    """

    name = "sm90"

    def __init__(
        self,
        device: torch.device | str,
        *,
        topk: int = 512,
        topk_blocks: int = 2048,
        memory_budget: int = 256 << 20,
    ) -> None:
        self.device = resolve_device(device)
        if self.device.type != "cuda":
            raise mismatch("device", "a CUDA device", str(self.device))
        self.topk = expect_int("topk", topk, 0, 1 << 15)
        self.topk_blocks = expect_int("topk_blocks", topk_blocks, 1, 1 << 15)
        self.memory_budget = expect_int("memory_budget", memory_budget, 1)
        kernels = [all_kernels()[name] for name in _KERNELS]
        if any(self.device not in kernel.loaded for kernel in kernels):
            try:
                warmup(self.device, kernels)
            except JitError as error:
                raise BackendUnavailable(f"sm90: {error}") from error
        self._pool = torch.cuda.MemPool()

    @torch.no_grad()
    def publish_prefill(
        self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor | None = None
    ) -> Candidates:
        """See `CandidateIndexer.publish_prefill`. The tables live in a pool of their own."""
        self._expect(inputs, out_positions)
        together = out_positions is not None and self.topk < self.topk_blocks
        with self._private_pool():
            quads = make_quads(inputs.plan)
            tables = self._tables(len(quads.rows), self.topk_blocks, quads)
        out = out_positions if together else None
        self._score(inputs, quads, self.topk_blocks, tables, out, dense=True)
        candidates = _Sm90Candidates(inputs.plan, quads, tables)
        if out_positions is not None and not together:
            self.select_prefill(candidates, inputs, out_positions)
        return candidates

    @torch.no_grad()
    def select_prefill(
        self, candidates: Candidates, inputs: PrefillIndexerInputs, out_positions: torch.Tensor
    ) -> None:
        """See `CandidateIndexer.select_prefill`. Takes any backend's candidates."""
        self._expect(inputs, out_positions, wanted=True)
        if isinstance(candidates, _Sm90Candidates) and candidates.plan is inputs.plan:
            candidates.wait()
            quads, tables = candidates.quads, candidates.tables
        else:
            blocks = expect_candidates(candidates, inputs, self.device)
            quads = make_quads(inputs.plan)
            tables = self._tables_of(blocks, quads)
        self._score(inputs, quads, tables.blocks.shape[2], tables, out_positions, dense=False)

    @torch.no_grad()
    def prefill_tail(self, candidates: Candidates, tail_lens: Sequence[int]) -> Candidates:
        """See `CandidateIndexer.prefill_tail`."""
        if not isinstance(candidates, Candidates):
            raise mismatch("candidates", "Candidates", candidates)
        rows, plan = candidates.plan.tail_rows(tail_lens), candidates.plan.tail(tail_lens)
        if isinstance(candidates, _Sm90Candidates):
            candidates.wait()
            source = candidates.tables.blocks.flatten(0, 1)
            rows = candidates.quads.slots[rows].long()
        else:
            source = candidates.blocks
        with self._private_pool():
            quads = make_quads(plan)
            tables = self._tables_of(source, quads, rows)
        return _Sm90Candidates(plan, quads, tables)

    @torch.no_grad()
    def topk_prefill(self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor) -> None:
        """See `CandidateIndexer.topk_prefill`."""
        self._expect(inputs, out_positions, wanted=True)
        quads = make_quads(inputs.plan)
        self._score(inputs, quads, self.topk + 1, None, out_positions, dense=True)

    def _score(
        self,
        inputs: PrefillIndexerInputs,
        quads: Quads,
        n: int,
        tables: _Tables | None,
        out_positions: torch.Tensor | None,
        *,
        dense: bool,
    ) -> None:
        """Tile by tile: if `dense`, the best n blocks of each row; the best positions of those.

        Args:
            tables: of all quads, written if `dense`; `None`: in scratch.
            out_positions: `None`: no positions are selected.
        """
        plan, element = inputs.plan, _element(inputs)
        heads = 32 if inputs.num_heads <= 32 else _MAX_HEADS
        queries = _contiguous(inputs.index_q)
        head_weights = inputs.head_weights.contiguous()
        starts = plan.request_starts
        scopes = self._scopes(
            inputs,
            quads,
            n,
            element,
            heads,
            own_tables=tables is None,
            dense=dense,
            select=out_positions is not None,
        )
        for scope in scopes:
            columns = min(n, scope.max_blocks)
            width = -(-scope.max_blocks // _UNIT_BLOCKS) * _UNIT_BLOCKS
            for tile in scope.tiles:
                count = tile.stop - tile.start
                scratch = scope.scratch.restart()
                values = scratch.take((count, 4 * heads, HEAD_DIM), element)
                weights = scratch.take((count, 4, heads), torch.float32)
                rows, lens = quads.rows[tile], quads.slot_lens[tile].view(-1)
                first = scope.first[tile]
                packed = {"rows": rows, "out_values": values, "out_weights": weights}
                if tables is None:
                    its = self._tables(count, n, quads, scratch)
                else:
                    its = _Tables(*(t[tile] for t in tables))
                if dense:
                    keys = scratch.peek((count * 4, width), torch.float32)
                    if scope.max_blocks > n:
                        index_q(queries, head_weights, **packed)
                        dense_block_keys(
                            scope.keys,
                            values,
                            weights,
                            quad_lens=quads.lens[tile],
                            quad_first=first,
                            out=keys,
                        )
                    topk(
                        keys,
                        lens,
                        out=its.blocks.view(count * 4, n),
                        per_column=BLOCK_SIZE,
                        force_last=True,
                        unused=INT32_MAX,
                    )
                    self._merge(its, scope.max_blocks)
                if out_positions is None:
                    continue
                index_q(queries, head_weights, counts=its.counts, **packed)
                logits = scratch.peek((count * 4, columns * BLOCK_SIZE), torch.float32)
                candidate_logits(
                    scope.keys,
                    values,
                    weights,
                    entries=its.entries,
                    ranks=its.ranks,
                    counts=its.counts,
                    quad_first=first,
                    out=logits,
                )
                topk(
                    logits,
                    lens,
                    out=out_positions,
                    rows=rows.view(-1),
                    blocks=its.blocks.view(count * 4, n),
                    request_of_row=None if starts is None else plan.request_of_row,
                    request_starts=starts,
                )

    def _scopes(
        self,
        inputs: PrefillIndexerInputs,
        quads: Quads,
        n: int,
        element: torch.dtype,
        heads: int,
        *,
        own_tables: bool,
        dense: bool,
        select: bool,
    ) -> Iterator[_Scope]:
        """As many requests at a time as half the budget holds the keys of, but at least one."""
        plan = inputs.plan
        where = plan.page_table if plan.page_table is not None else plan.key_starts
        assert where is not None
        # Of a packed block: values of 8 positions, then 128 bytes that hold their scales.
        elements = BLOCK_SIZE * HEAD_DIM + 128 // element.itemsize
        block_bytes = elements * element.itemsize
        begin = 0
        while begin < len(quads.requests):
            end, blocks, longest = begin, 0, 0
            while end < len(quads.requests):
                more = quads.requests[end].blocks
                if end > begin and (blocks + more) * block_bytes > self.memory_budget // 2:
                    break
                end, blocks, longest = end + 1, blocks + more, max(longest, more)
            base, last = quads.requests[begin], quads.requests[end - 1]
            stop = last.first_quad + last.quads
            if base.first_quad == stop:
                begin = end
                continue

            width = -(-longest // _UNIT_BLOCKS) * _UNIT_BLOCKS if dense else 0
            columns = min(n, longest) * BLOCK_SIZE if select else 0
            of_quad = 4 * heads * (HEAD_DIM * element.itemsize + 4) + 16 * max(width, columns)
            if own_tables:
                width = min(4 * n, _most_blocks(quads))
                of_quad += 4 * (4 * n + width + 2) + 8 * -(-width // RANK_EVERY)
            packed = (blocks + _UNIT_BLOCKS) * block_bytes
            free = self.memory_budget - packed - Scratch.SLACK
            tile = min(free // of_quad // GROUP_QUADS * GROUP_QUADS, stop - base.first_quad)
            if tile < GROUP_QUADS:
                least = packed + Scratch.SLACK + GROUP_QUADS * of_quad
                raise mismatch("memory_budget", f"at least {least} bytes", str(self.memory_budget))
            scratch = Scratch(
                packed + Scratch.SLACK + tile * of_quad, self.memory_budget, self.device
            )
            keys = scratch.take((blocks + _UNIT_BLOCKS, elements), element)
            scratch.keep()
            request_first, first = quads.request_first[begin:end], quads.first
            if base.first_block:
                request_first, first = request_first - base.first_block, first - base.first_block
            index_k(
                inputs.index_k,
                where[begin:end],
                lens=quads.request_lens[begin:end],
                max_len=longest * BLOCK_SIZE,
                out_starts=request_first,
                out_values=keys,
                out_scales=None,
            )
            tiles = [slice(q, min(q + tile, stop)) for q in range(base.first_quad, stop, tile)]
            yield _Scope(keys, first, longest, tiles, scratch)
            begin = end

    def _tables(self, count: int, n: int, quads: Quads, scratch: Scratch | None = None) -> _Tables:
        width = min(4 * n, _most_blocks(quads))
        pieces = (
            ((count, 4, n), torch.int32),
            ((count, width), torch.int32),
            ((count, -(-width // RANK_EVERY), 4), torch.int16),
            ((count, 2), torch.int32),
        )
        if scratch is not None:
            return _Tables(*(scratch.take(*piece) for piece in pieces))
        return _Tables(*(torch.empty(s, dtype=d, device=self.device) for s, d in pieces))

    def _tables_of(
        self, blocks: torch.Tensor, quads: Quads, places: torch.Tensor | None = None
    ) -> _Tables:
        """Tables of rows whose candidates are `blocks[places]`, default `blocks`."""
        tables = self._tables(len(quads.rows), blocks.shape[1], quads)
        rows = quads.rows.view(-1).long()
        there = rows.clamp(min=0)
        if len(blocks) and len(rows):
            source = there if places is None else places[there]
            picked = blocks[source].masked_fill_((rows < 0)[:, None], INT32_MAX)
            tables.blocks.copy_(picked.view_as(tables.blocks))
        self._merge(tables, _most_blocks(quads))
        return tables

    def _merge(self, tables: _Tables, max_blocks: int) -> None:
        candidate_quads(
            tables.blocks,
            max_blocks=max_blocks,
            pairs=True,
            out_entries=tables.entries,
            out_ranks=tables.ranks,
            out_counts=tables.counts,
        )

    @contextlib.contextmanager
    def _private_pool(self) -> Iterator[None]:
        """What outlives a call does not share memory with scratch: no fragments between chunks."""
        if torch.cuda.is_current_stream_capturing():  # into a pool of the graph's own
            yield
            return
        with torch.cuda.use_mem_pool(self._pool, self.device):
            yield

    def _expect(
        self,
        inputs: PrefillIndexerInputs,
        out_positions: torch.Tensor | None,
        *,
        wanted: bool = False,
    ) -> None:
        if not isinstance(inputs, PrefillIndexerInputs):
            raise mismatch("inputs", "PrefillIndexerInputs", describe(inputs))
        plan = inputs.plan
        if plan.device != self.device:
            raise mismatch("inputs", f"tensors on {self.device}", str(plan.device))
        if inputs.num_heads > _MAX_HEADS:
            raise mismatch("index_q values", "at most 64 heads", f"{inputs.num_heads}")
        if wanted or out_positions is not None:
            expect_out_positions(out_positions, plan.num_rows, self.topk, self.device)


def _element(inputs: PrefillIndexerInputs) -> torch.dtype:
    """What is scored: uint8 stands for e4m3 codes."""
    queries, keys = inputs.index_q.values.dtype, inputs.index_k.format
    halves = {torch.float16, torch.bfloat16} & {
        queries,
        {"fp16": torch.float16, "bf16": torch.bfloat16}.get(keys),
    }
    if not halves:
        return torch.uint8
    return torch.bfloat16 if halves == {torch.bfloat16} else torch.float16


def _contiguous(queries: IndexQ) -> IndexQ:
    if queries.values.is_contiguous() and (
        queries.scales is None or queries.scales.is_contiguous()
    ):
        return queries
    scales = queries.scales
    return IndexQ(queries.values.contiguous(), None if scales is None else scales.contiguous())


def _most_blocks(quads: Quads) -> int:
    return max((request.blocks for request in quads.requests), default=0)
