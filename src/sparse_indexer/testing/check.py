# SPDX-License-Identifier: Apache-2.0
"""Is this a `CandidateIndexer`? Every case, every rule, every law, and which of them failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from inspect import get_annotations
from numbers import Real
from typing import TypeVar, get_args

import msgspec
import torch

from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.devices import resolve_device
from sparse_indexer.errors import describe, expect_int, mismatch
from sparse_indexer.formats import INT32_MAX, KeyFormat
from sparse_indexer.inputs import BLOCK_SIZE, PrefillIndexerInputs
from sparse_indexer.protocol import CandidateIndexer, Candidates
from sparse_indexer.testing.cases import CASES, Case, CaseConfig
from sparse_indexer.testing.compare import (
    block_values,
    blocks_problem,
    equal_problem,
    logits_problem,
    near_floor_problem,
    positions_problem,
)
from sparse_indexer.testing.data import Layout, tail_inputs
from sparse_indexer.testing.oracle import oracle_publish, oracle_select
from sparse_indexer.testing.turns import turns

_T = TypeVar("_T")
OwnLogits = Callable[[PrefillIndexerInputs], torch.Tensor]

_POISON = 7
_GUARD_COLUMNS = 5


class Failure(msgspec.Struct, frozen=True):
    """One check that failed."""

    case: str
    check: str
    problem: str


class Report(msgspec.Struct, frozen=True):
    """What `check_backend` found."""

    backend: str
    checks: int
    failures: list[Failure]
    selecting_rows: int
    """Rows, over all cases, that saw more positions than topk, so that something was left out."""

    def raise_if_failed(self) -> None:
        """Raise an AssertionError that lists the failures, if there are any."""
        if self.failures:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        lines = [
            f"{self.backend}: {len(self.failures)} of {self.checks} checks failed, "
            f"{self.selecting_rows} rows saw more than topk"
        ]
        lines += [f"  {f.case}: {f.check}: {f.problem}" for f in self.failures]
        return "\n".join(lines)


def check_backend(
    indexer: CandidateIndexer,
    *,
    formats: Sequence[KeyFormat] = ("fp8", "fp4", "fp16", "bf16"),
    layouts: Sequence[Layout] = ("planar", "interleaved", "flat"),
    heads: Sequence[int] = (32, 64),
    page_sizes: Sequence[int] = (64, 8, 256),
    tolerance: float = 0.0,
    exact_cases: bool = True,
    own_logits: OwnLogits | None = None,
) -> Report:
    """Run every case of `CASES` through an indexer and compare it with the `mask` backend.

    On cases whose logits are exact in fp32 the blocks and positions must be equal to the last one.
    On random data the logits of a backend may differ from the oracle's by `tolerance`: then its
    selection must follow from its own logits, if `own_logits` is given, and wherever it differs
    from the oracle's, the entry must be within twice the tolerance of the selection floor.

    Args:
        indexer: what is checked; the cases are sized for its `topk` and `topk_blocks`.
        formats, layouts, heads, page_sizes: what it claims to support. Each case runs in every
            format; the others take turns, so that it meets as many of each as there are formats.
        tolerance: relative to a row's largest |logit|, finite; 0: equal there as well.
        exact_cases: hold it to the last entry where logits are exact in fp32; `False`, for a
            backend that rounds them further (`sm100`: to bfloat16): within the tolerance.
        own_logits: the backend's logits, `[rows, max(context_lens)]` float32.

    Returns:
        A report; `report.raise_if_failed()` in a test.

    Raises:
        ValueError: an argument is not as above, or one of the sequences is empty.
    """
    _expect_arguments(indexer, tolerance, own_logits)
    formats = _expect_each("formats", formats, get_args(KeyFormat))
    layouts = _expect_each("layouts", layouts, get_args(Layout))
    heads, page_sizes = _expect_each("heads", heads), _expect_each("page_sizes", page_sizes)
    for i, count in enumerate(heads):
        expect_int(f"heads[{i}]", count, 1)
    for i, size in enumerate(page_sizes):
        if expect_int(f"page_sizes[{i}]", size, 1) % BLOCK_SIZE:
            raise mismatch(f"page_sizes[{i}]", f"a multiple of {BLOCK_SIZE}", str(size))
    checks = selecting = 0
    failures: list[Failure] = []
    for name, form, layout, count, page_size in turns(
        list(CASES), formats, layouts, heads, page_sizes
    ):
        config = CaseConfig(
            topk=indexer.topk,
            topk_blocks=indexer.topk_blocks,
            format=form,
            layout=layout,
            heads=count,
            page_size=page_size,
            device=indexer.device,
        )
        case = CASES[name](config)
        selecting += int((case.source.plan.compressed_lens > indexer.topk).sum())
        exact = case.exact and (exact_cases or not case.source.plan.num_rows)
        run = _Run(indexer, case, 0.0 if exact else tolerance, own_logits)
        where = f"{name}[{form}, {layout}, {count} heads, pages of {page_size}]"
        try:
            for check, problem in run.problems():
                checks += 1
                if problem is not None:
                    failures.append(Failure(where, check, problem))
        except Exception as error:  # whatever a backend raises is a finding
            checks += 1
            failures.append(Failure(where, "runs", f"{type(error).__name__}: {error}"))
    return Report(indexer.name, checks, failures, selecting)


def _expect_arguments(
    indexer: CandidateIndexer, tolerance: float, own_logits: OwnLogits | None
) -> None:
    parts = [*get_annotations(CandidateIndexer), *vars(CandidateIndexer)]
    missing = [part for part in parts if not part.startswith("_") and not hasattr(indexer, part)]
    if missing:
        raise mismatch(
            "indexer", f"a CandidateIndexer, with {', '.join(missing)}", describe(indexer)
        )
    if not isinstance(indexer.name, str):
        raise mismatch("indexer.name", "a str", describe(indexer.name))
    expect_int("indexer.topk", indexer.topk, 0)
    expect_int("indexer.topk_blocks", indexer.topk_blocks, 1)
    try:
        where = resolve_device(indexer.device)
    except ValueError as error:
        raise ValueError(f"indexer.{error}") from error
    if where.type == "meta":
        raise mismatch("indexer.device", "a device that has values", str(where))
    if isinstance(tolerance, bool) or not isinstance(tolerance, Real):
        raise mismatch("tolerance", "a number", describe(tolerance))
    if not 0 <= tolerance < float("inf"):
        raise mismatch("tolerance", "a finite number of at least 0", str(tolerance))
    if own_logits is not None and not callable(own_logits):
        raise mismatch("own_logits", "a function or None", describe(own_logits))


def _expect_each(name: str, values: Sequence[_T], known: Sequence[_T] = ()) -> tuple[_T, ...]:
    """`values` if there are any, all of them `known` if some are given; in their order."""
    if isinstance(values, str) or not isinstance(values, Collection):
        raise mismatch(name, "a sequence", describe(values))
    if not values:
        raise mismatch(name, "at least one", "none")
    for i, value in enumerate(values):
        if known and value not in known:
            raise mismatch(f"{name}[{i}]", " or ".join(map(repr, known)), describe(value))
    return tuple(values)


class _Run:
    """One case through one indexer."""

    def __init__(
        self,
        indexer: CandidateIndexer,
        case: Case,
        tolerance: float,
        own_logits: OwnLogits | None,
    ) -> None:
        self.indexer = indexer
        self.case = case
        self.tolerance = tolerance
        self.own_logits = own_logits
        self.oracle = MaskIndexer(
            indexer.device,
            topk=indexer.topk,
            topk_blocks=indexer.topk_blocks,
            accumulate=torch.float64,
        )

    def problems(self) -> Iterator[tuple[str, str | None]]:
        """(check, problem or None), in an order that runs the indexer before the oracle."""
        source, consumer, indexer = self.case.source, self.case.consumer, self.indexer
        own, problem = self._positions(source)
        candidates = indexer.publish_prefill(source, own)
        yield "publish: own positions are well-formed", problem(candidates)
        selected, problem = self._positions(consumer)
        indexer.select_prefill(candidates, consumer, selected)
        yield "select: positions are well-formed", problem(candidates)
        full, problem = self._positions(consumer)
        indexer.topk_prefill(consumer, full)
        yield "topk: positions are well-formed", problem(None)

        yield from self._against_oracle(candidates, own, selected, full)
        yield from self._laws(candidates, own, selected)
        if self.own_logits is not None:
            yield from self._against_own_logits(candidates, selected, full)

    def _positions(
        self, inputs: PrefillIndexerInputs
    ) -> tuple[torch.Tensor, Callable[[Candidates | None], str | None]]:
        """A poisoned out_positions inside a wider buffer, and the check of it afterwards."""
        rows, topk = inputs.plan.num_rows, self.indexer.topk
        shape = (rows + 1, topk + _GUARD_COLUMNS)
        buffer = torch.full(shape, _POISON, dtype=torch.int32, device=self.indexer.device)
        out = buffer[:rows, :topk]

        def problem(candidates: Candidates | None) -> str | None:
            if (buffer[rows:] != _POISON).any() or (buffer[:, topk:] != _POISON).any():
                return "wrote outside out_positions"
            return positions_problem(out, inputs.plan, candidates)

        return out, problem

    def _against_oracle(
        self,
        candidates: Candidates,
        own: torch.Tensor,
        selected: torch.Tensor,
        full: torch.Tensor,
    ) -> Iterator[tuple[str, str | None]]:
        source, consumer = self.case.source, self.case.consumer
        yield "publish: blocks are well-formed", blocks_problem(candidates)
        want_own, want_selected, want_full = (torch.empty_like(t) for t in (own, selected, full))
        oracle_candidates = self.oracle.publish_prefill(source)
        # Of its own blocks, which within the tolerance may be others than the oracle's.
        self.oracle.select_prefill(candidates, source, want_own)
        self.oracle.select_prefill(candidates, consumer, want_selected)
        self.oracle.topk_prefill(consumer, want_full)
        pairs = (
            ("publish: blocks", candidates.blocks, oracle_candidates.blocks, source),
            ("publish: own positions among its candidates", own, want_own, source),
            ("select: positions among its candidates", selected, want_selected, consumer),
            ("topk: positions", full, want_full, consumer),
        )
        for check, got, want, inputs in pairs:
            if not self.tolerance:
                yield f"{check} = oracle's", equal_problem(got, want)
                continue
            if check != "publish: blocks":
                got, want = (_without_starts(positions, inputs) for positions in (got, want))
            logits = self.oracle.dense_logits(inputs)
            finite = logits.nan_to_num(0.0, 0.0, 0.0).abs().amax(1)
            values = logits
            if check == "publish: blocks":
                values = block_values(logits)
                lens = inputs.plan.compressed_lens.long()
                seen = (lens > 0).nonzero().flatten()
                # Published whatever it holds, so it is not what sets a floor.
                values[seen, (lens[seen] - 1) // BLOCK_SIZE] = torch.inf
            problem = near_floor_problem(got, want, values, 2 * self.tolerance * finite)
            yield f"{check} within the tolerance of the oracle's", problem

    def _laws(
        self, candidates: Candidates, own: torch.Tensor, selected: torch.Tensor
    ) -> Iterator[tuple[str, str | None]]:
        source, consumer, indexer = self.case.source, self.case.consumer, self.indexer
        again = torch.full_like(own, _POISON)
        before = candidates.blocks.clone()
        indexer.publish_prefill(consumer)
        yield "candidates outlive another publish", equal_problem(candidates.blocks, before)
        repeated = indexer.publish_prefill(source)
        yield "publish again: same blocks", equal_problem(repeated.blocks, before)
        indexer.select_prefill(repeated, source, again)
        yield "select with the source's queries = own positions", equal_problem(again, own)

        rows = source.plan.rows_per_request
        tail_lens = [min(count, 1 + i % 3) for i, count in enumerate(rows)]
        tail_rows = source.plan.tail_rows(tail_lens)
        tail = indexer.prefill_tail(candidates, tail_lens)
        want = candidates.blocks[tail_rows]
        yield "tail = the rows of the publish", equal_problem(tail.blocks, want)
        out = torch.full_like(selected[tail_rows], _POISON)
        published = indexer.publish_prefill(tail_inputs(source, tail_lens), out)
        yield "tail = publish of the tail rows", equal_problem(published.blocks, want)
        yield "own positions of the tail rows", equal_problem(out, own[tail_rows])
        its_consumer = tail_inputs(consumer, tail_lens)
        indexer.select_prefill(tail, its_consumer, out)
        yield "select of the tail = its rows", equal_problem(out, selected[tail_rows])

        last_lens = [min(count, i % 2) for i, count in enumerate(tail_lens, start=1)]
        last_rows = tail.plan.tail_rows(last_lens)
        last = indexer.prefill_tail(tail, last_lens)
        yield "tail of a tail = its rows", equal_problem(last.blocks, want[last_rows])
        last_out = torch.full_like(out[last_rows], _POISON)
        indexer.select_prefill(last, tail_inputs(its_consumer, last_lens), last_out)
        yield "select of a tail's tail = its rows", equal_problem(last_out, out[last_rows])

    def _against_own_logits(
        self, candidates: Candidates, selected: torch.Tensor, full: torch.Tensor
    ) -> Iterator[tuple[str, str | None]]:
        assert self.own_logits is not None
        for name, inputs in (("source", self.case.source), ("consumer", self.case.consumer)):
            plan, got = inputs.plan, self.own_logits(inputs)
            lens = plan.compressed_lens.tolist()
            want = self.oracle.dense_logits(inputs)
            problem = logits_problem(got, want, lens, self.tolerance)
            yield f"{name}: logits within the tolerance of the oracle's", problem
            rows = [row[:n] for row, n in zip(got.tolist(), lens, strict=True)]
            if name == "source":
                ids = oracle_publish(rows, self.indexer.topk_blocks)
                problem = equal_problem(
                    candidates.blocks, _padded(ids, candidates.blocks, INT32_MAX)
                )
                yield "publish: blocks follow from its own logits", problem
                continue
            published = [[b for b in ids if b != INT32_MAX] for ids in candidates.blocks.tolist()]
            for check, out, among in (("select", selected, published), ("topk", full, None)):
                chosen = oracle_select(rows, self.indexer.topk, among)
                starts = plan.request_starts
                if starts is not None:
                    first = starts[plan.request_of_row.long()].tolist()
                    chosen = [[n + s for n in r] for r, s in zip(chosen, first, strict=True)]
                problem = equal_problem(out, _padded(chosen, out, -1))
                yield f"{check}: positions follow from its own logits", problem


def _without_starts(positions: torch.Tensor, inputs: PrefillIndexerInputs) -> torch.Tensor:
    """Request-relative positions, as rows of logits have columns."""
    starts = inputs.plan.request_starts
    if starts is None:
        return positions
    first = starts[inputs.plan.request_of_row.long()]
    return torch.where(positions < 0, positions, positions - first[:, None])


def _padded(rows: list[list[int]], like: torch.Tensor, fill: int) -> torch.Tensor:
    width = like.shape[1]
    padded = [row + [fill] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=like.dtype, device=like.device).view(like.shape)
