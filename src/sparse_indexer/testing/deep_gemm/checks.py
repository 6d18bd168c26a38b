# SPDX-License-Identifier: Apache-2.0
"""What DeepGEMM's SM100 indexer functions ask of their arguments, by generation.

Each rule is one that the wheels of `sgl-deep-gemm` assert on the host, trap on or say of the
kernels (16-byte copies, TMA descriptors); a breach is a `ValueError` that names the argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sparse_indexer.errors import describe, expect_int, expect_tensor, mismatch
from sparse_indexer.formats import HEAD_DIM, INT32_MAX

PACKED_FP4 = torch.int8  # two e2m1 codes, low nibble = even element
FP8 = torch.float8_e4m3fn
MAX_SPARSE_BLOCKS = 4096
MAX_ROWS = 1 << 20  # of a sparse call
MAX_DENSE_HEADS = 128
_METADATA_SMEM = 232448  # bytes; the dense schedule takes 8 a Q block
_INT32 = (torch.int32,)


class Generation(NamedTuple):
    """What differs between the releases."""

    version: str  # the newest one that was read
    page_stride: int  # kv_cache.stride(0) is a multiple of this many bytes
    sparse_heads: Sequence[int]  # head counts of the sparse kernels
    mx_only: bool  # dense on SM100: group scales for both operands and bf16 weights, nothing else


CURRENT = Generation("0.2.5", 128, range(4, 33, 4), True)
OLDER = Generation("0.2.4rc0", 512, (32,), False)


class Dense(NamedTuple):
    """The checked operands of a dense call."""

    q: torch.Tensor  # [rows, heads, 64] int8 or [rows, heads, 128] float8_e4m3fn
    q_sf: torch.Tensor | None  # [rows, heads] int32: four ue8m0 codes
    kv: torch.Tensor  # [positions, 64 or 128] as q
    kv_sf: torch.Tensor  # [positions] int32 (four ue8m0 codes), or float32 without q_sf
    weights: torch.Tensor  # [rows, heads] bfloat16 or float32
    spans: torch.Tensor  # [2, rows] int64: first key of a row, and the one after its last


def expect_arch(arch_major: int, *wanted: int) -> None:
    """Refuse a device that a function does not run on."""
    if arch_major not in wanted:
        names = " or ".join(f"{major}.x" for major in wanted)
        raise mismatch("device", f"compute capability {names}", f"{arch_major}.x")


def expect_contiguous(argument: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not contiguous."""
    if not tensor.is_contiguous():
        raise mismatch(argument, "a contiguous tensor", f"strides {list(tensor.stride())}")


def expect_aligned(argument: str, tensor: torch.Tensor, multiple: int = 16) -> None:
    """Refuse a tensor whose first byte is not at a multiple of `multiple`."""
    if tensor.data_ptr() % multiple:
        got = f"one at {tensor.data_ptr() % multiple} modulo {multiple}"
        raise mismatch(argument, f"an address that is a multiple of {multiple}", got)


def expect_block_shape(num_max_sparse_blocks: int, sparse_block_kv: int, name: str) -> None:
    """Refuse a width or block size that the sparse kernels do not have."""
    expect_int(name, num_max_sparse_blocks, 1, MAX_SPARSE_BLOCKS)
    if num_max_sparse_blocks % 4:
        raise mismatch(name, "a multiple of 4", str(num_max_sparse_blocks))
    if sparse_block_kv not in (8, 16):
        raise mismatch("sparse_block_kv", "8 or 16", describe(sparse_block_kv))


def expect_queries(q: Any, middle: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values, scales) of `q`: `[rows, *middle, heads, ...]` and their group scales, if any."""
    data, scales = q if isinstance(q, (tuple, list)) and len(q) == 2 else (q, None)
    packed = isinstance(data, torch.Tensor) and data.dtype == PACKED_FP4
    width = HEAD_DIM // 2 if packed else HEAD_DIM
    shape: tuple[int | str, ...] = ("rows", *middle, "heads", width)
    values = expect_tensor("q", data, shape, (PACKED_FP4 if packed else FP8,))
    if not len(values):
        raise mismatch("q", "at least 1 row", values)
    expect_contiguous("q", values)
    expect_aligned("q", values)
    if packed and scales is None:
        raise mismatch("q", "(values, scales): packed e2m1 needs its scales", "no scales")
    if scales is None:
        return values, None
    scales = expect_tensor("q scales", scales, tuple(values.shape[:-1]), _INT32, values.device)
    expect_contiguous("q scales", scales)
    expect_aligned("q scales", scales)
    return values, scales


def expect_weights(
    weights: object, rows: int, heads: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> torch.Tensor:
    """`weights` if it is `[rows, heads]` of these dtypes, laid out as TMA reads it."""
    tensor = expect_tensor("weights", weights, (rows, heads), dtypes, device)
    if tensor.stride(0) * tensor.itemsize % 16:
        got = f"{tensor.stride(0) * tensor.itemsize} bytes"
        raise mismatch("weights", "a row stride that is a multiple of 16 bytes", got)
    expect_aligned("weights", tensor)
    return tensor


def expect_kv_cache(
    kv_cache: object, q: torch.Tensor, sparse_block_kv: int, generation: Generation
) -> torch.Tensor:
    """`kv_cache` if it is `[pages, page_kv, 1, 68 (fp4) or 132]` uint8 with pages as read."""
    width = q.shape[-1] + 4
    shape = ("pages", "page_kv", 1, width)
    cache = expect_tensor("kv_cache", kv_cache, shape, (torch.uint8,), q.device)
    if not cache.shape[0]:
        raise mismatch("kv_cache", "at least 1 page", cache)
    if not cache.shape[1] or cache.shape[1] % sparse_block_kv:
        want = f"pages of a multiple of sparse_block_kv ({sparse_block_kv}) positions"
        raise mismatch("kv_cache", want, str(cache.shape[1]))
    if cache.stride(1) != width:
        raise mismatch("kv_cache", f"a position stride of {width} bytes", str(cache.stride(1)))
    stride = cache.stride(0)
    if stride % generation.page_stride or not 0 <= stride <= INT32_MAX:
        want = f"a page stride that is a multiple of {generation.page_stride} bytes, in an int32"
        raise mismatch("kv_cache", want, str(stride))
    expect_aligned("kv_cache", cache)
    return cache


def expect_dense(
    q: object,
    kv: object,
    weights: object,
    bounds: tuple[object, object],
    generation: Generation,
    arch_major: int,
) -> Dense:
    """The operands of a dense call; `bounds` are `cu_seq_len_k_start` and `cu_seq_len_k_end`."""
    values, scales = expect_queries(q, ())
    rows, heads = values.shape[:2]
    device = values.device
    if arch_major == 9:
        if scales is not None:
            raise mismatch("q", "no scales on compute capability 9.x", "(values, scales)")
        if heads not in (32, 64):
            raise mismatch("q", "32 or 64 heads on compute capability 9.x", str(heads))
    elif generation.mx_only and scales is None:
        raise mismatch("q", "(values, scales)", "no scales")
    if heads > MAX_DENSE_HEADS or heads % 4:
        raise mismatch("q", f"a multiple of 4 heads, at most {MAX_DENSE_HEADS}", str(heads))
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    if arch_major == 9:
        dtypes = (torch.float32,)
    elif generation.mx_only:
        dtypes = (torch.bfloat16,)
    checked = expect_weights(weights, rows, heads, dtypes, device)
    if not isinstance(kv, (tuple, list)) or len(kv) != 2:
        raise mismatch("kv", "(values, scales)", describe(kv))
    shape = ("positions", values.shape[-1])
    keys = expect_tensor("kv", kv[0], shape, (values.dtype,), device)
    expect_contiguous("kv", keys)
    expect_aligned("kv", keys)
    if not len(keys):
        raise mismatch("kv", "at least 1 position", keys)
    dtype = torch.float32 if scales is None else torch.int32
    key_scales = expect_tensor("kv scales", kv[1], (len(keys),), (dtype,), device)
    expect_aligned("kv scales", key_scales)
    spans = expect_bounds(*bounds, rows, len(keys), device)
    return Dense(values, scales, keys, key_scales, checked, spans)


def expect_bounds(
    start: object, end: object, rows: int, num_kv_tokens: int, device: torch.device | None = None
) -> torch.Tensor:
    """`cu_seq_len_k_start` and `_end` as `[2, rows]` int64, if 0 <= start <= end <= tokens."""
    kept = []
    for name, bound in (("cu_seq_len_k_start", start), ("cu_seq_len_k_end", end)):
        tensor = expect_tensor(name, bound, (rows,), _INT32, device)
        if (tensor < 0).any() or (tensor > num_kv_tokens).any():
            got = f"{int(tensor.min())} to {int(tensor.max())}"
            raise mismatch(name, f"0 to {num_kv_tokens}", got)
        kept.append(tensor)
    if (kept[0] > kept[1]).any():
        row = int((kept[0] > kept[1]).nonzero()[0])
        want = f"at least its start {int(kept[0][row])}"
        raise mismatch(f"cu_seq_len_k_end[{row}]", want, str(int(kept[1][row])))
    return torch.stack(kept).long()


def expect_schedule_size(rows: int, num_heads: int) -> int:
    """Q blocks of the dense schedule, if they fit its kernel."""
    expect_int("num_heads", num_heads, 4, MAX_DENSE_HEADS)
    if num_heads % 4:
        raise mismatch("num_heads", "a multiple of 4", str(num_heads))
    blocks = -(-rows // (MAX_DENSE_HEADS // num_heads))
    if 8 * blocks > _METADATA_SMEM:
        most = _METADATA_SMEM // 8 * (MAX_DENSE_HEADS // num_heads)
        raise mismatch("cu_seq_len_k_start", f"at most {most} rows", str(rows))
    return blocks
