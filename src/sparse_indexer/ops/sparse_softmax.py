# SPDX-License-Identifier: Apache-2.0
"""Logits of sparse attention to probabilities: scale, mask, sink, softmax."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.jit import Kernel, load


def _configs(name: str, out: str) -> dict[str, str]:
    warps = "sparse_indexer::sparse_softmax_config::kWarps"
    return {
        f"sparse_softmax_{name}_warp": f"sparse_indexer::SparseSoftmax<{out}, 1>",
        f"sparse_softmax_{name}_cta": f"sparse_indexer::SparseSoftmax<{out}, {warps}>",
        f"sparse_softmax_{name}_long": f"sparse_indexer::LongSparseSoftmax<{out}>",
    }


KERNEL = Kernel(
    "sparse_softmax",
    _configs("fp16", "sparse_indexer::Float16")
    | _configs("bf16", "sparse_indexer::BFloat16")
    | _configs("fp32", "float"),
)


def sparse_softmax(
    logits: torch.Tensor,
    positions: torch.Tensor,
    *,
    num_slots: int,
    scale: float,
    sink: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    """Softmax of each row and head over its used entries and the sink.

    Float32 throughout, rounded once at the end. Whatever lies in unused entries takes no part, and
    they get 0; NaN and infinities of used ones give what the formula gives, so that a row whose
    used logits are all -inf is NaN without a sink. The bits of a row are those of k and its own
    entries, but for a sum's last bits: entries are taken 4 at a time if k is a multiple of 4 and
    all rows of the call, of every tensor, are at multiples of 4 elements (of one row only its
    address counts, so alone it may be where among others it is not), else one at a time, summed in
    another order.

    Args:
        logits: `[rows, heads, k]` float32, any strides of rows and heads. Read once for k up to
            2560, twice beyond that and if entries are taken one at a time.
        positions: `[rows, k]` int32, any row stride: entries that are negative or at least
            `num_slots` are unused.
        num_slots: of the pool.
        scale: multiplies the logits, not the sink.
        sink: `[heads]` float32, the logit of one more entry whose probability is not written.
        out: `[rows, heads, k]` float16, bfloat16 or float32, any strides of rows and heads; fully
            written. May be the memory of `logits`, if each row and head begins where it begins
            there: `logits` itself, or `logits.view(torch.float16)[..., :k]`.
    """
    try:
        load(KERNEL, logits.device).sparse_softmax(logits, positions, num_slots, scale, sink, out)
    except Exception as error:
        blame_argument(error, sparse_softmax, locals())
        raise
