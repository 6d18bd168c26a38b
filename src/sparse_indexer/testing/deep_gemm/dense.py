# SPDX-License-Identifier: Apache-2.0
"""Dense logits, as both generations compute them, and their schedule."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from sparse_indexer.errors import describe, expect_tensor, mismatch
from sparse_indexer.testing.deep_gemm.arithmetic import head_sums, widen
from sparse_indexer.testing.deep_gemm.buffers import CELLS, logits_buffer
from sparse_indexer.testing.deep_gemm.checks import (
    expect_aligned,
    expect_arch,
    expect_dense,
)

if TYPE_CHECKING:
    from sparse_indexer.testing.deep_gemm.shared import Emulator, Pair, Queries

_KV_TILE = 256  # positions: rows of logits are padded to whole tiles


def dense_logits(
    emulator: Emulator,
    q: Queries,
    kv: Pair,
    weights: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    schedule_meta: torch.Tensor | None,
    width: int,
    dtype: torch.dtype,
    *,
    outside: float | None = None,
) -> torch.Tensor:
    """`[rows, width]`, columns relative to a row's start; absolute, one a key, if `width` is 0.

    Args:
        bounds: `cu_seq_len_k_start` and `cu_seq_len_k_end`.
        outside: what columns outside of a row's span hold; `None`: poison.
    """
    arch = emulator.arch_major
    expect_arch(arch, 9, 10)
    operands = expect_dense(q, kv, weights, bounds, emulator.generation, arch)
    values, scales, keys, spans = operands.q, operands.q_sf, operands.kv, operands.spans
    rows, heads = values.shape[:2]
    if schedule_meta is not None:
        expect_arch(arch, 10)
        want = schedule_mark(spans, len(keys), heads, emulator.get_num_sms())
        _expect_schedule(schedule_meta, want)
    longest = int((spans[1] - spans[0]).max())
    if width and longest > width:
        raise mismatch("max_seqlen_k", f"at least the longest span {longest}", str(width))
    if operands.weights.dtype == torch.bfloat16 and dtype != torch.bfloat16:
        raise mismatch("logits_dtype", "torch.bfloat16 with bfloat16 weights", str(dtype))
    columns = width or len(keys)
    padded = -(-columns // _KV_TILE) * _KV_TILE if width else columns + _KV_TILE
    out = logits_buffer(rows, columns, padded, dtype, values.device)
    if outside is not None:
        out.fill_(outside)

    wide = widen(keys, None if scales is None else operands.kv_sf)
    step = max(1, CELLS // (heads * len(keys)))
    for first in range(0, rows, step):
        some = slice(first, first + step)
        queries = widen(values[some], None if scales is None else scales[some])
        dots = (queries.flatten(0, 1) @ wide.t()).to(torch.float32)
        logits = head_sums(dots.view(*queries.shape[:2], len(keys)), operands.weights[some])
        if scales is None:
            logits = logits * operands.kv_sf.to(logits.dtype)
        for row, (start, end) in enumerate(spans[:, some].t().tolist(), first):
            shift = start if width else 0
            out[row, start - shift : end - shift] = logits[row - first, start:end].to(dtype)
    return out


def schedule_mark(spans: torch.Tensor, tokens: int, heads: int, num_sms: int) -> torch.Tensor:
    """Four int32 words that tell one schedule from another."""
    facts = repr((spans.tolist(), tokens, heads, num_sms)).encode()
    digest = bytearray(hashlib.blake2b(facts, digest_size=16).digest())
    return torch.frombuffer(digest, dtype=torch.int32)


def _expect_schedule(schedule_meta: object, want: torch.Tensor) -> None:
    held = expect_tensor("schedule_meta", schedule_meta, ("words",), (torch.int32,))
    expect_aligned("schedule_meta", held, 8)
    if held[: len(want)].tolist() != want.tolist():
        words = "get_mqa_logits_metadata of these bounds, keys and heads, and of this SM count"
        raise mismatch("schedule_meta", words, describe(held))
