# SPDX-License-Identifier: Apache-2.0
"""The demo: all calls of an indexer on a trace, what they cost and what they chose."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import torch

from sparse_indexer.errors import expect_int, mismatch
from sparse_indexer.factory import make_candidate_indexer
from sparse_indexer.formats import INT32_MAX
from sparse_indexer.inputs import (
    BLOCK_SIZE,
    FlatIndexK,
    IndexKPool,
    IndexQ,
    PrefillIndexerInputs,
    plan_prefill,
)
from sparse_indexer.meter import Meter, memory_rule
from sparse_indexer.protocol import Candidates
from sparse_indexer.trace import Trace, TraceLayer

PAGE_SIZE = 64
CHUNK_ROWS = 128  # rows of a call, at most: progress is told between calls
TAIL_ROWS = 32
MEMORY_BUDGET = 32 << 20  # bytes of scratch: a mask tile of 128 rows x 1024 positions takes 17 MB
_MOST = 16_384  # positions or blocks a row: they fit the budget, whatever the rest
_LOGITS_BYTES = 64 << 20  # logits of selected positions are kept if the matrix is at most this

OnProgress = Callable[[str, float], None]  # the step that runs, share of all steps done


class Step(msgspec.Struct, frozen=True):
    """One layer's calls over all of its rows; means over the rows."""

    name: str  # source, consumer, tail, full
    rows: int
    blocks: float | None  # that a row published; None: the step publishes none
    positions: float  # of a row: in its published blocks, or selected
    share: float  # these positions of those that the row sees
    seconds: float
    peak_bytes: int  # as `DemoResult.memory_rule` says


class DemoResult(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What a demo ran and chose; tensors are on the CPU, positions as in `CandidateIndexer`."""

    trace: Trace
    device: str
    backend: str
    memory_rule: str  # what the steps' peak_bytes are
    steps: list[Step]  # source, consumer (unless the trace has none), tail, full
    blocks: torch.Tensor  # [rows, topk_blocks] int32, as in Candidates
    source_positions: torch.Tensor  # [rows, topk] int32: the source's own selection
    positions: torch.Tensor  # [rows, topk] int32: the consumer's; no consumer: the source's own
    tail_positions: torch.Tensor  # [tail rows, topk] int32: the same, of the tail alone
    exact_positions: torch.Tensor  # [rows, topk] int32: the full layer's
    logits: torch.Tensor | None  # [rows, topk] float32 of `positions`; None: matrix too big

    @property
    def topk(self) -> int:
        """Positions a row selects."""
        return self.positions.shape[1]

    @property
    def context(self) -> int:
        """Positions that the last row sees."""
        return int(self.trace.compressed_lens[-1])

    @property
    def deep_rows(self) -> torch.Tensor:
        """`[n]` int64: the rows that see more than `topk` positions."""
        return (self.trace.compressed_lens > self.topk).nonzero().squeeze(1)

    @property
    def recall(self) -> float:
        """Mean over the deep rows of `|positions & exact_positions| / topk`; NaN without any."""
        rows = self.deep_rows
        hits = _common(self.positions[rows], self.exact_positions[rows])
        return (hits.double() / self.topk).mean().item()

    @property
    def overlap(self) -> float:
        """Of a row's published blocks, those that the row before published: mean, NaN if none."""
        hits = _common(self.blocks[1:], self.blocks[:-1])
        counts = (self.blocks[1:] != INT32_MAX).sum(1)
        return (hits.double() / counts)[counts > 0].mean().item()

    @property
    def tail_rows_equal(self) -> int:
        """Rows of the tail that select what they selected among all rows."""
        among_all = self.positions[-len(self.tail_positions) :]
        return int((self.tail_positions == among_all).all(1).sum())


def run_demo(
    trace: Trace,
    *,
    topk: int = 64,
    topk_blocks: int = 128,
    device: torch.device | str | None = None,
    backend: str = "auto",
    on_progress: OnProgress | None = None,
) -> DemoResult:
    """Run a source, a consumer, a tail and a full layer on the trace's rows.

    Without a consumer the source's own selection stands in for the consumer's.

    Args:
        device: default: the current GPU, without one the CPU.
        backend: as for `make_candidate_indexer`; `mask` if `"auto"` gives one that does not read
            the trace's keys.
        on_progress: called after each call of the indexer.

    Raises:
        ValueError: an option out of range.
        BackendUnavailable: the named backend cannot run on that device.
    """
    expect_int("topk", topk, 1, _MOST)
    expect_int("topk_blocks", topk_blocks, 1, _MOST)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"topk": topk, "topk_blocks": topk_blocks, "memory_budget": MEMORY_BUDGET}
    indexer = make_candidate_indexer(device, **options, backend=backend)
    if indexer.device.type not in ("cpu", "cuda"):
        raise mismatch("device", "cpu or cuda", str(indexer.device))
    where, paged = indexer.device, _PagedTrace(trace, indexer.device)
    rows, reader = len(trace.positions), trace.consumer or trace.source
    parts = -(-rows // CHUNK_ROWS)
    cuts = [rows * i // parts for i in range(parts + 1)]  # no chunk is shorter than the tail
    chunks = [slice(first, stop) for first, stop in itertools.pairwise(cuts)]
    tail_rows = min(TAIL_ROWS, rows)
    of_source = [paged.inputs(trace.source, chunk) for chunk in chunks]
    of_reader = [paged.inputs(reader, chunk) for chunk in chunks]
    of_tail = paged.inputs(reader, slice(rows - tail_rows, rows))
    own, selected, exact = torch.full((3, rows, topk), -1, dtype=torch.int32, device=where)
    tail_selected = torch.full((tail_rows, topk), -1, dtype=torch.int32, device=where)
    candidates: list[Candidates] = []

    def publish(i: int) -> None:
        candidates.append(indexer.publish_prefill(of_source[i], own[chunks[i]]))

    def select(i: int) -> None:
        indexer.select_prefill(candidates[i], of_reader[i], selected[chunks[i]])

    def select_tail(i: int) -> None:
        kept = indexer.prefill_tail(candidates[-1], [tail_rows])
        indexer.select_prefill(kept, of_tail, tail_selected)

    def select_exactly(i: int) -> None:
        indexer.topk_prefill(of_reader[i], exact[chunks[i]])

    work = {"source": publish, "consumer": select, "tail": select_tail, "full": select_exactly}
    if trace.consumer is None:
        del work["consumer"]
        selected = own
    row = slice(0, 1)
    try:  # warms up
        one = indexer.publish_prefill(paged.inputs(trace.source, row))
        indexer.select_prefill(one, paged.inputs(reader, row), own[row])
    except ValueError:  # what the fastest backend does not read, such as `sm100` fp8 keys
        if backend != "auto":
            raise
        indexer = make_candidate_indexer(where, **options, backend="mask")
    costs: dict[str, tuple[float, int]] = {}
    for done, (name, call) in enumerate(work.items()):
        calls, meter = 1 if name == "tail" else parts, Meter(where)
        for i in range(calls):
            call(i)
            if on_progress is not None:
                on_progress(name, (done + (i + 1) / calls) / len(work))
        costs[name] = meter.stop()

    lens, logits = trace.compressed_lens, None
    if 0 < rows * int(lens[-1]) * 4 <= _LOGITS_BYTES:
        pairs = zip(of_reader, chunks, strict=True)
        logits = torch.cat([_at(x.dense_scores(), selected[part]) for x, part in pairs]).cpu()
    blocks = torch.cat([c.blocks for c in candidates]).cpu()
    counts = (blocks != INT32_MAX).sum(1)
    kept = {  # positions of each row
        # The newest block is always published: what a row's blocks lack of 8 is past its end.
        "source": counts * BLOCK_SIZE - (-lens) % BLOCK_SIZE,
        "consumer": (selected.cpu() >= 0).sum(1),
        "tail": (tail_selected.cpu() >= 0).sum(1),
        "full": (exact.cpu() >= 0).sum(1),
    }
    return DemoResult(
        trace=trace,
        device=_device_name(where),
        backend=indexer.name,
        memory_rule=memory_rule(where),
        steps=[
            Step(
                name=name,
                rows=len(kept[name]),
                blocks=counts.double().mean().item() if name == "source" else None,
                positions=kept[name].double().mean().item(),
                share=(kept[name].double() / lens[-len(kept[name]) :].clamp(min=1)).mean().item(),
                seconds=seconds,
                peak_bytes=peak_bytes,
            )
            for name, (seconds, peak_bytes) in costs.items()
        ],
        blocks=blocks,
        source_positions=own.cpu(),
        positions=selected.cpu(),
        tail_positions=tail_selected.cpu(),
        exact_positions=exact.cpu(),
        logits=logits,
    )


class _PagedTrace:
    """A trace's keys in pages in a shuffled order, as in a pool that has been in use."""

    def __init__(self, trace: Trace, device: torch.device) -> None:
        self._trace, self._device = trace, device
        layers = [trace.source] if trace.consumer is None else [trace.source, trace.consumer]
        longest = max(len(layer.index_k.values) for layer in layers)
        generator = torch.Generator().manual_seed(0)
        self._pages = torch.randperm(-(-longest // PAGE_SIZE), generator=generator)
        self._pools = {id(layer.index_k): self._pool(layer.index_k) for layer in layers}

    def _pool(self, keys: FlatIndexK) -> IndexKPool:
        pool = IndexKPool.empty(len(self._pages), PAGE_SIZE, keys.format)
        positions = torch.arange(len(keys.values))
        pool.write(self._pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE, keys)
        return IndexKPool(pool.pages.to(self._device), PAGE_SIZE, keys.format)

    def inputs(self, layer: TraceLayer, rows: slice) -> PrefillIndexerInputs:
        """The inputs of some rows of `layer`."""
        positions, scales = self._trace.positions[rows], layer.index_q.scales
        plan = plan_prefill(
            positions,
            [len(positions)],
            compress_ratio=self._trace.compress_ratio,
            device=self._device,
            page_table=self._pages[None],
        )
        index_q = IndexQ(
            layer.index_q.values[rows].to(self._device),
            None if scales is None else scales[rows].to(self._device),
        )
        weights = layer.head_weights[rows].to(self._device)
        return PrefillIndexerInputs(plan, index_q, weights, self._pools[id(layer.index_k)])


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def _at(dense: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The logits of selected positions, NaN where unused."""
    logits = dense.gather(1, positions.clamp(min=0).long())
    return logits.where(positions >= 0, torch.nan)


def _common(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`[rows]` int64: what each row of `a` and `b` has in common; -1 and INT32_MAX are unused."""
    a, b = (x.where(x >= 0, INT32_MAX).sort(1).values for x in (a, b))
    found = torch.searchsorted(a, b).clamp(max=a.shape[1] - 1)
    return ((a.gather(1, found) == b) & (b != INT32_MAX)).sum(1)
