# SPDX-License-Identifier: Apache-2.0
"""The GEMM route of the sm70 backend: logits, block keys, selections, memory. Any GPU.

Without one, `test_gemm_emulated.py` runs most of these on a CPU.
"""

import pytest
import torch
from budgets import named_budget
from fused_support import beyond_halves, logits_of, pack
from gemm_support import POISON, TOLERANCE, gemm_block_keys, gemm_logits, rounded_logits
from gpu_support import (
    check_graph_and_no_synchronization,
    check_select_on_another_stream,
    check_tail_on_another_stream,
    free_memory,
)
from sm90_support import Layers, Results, layers, poisoned, run, same

from sparse_indexer import IndexQ, PrefillIndexerInputs
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.backends.sm70 import Sm70Indexer
from sparse_indexer.formats import FORMATS, KeyFormat
from sparse_indexer.inputs import flat_index_k
from sparse_indexer.protocol import CandidateIndexer
from sparse_indexer.testing import check_backend, make_inputs, with_queries
from sparse_indexer.torch_ops.as_kernels import block_keys

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
MiB = 1 << 20
# Requests of no rows, of many, of one; lengths around blocks, units of 64 and the longest.
LENS = [
    [0, 1, 7, 8, 9, 63, 64, 65, 100],
    [],
    [1000 - 13 * i for i in range(21)],
    [5],
    [0, 0],
    [1025, 3, 1024],
]
OPTIONS = {"topk": 40, "topk_blocks": 60}
FORMS: list[tuple[KeyFormat, KeyFormat]] = [  # of keys and of queries
    ("fp8", "fp8"),
    ("fp4", "fp4"),
    ("fp16", "fp16"),
    ("bf16", "bf16"),
    ("fp8", "bf16"),
    ("fp4", "fp8"),
    ("bf16", "fp4"),
]
HEADS = (3, 32, 64, 96)


def gemm(route: str = "gemm", **options: int) -> CandidateIndexer:
    """Replaced where kernels are emulated."""
    return Sm70Indexer(DEVICE, **options, route=route)  # type: ignore[arg-type]


def seen(inputs: PrefillIndexerInputs) -> torch.Tensor:
    columns = torch.arange(max(inputs.plan.context_lens), device=DEVICE)
    return columns < inputs.plan.compressed_lens[:, None]


def oracle(inputs: PrefillIndexerInputs) -> torch.Tensor:
    """Logits in float64, rounded once."""
    return MaskIndexer(DEVICE, accumulate=torch.float64, memory_budget=1 << 30).dense_logits(inputs)


def smallest_budget(both: Layers, **options: int) -> int:
    return named_budget(lambda: run(gemm(**OPTIONS, **options, memory_budget=1), *both), 1)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("forms", FORMS, ids="-".join)
def test_exact_data(forms: tuple[KeyFormat, KeyFormat], heads: int) -> None:
    """No rounding anywhere: the oracle's numbers, whatever the tiles are; keys are theirs."""
    inputs = layers(LENS, forms[0], queries=forms[1], heads=heads, palette=True).source
    want, visible = oracle(inputs), seen(inputs)
    assert want[visible].unique().numel() > 100
    keys = torch.empty(len(want), -(-want.shape[1] // 8), device=DEVICE)
    block_keys(want, inputs.plan.compressed_lens, out=keys)
    for budget in (700 << 10, 2 * MiB, 256 * MiB):
        got = gemm_logits(inputs, budget)
        assert torch.equal(got[visible], want[visible])
        assert (got[~visible] == POISON).all()
        assert torch.equal(gemm_block_keys(inputs, budget), keys)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("forms", FORMS, ids="-".join)
def test_random_data(forms: tuple[KeyFormat, KeyFormat], heads: int) -> None:
    """Each head's score is rounded to float16, 2^-11 of it, and the rest is float32."""
    inputs = layers(LENS, forms[0], queries=forms[1], heads=heads).source
    got, want, visible = gemm_logits(inputs, 2 * MiB), oracle(inputs), seen(inputs)
    sizes = oracle(with_queries(inputs, inputs.index_q, inputs.head_weights.abs()))
    sizes = torch.where(visible, sizes, 0)
    # Scores far below a row's largest are subnormal in float16: off by 2^-25 of up to 2^9.
    bound = (2.0**-11 + (heads + 128) * 2.0**-23) * sizes + 2.0**-20 * sizes.amax(1, keepdim=True)
    error = torch.where(visible, (got - want).abs(), 0)
    assert (error <= bound).all(), (error / bound).max()
    # Scores of fp4 have few bits; else what is not rounded to float16 would be far closer.
    assert (error > 2.0**-15 * sizes).any() or forms == ("fp4", "fp4")


@pytest.mark.parametrize("heads", [32, 64, 96])
@pytest.mark.parametrize("form", ["fp8", "fp16", "bf16"])
def test_scores_are_rounded_as_with_half_scores(form: KeyFormat, heads: int) -> None:
    """Integers beyond 2^11, exact in float32, each rounded to nearest; the fused kernels agree."""
    inputs, scores = beyond_halves(form, heads)
    weights = inputs.head_weights
    want = rounded_logits(scores, weights, inputs)
    assert (want != (scores.relu() * weights[:, :, None]).sum(1)).float().mean() > 0.2
    got = gemm_logits(inputs, 400 << 10)
    assert torch.equal(got.double(), want)
    if heads <= 64:
        assert torch.equal(logits_of(pack(inputs), 300, half_scores=True), got)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("form", FORMATS)
def test_the_fused_route_is_closer_to_float64(form: KeyFormat, heads: int) -> None:
    """As a whole, and by the worst logit; lengths end inside blocks and tiles."""
    inputs = layers(LENS, form, heads=heads).source
    want, visible = oracle(inputs), seen(inputs)
    largest = torch.where(visible, want.abs(), 0).amax(1, keepdim=True).clamp(min=2.0**-100)

    def errors(logits: torch.Tensor) -> tuple[float, float]:
        error = (torch.where(visible, logits - want, 0) / largest).double()
        return error.abs().max().item(), error.square().sum().sqrt().item()

    fused = errors(logits_of(pack(inputs), want.shape[1]))
    by_gemm = errors(gemm_logits(inputs))
    assert fused[0] <= by_gemm[0]
    assert fused[1] <= by_gemm[1]


def test_bf16_far_beyond_float16() -> None:
    """A scale a position and a query; no score overflows."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    values = torch.randn(200, 128, device=DEVICE, generator=generator) * 2.0**90
    queries = torch.randn(3, 70, 128, device=DEVICE, generator=generator) * 2.0**-60
    weights = torch.randn(3, 70, device=DEVICE, generator=generator)
    keys = flat_index_k(values, "bf16")
    inputs = make_inputs(IndexQ(queries.bfloat16()), weights, [keys], [199, 150, 8], [3])
    got, want, visible = gemm_logits(inputs), oracle(inputs), seen(inputs)
    assert want[visible].abs().amax() > 2.0**30
    error = torch.where(visible, (got - want).abs(), 0).amax(1)
    assert (error <= TOLERANCE * torch.where(visible, want.abs(), 0).amax(1)).all()


@pytest.mark.parametrize(("form", "heads"), [*((form, 64) for form in FORMATS), ("fp8", 96)])
def test_passes_the_conformance_kit(form: KeyFormat, heads: int) -> None:
    route = "gemm" if heads <= 64 else "auto"
    indexer = gemm(route, topk=16, topk_blocks=20, memory_budget=8 * MiB)
    report = check_backend(indexer, formats=[form], heads=[heads], tolerance=TOLERANCE)
    report.raise_if_failed()
    assert report.backend == "sm70"
    assert report.selecting_rows > 80


def mask_results(both: Layers) -> Results:
    return run(MaskIndexer(DEVICE, **OPTIONS, accumulate=torch.float64), *both)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", ["planar", "flat"])
def test_exact_data_gives_what_mask_gives(layout: str, heads: int) -> None:
    """All four methods, for any budget from the least on."""
    both = layers(LENS, "fp8", heads=heads, palette=True, layout=layout)  # type: ignore[arg-type]
    want = mask_results(both)
    least = smallest_budget(both)
    for budget in (least, least + 100_000, 4 * MiB, 256 * MiB):
        assert same(run(gemm(**OPTIONS, memory_budget=budget), *both), want)
    less = gemm(**OPTIONS, memory_budget=least - 1)
    assert named_budget(lambda: run(less, *both), least - 1) == least


@pytest.mark.parametrize("options", [{"topk": 60, "topk_blocks": 6}, {"topk": 0, "topk_blocks": 9}])
def test_more_positions_than_blocks_and_none(options: dict[str, int]) -> None:
    both = layers(LENS, "fp16", heads=3, palette=True)
    want = run(MaskIndexer(DEVICE, **options, accumulate=torch.float64), *both)
    assert same(run(gemm(**options, memory_budget=2 * MiB), *both), want)


def test_candidates_and_tails_of_other_backends() -> None:
    """Of mask and of either route, by either route."""
    source, consumer = both = layers(LENS, "fp8", heads=32, palette=True)
    want, tail_lens = mask_results(both), [3, 0, 20, 1, 0, 2]
    rows = source.plan.tail_rows(tail_lens)
    mask = MaskIndexer(DEVICE, **OPTIONS, accumulate=torch.float64)
    every = [mask, *(gemm(route, **OPTIONS) for route in ("auto", "fused", "gemm"))]
    for publisher in every:
        candidates = publisher.publish_prefill(source)
        assert torch.equal(candidates.blocks, want.blocks)
        for indexer in every:
            out = poisoned(consumer, OPTIONS["topk"])
            indexer.select_prefill(candidates, consumer, out)
            assert torch.equal(out, want.selected)
            tail = indexer.prefill_tail(candidates, tail_lens)
            assert torch.equal(tail.blocks, want.blocks[rows])
            again = indexer.prefill_tail(tail, [0, 0, 5, 0, 0, 1])
            kept = tail.plan.tail_rows([0, 0, 5, 0, 0, 1])
            assert torch.equal(again.blocks, want.blocks[rows][kept])


def test_other_shapes_of_arguments() -> None:
    """Queries and weights that are slices, scales folded into the weights, weights in bf16."""
    source = layers(LENS, "fp8", heads=96, palette=True).source
    q, plan = source.index_q, source.plan
    assert q.scales is not None
    wide = torch.zeros(plan.num_rows, 99, 160, device=DEVICE).to(q.values.dtype)
    wide[:, 2:98, 16:144] = q.values
    scales = torch.zeros(plan.num_rows, 99, device=DEVICE)
    scales[:, :96] = q.scales
    weights = torch.zeros(plan.num_rows, 97, device=DEVICE)
    weights[:, :96] = source.head_weights
    sliced = PrefillIndexerInputs(
        plan, IndexQ(wide[:, 2:98, 16:144], scales[:, :96]), weights[:, :96], source.index_k
    )
    want = gemm_logits(source)
    assert torch.equal(gemm_logits(sliced), want)
    folded = with_queries(source, IndexQ(q.values), source.head_weights * q.scales)
    assert torch.equal(gemm_logits(folded), want)
    halves = with_queries(source, q, source.head_weights.bfloat16())
    assert torch.equal(gemm_logits(halves), want)  # multiples of 1/16


def test_autocast_changes_no_bit() -> None:
    source = layers(LENS, "fp16", heads=40).source
    want = gemm_logits(source)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert torch.equal(gemm_logits(source), want)


@pytest.mark.parametrize("lens", [[[]], [], [[0, 0], []]], ids=str)
def test_rows_that_see_nothing_and_none(lens: list[list[int]]) -> None:
    if not lens:
        lens = [[], []]
    both = layers(lens, "fp8", heads=96, palette=True)
    got = run(gemm("auto", **OPTIONS), *both)
    assert same(got, mask_results(both))


@pytest.mark.parametrize("heads", [32, 96])
def test_no_method_synchronizes_and_a_graph_replays(heads: int) -> None:
    source, consumer = layers(LENS, heads=heads, palette=True)
    indexer = gemm(**OPTIONS, memory_budget=4 * MiB)
    want = run(indexer, source, consumer)
    check_graph_and_no_synchronization(indexer, (source, consumer), want, [3, 0, 20, 1, 0, 2])


def test_other_streams() -> None:
    """What a publish or a tail leaves is waited for, and is its own."""
    both, tail_lens = layers(LENS, "fp8", heads=96, palette=True), [3, 0, 20, 1, 0, 2]
    indexer, want = gemm(**OPTIONS), mask_results(both)
    run(indexer, *both)
    check_select_on_another_stream(indexer, [both], [want], tail_lens)
    check_tail_on_another_stream(indexer, both, want, tail_lens, [1, 0, 9, 0, 0, 1])


@pytest.mark.parametrize("budget", [32 * MiB, 128 * MiB])
@pytest.mark.parametrize("heads", [64, 96])
def test_the_peak_is_one_budget(heads: int, budget: int) -> None:
    """With many tiles, chunks, and requests; cuBLAS's workspace is there before."""
    lens = [[60_000 - i for i in range(300)], [], [59_000 - i for i in range(200)]]
    source, consumer = layers(lens, "fp8", heads=heads)
    indexer = gemm(topk=512, topk_blocks=2048, memory_budget=budget)
    own, selected = poisoned(source, 512), poisoned(source, 512)
    run(indexer, *layers(LENS, heads=heads))
    free_memory()

    def peak_of(what: str) -> int:
        nonlocal candidates
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if what == "publish":
            candidates = indexer.publish_prefill(source)
        elif what == "publish with own positions":
            candidates = indexer.publish_prefill(source, own)
        elif what == "select":
            indexer.select_prefill(candidates, consumer, selected)
        else:
            indexer.topk_prefill(consumer, selected)
        return torch.cuda.max_memory_allocated() - before

    candidates = None
    of_rows = 500 * 200  # sorted, and how they are
    for what in ("publish", "publish with own positions", "select", "topk"):
        tables = 500 * 2048 * 4 + 512 if what.startswith("publish") else 0
        peak = peak_of(what)
        assert budget // 2 < peak <= budget + tables + of_rows, what
