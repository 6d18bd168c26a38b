# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's SM100 indexer functions in plain torch, for machines without such a card.

`DeepGemmEmulator` and `OlderDeepGemmEmulator` stand in for the module `deep_gemm` of the wheels of
`sgl-deep-gemm`: 0.2.5, and 0.2.0 to 0.2.4rc0 (there is no 0.2.4). They have those names, arguments,
result shapes and strides, run on any device, refuse what the kernels do not take with a
`ValueError`, round where the kernels round (`arithmetic`), and fill what the kernels leave
unwritten with `poison`. Values are looked at, too, so on a GPU each call synchronizes. There is no
workspace: the real one has 8 MiB a stream, allocated at the first call there, never in a capture.
"""

from __future__ import annotations

import torch

from sparse_indexer.errors import describe, expect_int, mismatch
from sparse_indexer.testing.deep_gemm.buffers import poison
from sparse_indexer.testing.deep_gemm.checks import CURRENT, OLDER
from sparse_indexer.testing.deep_gemm.dense import dense_logits
from sparse_indexer.testing.deep_gemm.shared import Emulator, Pair, Queries

__all__ = ["DeepGemmEmulator", "OlderDeepGemmEmulator", "poison"]


class DeepGemmEmulator(Emulator):
    """`deep_gemm` of sgl-deep-gemm 0.2.5; arguments as `Emulator`."""

    generation = CURRENT

    def fp8_fp4_mqa_logits(
        self,
        q: Queries,
        kv: Pair,
        weights: torch.Tensor,
        cu_seq_len_k_start: torch.Tensor,
        cu_seq_len_k_end: torch.Tensor,
        max_seqlen_k: int,
        schedule_meta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of each row at the keys `start` to `end`, which fills the first columns.

        Args:
            q: SM100: (`[rows, heads, 64]` int8 or `[rows, heads, 128]` float8_e4m3fn,
                `[rows, heads]` int32, four ue8m0 codes); SM90: float8_e4m3fn alone, 32 or 64 heads.
                Contiguous; heads a multiple of 4, at most 128.
            kv: (`[positions, 64 or 128]` as `q`, `[positions]` int32; SM90: float32), contiguous.
            weights: `[rows, heads]` bfloat16 (SM90: float32), row stride a multiple of 16 bytes.
            cu_seq_len_k_start, cu_seq_len_k_end: `[rows]` int32 contiguous.
            max_seqlen_k: columns, at least the longest span (the real one does not look).
            schedule_meta: `get_mqa_logits_metadata` of the same bounds; SM100 only.

        Returns:
            `[rows, max_seqlen_k]` bfloat16 (SM90: float32), rows apart by whole tiles; what is
            beyond a row's span holds anything.
        """
        expect_int("max_seqlen_k", max_seqlen_k, 1)
        bounds = (cu_seq_len_k_start, cu_seq_len_k_end)
        dtype = torch.bfloat16 if self.arch_major == 10 else torch.float32
        return dense_logits(self, q, kv, weights, bounds, schedule_meta, max_seqlen_k, dtype)


class OlderDeepGemmEmulator(Emulator):
    """`deep_gemm` of sgl-deep-gemm 0.2.0 to 0.2.4rc0; arguments as `Emulator`."""

    generation = OLDER

    def fp8_fp4_mqa_logits(
        self,
        q: Queries,
        kv: Pair,
        weights: torch.Tensor,
        cu_seq_len_k_start: torch.Tensor,
        cu_seq_len_k_end: torch.Tensor,
        clean_logits: bool = False,
        max_seqlen_k: int = 0,
        logits_dtype: torch.dtype = torch.float,
        schedule_meta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of each row at the keys `start` to `end`.

        As in 0.2.5, but on SM100 also float8_e4m3fn without scales with float32 key scales; and:

        Args:
            weights: float32, or on SM100 bfloat16 with bfloat16 logits.
            clean_logits: fill absolute columns outside of a row's span with -inf; else they hold
                anything. Not with `max_seqlen_k`.
            max_seqlen_k: 0: columns are absolute, `[rows, positions]`; else relative to the start.
            logits_dtype: float32 or bfloat16.
        """
        if logits_dtype not in (torch.float32, torch.bfloat16):
            want = "torch.float32 or torch.bfloat16"
            raise mismatch("logits_dtype", want, describe(logits_dtype))
        expect_int("max_seqlen_k", max_seqlen_k, 0)
        if clean_logits and max_seqlen_k:
            raise mismatch("clean_logits", "False with max_seqlen_k", "True")
        bounds = (cu_seq_len_k_start, cu_seq_len_k_end)
        return dense_logits(
            self,
            q,
            kv,
            weights,
            bounds,
            schedule_meta,
            max_seqlen_k,
            logits_dtype,
            outside=-torch.inf if clean_logits else None,
        )
