# SPDX-License-Identifier: Apache-2.0
"""Gather and convert index keys into the flat scratch that a scorer reads."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.inputs import FlatIndexK, IndexKPool
from sparse_indexer.jit import Kernel, load

_NAMES = {"fp4": "kFp4", "fp8": "kFp8", "fp16": "kFp16", "bf16": "kBf16"}
_CONVERSIONS = {
    "fp4": ("fp8", "fp16", "bf16"),
    "fp8": ("fp8", "fp16", "bf16"),
    "fp16": ("fp16",),
    "bf16": ("fp16", "bf16"),
}

_NUMBERS = {name: number for number, name in enumerate(_NAMES)}  # as in host/index_k.cc


def conversions(kernel: str, config: str) -> dict[str, str]:
    """Variants of `kernel`, which converts as `index_k` does: their symbols and Configs."""
    formats = "sparse_indexer::KeyFormat::"
    return {
        f"{kernel}_{source}_{target}": (
            f"sparse_indexer::{config}<{formats}{_NAMES[source]}, {formats}{_NAMES[target]}>"
        )
        for source, targets in _CONVERSIONS.items()
        for target in targets
    }


KERNEL = Kernel("index_k", conversions("index_k", "IndexK"))


def index_k(
    keys: IndexKPool | FlatIndexK,
    where: torch.Tensor,
    *,
    lens: torch.Tensor,
    max_len: int,
    out_starts: torch.Tensor,
    out_values: torch.Tensor,
    out_scales: torch.Tensor | None = None,
) -> None:
    """Convert the first `lens[i]` positions of each request i, all requests in one launch.

    `out_values * out_scales` is the stored key, exactly but for what `kernels/index_k.cuh` says of
    groups and elements far below a position's largest. Positions past a request's length, and the
    page-table slots that only they would use, are not read. A page or column that does not exist
    gives a NaN scale.

    Without `out_scales` the outputs are packed blocks of 8 positions, as Hopper's MMA reads them:
    chunk c of 16 bytes (16 dims of e4m3, 8 of halves) of position p at byte `c * 128 + p % 8 * 16`
    of its block, and behind the 8 positions' chunks, at byte 1024 (halves: 2048) `+ p % 8 * 4`,
    its float32 scale. Positions of a last block past a request's length are not written.

    Args:
        keys: a pool or flat keys of any format and layout.
        where: `[requests, max_pages]` int32, the page table of a pool; `[requests]` int32, the
            first column of each request in flat keys.
        lens: `[requests]` int32: positions to convert.
        max_len: at least the largest of `lens`; sizes the grid.
        out_starts: `[requests]` int32: row of the outputs where a request begins; packed: block.
        out_values: `[out rows, 128]` float8_e4m3fn or, sooner done, its codes as uint8 (of fp8 and
            fp4), float16 (of any) or bfloat16 (of all but fp16). Packed: `[out blocks, 1152]` of
            float8_e4m3fn or uint8, `[out blocks, 1088]` of float16 or bfloat16. Contiguous, at a
            multiple of 16 bytes.
        out_scales: `[out rows]` float32: 1 where the values need none. None: packed.
    """
    try:
        module = load(KERNEL, lens.device)
        values = out_values
        if values.dtype == torch.float8_e4m3fn:
            values = values.view(torch.uint8)
        if isinstance(keys, IndexKPool):
            pages = keys.pages if keys.pages.ndim == 2 else keys.pages.flatten(1)
            module.index_k_paged(
                pages,
                _NUMBERS[keys.format],
                keys.layout == "interleaved",
                keys.page_size,
                where,
                lens,
                out_starts,
                max_len,
                values,
                out_scales,
            )
        else:
            stored = keys.values
            module.index_k_flat(
                stored.view(torch.uint8) if stored.itemsize == 1 else stored,
                keys.scales,
                _NUMBERS[keys.format],
                where,
                lens,
                out_starts,
                max_len,
                values,
                out_scales,
            )
    except Exception as error:
        blame_argument(error, index_k, locals())
        raise
