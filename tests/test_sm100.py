# SPDX-License-Identifier: Apache-2.0
"""The sm100 backend on a CPU, over an emulated DeepGEMM of either generation."""

import random
from collections import Counter
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from budgets import named_budget
from quiet_deep_gemm import BlankDeepGemm, QuietDeepGemm
from sm100_support import (
    EMULATORS,
    LENS,
    POISON,
    Spy,
    check_within_tolerance,
    exact_layers,
    expect_agreement,
    mask,
    random_layers,
    run,
    same,
    sm100,
)
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_indexer import FlatIndexK, IndexKPool, PrefillIndexerInputs, PrefillPlan
from sparse_indexer.backends.sm100 import Sm100Indexer
from sparse_indexer.deep_gemm_api import schedule_bytes
from sparse_indexer.formats import INT32_MAX
from sparse_indexer.lasting import Ready
from sparse_indexer.row_ops import RowOps
from sparse_indexer.testing import make_inputs, random_keys, random_queries
from sparse_indexer.testing.data import Layout, tail_inputs

VERSIONS = list(EMULATORS)
KiB = 1 << 10
INTERLEAVED = [6, 6, 1, 3, 3, 3, 2, 1, 1, 6, 4, 2, 3, 1, 1]  # rows of LENS


@pytest.mark.parametrize("heads", [32, 64, 20])
@pytest.mark.parametrize("version", VERSIONS)
def test_blocks_and_positions_equal_the_mask_backends(version: str, heads: int) -> None:
    """Of logits that are exact in bfloat16, by the same rules."""
    layers = exact_layers(heads=heads)
    got, want = run(sm100(version), *layers), run(mask(), *layers)
    assert same(got, want)
    lens = layers[0].plan.compressed_lens
    assert {0, 1, 192, 193} <= set(lens.tolist())  # 24 blocks, and one position more
    assert ((got.blocks != INT32_MAX).sum(1) == (-(-lens // 8)).clamp(max=24)).all()
    assert int((lens > 16).sum()) > len(lens) // 2


def test_a_quiet_stand_in_gives_the_same() -> None:
    """What the tests of streams and graphs run on."""
    for lens in (LENS, [[1500 + i for i in range(30)]]):
        layers = exact_layers(lens)
        quiet = sm100("0.2.5", deep_gemm=QuietDeepGemm())
        assert same(run(quiet, *layers), run(mask(), *layers))


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_may_be_made_in_any_mode(version: str) -> None:
    """What is kept of a pool is of the first call's; keys are written and scored after it."""
    layers, other = exact_layers(), exact_layers(seed=6)
    indexer = sm100(version)
    with torch.inference_mode():
        candidates = indexer.publish_prefill(layers.source)
        assert same(run(indexer, *layers), run(mask(), *layers))
    shape = (len(candidates.blocks), 16)
    out, want = (torch.full(shape, POISON, dtype=torch.int32) for _ in range(2))
    indexer.select_prefill(candidates, layers.consumer, out)
    mask().select_prefill(candidates, layers.consumer, want)
    assert torch.equal(out, want)
    pool, new = layers.source.index_k, other.source.index_k
    slots = torch.arange(pool.num_pages * pool.page_size)
    stored = new.read(slots)
    pool.write(slots, FlatIndexK(stored.values, stored.scales, "fp4"))
    changed = [PrefillIndexerInputs(x.plan, x.index_q, x.head_weights, pool) for x in other]
    assert same(run(indexer, *changed), run(mask(), *other))


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_of_requests_may_be_interleaved(version: str) -> None:
    """Neighbors of one request are still pairs; the others are scored alone."""
    starts = [5, 700, 9000, 70_000, 80_000, 90_000, 100_000]
    layers = exact_layers(request_of_row=INTERLEAVED, request_starts=starts)
    spy = Spy(version)
    indexer = Sm100Indexer("cpu", topk=16, topk_blocks=24, deep_gemm=spy)
    assert same(run(indexer, *layers), run(mask(), *layers))
    expect_pairs(spy, layers[0], pairs=4)


def expect_pairs(spy: Spy, inputs: PrefillIndexerInputs, *, pairs: int) -> None:
    """The one schedule has so many pairs, each of one request, and no run of more than two."""
    (arguments,) = spy.of("schedule")
    lens, page_table, ids = arguments[:3]
    requests = inputs.plan.request_of_row
    assert torch.equal(lens, inputs.plan.compressed_lens)
    counts = torch.unique_consecutive(ids, return_counts=True)[1].tolist()
    assert len(counts) == len(ids.unique())
    assert max(counts) == 2
    assert counts.count(2) == pairs
    first = 0
    for count in counts:
        assert len(set(requests[first : first + count].tolist())) == 1
        first += count
    columns = -(-max(inputs.plan.context_lens) // 64)
    table = inputs.plan.page_table[requests.long(), :columns]
    used = torch.arange(columns) * 64 < lens[:, None]
    assert torch.equal(page_table[used], table[used])


@pytest.mark.parametrize("version", VERSIONS)
def test_interleaved_rows_whose_keys_are_held_few_requests_at_a_time(version: str) -> None:
    starts = [5, 700, 9000, 70_000, 80_000, 90_000, 100_000]
    layers = exact_layers(request_of_row=INTERLEAVED, request_starts=starts)
    poor = sm100(version, memory_budget=1)
    least = named_budget(partial(poor.publish_prefill, layers.source), 1)
    spy = Spy(version)
    small = sm100(version, deep_gemm=spy, memory_budget=least)
    assert same(run(small, *layers), run(mask(), *layers))
    assert len(spy.of("fp8_fp4_mqa_logits")) >= 2 * 3  # publish and topk, three groups at least


@pytest.mark.parametrize("version", VERSIONS)
def test_interleaved_rows_that_need_no_logits(version: str) -> None:
    """In as many groups as the least budget takes."""
    lens = [[10, 12], [3], [16, 1, 7], [5, 5]] * 2
    of_row = [request for request, rows in enumerate(lens) for _ in rows]
    random.Random(0).shuffle(of_row)
    layers = exact_layers(lens, request_of_row=of_row, page_size=128)
    want, poor = run(mask(), *layers), sm100(version, memory_budget=1)
    least = max(
        named_budget(partial(poor.publish_prefill, layers.source), 1),
        named_budget(partial(poor.topk_prefill, layers.source, torch.empty_like(want.own)), 1),
    )
    assert same(run(sm100(version, memory_budget=least), *layers), want)


@pytest.mark.parametrize("version", VERSIONS)
def test_pairs_never_span_requests(version: str) -> None:
    source, _ = exact_layers()
    spy = Spy(version)
    Sm100Indexer("cpu", topk=16, topk_blocks=24, deep_gemm=spy).publish_prefill(source)
    expect_pairs(spy, source, pairs=6)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_tail_is_the_rows_of_the_whole(version: str) -> None:
    source, consumer = exact_layers(request_of_row=INTERLEAVED)
    spy = Spy(version)
    indexer = Sm100Indexer("cpu", topk=16, topk_blocks=24, deep_gemm=spy)
    whole = run(indexer, source, consumer)
    tail_lens = [0, 3, 1, 4, 0, 0, 2]
    rows = source.plan.tail_rows(tail_lens)
    spy.calls.clear()
    tail = indexer.prefill_tail(whole.candidates, tail_lens)
    assert not spy.of("fp8_fp4_mqa_logits")
    assert len(spy.of("schedule")) == 1
    assert torch.equal(tail.blocks, whole.blocks[rows])
    out = torch.full((len(rows), 16), POISON, dtype=torch.int32)
    indexer.select_prefill(tail, tail_inputs(consumer, tail_lens), out)
    assert torch.equal(out, whole.selected[rows])
    assert len(spy.of("schedule")) == 1  # made for the tail, and read by another plan of its rows
    shorter = [0, 2, 0, 4, 0, 0, 1]
    again = indexer.prefill_tail(tail, shorter)
    assert torch.equal(again.blocks, whole.blocks[source.plan.tail_rows(shorter)])


def test_a_tail_of_another_stream_is_waited_for_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of it: whatever a select or a tail reads may be freed by the stream that made it."""
    source, consumer = exact_layers(request_starts=[0, 1, 2, 3, 4, 5, 6])
    indexer, seen, waited = sm100("0.2.5"), [], set()
    tail_lens = [0, 3, 1, 4, 0, 0, 2]
    tail = indexer.prefill_tail(indexer.publish_prefill(source), tail_lens)

    def wait(ready: Ready) -> None:
        if ready is tail.ready:
            seen.append("waited")
            waited.update(t.untyped_storage().data_ptr() for t in ready.tensors)

    rows_by_request = PrefillPlan.rows_by_request

    def read(plan: PrefillPlan) -> torch.Tensor:
        seen.append("read")
        return rows_by_request(plan)

    monkeypatch.setattr(Ready, "wait", wait)
    monkeypatch.setattr(PrefillPlan, "rows_by_request", read)
    indexer.prefill_tail(tail, [0, 1, 1, 1, 0, 0, 1])
    assert seen == ["waited", "read"]
    out = torch.empty(len(tail.blocks), 16, dtype=torch.int32)
    waited.clear()
    indexer.select_prefill(tail, tail_inputs(consumer, tail_lens), out)
    plan, (tile,) = tail.plan, tail.schedules.tiles
    needed = (plan.compressed_lens, plan.request_of_row, plan.request_starts, plan.page_table)
    for tensor in (*needed, tile.lens, tile.table, tile.metadata):
        assert tensor.untyped_storage().data_ptr() in waited


@pytest.mark.parametrize("version", VERSIONS)
def test_random_data_agrees_with_the_mask_backend(version: str) -> None:
    lens = [[2900 + 3 * i for i in range(20)], [1500 + i for i in range(11)]]
    options = {"topk": 64, "topk_blocks": 128}
    layers = random_layers(lens)
    got, want = expect_agreement(sm100(version, **options), mask(**options), *layers)
    if version == "0.2.5":
        assert not torch.equal(got.full, want.full)  # or the tolerance proves nothing


@pytest.mark.parametrize(
    ("version", "heads", "topk", "topk_blocks"),
    [
        ("0.2.5", 32, 8, 12),
        ("0.2.5", 32, 12, 12),
        ("0.2.5", 32, 64, 100),
        ("0.2.5", 64, 8, 12),
        ("older", 32, 8, 12),
        ("older", 64, 16, 16),
    ],
)
def test_passes_the_conformance_kit(version: str, heads: int, topk: int, topk_blocks: int) -> None:
    """Every case; the rules and laws hold to the bit."""
    indexer = sm100(version, topk=topk, topk_blocks=topk_blocks)
    report = check_within_tolerance(indexer, heads, [64, 256])
    report.raise_if_failed()
    assert report.backend == "sm100"
    assert report.selecting_rows > 40


@pytest.mark.parametrize(("version", "heads"), [("0.2.5", 32), ("older", 64)])
def test_the_budget_changes_nothing_and_is_kept(
    version: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [[2900, 2901], *([[2950]] * 6), [700, 20, 0], *([[300 + i] for i in range(9)])]
    lens = [[3000 + i for i in range(48)], *many]
    layers = random_layers(lens, heads=heads)
    want = run(sm100(version, topk_blocks=96), *layers)
    with pytest.raises(ValueError, match=r"^memory_budget: expected at least \d+ bytes, got 1$"):
        sm100(version, topk_blocks=96, memory_budget=1).publish_prefill(layers[0])
    read, held = IndexKPool.gather_pages, []

    def reading(pool: IndexKPool, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held.append(spy.held())
        return read(pool, pages)

    monkeypatch.setattr(IndexKPool, "gather_pages", reading)
    dense = []
    for budget in (420 * KiB, 800 * KiB, 3000 * KiB):
        spy = Spy(version)
        options = {"topk": 16, "topk_blocks": 96, "memory_budget": budget}
        indexer = Sm100Indexer("cpu", deep_gemm=spy, **options)
        assert same(run(indexer, *layers), want)
        assert budget // 2 < spy.most < budget
        dense.append(len(spy.of("fp8_fp4_mqa_logits")))
        assert set(held) == {0}  # when keys are gathered, those before and their logits are gone
    assert dense[0] > dense[1] > dense[2]
    # Made for a larger budget, and scored within a smaller one.
    spy = Spy(version)
    options["memory_budget"] = 180 * KiB
    small = Sm100Indexer("cpu", deep_gemm=spy, **options)
    out = torch.full_like(want.selected, POISON)
    small.select_prefill(want.candidates, layers[1], out)
    assert torch.equal(out, want.selected)
    assert max(spy.of("fp8_fp4_paged_sparse_mqa_logits")) == 8
    assert spy.most < 180 * KiB


@pytest.mark.parametrize("version", VERSIONS)
def test_candidates_of_64_heads_are_scored_within_the_budget(version: str) -> None:
    source, consumer = random_layers([[100 + i for i in range(33)]], heads=64)
    candidates = sm100(version, topk_blocks=512).publish_prefill(source)
    spy = Spy(version)
    indexer = Sm100Indexer("cpu", topk=16, memory_budget=250 * KiB, deep_gemm=spy)
    out, want = (torch.full((33, 16), POISON, dtype=torch.int32) for _ in range(2))
    indexer.select_prefill(candidates, consumer, out)
    assert spy.of("fp8_fp4_paged_sparse_mqa_logits") == [8] * 8 + [1] * 2
    assert 100 * KiB < spy.most < 200 * KiB
    sm100(version, topk_blocks=512).select_prefill(candidates, consumer, want)
    assert torch.equal(out, want)


@pytest.mark.parametrize("method", ["publish", "own", "select", "topk"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_least_budget_works(version: str, method: str) -> None:
    source, consumer = random_layers([[900 + i for i in range(11)], [2000]])
    candidates = sm100(version).publish_prefill(source)

    def call(budget: int) -> None:
        indexer = sm100(version, memory_budget=budget)
        out = torch.full((12, 16), POISON, dtype=torch.int32)
        if method in ("publish", "own"):
            indexer.publish_prefill(source, out if method == "own" else None)
        elif method == "select":
            indexer.select_prefill(candidates, consumer, out)
        else:
            indexer.topk_prefill(source, out)

    least = named_budget(partial(call, 1), 1)
    assert named_budget(partial(call, least - 1), least - 1) == least
    call(least)


@pytest.mark.parametrize("version", VERSIONS)
def test_schedules_are_made_once(version: str) -> None:
    """At the publish; consumers make none, unless they read other pages."""
    source, consumer = exact_layers()
    spy = Spy(version)
    indexer = Sm100Indexer("cpu", topk=16, topk_blocks=24, deep_gemm=spy)
    out = torch.empty(source.plan.num_rows, 16, dtype=torch.int32)
    candidates = indexer.publish_prefill(source, out)
    for _ in range(3):
        indexer.select_prefill(candidates, consumer, out)
    assert len(spy.of("schedule")) == 1
    want = out.clone()
    pool = msgspec.structs.replace(consumer.index_k, pages=consumer.index_k.pages[:-1])
    other = PrefillIndexerInputs(
        consumer.plan, consumer.index_q, consumer.head_weights, pool
    )  # its last page belongs to nobody
    indexer.select_prefill(candidates, other, out)
    assert len(spy.of("schedule")) == 2
    assert torch.equal(out, want)


@pytest.mark.parametrize("version", VERSIONS)
def test_schedules_are_for_the_sms_of_now(version: str) -> None:
    source, consumer = exact_layers()
    emulator = EMULATORS[version]()
    indexer = sm100(version, deep_gemm=emulator)
    want = run(indexer, source, consumer)
    emulator.set_num_sms(100)
    out = torch.full_like(want.selected, POISON)
    indexer.select_prefill(want.candidates, consumer, out)
    assert torch.equal(out, want.selected)
    tail = indexer.prefill_tail(want.candidates, source.plan.rows_per_request)
    assert (want.candidates.schedules.num_sms, tail.schedules.num_sms) == (148, 100)


@pytest.mark.parametrize("version", VERSIONS)
def test_schedules_can_be_recorded(version: str) -> None:
    """Before 0.2.3 they come by DLPack, and torch's allocator does not know them as its own."""

    class Foreign(EMULATORS[version]):
        def get_paged_sparse_mqa_logits_metadata(self, *arguments: Any) -> torch.Tensor:
            return torch.from_dlpack(super().get_paged_sparse_mqa_logits_metadata(*arguments))

    both = exact_layers()
    got = run(sm100(version, deep_gemm=Foreign()), *both)
    assert same(got, run(sm100(version), *both))
    (tile,) = got.candidates.schedules.tiles
    assert tile.metadata.untyped_storage().resizable()


@pytest.mark.parametrize("version", VERSIONS)
def test_schedules_that_a_select_makes_are_of_its_budget(version: str) -> None:
    """One at a time; those of a publish are the caller's to keep."""
    source, consumer = random_layers([[2000 + i for i in range(60)]])
    candidates, budget = mask(topk_blocks=96).publish_prefill(source), 300 * KiB
    spy = Spy(version)
    out, want = (torch.full((60, 16), POISON, dtype=torch.int32) for _ in range(2))
    sm100(version, deep_gemm=spy, memory_budget=budget).select_prefill(candidates, consumer, out)
    assert len(spy.schedules) > 2
    assert spy.most_schedules == 1
    sm100(version).select_prefill(candidates, consumer, want)
    assert torch.equal(out, want)
    made = EMULATORS[version]().get_paged_sparse_mqa_logits_metadata(*spy.of("schedule")[0])
    rows, n = spy.of("schedule")[0][4].shape
    assert schedule_bytes(rows, n) - 16 * 257 < len(made) <= schedule_bytes(rows, n)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_budget_that_cannot_schedule_is_refused_before_anything_is_scored(version: str) -> None:
    source, _ = random_layers([[200 + i for i in range(8)]])
    spy = Spy(version)
    refused = sm100(version, memory_budget=70_000, deep_gemm=spy)
    least = named_budget(partial(refused.publish_prefill, source), 70_000)
    assert not spy.calls
    sm100(version, memory_budget=least, deep_gemm=spy).publish_prefill(source)
    assert {name for name, _ in spy.calls} >= {"fp8_fp4_mqa_logits", "schedule"}


class Spans(BlankDeepGemm):
    """Counts dot products: four neighboring rows are scored over all that any of them sees."""

    def __init__(self) -> None:
        self.scored = 0

    def fp8_fp4_mqa_logits(
        self,
        q: Any,
        kv: Any,
        weights: torch.Tensor,
        start: torch.Tensor,
        end: torch.Tensor,
        max_seqlen_k: int,
    ) -> torch.Tensor:
        for first in range(0, len(start), 4):
            some = slice(first, first + 4)
            self.scored += 4 * int(end[some].max() - start[some].min())
        return super().fp8_fp4_mqa_logits(q, kv, weights, max_seqlen_k=max_seqlen_k)


@pytest.mark.parametrize("layout", ["planar", "flat"])
def test_interleaved_rows_are_scored_as_those_in_order(layout: Layout) -> None:
    requests, rows = 16, 6
    keys = [random_keys(500, "fp4", seed=i) for i in range(requests)]
    queries = random_queries(requests * rows, 32, "fp4", seed=90)
    counts, of_row = [rows] * requests, list(range(requests)) * rows
    scored = []
    for order in (sorted(of_row), of_row):
        seen: list[int] = [0] * requests
        positions = []
        for request in order:
            positions.append(493 + seen[request])
            seen[request] += 1
        inputs = make_inputs(*queries, keys, positions, counts, layout=layout, request_of_row=order)
        spans = Spans()
        indexer = sm100("0.2.5", deep_gemm=spans)
        indexer.publish_prefill(inputs)
        indexer.topk_prefill(inputs, torch.empty(requests * rows, 16, dtype=torch.int32))
        scored.append(spans.scored)
    assert 0 < scored[1] <= 1.1 * scored[0]
    assert scored[0] < 2 * 2 * sum(n + 1 for n in positions)  # publish and topk, ends of requests


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_that_select_all_they_see_are_not_scored(version: str) -> None:
    layers = exact_layers([[16, 9, 0, 1], [12]])
    spy = Spy(version)
    indexer = Sm100Indexer("cpu", topk=16, topk_blocks=24, deep_gemm=spy)
    assert same(run(indexer, *layers), run(mask(), *layers))
    assert not spy.calls


@pytest.mark.parametrize("lens", [[], [[], []], [[0, 0], [0]]])
@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_to_see_launches_nothing(version: str, lens: list[list[int]]) -> None:
    source, consumer = random_layers(lens) if lens else random_layers([[]])
    spy = Spy(version)
    indexer = Sm100Indexer("cpu", topk=16, topk_blocks=24, deep_gemm=spy)
    assert same(run(indexer, source, consumer), run(mask(), source, consumer))
    none = [0] * source.plan.num_requests
    assert not indexer.prefill_tail(indexer.publish_prefill(source), none).num_rows
    assert not spy.calls


@pytest.mark.parametrize("version", VERSIONS)
def test_a_tail_of_no_rows_launches_nothing(version: str) -> None:
    source, consumer = exact_layers()
    spy = Spy(version)
    indexer = sm100(version, deep_gemm=spy)
    candidates = indexer.publish_prefill(source)
    spy.calls.clear()
    none = [0] * source.plan.num_requests
    tail = indexer.prefill_tail(candidates, none)
    assert tail.blocks.shape == (0, 24)
    indexer.select_prefill(tail, tail_inputs(consumer, none), torch.empty(0, 16, dtype=torch.int32))
    assert not indexer.prefill_tail(tail, none).num_rows
    assert not spy.calls


@pytest.mark.parametrize("version", VERSIONS)
def test_candidates_are_exchanged_with_the_mask_backend(version: str) -> None:
    source, consumer = exact_layers(request_of_row=INTERLEAVED)
    ours, oracle = sm100(version), mask()
    published = (ours.publish_prefill(source), oracle.publish_prefill(source))
    want = torch.full((source.plan.num_rows, 16), POISON, dtype=torch.int32)
    oracle.select_prefill(published[1], consumer, want)
    for candidates in published:
        for indexer in (ours, oracle):
            out = torch.full_like(want, POISON)
            indexer.select_prefill(candidates, consumer, out)
            assert torch.equal(out, want)
    tail = ours.prefill_tail(published[1], [0, 1, 0, 2, 0, 0, 1])
    rows = source.plan.tail_rows([0, 1, 0, 2, 0, 0, 1])
    assert torch.equal(tail.blocks, published[1].blocks[rows])
    out = torch.full((4, 16), POISON, dtype=torch.int32)
    ours.select_prefill(tail, tail_inputs(consumer, [0, 1, 0, 2, 0, 0, 1]), out)
    assert torch.equal(out, want[rows])


class Kernels(TorchDispatchMode):
    """The operations of torch's that do more than look at a tensor otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self.names.append(str(func).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


class Idle(BlankDeepGemm):
    """Returns what was made before."""

    def __init__(self) -> None:
        self._made: dict[str, torch.Tensor] = {}

    def fp8_fp4_mqa_logits(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return self._once("dense", super().fp8_fp4_mqa_logits, *arguments, **options)

    def get_paged_sparse_mqa_logits_metadata(self, *arguments: Any) -> torch.Tensor:
        return self._once("plan", super().get_paged_sparse_mqa_logits_metadata, *arguments)

    def fp8_fp4_paged_sparse_mqa_logits(self, *arguments: Any) -> torch.Tensor:
        return self._once("sparse", super().fp8_fp4_paged_sparse_mqa_logits, *arguments)

    def _once(self, name: str, make: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        if name not in self._made:
            self._made[name] = make(*arguments, **options)
        return self._made[name]


def test_the_host_does_little_beside_the_kernels() -> None:
    """What torch does for a consumer, and for one more tile of a source or of its schedule."""
    source, consumer = random_layers([[3000 + i for i in range(32)]])
    out = torch.empty(32, 16, dtype=torch.int32)
    operations = []
    for budget in (256 << 20, 400 << 10):
        indexer = sm100("0.2.5", deep_gemm=Idle(), topk_blocks=96, memory_budget=budget)
        indexer._ops = RowOps(lambda *_, **__: None, lambda *_, **__: None)
        candidates = indexer.publish_prefill(source, out)
        indexer.select_prefill(candidates, consumer, out)
        with Kernels() as of_publish:
            indexer.publish_prefill(source, out)
        with Kernels() as of_select:
            indexer.select_prefill(candidates, consumer, out)
        assert of_select.names == ["_to_copy.default"]  # of the weights of all tiles
        operations.append(of_publish.names)
    fewer, more = (Counter(names) for names in operations)
    tiles = more["empty.memory_format"] - fewer["empty.memory_format"]
    schedules = len(candidates.schedules.tiles)
    assert tiles > 0
    assert schedules > 1
    scheduled = ["index_select.default", "clamp_.default"]
    assert more - fewer == Counter(tiles * ["empty.memory_format"] + (schedules - 1) * scheduled)
    assert len(operations[0]) < 14
