# SPDX-License-Identifier: Apache-2.0
"""Keys and queries as a GEMM in float16 takes them, and what keeps its scores within float16."""

from __future__ import annotations

import torch

from sparse_indexer.formats import FORMATS, HEAD_DIM, KeyFormat
from sparse_indexer.index_k import FlatIndexK
from sparse_indexer.inputs import PrefillIndexerInputs
from sparse_indexer.ops.index_k import index_k
from sparse_indexer.scratch import Scratch

KEY_BYTES = 2 * HEAD_DIM + 4
"""Of a widened position: 128 float16 values and a float32 scale."""

_QUERIES: dict[torch.dtype, KeyFormat] = {
    torch.uint8: "fp4",
    torch.float8_e4m3fn: "fp8",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
# `index_k` makes 2^-8 of e4m3 values, and e2m1 ones as they are: as e4m3 they would be 64 times
# that. So these factors give of either the scores of e4m3 values times 2^-16.
_OF_CODES: dict[KeyFormat, float] = {"fp8": 1.0, "fp4": 2.0**-2}
_OF_HALVES = 2.0**-8


def score_factor(inputs: PrefillIndexerInputs) -> float:
    """What scores are multiplied by before they are rounded to float16, a power of two.

    Then they round as those of the fused kernels do with `half_scores`, and only given float16 can
    overflow.
    """
    keys, queries = inputs.index_k.format, _QUERIES[inputs.index_q.values.dtype]
    if keys in _OF_CODES and queries in _OF_CODES:
        return _OF_CODES[keys] * _OF_CODES[queries]
    return _OF_HALVES


def widen_keys(
    inputs: PrefillIndexerInputs,
    request: int,
    seen: torch.Tensor,
    *,
    out_values: torch.Tensor,
    out_scales: torch.Tensor,
) -> None:
    """The keys of one request; positions that no row sees are left as they are.

    Args:
        seen: `[1]` int32: the most positions that a row of the request sees.
        out_values: `[width, 128]` float16; out_scales: `[width]` float32.
    """
    plan = inputs.plan
    where = plan.page_table if plan.page_table is not None else plan.key_starts
    assert where is not None
    index_k(
        inputs.index_k,
        where[request : request + 1],
        lens=seen,
        max_len=len(out_values),
        out_starts=torch.zeros_like(seen),
        out_values=out_values,
        out_scales=out_scales,
    )


def query_bytes(inputs: PrefillIndexerInputs) -> int:
    """What `widen_queries` takes of a scratch for a row."""
    spec = FORMATS[_QUERIES[inputs.index_q.values.dtype]]
    stored = spec.payload_bytes + spec.scale_bytes + inputs.head_weights.itemsize
    return inputs.num_heads * (stored + 2 * HEAD_DIM + 4)


def widen_queries(
    inputs: PrefillIndexerInputs, rows: torch.Tensor, scratch: Scratch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows' queries, converted by `index_k` as if they were keys.

    Args:
        rows: `[n]` int64, of the plan.

    Returns:
        `[n * heads, 128]` float16, and `[n, heads]` float32 head weights times their scales.
    """
    q, heads, count = inputs.index_q, inputs.num_heads, len(rows) * inputs.num_heads
    form = _QUERIES[q.values.dtype]

    def picked(source: torch.Tensor) -> torch.Tensor:
        out = scratch.take((len(rows), *source.shape[1:]), source.dtype)
        return torch.index_select(source, 0, rows, out=out)

    values = picked(q.values.view(torch.uint8) if q.values.itemsize == 1 else q.values)
    scales = None
    if q.scales is not None:
        scales = picked(q.scales).view(count)
    elif form == "fp8":
        scales = scratch.take((count,), torch.float32).fill_(1)
    weights = picked(inputs.head_weights)
    out_values = scratch.take((count, HEAD_DIM), torch.float16)
    out_scales = scratch.take((count,), torch.float32)
    first = torch.zeros(1, dtype=torch.int32, device=rows.device)
    index_k(
        FlatIndexK(values.view(q.values.dtype).flatten(0, 1), scales, form),
        first,
        lens=first + count,
        max_len=count,
        out_starts=first,
        out_values=out_values,
        out_scales=out_scales,
    )
    return out_values, out_scales.view(-1, heads).mul_(weights)
