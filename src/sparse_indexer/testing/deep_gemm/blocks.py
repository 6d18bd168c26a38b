# SPDX-License-Identifier: Apache-2.0
"""The metadata of DeepGEMM's paged sparse logits: what it takes, and what it holds here.

The real one is a schedule of tensor-core work; this one has its size and type, and holds the
physical blocks of each row, by which the emulated logits find their keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_indexer.errors import describe, expect_int, expect_tensor, mismatch
from sparse_indexer.formats import INT32_MAX
from sparse_indexer.testing.deep_gemm.checks import (
    FP8,
    MAX_ROWS,
    PACKED_FP4,
    expect_aligned,
    expect_block_shape,
    expect_contiguous,
)

_MAGIC = 0x5B10C5
_HEADER = 7  # int32 words: magic, rows, width, sparse_block_kv, page_kv, num_sms, packed fp4
_UINT32_MAX = (1 << 32) - 1
_FILLER = 0xA5


class Blocks(NamedTuple):
    """What the metadata of a call holds."""

    physical: torch.Tensor  # [rows, width] int32: page * blocks a page + block in it; -1: unused
    columns: torch.Tensor  # [rows] int32: columns of the logits that hold one
    made_for: tuple[int, ...]  # rows, width, sparse_block_kv, page_kv, num_sms, packed fp4

    @property
    def page_kv(self) -> int:
        """Positions of a page."""
        return self.made_for[3]


def metadata_bytes(
    rows: int, num_max_sparse_blocks: int, sparse_block_kv: int, qk_dtype: torch.dtype, num_sms: int
) -> int:
    """Bytes of the metadata of a paged call: a header, KV splits, a schedule entry for each."""
    per_split = (640 if qk_dtype == PACKED_FP4 else 512) // sparse_block_kv
    splits = rows * -(-num_max_sparse_blocks // per_split)
    entries = -(-splits // num_sms) * num_sms
    return 16 + splits * (16 + 8 * per_split) + 16 * entries


def pack_blocks(
    context_lens: object,
    block_table: object,
    indices: object,
    page_kv: int,
    sparse_kv_block_indices: object,
    qk_dtype: torch.dtype,
    sparse_block_kv: int,
    *,
    num_sms: int,
    longest_run: int,
) -> torch.Tensor:
    """The checked arguments of `get_paged_sparse_mqa_logits_metadata`, as its `[bytes]` uint8."""
    int32 = (torch.int32,)
    name = "sparse_kv_block_indices"
    blocks = expect_tensor(name, sparse_kv_block_indices, ("rows", "blocks"), int32)
    rows, width = blocks.shape
    device = blocks.device
    expect_int(f"rows of {name}", rows, 1, MAX_ROWS)
    expect_block_shape(width, sparse_block_kv, f"columns of {name}")
    expect_contiguous(name, blocks)
    expect_aligned(name, blocks)
    if isinstance(context_lens, torch.Tensor) and context_lens.numel() == rows:
        expect_contiguous("context_lens", context_lens)
        context_lens = context_lens.flatten()
    lens = expect_tensor("context_lens", context_lens, (rows,), int32, device)
    if (lens < 0).any():
        raise mismatch("context_lens", "lengths of at least 0", str(int(lens.min())))
    table = expect_tensor("block_table", block_table, (rows, "pages"), int32, device)
    if not table.shape[1] or not 0 <= table.stride(0) <= _UINT32_MAX:
        raise mismatch("block_table", "at least 1 page a row, rows in order", table)
    ids = expect_tensor("indices", indices, (rows,), int32, device)
    if qk_dtype not in (PACKED_FP4, FP8):
        raise mismatch("qk_dtype", f"{PACKED_FP4} or {FP8}", describe(qk_dtype))
    if expect_int("page_kv", page_kv, 1) % sparse_block_kv:
        raise mismatch("page_kv", f"a multiple of {sparse_block_kv}", str(page_kv))

    second = _second_of_pair(ids, longest_run)
    counts = (lens + (sparse_block_kv - 1)).div(sparse_block_kv, rounding_mode="floor")
    used = torch.arange(width, device=device) < counts[:, None]
    _expect_ascending(blocks, used, counts)
    physical = _physical(blocks, used, table, second, page_kv // sparse_block_kv)
    last = counts.clamp(max=width).long() - 1
    newest = blocks.gather(1, last.clamp(min=0)[:, None])[:, 0]
    tail = (lens - newest * sparse_block_kv).clamp(max=sparse_block_kv)
    columns = torch.where(last < 0, 0, last * sparse_block_kv + tail)

    packed = qk_dtype == PACKED_FP4
    header = [_MAGIC, rows, width, sparse_block_kv, page_kv, num_sms, int(packed)]
    words = torch.cat(
        (
            torch.tensor(header, dtype=torch.int32, device=device),
            columns.to(torch.int32),
            physical.flatten(),
        )
    ).view(torch.uint8)
    size = metadata_bytes(rows, width, sparse_block_kv, qk_dtype, num_sms)
    out = torch.full((size,), _FILLER, dtype=torch.uint8, device=device)
    out[: len(words)] = words
    return out


def unpack_blocks(metadata: object, device: torch.device) -> Blocks:
    """What `pack_blocks` wrote; `ValueError` for any other tensor."""
    held = expect_tensor("metadata", metadata, ("bytes",), (torch.uint8,), device)
    words = held[: len(held) // 4 * 4].clone().view(torch.int32)
    head = words[:_HEADER].tolist()
    if len(head) < _HEADER or head[0] != _MAGIC:
        want = "what get_paged_sparse_mqa_logits_metadata returned"
        raise mismatch("metadata", want, held)
    rows, width = head[1:3]
    end = _HEADER + rows
    physical = words[end : end + rows * width].view(rows, width)
    return Blocks(physical, words[_HEADER:end], tuple(head[1:]))


def _second_of_pair(ids: torch.Tensor, longest_run: int) -> torch.Tensor:
    """`[rows]` bool: the row shares the KV pass, and the page-table row, of the one before it."""
    seen = set()
    second = []
    start = 0
    listed = ids.tolist()
    for row, request in enumerate(listed):
        if not row or listed[row - 1] != request:
            if request in seen:
                raise mismatch(
                    f"indices[{row}]",
                    "equal ids in rows that follow one another",
                    f"{request} once more",
                )
            seen.add(request)
            start = row
        if row - start >= longest_run:
            want = f"at most {longest_run} rows of one id"
            raise mismatch(f"indices[{row}]", want, f"{row - start + 1} rows of {request}")
        second.append((row - start) % 2 == 1)
    return torch.tensor(second, device=ids.device)


def _expect_ascending(blocks: torch.Tensor, used: torch.Tensor, counts: torch.Tensor) -> None:
    outside = used & ((blocks < 0) | (blocks >= counts[:, None]))
    descending = torch.zeros_like(used)
    descending[:, 1:] = used[:, 1:] & (blocks[:, 1:] <= blocks[:, :-1])
    for bad, rule in ((outside, "0 to {last}"), (descending, "more than the block before it")):
        for row, column in bad.nonzero()[:1].tolist():
            want = rule.format(last=int(counts[row]) - 1)
            got = str(int(blocks[row, column]))
            raise mismatch(f"sparse_kv_block_indices[{row}, {column}]", want, got)


def _physical(
    blocks: torch.Tensor,
    used: torch.Tensor,
    table: torch.Tensor,
    second: torch.Tensor,
    per_page: int,
) -> torch.Tensor:
    """`[rows, width]` int32: where each used block is; the first row's table serves its pair."""
    pages = torch.where(used, blocks, 0).div(per_page, rounding_mode="floor").long()
    for name, limit in (("stride(0)", table.stride(0)), ("columns", table.shape[1])):
        if len(table) * limit == 0 or int(pages.max()) >= limit:
            want = f"{name} beyond the logical page {int(pages.max())} that a row uses"
            raise mismatch("block_table", want, str(limit))
    own = table.gather(1, pages)
    rows = torch.arange(len(table), device=table.device) - second.long()
    taken = table[rows].gather(1, pages)
    for row, column in (used & (own != taken)).nonzero()[:1].tolist():
        want = f"page {int(taken[row, column])}, that of the row before it, its pair"
        place = f"block_table[{row}, {int(pages[row, column])}]"
        raise mismatch(place, want, str(int(own[row, column])))
    for row, column in (used & (taken < 0)).nonzero()[:1].tolist():
        place = f"block_table[{row}, {int(pages[row, column])}]"
        raise mismatch(place, "a page of the cache", str(int(taken[row, column])))
    physical = taken.long() * per_page + torch.where(used, blocks, 0) % per_page
    if int(physical.max()) > INT32_MAX:
        got = str(int(physical.max()))
        raise mismatch("block_table", "physical blocks that fit an int32", got)
    return torch.where(used, physical, -1).to(torch.int32)
