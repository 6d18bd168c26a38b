# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM 0.2.5 for tests of streams, graphs and memory: no value is looked at on the host.

The emulator checks everything, and so waits for the device at each call.
"""

from typing import Any

import torch

from sparse_indexer.formats import dequantize_fp4
from sparse_indexer.testing.deep_gemm import poison
from sparse_indexer.testing.deep_gemm.buffers import read_cache

Pair = tuple[torch.Tensor, torch.Tensor]
_CELLS = 1 << 29  # dot products, or elements of gathered keys, at once


def _float(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return dequantize_fp4(values.view(torch.uint8), scales)


def _head_sums(dots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`[rows, n]` of `[rows, heads, n]` float32."""
    return torch.bmm(weights.float()[:, None], dots.relu_())[:, 0]


class QuietDeepGemm:
    """Logits in float32, rounded once to bfloat16: exact where they are integers below 256."""

    __version__ = "0.2.5"

    def fp8_fp4_mqa_logits(
        self,
        q: Pair,
        kv: Pair,
        weights: torch.Tensor,
        cu_seq_len_k_start: torch.Tensor,
        cu_seq_len_k_end: torch.Tensor,
        max_seqlen_k: int,
        schedule_meta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        (rows, heads), positions = q[1].shape, len(kv[1])
        out = self._empty(rows, max_seqlen_k, weights.device)
        keys, columns = _float(*kv), torch.arange(max_seqlen_k, device=weights.device)
        step = max(1, _CELLS // (heads * positions))
        for first in range(0, rows, step):
            some = slice(first, first + step)
            dots = (_float(q[0][some], q[1][some]).flatten(0, 1) @ keys.t()).view(
                -1, heads, positions
            )
            logits = _head_sums(dots, weights[some])
            at = cu_seq_len_k_start[some, None] + columns
            seen = at < cu_seq_len_k_end[some, None]
            logits = logits.gather(1, at.clamp_(max=positions - 1).long())
            out[some] = torch.where(seen, logits.to(torch.bfloat16), out[some])
        return out

    def get_paged_sparse_mqa_logits_metadata(
        self,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        indices: torch.Tensor,
        page_kv: int,
        sparse_kv_block_indices: torch.Tensor,
        qk_dtype: torch.dtype,
        sparse_block_kv: int,
    ) -> torch.Tensor:
        blocks = sparse_kv_block_indices
        columns = torch.arange(blocks.shape[1], device=blocks.device)
        used = columns * sparse_block_kv < context_lens[:, None]
        blocks = torch.where(used, blocks, 0)
        per_page = page_kv // sparse_block_kv
        pages = block_table.gather(1, (blocks // per_page).long())
        return (pages * per_page + blocks % per_page).view(torch.uint8).flatten()

    def fp8_fp4_paged_sparse_mqa_logits(
        self,
        q: Pair,
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        metadata: torch.Tensor,
        num_max_sparse_blocks: int,
        sparse_block_kv: int,
    ) -> torch.Tensor:
        rows, width = len(weights), num_max_sparse_blocks * sparse_block_kv
        out = self._empty(rows, width, weights.device)
        physical = metadata.view(torch.int32).view(rows, num_max_sparse_blocks).long()
        offsets = torch.arange(sparse_block_kv, device=weights.device)
        step = max(1, _CELLS // (128 * width))
        for first in range(0, rows, step):
            some = slice(first, first + step)
            slots = (physical[some, :, None] * sparse_block_kv + offsets).flatten(1)
            keys = _float(*read_cache(kv_cache, slots, torch.int8))
            queries = _float(q[0][some, 0], q[1][some, 0])
            out[some] = _head_sums(torch.bmm(queries, keys.transpose(1, 2)), weights[some])
        return out

    def _empty(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """Rows a multiple of 1024 bytes apart."""
        return poison((rows, -(-columns // 512) * 512), torch.bfloat16, device)[:, :columns]


class BlankDeepGemm(QuietDeepGemm):
    """Allocates what DeepGEMM does, for as long as it does, and computes nothing."""

    def fp8_fp4_mqa_logits(
        self, q: Pair, kv: Pair, weights: torch.Tensor, *_: Any, max_seqlen_k: int
    ) -> torch.Tensor:
        shape = (len(weights), -(-max_seqlen_k // 512) * 512)
        return torch.zeros(shape, dtype=torch.bfloat16, device=weights.device)[:, :max_seqlen_k]

    def get_paged_sparse_mqa_logits_metadata(self, *arguments: Any) -> torch.Tensor:
        blocks: torch.Tensor = arguments[4]
        return torch.zeros(9 * blocks.numel(), dtype=torch.uint8, device=blocks.device)

    def fp8_fp4_paged_sparse_mqa_logits(
        self,
        q: Pair,
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        metadata: torch.Tensor,
        num_max_sparse_blocks: int,
        sparse_block_kv: int,
    ) -> torch.Tensor:
        shape = (len(weights), num_max_sparse_blocks * sparse_block_kv)
        return torch.zeros(shape, dtype=torch.bfloat16, device=weights.device)
