# SPDX-License-Identifier: Apache-2.0
"""What both generations have alike: the paged sparse logits, and the schedules."""

from __future__ import annotations

from typing import ClassVar

import torch

from sparse_indexer.errors import expect_int, expect_tensor, mismatch
from sparse_indexer.testing.deep_gemm.arithmetic import head_sums, widen
from sparse_indexer.testing.deep_gemm.blocks import pack_blocks, unpack_blocks
from sparse_indexer.testing.deep_gemm.buffers import CELLS, logits_buffer, read_cache
from sparse_indexer.testing.deep_gemm.checks import (
    PACKED_FP4,
    Generation,
    expect_arch,
    expect_block_shape,
    expect_bounds,
    expect_kv_cache,
    expect_queries,
    expect_schedule_size,
    expect_weights,
)
from sparse_indexer.testing.deep_gemm.dense import schedule_mark

Pair = tuple[torch.Tensor, torch.Tensor]
Queries = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]


class Emulator:
    """What both generations share.

    Args:
        arch_major: the compute capability's major; 10 for all functions, 9 for dense logits alone,
            another one for none.
        num_sms: SMs that are scheduled for.
        longest_run: rows of one id of `indices` that are taken. The real function takes any number
            and scans back over them for each row, so a long run costs its square.
    """

    generation: ClassVar[Generation]

    def __init__(self, *, arch_major: int = 10, num_sms: int = 148, longest_run: int = 2) -> None:
        self.arch_major = expect_int("arch_major", arch_major, 1)
        self.longest_run = expect_int("longest_run", longest_run, 1)
        self._num_sms = expect_int("num_sms", num_sms, 3, 256)

    @property
    def __version__(self) -> str:
        return self.generation.version

    def get_num_sms(self) -> int:
        """SMs that are scheduled for."""
        return self._num_sms

    def set_num_sms(self, new_num_sms: int) -> None:
        """Schedule for so many SMs; what was scheduled before is then refused."""
        self._num_sms = expect_int("new_num_sms", new_num_sms, 3, 256)

    def get_mqa_logits_metadata(
        self,
        cu_seq_len_k_start: torch.Tensor,
        cu_seq_len_k_end: torch.Tensor,
        num_kv_tokens: int,
        num_heads: int,
    ) -> torch.Tensor:
        """A schedule for dense logits: `[words]` int32, for these bounds and SMs, on SM100.

        Takes `[rows]` int32 contiguous bounds, at least one row and one token.
        """
        expect_arch(self.arch_major, 10)
        expect_int("num_kv_tokens", num_kv_tokens, 1)
        start = expect_tensor("cu_seq_len_k_start", cu_seq_len_k_start, ("rows",), (torch.int32,))
        rows = expect_int("rows of cu_seq_len_k_start", len(start), 1)
        blocks = expect_schedule_size(rows, num_heads)
        spans = expect_bounds(start, cu_seq_len_k_end, rows, num_kv_tokens, start.device)
        words = (3 * self._num_sms + 1) // 2 * 2 + 2 * blocks
        out = torch.full((words,), -1, dtype=torch.int32, device=start.device)
        mark = schedule_mark(spans, num_kv_tokens, num_heads, self._num_sms)
        out[: len(mark)] = mark.to(out.device)
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
        """The schedule of `fp8_fp4_paged_sparse_mqa_logits`: `[bytes]` uint8, on SM100.

        Args:
            context_lens: `[rows]` int32 contiguous: positions a row sees. The first
                `min(blocks, ceil(len / sparse_block_kv))` block ids of the row are read.
            block_table: `[rows, max_pages]` int32: for every row the pages of its request. The row
                stride is beyond every logical page in use, so an expanded table is refused.
            indices: `[rows]` int32: rows of one id that follow one another share a pass over the
                keys two by two, by the first one's row of the table.
            page_kv: positions a page, a multiple of `sparse_block_kv`.
            sparse_kv_block_indices: `[rows, blocks]` int32 contiguous: ids ascending and unique,
                blocks a multiple of 4, at most 4096.
            qk_dtype: int8 (packed e2m1) or float8_e4m3fn.
            sparse_block_kv: positions a block, 8 or 16.
        """
        expect_arch(self.arch_major, 10)
        return pack_blocks(
            context_lens,
            block_table,
            indices,
            page_kv,
            sparse_kv_block_indices,
            qk_dtype,
            sparse_block_kv,
            num_sms=self._num_sms,
            longest_run=self.longest_run,
        )

    def fp8_fp4_paged_sparse_mqa_logits(
        self,
        q: Pair,
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        metadata: torch.Tensor,
        num_max_sparse_blocks: int,
        sparse_block_kv: int,
    ) -> torch.Tensor:
        """Logits of each row's blocks, in their order, on SM100.

        Args:
            q: (`[rows, 1, heads, 64]` int8 or `[rows, 1, heads, 128]` float8_e4m3fn,
                `[rows, 1, heads]` int32, four ue8m0 codes), contiguous. Heads: a multiple of 4 to
                32; until 0.2.4rc0 32 alone.
            kv_cache: `[pages, page_kv, 1, 68 or 132]` uint8; a page holds all its values, then all
                its scales, four ue8m0 codes a position for fp8, too. The page stride is a multiple
                of 128 bytes, until 0.2.4rc0 of 512.
            weights: `[rows, heads]` bfloat16, row stride a multiple of 16 bytes.

        Returns:
            `[rows, num_max_sparse_blocks * sparse_block_kv]` bfloat16, rows a multiple of 1024
            bytes apart; only the blocks that were read are written, and positions of theirs that
            the row does not see hold anything.
        """
        expect_arch(self.arch_major, 10)
        expect_block_shape(num_max_sparse_blocks, sparse_block_kv, "num_max_sparse_blocks")
        values, scales = expect_queries(q, (1,))
        rows, _, heads = values.shape[:3]
        if scales is None:
            raise mismatch("q", "(values, scales)", "no scales")
        if heads not in self.generation.sparse_heads:
            allowed = ", ".join(map(str, self.generation.sparse_heads))
            raise mismatch("q", f"{allowed} heads", str(heads))
        checked = expect_weights(weights, rows, heads, (torch.bfloat16,), values.device)
        cache = expect_kv_cache(kv_cache, values, sparse_block_kv, self.generation)
        blocks = unpack_blocks(metadata, values.device)
        packed = values.dtype == PACKED_FP4
        asked = (rows, num_max_sparse_blocks, sparse_block_kv, cache.shape[1])
        if (*asked, self._num_sms, packed) != blocks.made_for:
            want = "rows, blocks, sparse_block_kv, page_kv, num_sms and q dtype of this call"
            raise mismatch("metadata", want, f"that of {blocks.made_for}")
        per_page = blocks.page_kv // sparse_block_kv
        if int(blocks.physical.max()) >= len(cache) * per_page:
            page = str(int(blocks.physical.max()) // per_page)
            raise mismatch("block_table", f"pages of 0 to {len(cache) - 1}", page)

        width = num_max_sparse_blocks * sparse_block_kv
        out = logits_buffer(rows, width, width, torch.bfloat16, values.device)
        longest = -(-int(blocks.columns.max()) // sparse_block_kv)
        step = max(1, CELLS // max(1, heads * longest * sparse_block_kv))
        offsets = torch.arange(sparse_block_kv, device=values.device)
        for first in range(0, rows if longest else 0, step):
            some = slice(first, first + step)
            starts = blocks.physical[some, :longest].long().clamp(min=0) * sparse_block_kv
            slots = (starts[..., None] + offsets).flatten(1)
            keys = widen(*read_cache(cache, slots, values.dtype))
            queries = widen(values[some, 0], scales[some, 0])
            dots = torch.bmm(queries, keys.transpose(1, 2)).to(torch.float32)
            logits = head_sums(dots, checked[some])
            columns = torch.arange(logits.shape[1], device=out.device)
            seen = columns < blocks.columns[some, None]
            out[some, : logits.shape[1]][seen] = logits[seen]
        return out
