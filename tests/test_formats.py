# SPDX-License-Identifier: Apache-2.0
"""Every code of the stored formats, and what the quantizers make of every kind of input."""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_indexer import flat_index_k
from sparse_indexer.formats import (
    decode_ue8m0,
    dequantize_fp4,
    dequantize_fp8,
    quantize_fp4,
    quantize_fp8,
)

DECODED = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
NUDGES = pytest.mark.parametrize("ulps", [-1, 0, 1])
SIGNS = pytest.mark.parametrize("sign", [1, -1])
FORMATS = pytest.mark.parametrize(
    ("quantize", "dequantize"),
    [(quantize_fp8, dequantize_fp8), (quantize_fp4, dequantize_fp4)],
    ids=["fp8", "fp4"],
)

TINY = 2.0**-126  # the smallest normal float32
FP32_MAX = torch.finfo(torch.float32).max
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; 8 more is the negative


def e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if sign else magnitude


def e2m1(code: int) -> float:
    return -E2M1[code - 8] if code >= 8 else E2M1[code]


def ue8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor | list[float]) -> None:
    """Alike to the sign of a zero; any NaN equals any NaN."""
    expected = torch.as_tensor(expected, dtype=torch.float64).to(actual.dtype).view(actual.shape)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert ((actual.signbit() == expected.signbit()) | actual.isnan()).all()


def scale_codes(scales: torch.Tensor) -> torch.Tensor:
    """`[..., 4]`: the ue8m0 codes of each row."""
    return torch.stack([(scales >> (8 * group)) & 255 for group in range(4)], -1)


def nibbles(values: torch.Tensor) -> torch.Tensor:
    """`[..., 128]`: the e2m1 codes of each row."""
    return torch.stack((values & 15, values >> 4), -1).flatten(-2)


def nudged(x: torch.Tensor, ulps: int) -> torch.Tensor:
    """The float of the same dtype this many steps away."""
    return x if ulps == 0 else torch.nextafter(x, torch.full_like(x, ulps * math.inf))


def rounded(midpoints: Sequence[float] | torch.Tensor, ulps: int) -> list[int]:
    """Right codes of the midpoints above codes 0, 1, 2, ..., moved by some ulps."""
    return [code + (code % 2 if ulps == 0 else ulps > 0) for code in range(len(midpoints))]


def assert_close_enough(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, dequantize: Callable
) -> None:
    """Half a step of the format: an eighth or quarter of a binade, or of its smallest number."""
    decoded = dequantize(values, scales, dtype=torch.float64)
    x = x.double()
    if dequantize is dequantize_fp8:
        # The quotient is rounded to float32 first.
        allowed = torch.maximum(x.abs() / 16, scales.double()[..., None] / 1024) * (1 + 2.0**-20)
    else:
        unit = 2.0 ** (scale_codes(scales).double() - 127)
        allowed = torch.maximum(x.abs() / 5, unit.repeat_interleave(32, -1) / 4)
    assert ((decoded - x).abs() <= allowed).all()


def refused(message: str) -> AbstractContextManager[Any]:
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


@DECODED
def test_fp8_decodes_every_code(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    scales = torch.tensor([1.1, 1.25 * 2.0**-100])  # 1.1 takes all bits of a float32
    decoded = dequantize_fp8(values, scales, dtype=dtype)
    assert decoded.dtype == dtype
    assert_same_bits(decoded, [e4m3(code) * float(scales[code // 128]) for code in range(256)])


@DECODED
def test_fp4_decodes_every_byte(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(4, 64)
    codes = [127, 0, 130, 1, 0, 200, 120, 127, 1, 2, 3, 4, 100, 255, 0, 200]
    scales = torch.tensor(codes, dtype=torch.uint8).view(torch.int32)
    decoded = dequantize_fp4(values, scales, dtype=dtype)
    assert decoded.dtype == dtype
    pairs = [(byte & 15, byte >> 4) for byte in range(256)]
    expected = [
        e2m1(code) * ue8m0(codes[byte // 16]) for byte, pair in enumerate(pairs) for code in pair
    ]
    assert_same_bits(decoded, expected)


@DECODED
def test_fp4_decodes_every_value_at_every_scale(dtype: torch.dtype) -> None:
    """Products from 2^128 (4 * 2^126) are beyond float32: only float64 holds all of them."""
    sixteen = torch.tensor([2 * i | (2 * i + 1) << 4 for i in range(8)], dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8).view(torch.int32)
    decoded = dequantize_fp4(sixteen.repeat(64, 8), scales, dtype=dtype)
    twice = [*range(16), *range(16)]
    assert_same_bits(decoded, [e2m1(n) * ue8m0(code) for code in range(256) for n in twice])


def test_ue8m0_decodes_every_code() -> None:
    decoded = decode_ue8m0(torch.arange(256, dtype=torch.uint8))
    assert decoded.dtype == torch.float32
    assert_same_bits(decoded, [ue8m0(code) for code in range(256)])


@SIGNS
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**100, 7.0, 61 * 2.0**-30])
@NUDGES
def test_fp8_rounds_to_nearest_even_at_every_midpoint(ulps: int, scale: float, sign: int) -> None:
    midpoints = torch.tensor([(e4m3(code) + e4m3(code + 1)) / 2 for code in range(126)])
    x = torch.cat((torch.tensor([448.0 * scale, 0.0]), nudged(midpoints * scale, ulps)))
    values, quantized_scale = quantize_fp8(sign * x)
    assert quantized_scale.item() == scale
    assert (values[2:].view(torch.uint8) & 127).tolist() == rounded(midpoints, ulps)
    assert (values[2:].float().signbit() == (sign < 0)).all()


@SIGNS
@pytest.mark.parametrize("code", [0, 1, 127, 252])
@NUDGES
def test_fp4_rounds_to_nearest_even_at_every_midpoint(ulps: int, code: int, sign: int) -> None:
    midpoints = [(a + b) / 2 for a, b in pairwise(E2M1)]
    largest = torch.full((25,), 6.0, dtype=torch.float64)
    group = torch.cat((largest, nudged(torch.tensor(midpoints, dtype=torch.float64), ulps)))
    values, scale = quantize_fp4(sign * group.repeat(4) * ue8m0(code))
    assert scale_codes(scale).tolist() == [code] * 4
    right = [n | 8 if sign < 0 and n else n for n in rounded(midpoints, ulps)]
    assert nibbles(values).view(4, 32)[:, 25:].tolist() == [right] * 4


def test_fp4_packs_even_elements_low_and_early_groups_low() -> None:
    x = torch.zeros(128)
    x[0], x[1], x[33], x[126], x[127] = 6.0, -0.5, 48.0, 2.0, -12.0
    values, scale = quantize_fp4(x)
    assert values.dtype == torch.uint8
    assert scale.dtype == torch.int32
    assert {i: int(v) for i, v in enumerate(values) if v} == {0: 0x97, 16: 0x70, 63: 0xF2}
    assert scale.item() == int.from_bytes([127, 130, 0, 128], "little", signed=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@NUDGES
def test_fp4_scale_is_the_smallest_that_holds_the_group(ulps: int, dtype: torch.dtype) -> None:
    codes = list(range(253))  # 6 * 2^125 is the last one in float32
    exact = torch.tensor([6.0 * ue8m0(code) for code in codes], dtype=dtype)
    amax = torch.cat((nudged(exact, ulps), exact[:3]))
    x = torch.zeros(64, 4, 32, dtype=dtype)
    x[:, :, 5] = -amax.view(64, 4)
    _, scales = quantize_fp4(x.view(64, 128))
    right = [code + (ulps > 0) for code in codes]
    assert scale_codes(scales).flatten().tolist() == [*right, 0, 1, 2]


@pytest.mark.parametrize("amax", [2.0**-149, 1e-40, TINY, 448 * TINY, 1e-30, 1e-6, 1.0, FP32_MAX])
def test_fp8_scale_is_amax_over_448_but_normal(amax: float) -> None:
    x = torch.zeros(128)
    x[77] = -amax
    values, scale = quantize_fp8(x)
    right = torch.tensor(max(amax / 448, TINY), dtype=torch.float32)
    assert torch.equal(scale, right)
    if amax >= 448 * TINY:
        assert values[77].item() == -448


@FORMATS
@pytest.mark.parametrize("amax", [2.0**-149, 1e-40, TINY, 1e-30, 1e-6, 1.0, 3e38, FP32_MAX])
def test_magnitudes_keep_their_relative_error(
    amax: float, quantize: Callable, dequantize: Callable
) -> None:
    x = torch.linspace(-1, 1, 256).view(2, 128) * amax
    assert_close_enough(x, *quantize(x), dequantize)


@FORMATS
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_rows_are_exact_zeros(zero: float, quantize: Callable, dequantize: Callable) -> None:
    x = torch.ones(3, 128)
    x[1] = zero
    values, scales = quantize(x)
    assert (dequantize(values, scales)[1] == 0).all()
    assert (dequantize(values, scales)[[0, 2]] == 1).all()
    if quantize is quantize_fp8:
        assert scales[1].item() == 1.0
    else:
        assert scales[1].item() == 0
        assert not values[1].any()


@pytest.mark.parametrize("tiny", [5e-324, 1e-300, 6 * 2.0**-127])
def test_the_least_fp4_scale_is_that_of_all_small_groups(tiny: float) -> None:
    x = torch.zeros(1, 128, dtype=torch.float64)
    x[0, :64] = tiny
    values, scales = quantize_fp4(x)
    assert scales.view(torch.uint8).tolist() == [0, 0, 0, 0]
    assert (dequantize_fp4(values, scales) == (tiny if tiny > 1e-40 else 0)).flatten()[:64].all()


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 64, 127])
def test_fp8_row_with_a_nonfinite_element_is_nan(column: int, bad: float) -> None:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    clean_values, clean_scales = quantize_fp8(x)
    x[1, column] = bad
    values, scales = quantize_fp8(x)
    assert scales[1].isnan()
    assert values[1].isnan().all()
    assert torch.equal(scales[[0, 2]], clean_scales[[0, 2]])
    assert torch.equal(values.view(torch.uint8)[[0, 2]], clean_values.view(torch.uint8)[[0, 2]])


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 64, 127])
def test_fp4_group_with_a_nonfinite_element_is_nan(column: int, bad: float) -> None:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    right = dequantize_fp4(*quantize_fp4(x))
    x[1, column] = bad
    values, scales = quantize_fp4(x)
    group = column // 32
    assert scale_codes(scales)[1, group] == 255
    right[1, 32 * group : 32 * group + 32] = math.nan
    assert_same_bits(dequantize_fp4(values, scales), right)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS = st.lists(FINITE, min_size=1, max_size=128).map(lambda x: x + [0.0] * (128 - len(x)))


@FORMATS
@settings(deadline=None)
@given(row=ROWS)
def test_any_finite_row_keeps_its_relative_error(
    quantize: Callable, dequantize: Callable, row: list
) -> None:
    x = torch.tensor(row)
    assert_close_enough(x, *quantize(x), dequantize)


@settings(deadline=None)
@given(row=ROWS)
def test_fp4_keeps_what_it_made(row: list) -> None:
    once = dequantize_fp4(*quantize_fp4(torch.tensor(row)), dtype=torch.float64)
    assert torch.equal(dequantize_fp4(*quantize_fp4(once), dtype=torch.float64), once)


@FORMATS
@settings(deadline=None)
@given(
    row=st.lists(st.integers(-4000, 4000), min_size=128, max_size=128), shift=st.integers(-110, 110)
)
def test_a_power_of_two_passes_through(
    quantize: Callable, dequantize: Callable, row: list, shift: int
) -> None:
    """No floor and no constant beside the formats' own."""
    x = torch.tensor(row, dtype=torch.float32)
    plain = dequantize(*quantize(x), dtype=torch.float64)
    shifted = dequantize(*quantize(x * 2.0**shift), dtype=torch.float64)
    assert torch.equal(shifted, plain * 2.0**shift)


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_float_dtype_is_taken_as_its_value(
    dtype: torch.dtype, quantize: Callable, dequantize: Callable
) -> None:
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    for got, right in zip(quantize(x), quantize(x.float()), strict=True):
        assert got.dtype == right.dtype
        assert torch.equal(got.view(torch.uint8), right.view(torch.uint8))


def test_fp4_does_not_round_a_float64_to_float32() -> None:
    x = torch.full((128,), 6.0, dtype=torch.float64)
    x[::2] = 5.0 + 2.0**-40
    assert (nibbles(quantize_fp4(x)[0]) == 7).all()


LEADING = {
    "one row": (),
    "no rows": (0,),
    "rows": (7,),
    "rows and heads": (3, 5),
    "no rows of heads": (0, 5),
    "four dimensions": (2, 1, 3, 2),
}


@FORMATS
@pytest.mark.parametrize("shape", LEADING.values(), ids=LEADING.keys())
def test_leading_dimensions_are_free(
    shape: tuple[int, ...], quantize: Callable, dequantize: Callable
) -> None:
    x = torch.randn(*shape, 128, generator=torch.Generator().manual_seed(3))
    values, scales = quantize(x)
    assert scales.shape == shape
    assert values.shape[:-1] == shape
    decoded = dequantize(values, scales)
    assert decoded.shape == x.shape
    rows = x.reshape(-1, 128)
    alone = [dequantize(*quantize(row)) for row in rows]
    assert torch.equal(decoded.reshape(-1, 128), torch.stack(alone) if alone else rows)


BASE = torch.randn(6, 4, 300, generator=torch.Generator().manual_seed(4))
STRIDED = {
    "every other row": BASE[::2, 1, :128],
    "columns of wider rows": BASE[:, :, 5:133],
    "transposed leading dimensions": BASE[:, :, :128].transpose(0, 1),
    "one row for all": BASE[0, 0, :128].expand(5, 128),
}


@FORMATS
@pytest.mark.parametrize("x", STRIDED.values(), ids=STRIDED.keys())
def test_strides_do_not_matter(x: torch.Tensor, quantize: Callable, dequantize: Callable) -> None:
    assert not x.is_contiguous()
    values, scales = quantize(x)
    right_values, right_scales = quantize(x.clone(memory_format=torch.contiguous_format))
    assert torch.equal(values.view(torch.uint8), right_values.view(torch.uint8))
    assert torch.equal(scales, right_scales)


@FORMATS
def test_stored_strides_do_not_matter(quantize: Callable, dequantize: Callable) -> None:
    values, scales = quantize(BASE[:, :, :128])
    every_other = [stored.repeat_interleave(2, 0)[::2] for stored in (values, scales)]
    assert not any(stored.is_contiguous() for stored in every_other)
    assert torch.equal(dequantize(*every_other), dequantize(values, scales))


FLOATS = "float16 or bfloat16 or float32 or float64"
BAD_X = {
    "width": (torch.zeros(2, 127), f"[..., 128] {FLOATS}, got [2, 127] float32 on cpu"),
    "no dimension": (torch.tensor(1.0), f"[..., 128] {FLOATS}, got [] float32 on cpu"),
    "integers": (torch.ones(128).int(), f"[..., 128] {FLOATS}, got [128] int32 on cpu"),
    "no tensor": ([0.0] * 128, f"[..., 128] {FLOATS}, got a list"),
    "last stride": (
        torch.zeros(2, 256)[:, ::2],
        "a contiguous last dimension, got strides [256, 2]",
    ),
}


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_fp4])
@pytest.mark.parametrize(("x", "complaint"), BAD_X.values(), ids=BAD_X.keys())
def test_quantize_refuses(x: Any, complaint: str, quantize: Callable) -> None:
    with refused(f"x: expected {complaint}"):
        quantize(x)


FP8 = torch.zeros(3, 128).to(torch.float8_e4m3fn)
FP4 = torch.zeros(3, 64, dtype=torch.uint8)
BAD_STORED = {
    "fp8 values dtype": (
        (dequantize_fp8, FP8.view(torch.uint8), torch.ones(3)),
        "values: expected [..., 128] float8_e4m3fn, got [3, 128] uint8 on cpu",
    ),
    "fp8 values width": (
        (dequantize_fp8, FP8[:, :64], torch.ones(3)),
        "values: expected [..., 128] float8_e4m3fn, got [3, 64] float8_e4m3fn on cpu",
    ),
    "fp8 scales length": (
        (dequantize_fp8, FP8, torch.ones(4)),
        "scales: expected [3] float32, got [4] float32 on cpu",
    ),
    "fp8 scales dtype": (
        (dequantize_fp8, FP8, torch.ones(3).double()),
        "scales: expected [3] float32, got [3] float64 on cpu",
    ),
    "fp8 scales per element": (
        (dequantize_fp8, FP8, torch.ones(3, 1)),
        "scales: expected [3] float32, got [3, 1] float32 on cpu",
    ),
    "fp4 values dtype": (
        (dequantize_fp4, FP4.view(torch.int8), torch.ones(3).int()),
        "values: expected [..., 64] uint8, got [3, 64] int8 on cpu",
    ),
    "fp4 values unpacked": (
        (dequantize_fp4, FP4.repeat(1, 2), torch.ones(3).int()),
        "values: expected [..., 64] uint8, got [3, 128] uint8 on cpu",
    ),
    "fp4 scales dtype": (
        (dequantize_fp4, FP4, torch.ones(3)),
        "scales: expected [3] int32, got [3] float32 on cpu",
    ),
    "fp4 scales unpacked": (
        (dequantize_fp4, FP4, torch.ones(3, 4).int()),
        "scales: expected [3] int32, got [3, 4] int32 on cpu",
    ),
    "fp4 scales none": ((dequantize_fp4, FP4, None), "scales: expected [3] int32, got None"),
}


@pytest.mark.parametrize(("call", "message"), BAD_STORED.values(), ids=BAD_STORED.keys())
def test_dequantize_refuses(call: tuple, message: str) -> None:
    dequantize, values, scales = call
    with refused(message):
        dequantize(values, scales)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32])
def test_fp4_decodes_to_no_dtype_that_cannot_hold_it(dtype: torch.dtype) -> None:
    """2^-127 and 6 * 2^100 are neither float16 nor bfloat16."""
    with pytest.raises(ValueError, match=f"^dtype: expected .*float32.*float64.*{dtype}"):
        dequantize_fp4(FP4, torch.ones(3).int(), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn, None, "float32"])
def test_fp8_decodes_to_no_dtype_but_a_float_one(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"^dtype: expected .*float16.*float64, got "):
        dequantize_fp8(FP8, torch.ones(3), dtype=dtype)


@pytest.mark.parametrize("beyond", [math.nextafter(6 * 2.0**127, math.inf), 1e300])
def test_fp4_group_beyond_its_largest_scale_is_nan(beyond: float) -> None:
    x = torch.zeros(2, 128, dtype=torch.float64)
    x[:, 40], x[0, 41], x[1, 41] = 3.0, -6 * 2.0**127, -beyond
    values, scales = quantize_fp4(x)
    assert scale_codes(scales)[:, 1].tolist() == [254, 255]
    decoded = dequantize_fp4(values, scales, dtype=torch.float64)
    assert decoded[0, 41] == -6 * 2.0**127
    assert decoded[1, 32:64].isnan().all()


def test_no_gradient_is_recorded() -> None:
    x = torch.randn(3, 128, requires_grad=True)
    assert not quantize_fp8(x)[1].requires_grad
    assert not quantize_fp4(x)[1].requires_grad
    assert not flat_index_k(x, "fp16").values.requires_grad
