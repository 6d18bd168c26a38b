# SPDX-License-Identifier: Apache-2.0
"""Logits accumulated in float64 equal the plain-Python oracle's over the formats' whole range."""

import math

import pytest
import torch

from sparse_indexer import FlatIndexK, IndexQ
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.formats import FORMATS
from sparse_indexer.inputs import flat_index_k
from sparse_indexer.testing import index_q, make_inputs, oracle_logits
from sparse_indexer.torch_ops.dots import Sliced, relu_dots

WIDE = ("bf16", "fp4")


def random_bits(shape: tuple[int, ...], fmt: str, seed: int) -> tuple[torch.Tensor, ...]:
    """Any finite values `[*shape, 128]` and, fp4 and fp8, scales; the second half nearly cancels
    the first in every third vector, if another vector repeats it in every fourth."""
    generator = torch.Generator().manual_seed(seed)
    spec = FORMATS[fmt]
    itemsize = spec.values_dtype.itemsize
    raw = torch.randint(256, (*shape, spec.payload_bytes), generator=generator, dtype=torch.uint8)
    bits = raw.view({1: torch.uint8, 2: torch.int16}[itemsize])
    half, flat = bits.shape[-1] // 2, bits.view(-1, bits.shape[-1])
    sign = {"fp4": 0x88, "fp8": 0x80, "fp16": -(1 << 15), "bf16": -(1 << 15)}[fmt]
    flat[::3, half:] = flat[::3, :half] ^ sign
    flat[::4, half:] = flat[::4, :half]
    values = bits.view(spec.values_dtype)
    if fmt != "fp4":
        flat.masked_fill_(~values.float().isfinite().view_as(flat), 1)
    if fmt == "fp8":
        powers = torch.randint(-126, 100, shape, generator=generator)
        return values, torch.rand(shape, generator=generator) * powers.float().exp2()
    if fmt == "fp4":
        codes = torch.randint(255, (*shape, 2), generator=generator, dtype=torch.uint8)
        return values, torch.cat((codes, codes), -1).view(torch.int32).squeeze(-1)
    return (values,)


@pytest.mark.parametrize(
    ("rows", "heads", "positions", "budget"),
    [(2, 1, 1100, 256 << 20), (7, 5, 70, 256 << 20), (7, 5, 70, 3 << 20), (140, 3, 9, 256 << 20)],
)
@pytest.mark.parametrize("fmt", FORMATS)
def test_random_bits_score_as_the_oracle_says(
    fmt: str, rows: int, heads: int, positions: int, budget: int
) -> None:
    queries = IndexQ(*random_bits((rows, heads), fmt, seed=1))
    values, *scales = random_bits((positions,), fmt, seed=2)
    keys = FlatIndexK(values, scales[0] if scales else None, fmt)
    generator = torch.Generator().manual_seed(3)
    small = torch.randint(3, (rows, 1), generator=generator) * (-70.0 if fmt in WIDE else -7.0)
    weights = torch.randn(rows, heads, generator=generator) * small.exp2()
    inputs = make_inputs(queries, weights, [keys], [positions - 1] * rows, [rows])
    got = MaskIndexer("cpu", memory_budget=budget, accumulate=torch.float64).dense_logits(inputs)
    want = torch.tensor(oracle_logits(inputs))
    assert torch.equal(got, want)
    assert want.unique().numel() > want.numel() // 50


@pytest.mark.parametrize("fmt", WIDE)
@pytest.mark.parametrize("outlier", [0, 20, 40, 60, 66, 70, 100, 120])
def test_an_outlier_does_not_drown_the_rest(fmt: str, outlier: int) -> None:
    queries, keys = torch.zeros(1, 1, 128), torch.zeros(1, 128)
    queries[0, 0, 0], queries[0, 0, 32] = 2.0**outlier, 1.5
    keys[0, 32] = 1.5
    inputs = make_inputs(
        index_q(queries, fmt), torch.ones(1, 1), [flat_index_k(keys, fmt)], [0], [1]
    )
    assert inputs.dense_scores().item() == oracle_logits(inputs)[0][0] == 2.25


def test_sums_are_rounded_once_also_at_ties() -> None:
    """Powers of two over the whole range of bfloat16 products, so that a last bit decides."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.zeros(400, 128, dtype=torch.float64)
    signs = torch.randint(-3, 4, (400, 6), generator=generator)
    exponents = torch.randint(-130, 120, (400, 6), generator=generator)
    exponents[:, 1], exponents[:, 2] = exponents[:, 0] - 53, exponents[:, 0] - 54
    queries[:, :6] = signs * exponents.double().exp2()
    keys = torch.ones(1, 128, dtype=torch.float64)
    want = [[max(0.0, math.fsum(row))] for row in queries.tolist()]
    assert relu_dots(Sliced(queries), Sliced(keys)).tolist() == want
