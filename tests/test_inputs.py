# SPDX-License-Identifier: Apache-2.0
"""A layer's inputs: what fits together, what is refused, and the dense matrix on request."""

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import pytest
import torch

from sparse_indexer import (
    FlatIndexK,
    IndexKPool,
    IndexQ,
    PrefillIndexerInputs,
    PrefillPlan,
    dequantize_fp4,
    flat_index_k,
    make_candidate_indexer,
    plan_prefill,
    quantize_fp4,
    quantize_fp8,
)
from sparse_indexer.inputs import expect_out_positions
from sparse_indexer.testing import (
    dictated,
    index_q,
    make_inputs,
    oracle_logits,
    palette_queries,
    random_keys,
    random_queries,
)

INT32_MAX = 2**31 - 1
E4M3 = torch.float8_e4m3fn


def refused(message: str) -> AbstractContextManager[Any]:
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


# Values and scales of queries of 3 rows and 5 heads, by form.
QUERIES: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {
    "fp8 with scales": (zeros(3, 5, 128, dtype=E4M3), zeros(3, 5)),
    "fp8 folded": (zeros(3, 5, 128, dtype=E4M3), None),
    "fp4": (zeros(3, 5, 64, dtype=torch.uint8), zeros(3, 5, dtype=torch.int32)),
    "fp16": (zeros(3, 5, 128, dtype=torch.float16), None),
    "bf16": (zeros(3, 5, 128, dtype=torch.bfloat16), None),
}


@pytest.mark.parametrize(("values", "scales"), QUERIES.values(), ids=QUERIES.keys())
def test_index_q_takes_each_form(values: torch.Tensor, scales: torch.Tensor | None) -> None:
    queries = IndexQ(values, scales)
    assert queries.values is values
    assert queries.scales is scales
    part = slice(1, 4)
    some_heads = IndexQ(values[:, part], None if scales is None else scales[:, part])
    assert some_heads.values.shape[1] == 3
    no_rows = IndexQ(values[:0], None if scales is None else scales[:0])
    assert len(no_rows.values) == 0


FP8, FP8_SCALES = QUERIES["fp8 with scales"]
FP4, FP4_SCALES = QUERIES["fp4"]
FP16, BF16 = QUERIES["fp16"][0], QUERIES["bf16"][0]
OF_128 = "[rows, heads, 128] float8_e4m3fn or float16 or bfloat16 or uint8"
OF_64 = OF_128.replace("128", "64")
BAD_QUERIES: dict[str, tuple[tuple[Any, ...], str]] = {
    "float32": (
        (FP8.float(),),
        f"index_q values: expected {OF_128}, got [3, 5, 128] float32 on cpu",
    ),
    "no tensor": ((None,), f"index_q values: expected {OF_128}, got None"),
    "two dimensions": (
        (FP16[0],),
        f"index_q values: expected {OF_128}, got [5, 128] float16 on cpu",
    ),
    "96 dims": (
        (FP16[..., :96],),
        f"index_q values: expected {OF_128}, got [3, 5, 96] float16 on cpu",
    ),
    "e5m2": (
        (FP8.to(torch.float8_e5m2),),
        f"index_q values: expected {OF_128}, got [3, 5, 128] float8_e5m2 on cpu",
    ),
    "unpacked fp4": (
        (FP8.view(torch.uint8), FP4_SCALES),
        f"index_q values: expected {OF_64}, got [3, 5, 128] uint8 on cpu",
    ),
    "no heads": (
        (FP16[:, :0],),
        "index_q values: expected at least 1 head, got [3, 0, 128] float16 on cpu",
    ),
    "last stride": (
        (zeros(3, 5, 256, dtype=torch.float16)[..., ::2],),
        "index_q values: expected a contiguous last dimension, got strides [1280, 256, 2]",
    ),
    "fp4 without scales": ((FP4,), "index_q scales: expected [3, 5] int32 on cpu, got None"),
    "fp4 with fp8 scales": (
        (FP4, FP8_SCALES),
        "index_q scales: expected [3, 5] int32 on cpu, got [3, 5] float32 on cpu",
    ),
    "fp8 with fp4 scales": (
        (FP8, FP4_SCALES),
        "index_q scales: expected [3, 5] float32 on cpu, got [3, 5] int32 on cpu",
    ),
    "a scale a row": (
        (FP8, FP8_SCALES[:, 0]),
        "index_q scales: expected [3, 5] float32 on cpu, got [3] float32 on cpu",
    ),
    "scales of fewer rows": (
        (FP8, FP8_SCALES[1:]),
        "index_q scales: expected [3, 5] float32 on cpu, got [2, 5] float32 on cpu",
    ),
    "transposed scales": (
        (FP8, zeros(5, 3).t()),
        "index_q scales: expected a contiguous last dimension, got strides [1, 3]",
    ),
    "scales elsewhere": (
        (FP8, FP8_SCALES.to("meta")),
        "index_q scales: expected [3, 5] float32 on cpu, got [3, 5] float32 on meta",
    ),
    "fp16 with scales": (
        (FP16, FP8_SCALES),
        "index_q scales: expected None with torch.float16, got [3, 5] float32 on cpu",
    ),
    "bf16 with scales": (
        (BF16, FP8_SCALES),
        "index_q scales: expected None with torch.bfloat16, got [3, 5] float32 on cpu",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_QUERIES.values(), ids=BAD_QUERIES.keys())
def test_index_q_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with refused(message):
        IndexQ(*arguments)


# Two requests of 8 and 17 positions: one page and three; a pool of 100 pages of 8 positions.
GOOD_TABLE = torch.tensor([[99, -1, INT32_MAX], [0, 57, 98]], dtype=torch.int32)
POOL = IndexKPool.empty(100, 8, "fp8")
FLAT = random_keys(25, "fp8", seed=1)


def table_with(changes: dict[tuple[int, int], int]) -> torch.Tensor:
    table = GOOD_TABLE.clone()
    for place, page in changes.items():
        table[place] = page
    return table


def paged_inputs(
    table: torch.Tensor = GOOD_TABLE, *, interleaved: bool = False, **options: Any
) -> PrefillIndexerInputs:
    positions = [7, 16, 3] if interleaved else [7, 3, 16]
    requests = [0, 1, 0] if interleaved else None
    plan = plan_prefill(positions, [2, 1], page_table=table, request_of_row=requests, **options)
    return PrefillIndexerInputs(plan, IndexQ(FP16), zeros(3, 5), POOL)


PAGED = paged_inputs().plan
FLAT_PLAN = plan_prefill([7, 3, 16], [2, 1])
NO_KEYS_PLAN = plan_prefill([-1, -1, -1], [2, 1], page_table=GOOD_TABLE[:, :0])


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("values", "scales"), QUERIES.values(), ids=QUERIES.keys())
def test_inputs_take_all_that_fits(
    values: torch.Tensor, scales: torch.Tensor | None, weights: torch.dtype
) -> None:
    queries = IndexQ(values, scales)
    head_weights = zeros(3, 5, dtype=weights)
    for plan, keys in ((PAGED, POOL), (FLAT_PLAN, FLAT), (NO_KEYS_PLAN, POOL)):
        inputs = PrefillIndexerInputs(plan, queries, head_weights, keys)
        assert inputs.num_heads == 5
        assert inputs.plan is plan
        assert inputs.index_q is queries
        assert inputs.head_weights is head_weights
        assert inputs.index_k is keys


ON_META = plan_prefill([7, 3, 16], [2, 1], page_table=GOOD_TABLE, device="meta")
NARROW = plan_prefill([7, 3, 16], [2, 1], page_table=GOOD_TABLE[:, :2])
LONG = plan_prefill([7, 3, 16], [2, 1], page_table=GOOD_TABLE, context_lens=[25, 17])
GOOD: dict[str, Any] = {
    "plan": PAGED,
    "index_q": IndexQ(FP16),
    "head_weights": zeros(3, 5),
    "index_k": POOL,
}
BAD_INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "no plan": ({"plan": None}, "plan: expected a PrefillPlan, got None"),
    "bare queries": (
        {"index_q": FP16},
        "index_q: expected an IndexQ, got [3, 5, 128] float16 on cpu",
    ),
    "bare keys": (
        {"index_k": POOL.pages},
        "index_k: expected an IndexKPool or FlatIndexK, got [100, 1056] uint8 on cpu",
    ),
    "queries of fewer rows": (
        {"index_q": IndexQ(FP16[1:])},
        "index_q values: expected [3, 5, 128] float16 on cpu, got [2, 5, 128] float16 on cpu",
    ),
    "queries of more rows": (
        {"index_q": IndexQ(zeros(4, 5, 64, dtype=torch.uint8), zeros(4, 5, dtype=torch.int32))},
        "index_q values: expected [3, 5, 64] uint8 on cpu, got [4, 5, 64] uint8 on cpu",
    ),
    "weights of other heads": (
        {"head_weights": zeros(3, 6)},
        "head_weights: expected [3, 5] float32 or bfloat16 on cpu, got [3, 6] float32 on cpu",
    ),
    "weights of other rows": (
        {"head_weights": zeros(2, 5)},
        "head_weights: expected [3, 5] float32 or bfloat16 on cpu, got [2, 5] float32 on cpu",
    ),
    "weights of heads and rows": (
        {"head_weights": zeros(5, 3)},
        "head_weights: expected [3, 5] float32 or bfloat16 on cpu, got [5, 3] float32 on cpu",
    ),
    "fp16 weights": (
        {"head_weights": zeros(3, 5, dtype=torch.float16)},
        "head_weights: expected [3, 5] float32 or bfloat16 on cpu, got [3, 5] float16 on cpu",
    ),
    "transposed weights": (
        {"head_weights": zeros(5, 3).t()},
        "head_weights: expected a contiguous last dimension, got strides [1, 3]",
    ),
    "flat keys, paged plan": (
        {"index_k": FLAT},
        "index_k: expected IndexKPool, as the plan has a page table, got a FlatIndexK",
    ),
    "paged keys, flat plan": (
        {"plan": FLAT_PLAN},
        "index_k: expected FlatIndexK, as the plan has key_starts, got an IndexKPool",
    ),
    "a narrow table": (
        {"plan": NARROW},
        "page_table: expected at least 3 columns (17 positions, 8 a page), got [2, 2] int32 on cpu",
    ),
    "a table as wide as what is seen": (
        {"plan": LONG},
        "page_table: expected at least 4 columns (25 positions, 8 a page), got [2, 3] int32 on cpu",
    ),
    "plan elsewhere": (
        {"plan": ON_META},
        "index_q values: expected [3, 5, 128] float16 on meta, got [3, 5, 128] float16 on cpu",
    ),
    "queries elsewhere": (
        {"index_q": IndexQ(FP16.to("meta"))},
        "index_q values: expected [3, 5, 128] float16 on cpu, got [3, 5, 128] float16 on meta",
    ),
    "weights elsewhere": (
        {"head_weights": zeros(3, 5, device="meta")},
        "head_weights: expected [3, 5] float32 or bfloat16 on cpu, got [3, 5] float32 on meta",
    ),
    "pool elsewhere": (
        {"index_k": IndexKPool.empty(100, 8, "fp8", device="meta")},
        "index_k: expected tensors on cpu, got [100, 1056] uint8 on meta",
    ),
    "flat keys elsewhere": (
        {
            "plan": FLAT_PLAN,
            "index_k": FlatIndexK(zeros(25, 128, dtype=torch.float16, device="meta"), None, "fp16"),
        },
        "index_k: expected tensors on cpu, got [25, 128] float16 on meta",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS.keys())
def test_inputs_refuse(changes: dict[str, Any], message: str) -> None:
    PrefillIndexerInputs(**GOOD)
    with refused(message):
        PrefillIndexerInputs(**(GOOD | changes))


ROW_ORDERS = pytest.mark.parametrize("interleaved", [False, True])


# Page-table slots, by request and column: the rows use [0, 0], [1, 0], [1, 1] and [1, 2].
@ROW_ORDERS
@pytest.mark.parametrize("page", [-1, 100, INT32_MAX, -(2**31)])
@pytest.mark.parametrize("place", [(0, 0), (1, 0), (1, 1), (1, 2)])
def test_a_used_page_outside_the_pool_is_refused(
    place: tuple[int, int], page: int, interleaved: bool
) -> None:
    got = "-1 or less" if page < 0 else "2147483647 or more" if page == INT32_MAX else f"{page}"
    want = f"page_table[{place[0]}, {place[1]}]: expected a page of 0 to 99, got {got}"
    with refused(want):
        paged_inputs(table_with({place: page}), interleaved=interleaved)


@ROW_ORDERS
@pytest.mark.parametrize("page", [-1, 100, INT32_MAX, -(2**31)])
@pytest.mark.parametrize("place", [(0, 1), (0, 2)])
def test_an_unused_page_is_anything(place: tuple[int, int], page: int, interleaved: bool) -> None:
    scores = paged_inputs(table_with({place: page}), interleaved=interleaved).dense_scores()
    assert scores.isfinite().sum(1).tolist() == ([8, 17, 4] if interleaved else [8, 4, 17])


def test_pages_are_used_up_to_what_rows_see_not_up_to_the_context() -> None:
    inputs = paged_inputs(context_lens=[24, 24])
    assert inputs.dense_scores().shape == (3, 24)
    lens = inputs.plan.compressed_lens
    lens.copy_(torch.tensor([8, 9, 17]))
    with refused("page_table[0, 1]: expected a page of 0 to 99, got -1 or less"):
        inputs.check()
    lens.copy_(torch.tensor([8, 25, 17]))
    with refused("compressed_lens[1]: expected 0 to the context_lens of its request, got 25"):
        inputs.check()
    lens.copy_(torch.tensor([0, 0, 0]))
    inputs.plan.page_table.fill_(-1)
    inputs.check()


def test_the_first_and_the_last_page_of_the_pool_may_be_used() -> None:
    for page in (0, 99):
        paged_inputs(table_with({(1, 2): page}))


# Starts of 8 and 17 positions in 25 columns; what is wrong with them.
@pytest.mark.parametrize(
    ("starts", "complaint"),
    {
        "packed": ([0, 8], None),
        "shared": ([0, 0], None),
        "the other way round": ([17, 0], None),
        "one beyond": ([0, 9], "key_starts[1]: {}, got 9 with 17 positions seen"),
        "first one beyond": ([18, 8], "key_starts[0]: {}, got 18 with 8 positions seen"),
        "far beyond": (
            [0, INT32_MAX],
            f"key_starts[1]: {{}}, got {INT32_MAX} with 17 positions seen",
        ),
    }.values(),
)
def test_a_flat_column_beyond_the_keys_is_refused(starts: list[int], complaint: str | None) -> None:
    plan = plan_prefill([7, 3, 16], [2, 1], key_starts=starts)
    if complaint is None:
        PrefillIndexerInputs(plan, IndexQ(FP16), zeros(3, 5), FLAT)
        return
    want = "expected a start within the 25 columns of the flat keys"
    with refused(complaint.format(want)):
        PrefillIndexerInputs(plan, IndexQ(FP16), zeros(3, 5), FLAT)


def test_a_negative_flat_column_is_refused() -> None:
    starts = torch.tensor([-1, 8], dtype=torch.int32)
    for lens, message in (
        (
            [8, 4, 17],
            "key_starts[0]: expected a start within the 25 columns of the flat keys, "
            "got -1 with 8 positions seen",
        ),
        ([0, 0, 17], None),
    ):
        plan = plan_prefill([n - 1 for n in lens], [2, 1])
        plan.key_starts.copy_(starts)
        if message is None:
            PrefillIndexerInputs(plan, IndexQ(FP16), zeros(3, 5), FLAT)
        else:
            with refused(message):
                PrefillIndexerInputs(plan, IndexQ(FP16), zeros(3, 5), FLAT)


def test_no_value_is_read_off_a_device() -> None:
    """The meta device has none to read."""
    table = table_with({(1, 0): -1})
    plan = plan_prefill([7, 3, 16], [2, 1], page_table=table, device="meta")
    pool = IndexKPool.empty(1, 8, "fp8", device="meta")
    weights = zeros(3, 5, device="meta")
    inputs = PrefillIndexerInputs(plan, IndexQ(FP16.to("meta")), weights, pool)
    assert inputs.num_heads == 5


@pytest.mark.parametrize("layout", ["planar", "flat"])
@pytest.mark.parametrize("counts", [[], [0], [0, 0]])
def test_inputs_may_have_no_rows(layout: str, counts: list[int]) -> None:
    queries, weights = palette_queries(0, 4, "fp8", seed=1)
    columns = random_keys(0, "fp8", seed=2)
    if layout == "flat":
        plan = plan_prefill([], counts)
        inputs = PrefillIndexerInputs(plan, queries, weights, columns)
    else:
        table = torch.full((len(counts), 2), -1)
        plan = plan_prefill([], counts, page_table=table)
        inputs = PrefillIndexerInputs(plan, queries, weights, IndexKPool.empty(0, 8, "fp8"))
    assert inputs.dense_scores().shape == (0, 0)


@pytest.mark.parametrize("field", ["plan", "index_q", "head_weights", "index_k"])
def test_inputs_are_frozen(field: str) -> None:
    inputs = paged_inputs()
    with pytest.raises(AttributeError, match="immutable"):
        setattr(inputs, field, getattr(inputs, field))
    with pytest.raises(AttributeError, match="immutable"):
        inputs.index_q.values = FP16


def mixed_inputs(form: str, layout: str, heads: int) -> PrefillIndexerInputs:
    """Interleaved rows of three requests, one of them padding, over random data."""
    lens = [14, 1, 23]
    requests = [2, 0, 1, 2, 0, 2, 0]
    positions = [22, 13, 0, 9, 4, 15, -1]
    queries, weights = random_queries(len(requests), heads, form, seed=3)
    keys = [random_keys(n, form, seed=4 + n) for n in lens]
    return make_inputs(
        queries,
        weights,
        keys,
        positions,
        [3, 1, 3],
        layout=layout,
        page_size=8,
        request_of_row=requests,
    )


@pytest.mark.parametrize("form", ["fp8", "fp4", "fp16", "bf16"])
@pytest.mark.parametrize("layout", ["planar", "interleaved", "flat"])
@pytest.mark.parametrize("heads", [1, 5])
def test_dense_scores_equal_the_oracle(form: str, layout: str, heads: int) -> None:
    inputs = mixed_inputs(form, layout, heads)
    scores = inputs.dense_scores()
    assert scores.dtype == torch.float32
    assert scores.shape == (7, 23)
    for row, right in zip(scores, oracle_logits(inputs), strict=True):
        seen = torch.tensor(right)
        assert torch.equal(row[: len(right)], seen)
        assert (row[len(right) :] == -math.inf).all()
    assert inputs.dense_scores() is scores


def test_dense_scores_follow_the_formula() -> None:
    """Dictated logits, so no quantizer and no oracle has a say."""
    wanted = [[n * n % 97 + 1 for n in range(19)], [3 * n for n in range(19)]]
    for form in ("fp4", "fp8", "fp16"):
        queries, weights, keys = dictated(wanted, form, shift=3, heads=9)
        inputs = make_inputs(queries, weights, [keys], [18, 11], [2], page_size=8)
        scores = inputs.dense_scores() * 8
        assert scores[0].tolist() == wanted[0]
        assert scores[1].tolist() == wanted[1][:12] + [-math.inf] * 7


def test_each_inputs_has_its_own_scores() -> None:
    inputs = mixed_inputs("fp8", "planar", 2)
    other = PrefillIndexerInputs(
        inputs.plan, inputs.index_q, inputs.head_weights * 2, inputs.index_k
    )
    assert torch.equal(other.dense_scores(), inputs.dense_scores() * 2)
    replaced = msgspec.structs.replace(inputs, head_weights=-inputs.head_weights)
    fresh = PrefillIndexerInputs(inputs.plan, inputs.index_q, -inputs.head_weights, inputs.index_k)
    assert torch.equal(replaced.dense_scores(), fresh.dense_scores())
    assert not torch.equal(replaced.dense_scores(), inputs.dense_scores())


@pytest.mark.parametrize("trained", ["queries", "weights", "keys"])
def test_inputs_may_require_a_gradient(trained: str) -> None:
    """Logits and selections are those of the same numbers that require none."""
    generator = torch.Generator().manual_seed(9)
    shapes = {"queries": (3, 5, 128), "weights": (3, 5), "keys": (25, 128)}
    plain = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    scores, selections = [], []
    for parts in (plain, plain | {trained: plain[trained].clone().requires_grad_()}):
        queries = IndexQ(parts["queries"].bfloat16())
        keys = flat_index_k(parts["keys"], "bf16")
        inputs = PrefillIndexerInputs(FLAT_PLAN, queries, parts["weights"], keys)
        scores.append(inputs.dense_scores().detach())
        out = torch.full((3, 2), 7, dtype=torch.int32)
        indexer = make_candidate_indexer("cpu", topk=2, topk_blocks=1)
        assert indexer.name == "mask"
        indexer.publish_prefill(inputs, out)
        selections.append(out)
    assert torch.equal(*scores)
    assert torch.equal(*selections)


VECTORS = torch.randn(25, 128, generator=torch.Generator().manual_seed(10))
STORED = flat_index_k(VECTORS, "fp4")
SLOTS = torch.tensor([3, 0, 24])
RANDOM_QUERIES = random_queries(3, 5, "bf16", seed=11)


def scored() -> PrefillIndexerInputs:
    return PrefillIndexerInputs(FLAT_PLAN, *RANDOM_QUERIES, FLAT)


def written() -> tuple[torch.Tensor, ...]:
    pool = IndexKPool.empty(4, 8, "fp8")
    pool.write(SLOTS, VECTORS[:3])
    return pool.pages, *pool.read(SLOTS)


def plan_tensors(plan: PrefillPlan) -> tuple[torch.Tensor | None, ...]:
    plan.check()
    return plan.compressed_lens, plan.request_of_row, plan.page_table, plan.key_starts


MADE: dict[str, Callable[[], tuple[torch.Tensor | None, ...]]] = {
    "quantized to fp8": lambda: quantize_fp8(VECTORS),
    "quantized to fp4": lambda: quantize_fp4(VECTORS),
    "dequantized": lambda: (dequantize_fp4(STORED.values, STORED.scales),),
    "written": written,
    "planned": lambda: plan_tensors(plan_prefill([7, 3, 16], [2, 1])),
    "planned for a table": lambda: plan_tensors(
        plan_prefill([7, 3, 16], [2, 1], row_page_table=GOOD_TABLE[[0, 0, 1]])
    ),
    "planned for a tail": lambda: plan_tensors(PAGED.tail([1, 1])),
    "scored": lambda: (scored().dense_scores(),),
    "published": lambda: (
        make_candidate_indexer("cpu", topk_blocks=2).publish_prefill(scored()).blocks,
    ),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_defaults_of_torch_have_no_say(make: Callable, dtype: torch.dtype, device: str) -> None:
    """Whatever else a program sets them for."""
    right = make()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            made = make()
    finally:
        torch.set_default_dtype(torch.float32)
    for got, want in zip(made, right, strict=True):
        if want is None:
            assert got is None
        else:
            assert (got.dtype, got.device) == (want.dtype, want.device)
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_fp8_scales_of_queries_multiply_the_weights() -> None:
    queries = torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(7))
    weights = torch.randn(3, 5, generator=torch.Generator().manual_seed(8))
    scaled = index_q(queries, "fp8")
    assert scaled.scales is not None
    powers = torch.tensor([0.5, 1.0, 2.0, 4.0, 0.25]).expand(3, 5).contiguous()
    plan = plan_prefill([7, 3, 16], [2, 1])
    with_scales = PrefillIndexerInputs(plan, IndexQ(scaled.values, powers), weights, FLAT)
    folded = PrefillIndexerInputs(plan, IndexQ(scaled.values), weights * powers, FLAT)
    plain = PrefillIndexerInputs(plan, IndexQ(scaled.values), weights, FLAT)
    assert torch.equal(with_scales.dense_scores(), folded.dense_scores())
    assert not torch.equal(with_scales.dense_scores(), plain.dense_scores())


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0), (3, 1)])
def test_out_positions_are_handed_back(shape: tuple[int, int]) -> None:
    out = torch.full((shape[0], 9), 7, dtype=torch.int32)[:, : shape[1]]
    assert expect_out_positions(out, *shape, torch.device("cpu")) is out
    assert (out == 7).all()


BAD_OUTS: dict[str, tuple[Any, str]] = {
    "int64": (zeros(3, 4, dtype=torch.int64), "[3, 4] int64 on cpu"),
    "wide": (zeros(3, 5, dtype=torch.int32), "[3, 5] int32 on cpu"),
    "short": (zeros(2, 4, dtype=torch.int32), "[2, 4] int32 on cpu"),
    "rows and topk swapped": (zeros(4, 3, dtype=torch.int32), "[4, 3] int32 on cpu"),
    "flat": (zeros(12, dtype=torch.int32), "[12] int32 on cpu"),
    "elsewhere": (zeros(3, 4, dtype=torch.int32, device="meta"), "[3, 4] int32 on meta"),
    "none": (None, "None"),
}


@pytest.mark.parametrize(("out", "got"), BAD_OUTS.values(), ids=BAD_OUTS.keys())
def test_out_positions_refuse(out: Any, got: str) -> None:
    with refused(f"out_positions: expected [3, 4] int32 on cpu, got {got}"):
        expect_out_positions(out, 3, 4, torch.device("cpu"))


def test_transposed_out_positions_are_refused() -> None:
    out = zeros(4, 3, dtype=torch.int32).t()
    with refused("out_positions: expected a contiguous last dimension, got strides [1, 3]"):
        expect_out_positions(out, 3, 4, torch.device("cpu"))
