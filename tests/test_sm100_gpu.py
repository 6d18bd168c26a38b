# SPDX-License-Identifier: Apache-2.0
"""The sm100 backend on a GPU of any kind: our kernels, streams, graphs, memory.

DeepGEMM is the emulator, or a stand-in that looks at no value where that would hide a race.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gpu_support import (
    Captured,
    check_select_on_another_stream,
    check_tail_on_another_stream,
    check_threads,
    free_memory,
    late,
    no_synchronization,
    overwrite,
)
from quiet_deep_gemm import BlankDeepGemm, QuietDeepGemm
from sm100_support import (
    EMULATORS,
    LENS,
    POISON,
    Layers,
    check_within_tolerance,
    exact_layers,
    expect_agreement,
    mask,
    random_layers,
    run,
    same,
    sm100,
)

from sparse_indexer import PrefillIndexerInputs, plan_prefill
from sparse_indexer.backends.sm100 import Sm100Indexer
from sparse_indexer.formats import INT32_MAX
from sparse_indexer.lasting import _pool_of
from sparse_indexer.ops.candidate_table import candidate_table
from sparse_indexer.pair_candidates import PairCandidates
from sparse_indexer.testing import random_queries, with_queries
from sparse_indexer.testing.data import tail_inputs
from sparse_indexer.testing.deep_gemm.blocks import unpack_blocks

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
DEVICE = torch.device(GPU)
MiB = 1 << 20
VERSIONS = list(EMULATORS)
# 2048 blocks, one position more and less, far more, few, a row that sees nothing.
LONG = [[16_383, 16_384, 16_385, 20_000, 20_001, 19_999], [], [300, 0, 511, 513], [17_000]]
SHORT = [[3000 + 5 * i for i in range(13)], [], [1900 - i for i in range(10)], [40, 0, 5000]]
TAIL = [5, 0, 0, 2]


def quiet(device: str = GPU, **options: Any) -> Sm100Indexer:
    options = {"deep_gemm": QuietDeepGemm(), "topk": 64, "topk_blocks": 100, **options}
    return sm100("0.2.5", device, **options)


def poisoned(inputs: PrefillIndexerInputs, columns: int) -> torch.Tensor:
    shape = (inputs.plan.num_rows, columns)
    return torch.full(shape, POISON, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("heads", [32, 64, 20])
@pytest.mark.parametrize("version", VERSIONS)
def test_blocks_and_positions_equal_the_mask_backends(version: str, heads: int) -> None:
    """Of logits that are exact in bfloat16: 512 positions of 2048 blocks, and few of few."""
    for lens, topk, topk_blocks in ((LONG, 512, 2048), (LENS, 16, 24)):
        options = {"topk": topk, "topk_blocks": topk_blocks}
        layers = exact_layers(lens, heads=heads, page_size=128, device=GPU)
        got, want = run(sm100(version, GPU, **options), *layers), run(mask(GPU, **options), *layers)
        assert same(got, want)
        seen = layers.source.plan.compressed_lens
        published = (-(-seen // 8)).clamp(max=topk_blocks)
        assert ((got.blocks != INT32_MAX).sum(1) == published).all()
        assert int((seen > 8 * topk_blocks).sum()) >= 4


@pytest.mark.parametrize(("version", "heads"), [("0.2.5", 32), ("older", 64)])
def test_gpu_and_cpu_give_the_same_bits(version: str, heads: int) -> None:
    """By the same emulator: kernels instead of torch, on data without ties."""
    lens = [[2900 + 3 * i for i in range(10)], [], [1500 + i for i in range(5)], [0, 900, 100]]
    options = {"topk": 64, "topk_blocks": 100, "memory_budget": 1200 << 10}
    got, want = (
        run(sm100(version, device, **options), *random_layers(lens, heads=heads, device=device))
        for device in (GPU, "cpu")
    )
    for a, b in zip(got[1:], want[1:], strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("version", VERSIONS)
def test_schedules_hold_the_slots_of_the_candidate_table(version: str) -> None:
    source, _ = exact_layers(LONG, page_size=128, device=GPU)
    candidates = sm100(version, GPU, topk=512, topk_blocks=2048).publish_prefill(source)
    assert isinstance(candidates, PairCandidates)
    plan, blocks = source.plan, candidates.blocks
    again, slots = torch.empty_like(blocks), torch.empty_like(blocks)
    columns = torch.empty_like(plan.compressed_lens)
    candidate_table(
        blocks,
        plan.compressed_lens,
        out_blocks=again,
        out_lens=columns,
        request_of_row=plan.request_of_row,
        page_table=plan.page_table,
        page_size=128,
        out_slots=slots,
    )
    (tile,) = candidates.schedules.tiles
    held = unpack_blocks(tile.metadata, DEVICE)
    assert torch.equal(again, blocks)
    assert torch.equal(held.columns, columns)
    assert torch.equal(held.physical.clamp(min=0), slots)


@pytest.mark.parametrize("version", VERSIONS)
def test_random_data_agrees_with_the_mask_backend(version: str) -> None:
    """Weights of one sign: where a sum cancels, its error is no share of it."""
    lens = [[60_000 + 3 * i for i in range(20)], [50_000 + i for i in range(11)]]
    options = {"topk": 512, "topk_blocks": 2048}
    layers = random_layers(lens, device=GPU)
    for layer in layers:
        layer.head_weights.abs_()
    expect_agreement(sm100(version, GPU, **options), mask(GPU, **options), *layers)


@pytest.mark.parametrize(("version", "heads"), [("0.2.5", 32), ("older", 64)])
def test_passes_the_conformance_kit(version: str, heads: int) -> None:
    indexer = sm100(version, GPU, topk=8, topk_blocks=12)
    report = check_within_tolerance(indexer, heads, [64, 256])
    report.raise_if_failed()
    assert report.selecting_rows > 40


def test_the_budget_changes_nothing() -> None:
    """Requests whose keys are held one after the other, several tiles of each."""
    layers = random_layers([[3000 + i for i in range(40)], [2900, 2901], [700, 20, 0]], device=GPU)
    want = run(quiet(), *layers)
    for kib in (420, 800):
        assert same(run(quiet(memory_budget=kib << 10), *layers), want)


def test_publish_on_one_stream_and_select_on_another() -> None:
    """The caller need not synchronize."""
    cases = [exact_layers(SHORT, seed=seed, device=GPU) for seed in range(3)]
    indexer = quiet()
    want = [run(indexer, *both) for both in cases]
    check_select_on_another_stream(indexer, cases, want, TAIL)


def test_a_tail_of_one_stream_is_selected_and_cut_on_another() -> None:
    indexer, both = quiet(), exact_layers(SHORT, device=GPU)
    check_tail_on_another_stream(indexer, both, run(indexer, *both), TAIL, [2, 0, 0, 1])


def test_blocks_are_read_on_another_stream() -> None:
    source, _ = exact_layers(SHORT, device=GPU)
    indexer = quiet()
    want, out = run(indexer, source, source).blocks, poisoned(source, 100)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late(20)
        candidates = indexer.publish_prefill(source)
    out.copy_(candidates.blocks)
    assert torch.equal(out, want)


def test_threads_share_the_pool() -> None:
    both = exact_layers(SHORT, device=GPU)
    want, indexer = run(quiet(), *both), quiet()
    check_threads(lambda: run(indexer, *both), want, same)


@pytest.mark.parametrize("budget", [600 << 10, 256 * MiB])
def test_no_method_synchronizes(budget: int) -> None:
    source, consumer = exact_layers(SHORT, device=GPU)
    indexer = quiet(memory_budget=budget)
    want = run(indexer, source, consumer)
    own, selected, full = (poisoned(source, 64) for _ in range(3))
    of_tail = torch.full((sum(TAIL), 64), POISON, dtype=torch.int32, device=DEVICE)
    positions = [n - 1 for request in SHORT for n in request]
    counts = [len(request) for request in SHORT]
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
        blocks, blocks_of_tail = candidates.blocks, tail.blocks
    for got, expected in zip((blocks, own, selected, full), want[1:], strict=True):
        assert torch.equal(got, expected)
    indexer.select_prefill(tail, tail_inputs(consumer, TAIL), of_tail)
    rows = source.plan.tail_rows(TAIL)
    assert torch.equal(blocks_of_tail, want.blocks[rows])
    assert torch.equal(of_tail, want.selected[rows])


def test_a_graph_replays_with_other_lengths_queries_and_keys() -> None:
    """All that is ours can be captured, whatever DeepGEMM's own functions can."""
    source, consumer = exact_layers(SHORT, device=GPU)
    indexer = quiet()
    run(indexer, source, consumer)
    graph = Captured(indexer, (source, consumer), TAIL)
    seen = []
    for seed in (5, 6, 7):
        lens = [[max(0, n - 211 * (seed - 5)) for n in request] for request in SHORT]
        if seed == 7:
            lens = [[n // 30 for n in request] for request in lens]
        other = exact_layers(SHORT, seed=seed, device=GPU)
        flat = [n for request in lens for n in request]
        other.source.plan.compressed_lens.copy_(torch.tensor(flat, dtype=torch.int32))
        swapped = other[::-1] if seed == 6 else other  # the queries of the other layer
        for to, of in zip((source, consumer), swapped, strict=True):
            overwrite(to, of)
        want = run(quiet(), source, consumer)
        graph.expect(want[1:])
        seen.append(want)
    assert not same(seen[0], seen[1])
    assert not same(seen[1], seen[2])
    out = poisoned(consumer, 64)
    indexer.select_prefill(graph.candidates, consumer, out)  # after the graph, too
    assert torch.equal(out, seen[2].selected)


@pytest.mark.two_gpus
def test_tensors_on_another_device_than_the_current_one() -> None:
    found = []
    for device in (GPU, "cuda:1", GPU):
        got = run(quiet(device), *exact_layers(SHORT, device=device))
        found.append([tensor.cpu() for tensor in got[1:]])
        assert torch.cuda.current_device() == 0
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def pool_id(tensor: torch.Tensor) -> tuple[int, int]:
    """That of the memory pool in which a tensor lies; (0, 0) is everyone's."""
    for segment in torch.cuda.memory_snapshot():
        if 0 <= tensor.data_ptr() - segment["address"] < segment["total_size"]:
            return tuple(segment["segment_pool_id"])
    raise AssertionError("a tensor lies in no segment")


def test_only_what_outlives_a_chunk_lies_in_the_private_pool() -> None:
    """Not what the caller owns, nor scratch."""
    source, consumer = exact_layers(SHORT, device=GPU)
    private, own, scored = tuple(_pool_of(DEVICE).id), poisoned(source, 64), []

    class Watched(QuietDeepGemm):
        def fp8_fp4_mqa_logits(self, *arguments: Any, **options: Any) -> torch.Tensor:
            logits = super().fp8_fp4_mqa_logits(*arguments, **options)
            scored.append(pool_id(logits))
            return logits

    indexer = quiet(deep_gemm=Watched())
    candidates = indexer.publish_prefill(source, own)
    tail = indexer.prefill_tail(candidates, TAIL)
    indexer.select_prefill(candidates, consumer, own)
    for kept in (candidates, tail):
        assert isinstance(kept, PairCandidates)
        (tile,) = kept.schedules.tiles
        assert pool_id(kept.blocks) == pool_id(tile.metadata) == private
    assert pool_id(own) == pool_id(tail.plan.compressed_lens) == (0, 0)
    assert set(scored) == {(0, 0)}


USERS_POOLS: list[torch.cuda.MemPool] = []  # for as long as the process lives, as ours


def test_a_users_own_pool_around_the_call() -> None:
    both = exact_layers(SHORT, device=GPU)
    indexer = quiet()
    want = run(indexer, *both)
    USERS_POOLS.append(torch.cuda.MemPool())
    with torch.cuda.use_mem_pool(USERS_POOLS[-1]):
        inside = run(indexer, *both)
    assert same(inside, want)
    again = run(indexer, *both)
    out = poisoned(both.consumer, 64)
    indexer.select_prefill(inside.candidates, both.consumer, out)
    assert same(inside, again)
    assert torch.equal(out, want.selected)


def reserved_by(pool: torch.cuda.MemPool) -> int:
    segments = torch.cuda.memory_snapshot()
    own = [s for s in segments if tuple(s["segment_pool_id"]) == tuple(pool.id)]
    return sum(segment["total_size"] for segment in own)


class Prefill:
    """One request of 262,144 positions; a chunk is some rows of it at some depth."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.whole = random_layers([[262_144]], device=GPU).source
        self.queries = [random_queries(rows, 32, "fp4", seed=i, device=DEVICE) for i in range(2)]

    def chunk(self, positions: int) -> Layers:
        plan = plan_prefill(
            range(positions - self.rows, positions),
            [self.rows],
            page_table=self.whole.plan.page_table,
        )
        source = PrefillIndexerInputs(plan, *self.queries[0], self.whole.index_k)
        return Layers(source, with_queries(source, *self.queries[1]))

    def run(self, indexer: Sm100Indexer, chunks: Sequence[int]) -> torch.Tensor:
        """Publish and two consumers, chunk by chunk, the last candidates gone before the next."""
        own, selected = (
            torch.full((self.rows, 512), POISON, dtype=torch.int32, device=DEVICE) for _ in range(2)
        )
        for positions in chunks:
            source, consumer = self.chunk(positions)
            candidates = indexer.publish_prefill(source, own)
            for _ in range(2):
                indexer.select_prefill(candidates, consumer, selected)
            assert indexer.prefill_tail(candidates, [128]).num_rows == 128
            del candidates
        return torch.cat((own, selected))


def test_memory_of_cold_and_warm_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Flush, cold, cold, warm at 262,144 positions, with and without the private pool."""
    prefill, cold, pool = Prefill(256), [1 << 16, 2 << 16, 3 << 16, 4 << 16], _pool_of(DEVICE)
    results, lines = [], []
    for name in ("on", "off"):
        options = {"topk": 512, "topk_blocks": 2048, "memory_budget": 128 * MiB}
        indexer = sm100("0.2.5", GPU, **options)  # two tiles at the end
        if name == "off":
            indexer._lasting = contextlib.nullcontext
        free_memory()
        reserved, private = [torch.cuda.memory_reserved()], [reserved_by(pool)]
        for chunks in (cold, cold, cold[-1:]):
            results.append(prefill.run(indexer, chunks))
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
            private.append(reserved_by(pool))
        if name == "on":
            assert private[1] == private[2] == private[3] > 0
            assert reserved[3] <= reserved[2] <= 1.05 * reserved[1]
        sizes = ", ".join(f"{n / MiB:.0f}" for n in reserved)
        lines.append(f"pool {name}: reserved after flush, cold, cold, warm: {sizes} MiB")
    assert all(torch.equal(result, results[0]) for result in results)
    assert ((results[0] >= 0) & (results[0] < 262_144)).all()
    with capsys.disabled():
        print("", *lines, sep="\n")


@pytest.mark.parametrize("budget", [64 * MiB, 256 * MiB])
def test_scratch_stays_within_the_budget(budget: int) -> None:
    prefill = Prefill(4096)
    source, consumer = prefill.chunk(131_072)
    indexer = quiet(deep_gemm=BlankDeepGemm(), topk=512, topk_blocks=2048, memory_budget=budget)
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
    assert published < 1.01 * 4096 * 2048 * (4 + 9)  # block ids, and what schedules them
    assert budget // 4 < peak_beyond(before) <= published + budget
    before = torch.cuda.memory_allocated()
    indexer.select_prefill(candidates, consumer, selected)
    assert torch.cuda.memory_allocated() == before
    assert budget // 4 < peak_beyond(before) <= budget
    full = poisoned(source, 512)
    before = torch.cuda.memory_allocated()
    indexer.topk_prefill(consumer, full)
    assert budget // 4 < peak_beyond(before) <= budget


def test_reserved_memory_is_bounded_over_growing_chunks() -> None:
    """A prefill of 262,144 positions in 64 chunks, twice; tiles of logits differ in size."""
    prefill, reserved = Prefill(4096), []
    indexer = quiet(deep_gemm=BlankDeepGemm(), topk=512, topk_blocks=2048)
    free_memory()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        prefill.run(indexer, [4096 * chunk for chunk in range(1, 65)])
        reserved.append(torch.cuda.memory_reserved())
    alive = 256 * MiB + 2 * 4096 * 2048 * (4 + 9)  # at once; torch keeps what was too small
    assert reserved[0] - before < 3 * alive
    assert reserved[1] <= 1.05 * reserved[0]
