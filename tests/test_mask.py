# SPDX-License-Identifier: Apache-2.0
"""The mask backend against the plain-Python oracle, and through the conformance kit."""

import pytest
import torch

from sparse_indexer import (
    FlatIndexK,
    IndexQ,
    PrefillIndexerInputs,
    make_candidate_indexer,
    plan_prefill,
)
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.formats import FORMATS, INT32_MAX
from sparse_indexer.protocol import Candidates
from sparse_indexer.testing import (
    CASES,
    CaseConfig,
    check_backend,
    make_inputs,
    oracle_logits,
    oracle_publish,
    oracle_select,
    palette_keys,
    random_keys,
    random_queries,
    tail_inputs,
    with_queries,
)

LAYOUTS = ("planar", "interleaved", "flat")
HEADS = 12  # as many as fp4 needs digits


def used(rows: torch.Tensor, unused: int) -> list[list[int]]:
    return [[i for i in row if i != unused] for row in rows.tolist()]


@pytest.mark.parametrize("turn", range(len(CASES)), ids=list(CASES))
@pytest.mark.parametrize("fmt", FORMATS)
def test_equals_the_loop_oracle_exactly(fmt: str, turn: int) -> None:
    config = CaseConfig(topk=5, topk_blocks=7, format=fmt, layout=LAYOUTS[turn % 3], heads=HEADS)
    case = list(CASES.values())[turn](config)
    indexer = make_candidate_indexer("cpu", topk=5, topk_blocks=7)
    assert indexer.name == "mask"
    source, consumer = case.source, case.consumer
    rows = source.plan.num_rows
    own, selected, full = (torch.full((rows, 5), 7, dtype=torch.int32) for _ in range(3))
    candidates = indexer.publish_prefill(source, own)
    indexer.select_prefill(candidates, consumer, selected)
    indexer.topk_prefill(consumer, full)

    starts = source.plan.request_starts
    shifts = [0] * rows
    if starts is not None:
        shifts = starts[source.plan.request_of_row.long()].tolist()
    for inputs, outs in ((source, ((own, False),)), (consumer, ((selected, True), (full, False)))):
        logits = oracle_logits(inputs)
        lens = [len(row) for row in logits]
        assert lens == inputs.plan.compressed_lens.tolist()
        dense = inputs.dense_scores()
        for row, want in enumerate(logits):
            torch.testing.assert_close(
                dense[row, : len(want)], torch.tensor(want), rtol=0, atol=0, equal_nan=True
            )
            assert (dense[row, len(want) :] == -torch.inf).all()
        if inputs is source:
            blocks = oracle_publish(logits, 7)
            assert used(candidates.blocks, INT32_MAX) == blocks
        for out, among in outs:
            want = oracle_select(logits, 5, blocks if among else None)
            want = [[n + shift for n in row] for row, shift in zip(want, shifts, strict=True)]
            assert used(out, -1) == want


@pytest.mark.parametrize("accumulate", [torch.float32, torch.float64])
@pytest.mark.parametrize("fmt", FORMATS)
def test_autocast_changes_no_bit(fmt: str, accumulate: torch.dtype) -> None:
    queries, weights = random_queries(3, 32, fmt, seed=1)
    inputs = make_inputs(queries, weights, [random_keys(700, fmt, seed=2)], [650, 651, 699], [3])
    indexer = MaskIndexer("cpu", topk=16, topk_blocks=24, accumulate=accumulate)

    def results() -> list[torch.Tensor]:
        own, selected, full = (torch.full((3, 16), 7, dtype=torch.int32) for _ in range(3))
        candidates = indexer.publish_prefill(inputs, own)
        indexer.select_prefill(candidates, inputs, selected)
        indexer.topk_prefill(inputs, full)
        return [indexer.dense_logits(inputs), candidates.blocks, own, selected, full]

    want = results()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, results(), want))


@pytest.mark.parametrize(("topk", "topk_blocks"), [(1, 1), (8, 12), (64, 70), (100, 3)])
def test_passes_the_conformance_kit(topk: int, topk_blocks: int) -> None:
    indexer = make_candidate_indexer("cpu", topk=topk, topk_blocks=topk_blocks, backend="mask")
    heads = (32, 64) if topk == 8 else (HEADS,)  # time goes with the heads
    report = check_backend(indexer, heads=heads, own_logits=indexer.dense_logits)
    report.raise_if_failed()
    assert report.backend == "mask"
    assert report.checks > 1000
    assert report.selecting_rows > 200


def test_passes_the_conformance_kit_at_the_reference_size() -> None:
    indexer = make_candidate_indexer("cpu", topk=512, topk_blocks=2048, backend="mask")
    report = check_backend(indexer, formats=["fp8"], heads=[6])
    report.raise_if_failed()
    assert report.selecting_rows > 80


@pytest.mark.parametrize("fmt", FORMATS)
def test_fp32_accumulation_is_within_the_fp32_tolerance(fmt: str) -> None:
    indexer = MaskIndexer("cpu", topk=16, topk_blocks=24, accumulate=torch.float32)
    check_backend(indexer, formats=[fmt], tolerance=5e-6).raise_if_failed()


def test_published_with_topk_blocks_for_all_selects_as_the_full_layer() -> None:
    keys = [random_keys(n, "fp8", seed=n) for n in (300, 517)]
    queries, weights = random_queries(6, 4, "fp8", seed=1)
    source = make_inputs(queries, weights, keys, [299, 200, 7, 516, 400, 15], [3, 3])
    consumer = with_queries(source, *random_queries(6, 4, "fp8", seed=2))
    indexer = MaskIndexer("cpu", topk=20, topk_blocks=65)
    selected, full = torch.empty(6, 20, dtype=torch.int32), torch.empty(6, 20, dtype=torch.int32)
    indexer.select_prefill(indexer.publish_prefill(source), consumer, selected)
    indexer.topk_prefill(consumer, full)
    assert torch.equal(selected, full)


@pytest.mark.parametrize("layout", ["planar", "interleaved"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_pages_may_lie_anywhere(fmt: str, layout: str) -> None:
    keys = [random_keys(n, fmt, seed=n) for n in (130, 517)]
    queries, weights = random_queries(4, 4, fmt, seed=1)
    results = []
    for seed, page_size in ((0, 64), (1, 64), (2, 8), (3, 256)):
        inputs = make_inputs(
            queries,
            weights,
            keys,
            [129, 50, 516, 333],
            [2, 2],
            layout=layout,
            page_size=page_size,
            seed=seed,
        )
        out = torch.empty(4, 20, dtype=torch.int32)
        blocks = MaskIndexer("cpu", topk=20, topk_blocks=30).publish_prefill(inputs, out).blocks
        results.append(torch.cat((out, blocks), 1))
    flat = make_inputs(queries, weights, keys, [129, 50, 516, 333], [2, 2], layout="flat")
    out = torch.empty(4, 20, dtype=torch.int32)
    blocks = MaskIndexer("cpu", topk=20, topk_blocks=30).publish_prefill(flat, out).blocks
    for result in results:
        assert torch.equal(result, torch.cat((out, blocks), 1))


def test_reads_candidates_of_another_backend_in_any_order() -> None:
    keys = [palette_keys(400, "fp8", seed=1)]
    queries, weights = random_queries(3, 4, "fp8", seed=1)
    inputs = make_inputs(queries, weights, keys, [399, 350, 20], [3])
    indexer = MaskIndexer("cpu", topk=20, topk_blocks=25)
    candidates = indexer.publish_prefill(inputs)
    want, got = torch.empty(3, 20, dtype=torch.int32), torch.empty(3, 20, dtype=torch.int32)
    indexer.select_prefill(candidates, inputs, want)
    shuffled = type(candidates)(candidates.blocks.flip(1).contiguous(), candidates.plan)
    indexer.select_prefill(shuffled, inputs, got)
    assert torch.equal(got, want)


@pytest.mark.parametrize("tail_lens", [[0, 0, 0], [4, 0, 2], [1, 0, 1], [3, 0, 0]])
def test_tail_is_the_publish_of_the_tail_rows(tail_lens: list[int]) -> None:
    keys = [random_keys(n, "fp8", seed=n) for n in (300, 0, 517)]
    queries, weights = random_queries(6, 4, "fp8", seed=1)
    positions = [299, 516, 200, 7, 400, 298]
    requests = [0, 2, 0, 0, 2, 0]
    source = make_inputs(queries, weights, keys, positions, [4, 0, 2], request_of_row=requests)
    indexer = MaskIndexer("cpu", topk=20, topk_blocks=30)
    candidates = indexer.publish_prefill(source)
    tail = indexer.prefill_tail(candidates, tail_lens)
    rows_of = [[0, 2, 3, 5], [], [1, 4]]
    want_rows = sorted(
        r for of, n in zip(rows_of, tail_lens, strict=True) for r in of[len(of) - n :]
    )
    assert tail.num_rows == len(want_rows)
    assert torch.equal(tail.blocks, candidates.blocks[want_rows])
    published = indexer.publish_prefill(tail_inputs(source, tail_lens))
    assert torch.equal(published.blocks, tail.blocks)


def test_bad_calls_say_argument_expected_got() -> None:
    keys = [random_keys(40, "fp8", seed=1)]
    queries, weights = random_queries(3, 4, "fp8", seed=1)
    inputs = make_inputs(queries, weights, keys, [39, 20, 7], [3])
    indexer = MaskIndexer("cpu", topk=20, topk_blocks=30)
    candidates = indexer.publish_prefill(inputs)
    out = torch.empty(3, 20, dtype=torch.int32)
    bad_outs = {
        r"\[3, 20\] int32 on cpu, got \[3, 19\] int32": out[:, :19],
        r"\[3, 20\] int32 on cpu, got \[2, 20\] int32": out[:2],
        r"\[3, 20\] int32 on cpu, got \[3, 20\] int64": out.long(),
        r"\[3, 20\] int32 on cpu, got \[3, 20\] int32 on meta": out.to("meta"),
        "a contiguous last dimension, got strides": torch.empty(20, 3, dtype=torch.int32).t(),
    }
    for message, bad in bad_outs.items():
        for call in (
            lambda bad=bad: indexer.publish_prefill(inputs, bad),
            lambda bad=bad: indexer.select_prefill(candidates, inputs, bad),
            lambda bad=bad: indexer.topk_prefill(inputs, bad),
        ):
            with pytest.raises(ValueError, match=f"out_positions: expected {message}"):
                call()
    with pytest.raises(
        ValueError, match="candidates: expected 3 rows, as the inputs have, got 1 rows"
    ):
        indexer.select_prefill(indexer.prefill_tail(candidates, [1]), inputs, out)
    with pytest.raises(ValueError, match="candidates: expected Candidates, got None"):
        indexer.select_prefill(None, inputs, out)
    with pytest.raises(ValueError, match="candidates: expected Candidates, got None"):
        indexer.prefill_tail(None, [1])
    with pytest.raises(ValueError, match="plan: expected a PrefillPlan, got None"):
        Candidates(candidates.blocks, None)
    for call in (
        lambda: indexer.topk_prefill(inputs, None),
        lambda: indexer.select_prefill(candidates, inputs, None),
    ):
        with pytest.raises(
            ValueError, match=r"out_positions: expected \[3, 20\] int32 on cpu, got None"
        ):
            call()
    with pytest.raises(ValueError, match="out_positions: expected rows of their own memory"):
        indexer.topk_prefill(inputs, torch.empty(1, 20, dtype=torch.int32).expand(3, 20))
    others = make_inputs(queries, weights, keys, [20, 39, 7], [3])
    with pytest.raises(
        ValueError, match="candidates: expected a plan with the compressed_lens of the inputs"
    ):
        indexer.select_prefill(candidates, others, out)
    same = make_inputs(queries, weights, keys, [39, 20, 7], [3])
    indexer.select_prefill(candidates, same, out)
    blocks = candidates.blocks
    for bad in (blocks.float(), blocks[:1], blocks.numpy(), None):
        with pytest.raises(
            ValueError, match=r"candidates.blocks: expected \[3, topk_blocks\] int32"
        ):
            indexer.select_prefill(type(candidates)(bad, inputs.plan), inputs, out)
        with pytest.raises(
            ValueError, match=r"candidates.blocks: expected \[3, topk_blocks\] int32"
        ):
            indexer.prefill_tail(type(candidates)(bad, inputs.plan), [1])
    with pytest.raises(ValueError, match="tail_lens: expected a list of ints on the host, got 1"):
        indexer.prefill_tail(candidates, 1)
    with pytest.raises(ValueError, match="inputs: expected PrefillIndexerInputs, got \\[3, 20\\]"):
        indexer.topk_prefill(out, out)
    on_meta = PrefillIndexerInputs(
        plan_prefill([39, 20, 7], [3], device="meta"),
        IndexQ(torch.zeros(3, 5, 128, dtype=torch.float16, device="meta")),
        torch.zeros(3, 5, device="meta"),
        FlatIndexK(torch.zeros(40, 128, dtype=torch.float16, device="meta"), None, "fp16"),
    )
    with pytest.raises(ValueError, match="inputs: expected tensors on cpu, got meta"):
        indexer.publish_prefill(on_meta)
    for make in (make_candidate_indexer, MaskIndexer):
        with pytest.raises(ValueError, match="device: expected a device that has values, got meta"):
            make("meta")
    with pytest.raises(ValueError, match=r"tail_lens\[0\]: expected an int of 0 to 3, got 4"):
        indexer.prefill_tail(candidates, [4])
    with pytest.raises(ValueError, match="tail_lens: expected 1 values, one a request, got 2"):
        indexer.prefill_tail(candidates, [1, 1])
    with pytest.raises(ValueError, match=r"accumulate: expected torch.float32 or torch.float64"):
        MaskIndexer("cpu", accumulate=torch.float16)
