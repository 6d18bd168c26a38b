# SPDX-License-Identifier: Apache-2.0
"""The sm90 backend among other work: graphs, streams, interleaved calls, memory, no sync."""

import gc
import subprocess
import sys

import pytest
import torch
from gpu_support import (
    Captured,
    check_select_on_another_stream,
    check_tail_on_another_stream,
    check_threads,
    free_memory,
    no_synchronization,
    overwrite,
)
from sm90_support import (
    DEVICE,
    Layers,
    Results,
    layers,
    needs_hopper,
    pick,
    poisoned,
    run,
    same,
    sm90,
)

from sparse_indexer import PrefillIndexerInputs, PrefillPlan, plan_prefill
from sparse_indexer.inputs import IndexKPool, flat_index_k
from sparse_indexer.testing import random_queries, with_queries

pytestmark = [pytest.mark.gpu, needs_hopper]

MiB = 1 << 20
LENS = [[3000 + 5 * i for i in range(37)], [], [1900 - i for i in range(20)], [40, 0, 5000]]
OPTIONS = {"topk": 64, "topk_blocks": 100}
TAIL = [5, 0, 0, 2]


def test_a_graph_replays_with_other_lengths_queries_and_keys() -> None:
    """The same pages, page tables, queries and lengths, overwritten; contexts are the largest."""
    source, consumer = layers(LENS)
    indexer = sm90(**OPTIONS)
    run(indexer, source, consumer)
    graph = Captured(indexer, (source, consumer), TAIL)
    seen = []
    for seed in (0, 1, 2):
        lens = [[max(0, n - 211 * seed - i) for i, n in enumerate(request)] for request in LENS]
        if seed == 2:
            lens = [[n // 30 for n in request] for request in lens]
        other = layers(LENS, seed=seed)
        flat = [n for request in lens for n in request]
        other.source.plan.compressed_lens.copy_(torch.tensor(flat, dtype=torch.int32))
        overwrite(source, other.source)
        overwrite(consumer, other.consumer)
        want = run(sm90(**OPTIONS), source, consumer)
        assert want.blocks.shape == (source.plan.num_rows, 100)
        graph.expect(want)
        seen.append(want)
    assert not same(seen[0], seen[1])
    assert not same(seen[1], seen[2])


def test_candidates_of_a_graph_are_readable_after_it() -> None:
    source, consumer = layers(LENS)
    indexer = sm90(**OPTIONS)
    want = run(indexer, source, consumer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        candidates = indexer.publish_prefill(source)
    graph.replay()
    selected = poisoned(consumer, 64)
    indexer.select_prefill(candidates, consumer, selected)
    assert torch.equal(selected, want.selected)
    assert torch.equal(candidates.blocks, want.blocks)


def test_publish_on_one_stream_and_select_on_another() -> None:
    """The caller need not synchronize."""
    cases = [layers(LENS, seed=seed) for seed in range(3)]
    indexer = sm90(**OPTIONS)
    want = [run(indexer, *both) for both in cases]
    check_select_on_another_stream(indexer, cases, want, TAIL)


def test_a_tail_of_one_stream_is_selected_and_cut_on_another() -> None:
    indexer, both = sm90(**OPTIONS), layers(LENS)
    check_tail_on_another_stream(indexer, both, run(indexer, *both), TAIL, [2, 0, 0, 1])


def test_interleaved_indexers_and_requests() -> None:
    """And candidates outlive many later publishes, read or unread."""
    cases = [layers(LENS, seed=1), layers([[700, 5001], [16, 2000]], "fp4", heads=64, seed=2)]
    indexers = [sm90(**OPTIONS), sm90(topk=40, topk_blocks=33, memory_budget=2 * MiB)]
    want = {(i, c): run(indexers[i], *cases[c]) for i in range(2) for c in range(2)}
    held = {}
    for i, c in ((0, 0), (1, 1), (1, 0), (0, 1)):
        own = poisoned(cases[c].source, indexers[i].topk)
        held[i, c] = indexers[i].publish_prefill(cases[c].source, own), own
    assert torch.equal(held[0, 0][0].blocks, want[0, 0].blocks)
    for _ in range(5):
        for indexer in indexers:
            for both in cases:
                indexer.publish_prefill(both.source)
                indexer.topk_prefill(both.source, poisoned(both.source, indexer.topk))
    for i, c in ((1, 0), (0, 0), (0, 1), (1, 1), (1, 0), (0, 0)):
        candidates, own = held[i, c]
        selected = poisoned(cases[c].consumer, indexers[i].topk)
        indexers[i].select_prefill(candidates, cases[c].consumer, selected)
        assert torch.equal(selected, want[i, c].selected)
        assert torch.equal(own, want[i, c].own)
        assert torch.equal(candidates.blocks, want[i, c].blocks)


def test_candidates_outlive_their_indexer() -> None:
    source, consumer = layers(LENS)
    want = run(sm90(**OPTIONS), source, consumer)
    candidates = sm90(**OPTIONS).publish_prefill(source)
    gc.collect()
    for seed in range(3):
        run(sm90(**OPTIONS), *layers(LENS, seed=seed))
    selected = poisoned(consumer, 64)
    sm90(**OPTIONS).select_prefill(candidates, consumer, selected)
    assert torch.equal(selected, want.selected)
    assert torch.equal(candidates.blocks, want.blocks)


DIES_LATE = """
import gc, torch
from sparse_indexer.lasting import LastingMemory

def used_in_a_cycle():
    lasting = LastingMemory(torch.device("cuda", 0))
    with lasting():
        torch.empty(1, device="cuda")
    lasting.itself = lasting

other = torch.cuda.MemPool()
used_in_a_cycle()
with torch.cuda.use_mem_pool(other):
    gc.collect()
used_in_a_cycle()
with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
    gc.collect()
"""


def test_an_indexer_may_die_while_others_allocate() -> None:
    """A `MemPool` may not, and the garbage collector does not ask."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", DIES_LATE], check=True, timeout=120)


def test_threads_share_the_pool() -> None:
    both = layers(LENS)
    want, indexer = run(sm90(**OPTIONS), *both), sm90(**OPTIONS)
    check_threads(lambda: run(indexer, *both), want, same)


@pytest.mark.parametrize("budget", [MiB, 256 * MiB])
def test_no_method_synchronizes(budget: int) -> None:
    source, consumer = layers(LENS)
    indexer = sm90(**OPTIONS, memory_budget=budget)
    want = run(indexer, source, consumer)
    own, selected, full = (poisoned(source, 64) for _ in range(3))
    positions = [n - 1 for request in LENS for n in request]
    counts = [len(request) for request in LENS]
    with no_synchronization():
        plan = plan_prefill(positions, counts, page_table=source.plan.page_table)
        again = [
            PrefillIndexerInputs(plan, of.index_q, of.head_weights, of.index_k)
            for of in (source, consumer)
        ]
        candidates = indexer.publish_prefill(again[0], own)
        indexer.select_prefill(candidates, again[1], selected)
        indexer.select_prefill(candidates, consumer, selected)  # another plan of the same rows
        indexer.topk_prefill(again[1], full)
        tail = indexer.prefill_tail(candidates, TAIL)
        of_tail, blocks = tail.blocks, candidates.blocks
    for got, expected in zip((blocks, own, selected, full), want, strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(of_tail, want.blocks[source.plan.tail_rows(TAIL)])


def large(rows: int, positions: int) -> Layers:
    return layers([[positions - rows + 1 + i for i in range(rows)]])


def tensor_bytes(*tensors: torch.Tensor) -> int:
    """As they are allocated, in units of 512 bytes."""
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)


@pytest.mark.parametrize("budget", [64 * MiB, 256 * MiB])
def test_scratch_stays_within_the_budget(budget: int) -> None:
    source, consumer = large(4096, 131_072)
    indexer = sm90(memory_budget=budget)
    own, selected = poisoned(source, 512), poisoned(source, 512)
    free_memory()

    def peak_beyond(before: int) -> int:
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        return peak

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    candidates = indexer.publish_prefill(source, own)
    published = torch.cuda.memory_allocated() - before
    assert published < 1.01 * tensor_bytes(*candidates.tables, *candidates.quads[1:])
    assert published + budget // 4 < peak_beyond(before) <= published + budget
    before = torch.cuda.memory_allocated()
    indexer.select_prefill(candidates, consumer, selected)
    assert torch.cuda.memory_allocated() == before
    assert budget // 4 < peak_beyond(before) <= budget
    assert ((own >= 0) & (own < 131_072)).all()
    assert ((selected >= 0) & (selected < 131_072)).all()


def test_reserved_memory_is_flat_over_growing_chunks() -> None:
    """A prefill of 262,144 positions in 64 chunks, the last candidates gone before the next."""
    rows = step = 4096
    whole = layers([[64 * step]]).source
    assert isinstance(whole.index_k, IndexKPool)
    queries, weights = random_queries(rows, 32, "fp8", seed=1, device=DEVICE)
    indexer = sm90()
    out = torch.empty(rows, 512, dtype=torch.int32, device=DEVICE)
    free_memory()
    reserved = []
    for chunk in range(1, 65):
        positions = list(range(chunk * step - rows, chunk * step))
        plan = plan_prefill(positions, [rows], page_table=whole.plan.page_table)
        source = PrefillIndexerInputs(plan, queries, weights, whole.index_k)
        consumer = with_queries(source, queries, weights.flip(0))
        candidates = indexer.publish_prefill(source, out)
        for _ in range(2):
            indexer.select_prefill(candidates, consumer, out)
        tail = indexer.prefill_tail(candidates, [128])
        assert tail.num_rows == 128
        assert ((out >= 0).sum(1) == plan.compressed_lens.clamp(max=512)).all()
        assert (out < chunk * step).all()
        del candidates, tail
        reserved.append(torch.cuda.memory_reserved())
    assert len(set(reserved[16:])) == 1, reserved  # scratch is as large as the budget from there on
    assert reserved[-1] > 0


def test_a_million_positions_for_2049_rows() -> None:
    """More rows than a tile and a last group of one: each row as if it were alone."""
    rows, positions, distinct = 2049, 1 << 20, 64 * 64
    generator = torch.Generator().manual_seed(5)
    pages = torch.randint(64, (1, positions // 64), generator=generator).int().to(DEVICE)
    pool = IndexKPool.empty(64, 64, "fp8", device=DEVICE)
    keys = flat_index_k(torch.randn(distinct, 128, device=DEVICE), "fp8")
    pool.write(torch.arange(distinct, device=DEVICE), keys)
    lens = torch.arange(positions - rows + 1, positions + 1, dtype=torch.int32, device=DEVICE)
    plan = PrefillPlan(
        compressed_lens=lens,
        request_of_row=torch.zeros_like(lens),
        rows_per_request=[rows],
        context_lens=[positions],
        page_table=pages,
    )
    queries = [random_queries(rows, 32, "fp8", seed=2 + i, device=DEVICE) for i in range(2)]
    source = PrefillIndexerInputs(plan, *queries[0], pool)
    consumer = with_queries(source, *queries[1])
    indexer = sm90()
    got = run(indexer, source, consumer)
    some = [0, 1, 777, 1024, 2047, 2048]
    alone = run(indexer, pick(source, some), pick(consumer, some))
    assert same(Results(*(part[some] for part in got)), alone)
    newest = (lens.long() - 1) // 8
    assert (got.blocks == newest[:, None]).any(1).all()
    assert ((got.full >= 0) & (got.full < lens[:, None])).all()
