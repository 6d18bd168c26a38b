# SPDX-License-Identifier: Apache-2.0
"""The index_q kernel against the exact dequantizers."""

import math

import pytest
import torch

from sparse_indexer import IndexQ
from sparse_indexer.formats import dequantize_fp4
from sparse_indexer.ops.index_q import index_q
from sparse_indexer.testing import random_queries

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
DTYPES = {"fp8": torch.uint8, "fp16": torch.float16, "bf16": torch.bfloat16}
PAIRS = [
    ("fp4", "fp8"), ("fp4", "fp16"), ("fp4", "bf16"), ("fp8", "fp8"), ("fp8", "fp16"),
    ("fp8", "bf16"), ("fp16", "fp16"), ("bf16", "bf16"), ("bf16", "fp16"),
]  # fmt: skip
ROWS = 11
QUADS_OF_ROWS = [[3, 0, 10, 7], [-1, 4, -1, 5], [-1, -1, -1, -1], [2, 2, 1, -1], [9, 8, 6, 3]]
ALL = {  # all head counts; what out_heads is; whether weights are bf16
    "1 head": (1, 32, False),
    "1 head of 64": (1, 64, True),
    "20 heads": (20, 32, True),
    "32 heads": (32, 32, False),
    "48 heads": (48, 64, False),
    "64 heads": (64, 64, True),
}


def unpack(packed: torch.Tensor, pairs: list[bool]) -> torch.Tensor:
    """Values `[quads, 4 rows, heads, 128]` float64 out of core matrices, as the kernel says.

    A core matrix is 8 columns: chunks of 16 bytes, chunk after chunk, within a chunk the columns.
    """
    quads, columns = packed.shape[:2]
    heads = columns // 4
    chunks = packed.view(torch.uint8).view(quads, columns // 8, -1, 8, 16)
    of_columns = chunks.transpose(2, 3).reshape(quads, columns, -1)
    places = torch.empty(quads, 4, heads, dtype=torch.long)
    for r in range(4):
        for head in range(heads):
            column = 8 * (head // 2) + 2 * r + head % 2
            of_pair = r // 2 * 2 * heads + 8 * (head // 4) + 4 * (r % 2) + head % 4
            for quad in range(quads):
                places[quad, r, head] = of_pair if pairs[quad] else column
    values = of_columns[torch.arange(quads)[:, None, None], places.to(packed.device)]
    dtype = torch.float8_e4m3fn if packed.dtype == torch.uint8 else packed.dtype
    return values.view(dtype).double()


def convert(
    queries: IndexQ,
    head_weights: torch.Tensor,
    rows: list[list[int]],
    to: str,
    out_heads: int,
    counts: list[list[int]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed values and weights; the quad before them and the one behind must stay poisoned."""
    quads = len(rows)
    bits = torch.uint8 if to == "fp8" else torch.int16
    values = torch.full((quads + 2, 4 * out_heads, 128), 7, dtype=bits, device=DEVICE)
    weights = torch.full((quads + 2, 4, out_heads), 7.0, device=DEVICE)
    index_q(
        queries,
        head_weights,
        rows=torch.tensor(rows, dtype=torch.int32, device=DEVICE).view(-1, 4),
        counts=None if counts is None else torch.tensor(counts, dtype=torch.int32, device=DEVICE),
        out_values=values[1:-1].view(DTYPES[to]),
        out_weights=weights[1:-1],
    )
    assert (values[[0, -1]] == 7).all()
    assert (weights[[0, -1]] == 7).all()
    return values[1:-1].view(DTYPES[to]), weights[1:-1]


def stored(queries: IndexQ) -> torch.Tensor:
    """What is multiplied with keys, but for an fp8 scale, `[rows, heads, 128]` float64."""
    if queries.values.dtype == torch.uint8:
        return dequantize_fp4(queries.values, queries.scales, dtype=torch.float64)
    return queries.values.double()


def check(
    queries: IndexQ,
    head_weights: torch.Tensor,
    to: str,
    out_heads: int,
    counts: list[list[int]] | None = None,
) -> None:
    """Values times weights are stored values times half the head weights, an fp8 scale in them."""
    pairs = [c[1] >= 0 for c in counts or [[0, -1]] * len(QUADS_OF_ROWS)]
    packed, weights = convert(queries, head_weights, QUADS_OF_ROWS, to, out_heads, counts)
    got = unpack(packed, pairs) * weights.double()[..., None]

    heads = head_weights.shape[1]
    factors = head_weights.float()
    if queries.values.dtype == torch.float8_e4m3fn and queries.scales is not None:
        factors = factors * queries.scales
    products = stored(queries) * (factors * 0.5).double()[..., None]
    want = torch.zeros_like(got)
    for quad, rows in enumerate(QUADS_OF_ROWS):
        for r, row in enumerate(rows):
            if row >= 0:
                want[quad, r, :heads] = products[row]
    assert torch.equal(got, want)
    assert want.count_nonzero() > 14 * heads * 64  # what it compares is not all zeros

    values = unpack(packed, pairs)
    named = torch.tensor(QUADS_OF_ROWS, device=DEVICE) >= 0
    for nothing in (values[~named], values[:, :, heads:], weights[~named], weights[:, :, heads:]):
        assert (nothing == 0).all()


@pytest.mark.parametrize(("form", "to"), PAIRS)
@pytest.mark.parametrize(("heads", "out_heads", "bf16_weights"), ALL.values(), ids=ALL)
def test_products_are_those_of_what_is_stored(
    form: str, to: str, heads: int, out_heads: int, bf16_weights: bool
) -> None:
    queries, weights = random_queries(ROWS, heads, form, seed=heads, device=DEVICE)
    check(queries, weights.bfloat16() if bf16_weights else weights, to, out_heads)


@pytest.mark.parametrize(("form", "to"), PAIRS)
@pytest.mark.parametrize(("heads", "out_heads"), [(32, 32), (48, 64)])
def test_quads_of_two_lists_are_packed_by_pairs(
    form: str, to: str, heads: int, out_heads: int
) -> None:
    queries, weights = random_queries(ROWS, heads, form, seed=heads, device=DEVICE)
    counts = [[5, 0], [3, -1], [0, 0], [9, 7], [0, -1]]
    check(queries, weights, to, out_heads, counts)


@pytest.mark.parametrize("to", ["fp8", "fp16", "bf16"])
@pytest.mark.parametrize("heads", [1, 32, 64])
def test_fp8_without_scales(to: str, heads: int) -> None:
    queries, weights = random_queries(ROWS, heads, "fp8", seed=heads, device=DEVICE)
    check(IndexQ(queries.values), weights, to, 32 if heads <= 32 else 64)


@pytest.mark.parametrize("to", ["fp8", "fp16"])
def test_nan_scales_make_nan_weights(to: str) -> None:
    for form in ("fp4", "fp8"):
        queries, weights = random_queries(ROWS, 32, form, seed=1, device=DEVICE)
        assert queries.scales is not None
        scales = queries.scales.clone()
        scales[3, 5] = 255 << 16 if form == "fp4" else math.nan  # one group's code
        _, got = convert(IndexQ(queries.values, scales), weights, QUADS_OF_ROWS, to, 32)
        nan = got.isnan()
        assert nan[0, 0, 5]
        assert nan[4, 3, 5]  # row 3 again
        assert nan.sum() == 2


def test_every_e4m3_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(4, 1, 64).repeat(1, 32, 2)
    queries = IndexQ(codes.view(torch.float8_e4m3fn).to(DEVICE))
    weights = torch.full((4, 32), 3.0, device=DEVICE)
    want = stored(queries) * 1.5
    for to in DTYPES:
        packed, got = convert(queries, weights, [[0, 1, 2, 3]], to, 32)
        products = unpack(packed, [False])[0] * got[0].double()[..., None]
        torch.testing.assert_close(products, want, rtol=0, atol=0, equal_nan=True)


def test_no_quads() -> None:
    queries, weights = random_queries(ROWS, 32, "fp8", seed=1, device=DEVICE)
    values, _ = convert(queries, weights, [], "fp8", 32)
    assert values.shape == (0, 128, 128)


def test_packed_queries_beyond_two_gigabytes() -> None:
    queries, weights = random_queries(ROWS, 64, "fp8", seed=1, device=DEVICE)
    quads = (5 << 29) // (256 * 256)
    rows = torch.full((quads, 4), -1, dtype=torch.int32, device=DEVICE)
    rows[-1] = torch.tensor(QUADS_OF_ROWS[0], device=DEVICE)
    values = torch.full((quads, 256, 128), 7.0, dtype=torch.float16, device=DEVICE)
    out_weights = torch.full((quads, 4, 64), 7.0, device=DEVICE)
    index_q(queries, weights, rows=rows, out_values=values, out_weights=out_weights)
    want, want_weights = convert(queries, weights, QUADS_OF_ROWS[:1], "fp16", 64)
    assert torch.equal(values[-1].view(torch.int16), want[0].view(torch.int16))
    assert torch.equal(out_weights[-1], want_weights[0])
    assert not values[:-1].any()
    assert not out_weights[:-1].any()
