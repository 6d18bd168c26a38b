# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of DeepGEMM's SM100 indexer kernels, rounding point by rounding point.

Each head's dot product is one fp32 number. With bf16 weights (all of 0.2.5, and the sparse kernels
of 0.2.0 to 0.2.4rc0) its ReLU is rounded to bf16, and four chains of bf16 fused multiply-adds, one
of the heads 4 i + c for each c, sum the heads: (chain 0 + chain 2) + (chain 1 + chain 3), every sum
rounded to bf16. With fp32 weights (dense, 0.2.0 to 0.2.4rc0) the same chains are fp32, of twice the
ReLU, written `x + |x|` (so that of -inf is NaN), and halved at the end.
"""

from __future__ import annotations

import torch

from sparse_indexer.formats import dequantize_fp4

CHAINS = 4


def widen(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Operands to float64 `[..., 128]`, exactly.

    Args:
        values: `[..., 64]` int8 or uint8, packed e2m1, or `[..., 128]` float8_e4m3fn.
        scales: `[...]` int32, four ue8m0 codes, one per 32 dims; `None`: none (e4m3 alone).
    """
    if values.dtype != torch.float8_e4m3fn:
        assert scales is not None
        return dequantize_fp4(values.view(torch.uint8), scales, dtype=torch.float64)
    if scales is None:
        return values.to(torch.float64)
    ones = torch.full((*scales.shape, 64), 0x22, dtype=torch.uint8, device=scales.device)
    return values.to(torch.float64) * dequantize_fp4(ones, scales, dtype=torch.float64)


def head_sums(dots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`sum_h w[r, h] * relu(dots[r, h, n])` in the weights' dtype: bfloat16 or float32.

    Args:
        dots: `[rows, heads, n]` float32, heads a multiple of 4.
        weights: `[rows, heads]`.

    Returns:
        `[rows, n]` of the weights' dtype.
    """
    brain = weights.dtype == torch.bfloat16
    terms = dots.relu().to(torch.bfloat16) if brain else dots + dots.abs()
    steps = dots.shape[1] // CHAINS
    rows, _, columns = dots.shape
    terms = terms.to(torch.float64).view(rows, steps, CHAINS, columns)
    factors = weights.to(torch.float64).reshape(rows, steps, CHAINS, 1)
    chains = torch.zeros_like(terms[:, 0])
    for step in range(steps):
        chains = _rounded_sum(terms[:, step] * factors[:, step], chains, brain)
    pairs = _rounded_sum(chains[:, :2], chains[:, 2:], brain)
    total = _rounded_sum(pairs[:, 0], pairs[:, 1], brain)
    return total.to(torch.bfloat16) if brain else total.to(torch.float32) / 2


def _rounded_sum(a: torch.Tensor, b: torch.Tensor, brain: bool) -> torch.Tensor:
    """`a + b` (float64) rounded once to bfloat16 or, by way of float64, to float32."""
    total = a + b
    if not brain:
        return total.to(torch.float32).to(torch.float64)
    back = total - a
    rest = (a - (total - back)) + (b - back)  # what the float64 sum has lost
    return round_bf16(total, rest).to(torch.float64)


def round_bf16(x: torch.Tensor, rest: torch.Tensor | None = None) -> torch.Tensor:
    """`x + rest` (float64, `rest` below an ulp of `x`) to the nearest bfloat16, ties to even.

    A conversion by way of float32 would round twice, so the float32 in between is rounded to odd:
    cut off, its last bit set where anything was lost.
    """
    rest = torch.zeros_like(x) if rest is None else rest.nan_to_num(0.0, 0.0, 0.0)
    near = x.to(torch.float32)
    gap = (x - near.to(torch.float64)).nan_to_num(0.0, posinf=-1.0, neginf=1.0)
    gap = torch.where(near.isinf(), torch.where(x.isinf(), 0.0, -near.sign().double()), gap)
    gap = torch.where(gap == 0, rest, gap)
    bits = near.view(torch.int32)
    outward = (gap != 0) & (gap.sign() == -near.sign().to(torch.float64))
    bits = torch.where(outward, bits - 1, bits)
    bits = torch.where((gap != 0) & (near != 0), bits | 1, bits)
    return bits.view(torch.float32).to(torch.bfloat16)
