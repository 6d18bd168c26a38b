# SPDX-License-Identifier: Apache-2.0
"""What tests on a GPU share."""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from sparse_indexer import CandidateIndexer, IndexQ, PrefillIndexerInputs
from sparse_indexer.testing.data import tail_inputs

Layers = tuple[PrefillIndexerInputs, PrefillIndexerInputs]  # a source and a consumer


@contextmanager
def no_synchronization() -> Iterator[None]:
    """An operation that waits for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def late(milliseconds: int) -> None:
    """Keeps the current stream busy, at some 2 GHz."""
    torch.cuda._sleep(milliseconds * 2_000_000)


def poisoned(rows: int, columns: int) -> torch.Tensor:
    return torch.full((rows, columns), 7, dtype=torch.int32, device="cuda:0")


def overwrite(to: PrefillIndexerInputs, of: PrefillIndexerInputs) -> None:
    """The values of one layer into the tensors of another."""
    pairs = [(to.index_q.values, of.index_q.values), (to.index_q.scales, of.index_q.scales)]
    pairs.append((to.index_k.pages, of.index_k.pages))
    for a, b in pairs:
        a.view(torch.uint8).copy_(b.view(torch.uint8))
    to.head_weights.copy_(of.head_weights)
    to.plan.compressed_lens.copy_(of.plan.compressed_lens)
    to.plan.page_table.copy_(of.plan.page_table)


class Captured:
    """All methods of an indexer in a CUDA graph."""

    def __init__(self, indexer: CandidateIndexer, case: Layers, tail_lens: list[int]) -> None:
        source, consumer = case
        plan, q = source.plan, consumer.index_q
        self.tail_rows = rows = plan.tail_rows(tail_lens)
        own, selected, full = (poisoned(plan.num_rows, indexer.topk) for _ in range(3))
        self.of_tail = poisoned(len(rows), indexer.topk)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.candidates = indexer.publish_prefill(source, own)
            blocks = self.candidates.blocks
            indexer.select_prefill(self.candidates, consumer, selected)
            indexer.topk_prefill(consumer, full)
            tail = indexer.prefill_tail(self.candidates, tail_lens)
            queries = IndexQ(q.values[rows], None if q.scales is None else q.scales[rows])
            weights = consumer.head_weights[rows]
            of_rows = PrefillIndexerInputs(tail.plan, queries, weights, consumer.index_k)
            indexer.select_prefill(tail, of_rows, self.of_tail)
        self.results = (blocks, own, selected, full)

    def expect(self, want: Sequence[torch.Tensor]) -> None:
        """A replay gives `want`: blocks, own positions, selected, full."""
        for out in (*self.results, self.of_tail):
            out.fill_(7)
        self.graph.replay()
        for got, expected in zip(self.results, want, strict=True):
            assert torch.equal(got, expected)
        assert torch.equal(self.of_tail, want[2][self.tail_rows])


def check_graph_and_no_synchronization(
    indexer: CandidateIndexer, case: Layers, want: Sequence[torch.Tensor], tail_lens: list[int]
) -> None:
    """A captured graph gives `want`: blocks, own positions, selected, full; no method waits."""
    source, consumer = case
    Captured(indexer, case, tail_lens).expect(want)
    own, selected, full = (poisoned(source.plan.num_rows, indexer.topk) for _ in range(3))
    with no_synchronization():
        candidates = indexer.publish_prefill(source, own)
        indexer.publish_prefill(source)
        indexer.prefill_tail(candidates, tail_lens)
        indexer.select_prefill(candidates, consumer, selected)
        indexer.topk_prefill(consumer, full)


def check_select_on_another_stream(
    indexer: CandidateIndexer, cases: Sequence[Layers], want: Sequence[Any], tail_lens: list[int]
) -> None:
    """Publish on one, select and cut on another; candidates may go as soon as the call is made.

    `want` are the results of each case, with `selected` and `blocks`.
    """
    plan = cases[0][0].plan
    outs = [poisoned(plan.num_rows, indexer.topk) for _ in range(12)]
    tails = [poisoned(sum(tail_lens), indexer.topk_blocks) for _ in outs]
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (one, two):
        stream.wait_stream(torch.cuda.current_stream())
    for i, (out, tail) in enumerate(zip(outs, tails, strict=True)):
        source, consumer = cases[i % len(cases)]
        with torch.cuda.stream(one):
            late(5)
            candidates = indexer.publish_prefill(source)
        with torch.cuda.stream(two):  # falls behind: the next publish comes before this select
            late(10)
            indexer.select_prefill(candidates, consumer, out)
            tail.copy_(indexer.prefill_tail(candidates, tail_lens).blocks)
        del candidates  # its memory is the next publish's, but not before it has been read
    for stream in (one, two):
        torch.cuda.current_stream().wait_stream(stream)
    tail_rows = plan.tail_rows(tail_lens)
    for i, (out, tail) in enumerate(zip(outs, tails, strict=True)):
        assert torch.equal(out, want[i % len(cases)].selected)
        assert torch.equal(tail, want[i % len(cases)].blocks[tail_rows])


def check_tail_on_another_stream(
    indexer: CandidateIndexer, case: Layers, want: Any, tail_lens: list[int], shorter: list[int]
) -> None:
    """All that a tail has is its own, its plan, too: it may go as soon as the calls are made."""
    source, consumer = case
    rows, of_tail = source.plan.tail_rows(tail_lens), tail_inputs(consumer, tail_lens)
    outs = [poisoned(sum(tail_lens), indexer.topk) for _ in range(6)]
    cuts = [poisoned(sum(shorter), indexer.topk_blocks) for _ in outs]
    torch.cuda.synchronize()
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    for out, cut in zip(outs, cuts, strict=True):
        with torch.cuda.stream(one):
            late(5)
            tail = indexer.prefill_tail(indexer.publish_prefill(source), tail_lens)
        with torch.cuda.stream(two):
            cut.copy_(indexer.prefill_tail(tail, shorter).blocks)
            late(10)
            indexer.select_prefill(tail, of_tail, out)
        plan = tail.plan
        shapes = [t.shape for t in (plan.compressed_lens, plan.request_of_row)]
        del tail, plan
        with torch.cuda.stream(one):  # what the tail's memory would hold next
            junk = [
                torch.zeros(shape, dtype=torch.int32, device=out.device) for shape in shapes * 8
            ]
        del junk
    torch.cuda.synchronize()
    for out, cut in zip(outs, cuts, strict=True):
        assert torch.equal(out, want.selected[rows])
        assert torch.equal(cut, want.blocks[source.plan.tail_rows(shorter)])


def check_threads(run: Callable[[], Any], want: Any, same: Callable[[Any, Any], bool]) -> None:
    """Eight threads run at once what gives `want`."""
    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(lambda _: run(), range(32)))
    assert all(same(one, want) for one in got)


def free_memory() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
