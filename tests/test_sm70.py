# SPDX-License-Identifier: Apache-2.0
"""The sm70 backend, on any card: its own machine code there, and PTX of Turing and Volta."""

import pytest
import torch
from budgets import named_budget
from fused_support import CODES, use_code
from gpu_support import check_graph_and_no_synchronization, free_memory
from sm90_support import DEVICE, Layers, layers, poisoned, run, same

from sparse_indexer import make_candidate_indexer
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.backends.sm70 import Sm70Indexer
from sparse_indexer.formats import FORMATS, KeyFormat
from sparse_indexer.testing import check_backend

pytestmark = pytest.mark.gpu

MiB = 1 << 20
TOLERANCE = 2e-5  # of a row's largest |logit|: sums of float32 against float64
LENS = [[3000 + 5 * i for i in range(37)], [], [1900 - i for i in range(20)], [40, 0, 5000]]
OPTIONS = {"topk": 64, "topk_blocks": 100}


@pytest.fixture(params=CODES, autouse=True)
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_code(request.param, monkeypatch)
    return str(request.param)


@pytest.mark.parametrize("form", FORMATS)
def test_passes_the_conformance_kit(form: KeyFormat) -> None:
    indexer = Sm70Indexer(DEVICE, topk=16, topk_blocks=20)
    report = check_backend(indexer, formats=[form], tolerance=TOLERANCE)
    report.raise_if_failed()
    assert report.backend == "sm70"
    assert report.selecting_rows > 80


@pytest.mark.parametrize(("heads", "form"), [(20, "fp4"), (48, "fp8"), (48, "bf16")])
def test_head_counts_between_are_padded(heads: int, form: KeyFormat) -> None:
    indexer = Sm70Indexer(DEVICE, topk=8, topk_blocks=12)
    report = check_backend(indexer, formats=[form], heads=[heads], tolerance=TOLERANCE)
    report.raise_if_failed()
    assert report.backend == "sm70"


def test_more_heads_are_for_the_other_route() -> None:
    """Which `test_gemm_scoring.py` is about."""
    both = layers(LENS, heads=65, palette=True)
    with pytest.raises(ValueError, match=r"^index_q values: expected at most 64 heads"):
        Sm70Indexer(DEVICE, route="fused").publish_prefill(both.source)
    want = run(MaskIndexer(DEVICE, **OPTIONS, accumulate=torch.float64), *both)
    assert same(run(Sm70Indexer(DEVICE, **OPTIONS), *both), want)


def test_the_peak_is_one_budget() -> None:
    """Of requests whose keys do not fit together, one after the other."""
    source, consumer = layers([[60_000 - i for i in range(40)] for _ in range(4)])
    indexer, budget = Sm70Indexer(DEVICE, memory_budget=16 * MiB), 16 * MiB
    out, candidates = poisoned(source, 512), indexer.publish_prefill(source)
    for call in (
        lambda: indexer.topk_prefill(consumer, out),
        lambda: indexer.select_prefill(candidates, consumer, out),
    ):
        free_memory()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        assert torch.cuda.max_memory_allocated() - before <= budget + 64 * 160 + 8192


@pytest.mark.parametrize(("form", "queries"), [("fp8", "fp8"), ("bf16", "fp8"), ("fp4", "fp16")])
def test_exact_data_gives_what_mask_gives(form: KeyFormat, queries: KeyFormat) -> None:
    """Publish, own positions, select and full top-k, with far more positions than are selected."""
    both = layers(LENS, form, queries=queries, palette=True)
    want = run(MaskIndexer(DEVICE, **OPTIONS, accumulate=torch.float64), *both)
    assert same(run(Sm70Indexer(DEVICE, **OPTIONS), *both), want)


def smallest_budget(both: Layers) -> int:
    """That all methods can do with: what their refusals name."""
    source, consumer = both
    poor, out = Sm70Indexer(DEVICE, **OPTIONS, memory_budget=1), poisoned(source, 64)
    candidates = Sm70Indexer(DEVICE, **OPTIONS).publish_prefill(source)
    return max(
        named_budget(lambda: poor.publish_prefill(source, out), 1),
        named_budget(lambda: poor.select_prefill(candidates, consumer, out), 1),
        named_budget(lambda: poor.topk_prefill(consumer, out), 1),
    )


@pytest.mark.parametrize("form", ["fp8", "fp16"])
def test_neither_budget_nor_run_matters(form: KeyFormat) -> None:
    both = layers(LENS, form)
    want = run(Sm70Indexer(DEVICE, **OPTIONS), *both)
    least = smallest_budget(both)
    assert 1 < least < 3 * MiB
    for budget in (least, 3 * MiB, 256 * MiB):
        assert same(run(Sm70Indexer(DEVICE, **OPTIONS, memory_budget=budget), *both), want)


def test_no_method_synchronizes_and_a_graph_replays() -> None:
    source, consumer = layers(LENS)
    indexer = Sm70Indexer(DEVICE, **OPTIONS)
    want = run(indexer, source, consumer)
    check_graph_and_no_synchronization(indexer, (source, consumer), want, [3, 0, 20, 1])


def test_candidates_of_another_backend() -> None:
    source, consumer = layers(LENS)
    sm70, mask = Sm70Indexer(DEVICE, **OPTIONS), MaskIndexer(DEVICE, **OPTIONS)
    blocks = sm70.publish_prefill(source)
    want, got, tail = poisoned(consumer, 64), poisoned(consumer, 64), poisoned(consumer, 64)
    sm70.select_prefill(blocks, consumer, want)
    other = mask.prefill_tail(blocks, source.plan.rows_per_request)  # the same rows
    sm70.select_prefill(other, consumer, got)
    assert torch.equal(got, want)
    if torch.cuda.get_device_capability(DEVICE) == (9, 0):  # whose tables are others
        sm90 = make_candidate_indexer(DEVICE, backend="sm90", **OPTIONS)
        theirs = sm90.prefill_tail(blocks, source.plan.rows_per_request)
        sm70.select_prefill(theirs, consumer, tail)
        assert torch.equal(tail, want)
