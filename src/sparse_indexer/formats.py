# SPDX-License-Identifier: Apache-2.0
"""The stored formats of index keys and queries, and their quantizers.

format  bytes a position  content
fp4     64 + 4            e2m1, low nibble = even element; one ue8m0 scale byte per 32 dims
fp8     128 + 4           e4m3fn; one fp32 scale
fp16    256               plain
bf16    256               plain

e2m1 (OCP Microscaling Formats v1.0, section 5.3.3): sign, 2 exponent bits of bias 1, 1 mantissa
bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6. ue8m0 (section 5.4.1): 2^(code - 127), code 255 = NaN.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from sparse_indexer.errors import expect_tensor, mismatch

HEAD_DIM = 128
FP4_GROUP = 32
INT32_MAX = 2**31 - 1

KeyFormat = Literal["fp4", "fp8", "fp16", "bf16"]

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class FormatSpec(NamedTuple):
    """How one position of a format is stored."""

    payload_bytes: int  # bytes of the values of one position
    scale_bytes: int  # bytes of its scale(s); 0: none
    values_dtype: torch.dtype  # dtype of the values
    values_width: int  # elements of values_dtype a position
    scales_dtype: torch.dtype | None  # dtype of the scale(s), one element a position


FORMATS: dict[str, FormatSpec] = {
    "fp4": FormatSpec(64, 4, torch.uint8, 64, torch.int32),
    "fp8": FormatSpec(128, 4, torch.float8_e4m3fn, 128, torch.float32),
    "fp16": FormatSpec(256, 0, torch.float16, 128, None),
    "bf16": FormatSpec(256, 0, torch.bfloat16, 128, None),
}


@torch.no_grad()
def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows of 128 to e4m3 with one fp32 scale a row, `x ~= values * scale`.

    Args:
        x: `[..., 128]`, any float dtype.

    Returns:
        values: `[..., 128]` float8_e4m3fn, round to nearest even, at most 448 in magnitude.
        scales: `[...]` float32, `amax / 448`, at least 2^-126; 1 for an all-zero row, whose values
            are exact zeros. A row that holds a NaN, an infinity or what float32 does not hold
            becomes NaN as a whole. No gradient is recorded.

    Raises:
        ValueError: `x` is not a float tensor of 128 columns.
    """
    expect_tensor("x", x, (..., HEAD_DIM), FLOATS)
    x = x.to(torch.float32)
    amax = x.abs().amax(-1)
    scales = (amax / _E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    scales = torch.where(amax == 0, torch.ones_like(scales), scales)
    scales = torch.where(amax.isfinite(), scales, torch.full_like(scales, torch.nan))
    values = (x / scales[..., None]).clamp(-_E4M3_MAX, _E4M3_MAX)
    return values.to(torch.float8_e4m3fn), scales


def dequantize_fp8(
    values: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """`values * scales` in `dtype`, a float one: e4m3 `[..., 128]`, fp32 `[...]` to `[..., 128]`.

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    expect_tensor("values", values, (..., HEAD_DIM), (torch.float8_e4m3fn,))
    expect_tensor("scales", scales, tuple(values.shape[:-1]), (torch.float32,))
    if dtype not in FLOATS:
        raise mismatch("dtype", " or ".join(map(str, FLOATS)), repr(dtype))
    return values.to(dtype) * scales.to(dtype)[..., None]


@torch.no_grad()
def quantize_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows of 128 to e2m1 with a power-of-two scale per 32 dims.

    The scale of a group is the smallest 2^e with `6 * 2^e >= amax`, so nothing saturates; an
    all-zero group gets 2^-127 and exact zeros.

    Args:
        x: `[..., 128]`, any float dtype.

    Returns:
        values: `[..., 64]` uint8, two e2m1 codes a byte, low nibble = even element, round to
            nearest even.
        scales: `[...]` int32, four ue8m0 codes, byte g (little endian) = dims 32 g to 32 g + 31.
            A group that holds a NaN or a magnitude beyond 6 * 2^127 gets code 255 (NaN). No
            gradient is recorded.

    Raises:
        ValueError: `x` is not a float tensor of 128 columns.
    """
    expect_tensor("x", x, (..., HEAD_DIM), FLOATS)
    groups = _groups(x.to(torch.float64).contiguous())
    amax = groups.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax / _E2M1_MAX)  # mantissa in [0.5, 1)
    exponent = (exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(-127, 127)
    exponent = torch.where(mantissa == 0, torch.full_like(exponent, -127), exponent)
    finite = amax <= _E2M1_MAX * 2.0**127
    codes = torch.where(finite, exponent + 127, torch.full_like(exponent, 255)).to(torch.uint8)
    unit = power_of_two(-exponent)
    scaled = torch.where(finite[..., None], groups * unit[..., None], torch.zeros_like(groups))
    nibbles = _e2m1_codes(scaled.flatten(-2))
    values = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return values, codes.contiguous().view(torch.int32).squeeze(-1)


def _e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 code of each element, ties to the even code, beyond 6 saturated."""
    m = x.abs()
    code = (m > 0.25).to(torch.uint8)
    for threshold, tie_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False)):
        code += (m >= threshold) if tie_up else (m > threshold)
    code += m >= 3.5
    code += m > 5.0
    return torch.where((x < 0) & (code > 0), code | 8, code)


def dequantize_fp4(
    values: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """e2m1 `[..., 64]` uint8 and ue8m0 `[...]` int32 to `[..., 128]` of `dtype`, exactly.

    `dtype` is float32 or float64. Both hold every e2m1 x ue8m0 product, the subnormal ones
    included, but for those from 2^128 on, which are infinite in float32.

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    expect_tensor("values", values, (..., HEAD_DIM // 2), (torch.uint8,))
    expect_tensor("scales", scales, tuple(values.shape[:-1]), (torch.int32,))
    if dtype not in (torch.float32, torch.float64):
        raise mismatch("dtype", "torch.float32 or torch.float64", repr(dtype))
    codes = scales.contiguous()[..., None].view(torch.uint8)
    low, high = values & 15, values >> 4
    nibbles = torch.stack((low, high), -1).flatten(-2).to(torch.int16)
    # As fp16 bits, exponent and mantissa of an e2m1 code read as its value times 2^-14.
    half = (((nibbles & 7) << 9) | ((nibbles & 8) << 12)).view(torch.float16)
    groups = _groups(half.to(dtype) * 2.0**14)
    return (groups * decode_ue8m0(codes).to(dtype)[..., None]).flatten(-2)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """`2^exponents` float64 of int32 that need no subnormals.

    By their bits: torch's `ldexp` runs on the current device, whatever its tensors' is
    (pytorch/pytorch#189567).
    """
    return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)


def _groups(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:-1], HEAD_DIM // FP4_GROUP, FP4_GROUP)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """ue8m0 codes (uint8) to float32: 2^(code - 127); 0 is 2^-127, 255 is NaN."""
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, torch.full_like(bits, 1 << 22), bits)
    bits = torch.where(codes == 255, torch.full_like(bits, 0x7FC00000), bits)
    return bits.view(torch.float32)
