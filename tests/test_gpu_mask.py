# SPDX-License-Identifier: Apache-2.0
"""The mask backend and the inputs on a GPU."""

import logging

import numpy as np
import pytest
import torch
from gpu_support import no_synchronization

from sparse_indexer import (
    IndexKPool,
    PrefillIndexerInputs,
    PrefillPlan,
    factory,
    make_candidate_indexer,
    plan_prefill,
)
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.formats import FORMATS
from sparse_indexer.testing import (
    CASES,
    CaseConfig,
    check_backend,
    hostile_pool,
    palette_keys,
    palette_queries,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"normal", "overlapping"}))
@pytest.mark.parametrize("fmt", FORMATS)
def test_selects_the_same_bits_as_on_a_cpu(fmt: str, name: str) -> None:
    results = []
    for device in ("cpu", "cuda:0"):
        config = CaseConfig(topk=8, topk_blocks=12, format=fmt, device=torch.device(device))
        case = CASES[name](config)
        assert case.exact  # in the fp32 that a GPU accumulates in as well
        indexer = make_candidate_indexer(device, topk=8, topk_blocks=12, backend="mask")
        rows = case.source.plan.num_rows
        own, selected = (torch.full((rows, 8), 7, dtype=torch.int32, device=device) for _ in "ab")
        candidates = indexer.publish_prefill(case.source, own)
        indexer.select_prefill(candidates, case.consumer, selected)
        results.append(torch.cat((candidates.blocks, own, selected), 1).cpu())
    assert torch.equal(*results)


@pytest.mark.parametrize("accumulate", [torch.float32, torch.float64])
@pytest.mark.parametrize(("topk", "topk_blocks"), [(8, 12), (512, 2048)])
def test_passes_the_conformance_kit(topk: int, topk_blocks: int, accumulate: torch.dtype) -> None:
    indexer = MaskIndexer("cuda:0", topk=topk, topk_blocks=topk_blocks, accumulate=accumulate)
    tolerance = 5e-6 if accumulate == torch.float32 else 0.0
    formats = FORMATS if topk == 8 else ["fp8"]
    report = check_backend(indexer, formats=formats, tolerance=tolerance)
    report.raise_if_failed()
    assert report.selecting_rows > 80


def test_auto_says_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    factory._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="sparse_indexer"):
        indexer = make_candidate_indexer("cuda")
    assert caplog.messages == [f"backend {indexer.name} on {indexer.device}"]


def inputs_on_gpu(rows: int = 6) -> PrefillIndexerInputs:
    keys = [palette_keys(n, "fp8", seed=n, device="cuda:0") for n in (700, 900)]
    pool, table = hostile_pool(keys, "planar", seed=1)
    positions = [699 - i for i in range(rows // 2)] + [899 - i for i in range(rows // 2)]
    plan = plan_prefill(positions, [rows // 2] * 2, page_table=table)
    queries, weights = palette_queries(rows, 4, "fp8", seed=1, device="cuda:0")
    return PrefillIndexerInputs(plan, queries, weights, pool)


def test_no_method_synchronizes() -> None:
    inputs = inputs_on_gpu()
    table = inputs.plan.page_table
    indexer = make_candidate_indexer("cuda:0", topk=16, topk_blocks=20, backend="mask")
    out = torch.empty(6, 16, dtype=torch.int32, device="cuda:0")
    tail_out = torch.empty(3, 16, dtype=torch.int32, device="cuda:0")
    with no_synchronization():
        plan = plan_prefill([699, 698, 697, 899, 898, 897], [3, 3], page_table=table)
        again = PrefillIndexerInputs(plan, inputs.index_q, inputs.head_weights, inputs.index_k)
        candidates = indexer.publish_prefill(again, out)
        indexer.select_prefill(candidates, again, out)
        indexer.topk_prefill(again, out)
        tail = indexer.prefill_tail(candidates, [1, 2])
        assert tail_out.shape[0] == tail.num_rows


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_write_to_a_pool_does_not_synchronize(fmt: str) -> None:
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([-1, 9, 700, 3, -2], dtype=torch.int32)
    pools = [IndexKPool.empty(3, 64, fmt, device=device) for device in ("cpu", "cuda:0")]
    pools[0].write(slots[[1, 3]], x[[1, 3]])
    there, rows, none = slots.cuda(), x.cuda(), torch.full((5,), -1, device="cuda:0")
    with no_synchronization():
        pools[1].write(there, rows)
        pools[1].write(none, rows)
    assert torch.equal(pools[0].pages, pools[1].pages.cpu())


def test_the_callers_arrays_may_change_at_once() -> None:
    positions = np.full(1 << 16, 700, np.int32)
    torch.cuda._sleep(200_000_000)  # the copy waits behind this
    plan = plan_prefill(positions, [1 << 16], device="cuda:0")
    positions[:] = 3
    for _ in range(20):  # would take over a staging buffer that was given back too early
        plan_prefill(positions, [1 << 16], device="cuda:0")
    assert (plan.compressed_lens == 701).all()


def test_a_page_outside_the_pool_does_no_harm_and_check_names_it() -> None:
    inputs = inputs_on_gpu()
    want = torch.empty(6, 16, dtype=torch.int32, device="cuda:0")
    indexer = make_candidate_indexer("cuda:0", topk=16, topk_blocks=20, backend="mask")
    indexer.topk_prefill(inputs, want)
    table = inputs.plan.page_table.clone()
    table[1, 2] = inputs.index_k.num_pages
    plan = PrefillPlan(
        compressed_lens=inputs.plan.compressed_lens,
        request_of_row=inputs.plan.request_of_row,
        rows_per_request=inputs.plan.rows_per_request,
        context_lens=inputs.plan.context_lens,
        page_table=table,
    )
    bad = PrefillIndexerInputs(plan, inputs.index_q, inputs.head_weights, inputs.index_k)
    out = torch.empty_like(want)
    indexer.topk_prefill(bad, out)
    torch.cuda.synchronize()
    assert torch.equal(out[:3], want[:3])
    assert not ((out[3:] >= 128) & (out[3:] < 192)).any()  # its positions count as NaN
    pages = inputs.index_k.num_pages
    with pytest.raises(
        ValueError, match=rf"page_table\[1, 2\]: expected a page of 0 to {pages - 1}"
    ):
        bad.check()


def test_pages_beyond_two_gigabytes() -> None:
    page_bytes = 64 * 132
    pages = torch.empty((1 << 32) // page_bytes, page_bytes, dtype=torch.uint8, device="cuda:0")
    pool = IndexKPool(pages, 64, "fp8")
    last = pool.num_pages - 1
    keys = palette_keys(64, "fp8", seed=1, device="cuda:0")
    queries, weights = palette_queries(1, 4, "fp8", seed=1, device="cuda:0")
    slots = last * 64 + torch.arange(64, device="cuda:0")
    pool.write(slots, keys)
    table = torch.tensor([[last]], dtype=torch.int32, device="cuda:0")
    paged = PrefillIndexerInputs(plan_prefill([63], [1], page_table=table), queries, weights, pool)
    flat_plan = plan_prefill([63], [1], device="cuda:0")
    flat = PrefillIndexerInputs(flat_plan, queries, weights, keys)
    assert torch.equal(paged.dense_scores(), flat.dense_scores())
