# SPDX-License-Identifier: Apache-2.0
"""The sm90 backend selects what the rules say, of logits within its tolerance."""

import pytest
import torch
from sm90_support import (
    DEVICE,
    TOLERANCE,
    Layers,
    layers,
    needs_hopper,
    own_logits,
    pick,
    poisoned,
    run,
    same,
    sm90,
)

from sparse_indexer import (
    IndexKPool,
    PrefillIndexerInputs,
    PrefillPlan,
)
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.formats import FORMATS, INT32_MAX, KeyFormat
from sparse_indexer.testing import (
    block_values,
    check_backend,
    logits_problem,
    near_floor_problem,
    palette_keys,
    palette_queries,
    with_queries,
)
from sparse_indexer.torch_ops.block_keys import block_keys, published
from sparse_indexer.torch_ops.topk import indices, ordered, pack

pytestmark = [pytest.mark.gpu, needs_hopper]

LARGE = [[65_536 - 3 * i for i in range(400)], [30_011 - i for i in range(112)]]
SMALL = [[3000 + 5 * i for i in range(21)], [], [13, 0, 1, 700], [1900 - i for i in range(18)]]


@pytest.mark.parametrize(("topk", "topk_blocks"), [(8, 12), (16, 16)])
def test_passes_the_conformance_kit(topk: int, topk_blocks: int) -> None:
    """With all its logits known, and with as many blocks as positions."""
    indexer = sm90(topk=topk, topk_blocks=topk_blocks)
    known = own_logits if topk == 8 else None
    formats = list(FORMATS) if topk == 8 else ["fp8", "bf16"]
    report = check_backend(indexer, formats=formats, tolerance=TOLERANCE, own_logits=known)
    report.raise_if_failed()
    assert report.backend == "sm90"
    assert report.selecting_rows > 80


@pytest.mark.parametrize(("heads", "form"), [(20, "fp4"), (48, "fp8"), (48, "fp16")])
def test_head_counts_between_are_padded(heads: int, form: KeyFormat) -> None:
    report = check_backend(
        sm90(topk=8, topk_blocks=12), formats=[form], heads=[heads], tolerance=TOLERANCE
    )
    report.raise_if_failed()
    assert report.backend == "sm90"


@pytest.mark.parametrize("heads", [1, 20, 32, 33, 48, 64])
def test_head_counts_on_random_data(heads: int) -> None:
    source, _ = layers([[700, 699, 77]], heads=heads)
    want = MaskIndexer(DEVICE, accumulate=torch.float64).dense_logits(source)
    assert logits_problem(own_logits(source), want, [700, 699, 77], TOLERANCE) is None


def test_more_than_64_heads_are_refused() -> None:
    source, _ = layers([[100, 101]], heads=65)
    indexer = sm90(topk=8, topk_blocks=9)
    fits, _ = layers([[100, 101]])
    candidates = indexer.publish_prefill(fits)
    out = poisoned(source, 8)
    most = r'at most 64 heads \(backend="mask" takes any number\)'
    message = f"^index_q values: expected {most}, got 65$"
    with pytest.raises(ValueError, match=message):
        indexer.publish_prefill(source, out)
    with pytest.raises(ValueError, match=message):
        indexer.select_prefill(candidates, source, out)
    with pytest.raises(ValueError, match=message):
        indexer.topk_prefill(source, out)
    assert (out == 7).all()


def near(got: torch.Tensor, want: torch.Tensor, values: torch.Tensor, bounds: torch.Tensor) -> None:
    assert near_floor_problem(got, want, values, bounds) is None
    shared = sum(len(set(a) & set(b)) for a, b in zip(got.tolist(), want.tolist(), strict=True))
    assert shared > 0.99 * got.numel()


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_near_mask_on_random_keys(form: KeyFormat) -> None:
    """Wherever the two differ, the entry is within the tolerance of the selection's floor."""
    source, consumer = layers(LARGE, form)
    indexer, mask = sm90(), MaskIndexer(DEVICE, accumulate=torch.float32)
    assert (source.plan.compressed_lens > 8 * indexer.topk_blocks).all()
    own, selected, full = (poisoned(source, 512) for _ in range(3))
    candidates = indexer.publish_prefill(source, own)
    indexer.select_prefill(candidates, consumer, selected)
    indexer.topk_prefill(consumer, full)

    want_own, want_selected, want_full = (poisoned(source, 512) for _ in range(3))
    want_blocks = mask.publish_prefill(source, want_own).blocks
    mask.select_prefill(candidates, consumer, want_selected)
    mask.topk_prefill(consumer, want_full)
    logits = mask.dense_logits(source)
    bounds = 2 * TOLERANCE * logits.nan_to_num(neginf=0.0).abs().amax(1)
    near(own, want_own, logits, bounds)
    keys = block_values(logits)
    newest = (source.plan.compressed_lens.long() - 1) // 8
    keys[torch.arange(len(keys), device=DEVICE), newest] = torch.inf  # published whatever it holds
    near(candidates.blocks, want_blocks, keys, bounds)
    del keys, logits
    logits = mask.dense_logits(consumer)
    bounds = 2 * TOLERANCE * logits.nan_to_num(neginf=0.0).abs().amax(1)
    near(selected, want_selected, logits, bounds)
    near(full, want_full, logits, bounds)


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_equals_mask_on_exact_keys(form: KeyFormat) -> None:
    source, consumer = layers(LARGE, form, palette=True)
    want = run(MaskIndexer(DEVICE, accumulate=torch.float32), source, consumer)
    assert same(run(sm90(), source, consumer), want)


MIXED = [("fp8", "bf16"), ("bf16", "fp8"), ("fp16", "fp4"), ("fp4", "fp16"), ("fp16", "bf16"),
         ("bf16", "fp16"), ("fp8", "fp4"), ("fp4", "fp8")]  # fmt: skip


@pytest.mark.parametrize(("queries", "form"), MIXED)
def test_mixed_formats(queries: KeyFormat, form: KeyFormat) -> None:
    source, consumer = layers(SMALL, form, queries=queries, palette=True)
    mask = MaskIndexer(DEVICE, topk=40, topk_blocks=70, accumulate=torch.float64)
    want = run(mask, source, consumer)
    assert same(run(sm90(topk=40, topk_blocks=70), source, consumer), want)
    source, _ = layers(SMALL, form, queries=queries, heads=64)
    lens = source.plan.compressed_lens.tolist()
    assert logits_problem(own_logits(source), mask.dense_logits(source), lens, TOLERANCE) is None


def test_candidates_of_another_backend_or_plan() -> None:
    source, consumer = layers(SMALL, palette=True)
    rows, tail_lens = source.plan.num_rows, [5, 0, 2, 18]
    indexer = sm90(topk=40, topk_blocks=70)
    mask = MaskIndexer(DEVICE, topk=40, topk_blocks=60)  # the number of blocks is the candidates'
    of_mask, of_sm90 = mask.publish_prefill(source), indexer.publish_prefill(source)
    again = pick(consumer, range(rows))  # another plan of the same rows
    for candidates, inputs in ((of_mask, consumer), (of_sm90, consumer), (of_sm90, again)):
        got, want = poisoned(inputs, 40), poisoned(inputs, 40)
        indexer.select_prefill(candidates, inputs, got)
        mask.select_prefill(candidates, inputs, want)
        assert torch.equal(got, want)

        tail_rows = source.plan.tail_rows(tail_lens).tolist()
        tail = indexer.prefill_tail(candidates, tail_lens)
        assert torch.equal(tail.blocks, candidates.blocks[tail_rows])
        out = poisoned(pick(inputs, tail_rows), 40)
        indexer.select_prefill(tail, pick(inputs, tail_rows), out)
        assert torch.equal(out, want[tail_rows])
        for one in (indexer, mask):
            with pytest.raises(ValueError, match=r"^candidates: expected 25 rows, .*, got 43 rows"):
                one.select_prefill(candidates, pick(inputs, tail_rows), out)


def test_a_million_positions_on_few_pages() -> None:
    """Pages that come again and again: all ties, that the lower id wins. Against the rules."""
    distinct, rows, positions = 64 * 64, 65, 1 << 20
    generator = torch.Generator().manual_seed(5)
    pages = torch.randint(64, (1, positions // 64), generator=generator).int().to(DEVICE)
    pool = IndexKPool.empty(64, 64, "fp8", device=DEVICE)
    keys = palette_keys(distinct, "fp8", seed=1, device=DEVICE)
    pool.write(torch.arange(distinct, device=DEVICE), keys)
    lens = [positions - 5 * i for i in range(rows - 3)] + [8 * 2048, 8 * 2048 + 1, 300_001]
    plan = PrefillPlan(
        compressed_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        request_of_row=torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        rows_per_request=[rows],
        context_lens=[positions],
        page_table=pages,
    )
    queries = [palette_queries(rows, 32, "fp8", seed=2 + i, device=DEVICE) for i in range(2)]
    source = PrefillIndexerInputs(plan, *queries[0], pool)
    both = Layers(source, with_queries(source, *queries[1]))
    got = run(sm90(), *both)

    slots = pages[0].long()[:, None] * 64 + torch.arange(64, device=DEVICE)
    for inputs in both:
        flat_plan = PrefillPlan(
            compressed_lens=torch.full_like(plan.compressed_lens, distinct),
            request_of_row=plan.request_of_row,
            rows_per_request=[rows],
            context_lens=[distinct],
            key_starts=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        )
        flat = PrefillIndexerInputs(flat_plan, inputs.index_q, inputs.head_weights, keys)
        of_pages = MaskIndexer(DEVICE).dense_logits(flat)
        order = ordered(of_pages[:, slots.flatten()])
        visible = torch.arange(positions, device=DEVICE) < plan.compressed_lens[:, None]
        if inputs is source:
            best, some = block_keys(order, plan.compressed_lens, 0)
            packed = pack(best, some, 0).topk(2048, dim=1).values
            assert torch.equal(got.blocks, indices(packed, INT32_MAX))
        allowed = visible & published(got.blocks, 0, positions)
        packed = pack(order, allowed, 0).topk(512, dim=1).values
        assert torch.equal(got.own if inputs is source else got.selected, indices(packed, -1))
    packed = pack(order, visible, 0).topk(512, dim=1).values
    assert torch.equal(got.full, indices(packed, -1))


def test_another_layer_than_the_first_and_padded_pages() -> None:
    """Keys in a slice of a larger tensor, which all layers' pages share."""
    source, consumer = layers(SMALL, palette=True)
    held = source.index_k
    assert isinstance(held, IndexKPool)
    storage = torch.full((5, held.num_pages, held.pages.shape[1] + 64), 255, dtype=torch.uint8)
    pages = storage.to(DEVICE)[3, :, 16 : 16 + held.pages.shape[1]]
    pages.copy_(held.pages)
    pool = IndexKPool(pages, held.page_size, held.format, held.layout)
    moved = [
        PrefillIndexerInputs(inputs.plan, inputs.index_q, inputs.head_weights, pool)
        for inputs in (source, consumer)
    ]
    indexer = sm90(topk=40, topk_blocks=70)
    assert same(run(indexer, *moved), run(indexer, source, consumer))


def test_queries_and_weights_with_strides() -> None:
    source, consumer = layers(SMALL, palette=True)
    indexer = sm90(topk=40, topk_blocks=70)
    want = run(indexer, source, consumer)
    q = source.index_q
    values = torch.zeros(len(q.values), 40, 128, dtype=torch.uint8, device=DEVICE)
    values[:, 4:36] = q.values.view(torch.uint8)
    weights = torch.zeros(len(q.values), 50, device=DEVICE)
    weights[:, 9:41] = source.head_weights
    scales = torch.zeros(len(q.values), 70, device=DEVICE)
    scales[:, 1:33] = q.scales
    queries = type(q)(values[:, 4:36].view(torch.float8_e4m3fn), scales[:, 1:33])
    strided = with_queries(source, queries, weights[:, 9:41])
    assert same(run(indexer, strided, consumer), want)
