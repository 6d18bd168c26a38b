# SPDX-License-Identifier: Apache-2.0
"""`candidate_topk` selects, bit for bit, what `topk` selects of `candidate_logits`."""

from collections.abc import Sequence

import pytest
import torch
from candidate_topk_support import (
    Case,
    Scratch,
    make_case,
    make_scratch,
    one_kernel,
    run_into,
    two_kernels,
)
from sm90_support import DEVICE, layers, needs_hopper, run, same, sm90, spying

from sparse_indexer import quad_scopes, quad_scoring
from sparse_indexer.formats import KeyFormat
from sparse_indexer.testing import with_queries

pytestmark = [pytest.mark.gpu, needs_hopper]

CTAS = 132  # of an H200
ROWS = 90  # of a case with long lists


def falling(rows: int, longest: int, step: int = 7) -> list[int]:
    return [max(longest - step * i, 0) for i in range(rows)]


def check(case: Case, k: int, ctas: Sequence[int], starts: torch.Tensor | None = None) -> None:
    want = two_kernels(case, k, starts)
    for count in ctas:
        assert torch.equal(one_kernel(case, k, count, starts), want), count


def selecting(case: Case, k: int) -> float:
    """How many of the rows have more positions to select from than k."""
    held = torch.minimum(case.lens, torch.tensor(case.columns, device=case.lens.device))
    return float(((held > k) & (case.rows >= 0)).sum()) / case.plan.num_rows


@pytest.mark.parametrize("form", ["fp8", "fp4"])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("alike", [1.0, 0.9, 0.0])
def test_random_data(form: KeyFormat, heads: int, alike: float) -> None:
    lens = [falling(270, 30_000), falling(31, 9000), [], [7, 0, 8, 9, 4000]]
    case = make_case(lens, form, heads=heads, n=700, alike=alike)
    counts = case.tables.counts[:, 1]
    assert bool((counts[:60] >= 0).all() if alike == 0.0 else (counts[:60] < 0).all())
    assert selecting(case, 512) > 0.9
    check(case, 512, [1, 7, 77, CTAS, 3 * CTAS])


@pytest.mark.parametrize("quads", [2, 5, 131, 133, 500, 1100])
@pytest.mark.parametrize("n", [60, 500])
def test_few_and_many_quads(quads: int, n: int) -> None:
    """Fewer than CTAs: a quad is of many of them, and some have nothing."""
    case = make_case([falling(4 * quads - 3, 9000, 1)], n=n, alike=0.9)
    assert selecting(case, 64) > 0.5
    check(case, 64, [CTAS - 1, CTAS, CTAS + 1])


def test_long_lists_and_few_ctas() -> None:
    """Every part of a quad that a CTA's part may begin and end with."""
    case = make_case([falling(45, 60_000)], n=2048, alike=0.95)
    check(case, 512, [*range(1, 40), 61, 100, 150])


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("k", [1, 2, 31, 512, 1024, 2048, 4000])
def test_every_k(heads: int, k: int) -> None:
    case = make_case([falling(100, 40_000), falling(60, 2500)], heads=heads, n=2048, alike=0.9)
    assert selecting(case, k) > 0.5
    check(case, k, [33, CTAS])


@pytest.mark.parametrize("heads", [32, 64])
def test_ties(heads: int) -> None:
    """A palette's logits are few; of the same keys all are equal: no list, digits."""
    lens = [falling(ROWS, 30_000)]
    check(make_case(lens, heads=heads, n=1500, palette=True), 512, [20, CTAS])
    case = make_case(lens, heads=heads, n=1500)
    case.keys.copy_(case.keys[:1].expand_as(case.keys).clone())
    check(case, 512, [20, CTAS])
    some = torch.arange(len(case.keys), device=case.keys.device) % 3 > 0
    case.keys[some] = 0
    check(case, 512, [20, CTAS])


def test_nan_and_infinity() -> None:
    case = make_case([falling(ROWS, 30_000)], n=1500, alike=0.8)
    case.keys[::3, 5] = 0x7F
    case.keys.view(torch.float32)[1::5, 256 + 3] = torch.inf
    case.keys.view(torch.float32)[2::5, 256 + 4] = -torch.inf
    check(case, 512, [20, CTAS])
    case.keys[:, ::16] = 0x7F
    check(case, 512, [20, CTAS])


def test_slots_without_a_row_and_rows_without_candidates() -> None:
    lens = [[0] * 50, falling(5, 9000), [0, 0, 0, 9000], [], [0] * 33, [9000, 0, 0, 1], [3] * 70]
    case = make_case(lens, n=300)
    assert bool((case.rows < 0).any())
    assert bool((case.tables.counts[:, 0] == 0).any())
    check(case, 100, [1, 2, 9, CTAS])


def test_nothing_at_all() -> None:
    case = make_case([[0] * 50, [0]], n=300)
    check(case, 100, [3, CTAS])
    assert (one_kernel(case, 100, CTAS) == -1).all()


def test_positions_of_flat_keys() -> None:
    case = make_case([falling(80, 9000), falling(70, 7000)], n=300)
    starts = torch.tensor([1000, 777_777], dtype=torch.int32, device=case.lens.device)
    check(case, 512, [CTAS], starts)
    assert not torch.equal(one_kernel(case, 512, CTAS, starts), one_kernel(case, 512, CTAS))


def test_more_candidates_than_columns() -> None:
    """Those past the slots' columns are left out."""
    case = make_case([falling(80, 9000)], n=300, alike=0.9)
    narrow = case._replace(tables=case.tables._replace(blocks=case.tables.blocks[:, :, :200]))
    check(narrow, 100, [7, CTAS])


@pytest.mark.parametrize("heads", [32, 64])
def test_fifty_runs_give_the_same(heads: int) -> None:
    """While another stream keeps some SMs and the L2 busy, too."""
    case = make_case([falling(4200, 60_000, 3)], heads=heads, n=600, alike=0.9)
    want = two_kernels(case, 512)
    scratch = make_scratch(case, CTAS)
    other = torch.cuda.Stream()
    noise = torch.ones(1 << 27, device=DEVICE)
    for i in range(50):
        if i % 2:
            with torch.cuda.stream(other):
                noise.mul_(1.0)
        assert torch.equal(one_kernel(case, 512, CTAS, scratch=scratch), want), i


def test_a_graph_replays_with_other_data() -> None:
    case = make_case([falling(700, 9000)], n=300, alike=0.9)
    out, scratch = case.poisoned(100), make_scratch(case, CTAS)
    run_into(case, out, *scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_into(case, out, *scratch)
    seen = []
    for i in range(4):
        case.queries.copy_(case.queries.roll(1, 0))
        case.lens[i::7] = 0
        case.tables.counts[i::5, 0] = 0  # and then no row of the quad sees anything
        case.lens.view(-1, 4)[i::5] = 0
        out.fill_(7)
        for _ in range(3):
            graph.replay()
        assert torch.equal(out, two_kernels(case, 100))
        assert not scratch.counters.any()
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[-1])


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Quads of each call of `candidate_topk` that the backend makes."""
    quads: list[int] = []

    def spy(keys: torch.Tensor, queries: torch.Tensor, *arguments: object, **named: object) -> None:
        quads.append(len(queries))
        op(keys, queries, *arguments, **named)

    op = quad_scoring.WGMMA.candidate_topk
    assert op is not None
    spied = quad_scoring.WGMMA._replace(candidate_topk=spy)
    monkeypatch.setattr("sparse_indexer.backends.sm90.Sm90Indexer.kernels", spied)
    return quads


LENS = [[5000 - 7 * i for i in range(50)], [], [1900 - i for i in range(20)],
        [3000 + 5 * i for i in range(37)], [0, 3, 801]]  # fmt: skip
MiB = 1 << 20


@pytest.mark.parametrize("layout", ["planar", "flat"])
@pytest.mark.parametrize(("form", "heads"), [("fp8", 64), ("fp4", 40), ("bf16", 32), ("fp8", 32)])
def test_the_backend_selects_the_same_either_way(
    form: KeyFormat, heads: int, layout: str, called: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, consumer = layers(LENS, form, heads=heads, layout=layout)  # type: ignore[arg-type]
    options = {"topk": 64, "topk_blocks": 100}
    want = run(sm90(**options), source, consumer)
    assert not called
    monkeypatch.setattr(quad_scopes, "_ONE_KERNEL_QUADS", 0)
    with spying() as calls:
        assert same(run(sm90(**options), source, consumer), want)
    # Halves take two kernels; so does what is scored densely first.
    one = form != "bf16"
    assert len(called) == one
    assert len(calls) == (5 if one else 6)
    called.clear()
    assert same(run(sm90(**options, memory_budget=8 * MiB), source, consumer), want)
    monkeypatch.setattr(quad_scopes, "_ONE_KERNEL_QUADS", 1 << 20)
    assert same(run(sm90(**options), source, consumer), want)


def test_a_large_consumer_takes_one_kernel_a_tile(called: list[int]) -> None:
    rows = 4 * CTAS * quad_scopes._ONE_KERNEL_QUADS + 100
    source, consumer = layers([falling(rows, 40_000, 1)], heads=64)
    indexer = sm90(topk=64, topk_blocks=200)
    candidates = indexer.publish_prefill(source)
    out = torch.full((rows, 64), 7, dtype=torch.int32, device=DEVICE)
    indexer.select_prefill(candidates, consumer, out)
    assert len(called) == 1
    assert called[0] * 4 >= rows
    part = 1000
    few = with_queries(source, consumer.index_q, consumer.head_weights)
    own = torch.full((rows, 64), 7, dtype=torch.int32, device=DEVICE)
    sm90(topk=64, topk_blocks=200, memory_budget=32 * MiB).select_prefill(candidates, few, own)
    assert len(called) == 1  # no room for slots
    assert torch.equal(own[-part:], out[-part:])
    assert torch.equal(own, out)


def test_a_scratch_of_another_call(called: list[int]) -> None:
    """Counters are zeros again whichever call was before."""
    assert not called
    case = make_case([falling(300, 9000)], n=300)
    other = make_case([falling(90, 9000)], n=300, alike=0.0)
    scratch = make_scratch(case, CTAS)
    for one in (case, other, case, other):
        fits = Scratch(scratch.slots, scratch.counters)
        assert torch.equal(one_kernel(one, 64, CTAS, scratch=fits), two_kernels(one, 64))
