# SPDX-License-Identifier: Apache-2.0
"""Gather and dequantize the KV rows that query rows attend to."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.jit import Kernel, load
from sparse_indexer.kv_pool import KVPool

_ELEMENTS = {
    "fp16": "sparse_indexer::Float16",
    "bf16": "sparse_indexer::BFloat16",
    "fp32": "float",
}

KERNEL = Kernel(
    "kv_gather",
    {
        f"kv_gather_{source}_{target}": f"sparse_indexer::KvGather<{stored}, {written}>"
        for source, stored in {"fp8": "sparse_indexer::E4m3", **_ELEMENTS}.items()
        for target, written in _ELEMENTS.items()
    },
)


def kv_gather(
    kv_pool: torch.Tensor | KVPool, positions: torch.Tensor, *, out: torch.Tensor
) -> None:
    """Write the KV row of each slot, zeros where `positions` names none.

    A value times its scale is rounded to float32, and to what `out` holds; of float16 that is
    infinite beyond 65,504. The bits are the same whatever the other rows of a call are.

    Args:
        kv_pool: `[slots, dim]` float16, bfloat16 or float32, any row stride, or a `KVPool`.
        positions: `[rows, k]` int32 slots, any row stride; those that are negative or beyond the
            pool are unused, and nothing is looked up for them.
        out: `[rows, k, dim]` float16, bfloat16 or float32, any strides of rows and slots; fully
            written. The pool is read and this is written 8 elements at a time if dim is a multiple
            of 8 and all rows are at multiples of 16 bytes (of 8: e4m3), else by single elements.
    """
    try:
        module = load(KERNEL, positions.device)
        if isinstance(kv_pool, KVPool):
            values = kv_pool.values.view(torch.uint8)
            module.kv_gather_fp8(values, kv_pool.scales, kv_pool.rope, positions, out)
        else:
            module.kv_gather_plain(kv_pool, positions, out)
    except Exception as error:
        blame_argument(error, kv_gather, locals())
        raise
