# SPDX-License-Identifier: Apache-2.0
"""Attention of each query row over the KV rows that were selected for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from numbers import Real
from typing import NamedTuple

import torch

from sparse_indexer.backends.kernels import build_kernels
from sparse_indexer.devices import current, forbids_loading, no_autocast
from sparse_indexer.errors import (
    BackendUnavailable,
    describe,
    expect_int,
    expect_tensor,
    mismatch,
)
from sparse_indexer.jit import load
from sparse_indexer.kv_pool import (
    KV_DTYPES,
    KVPool,
    expect_kv_pool,
    expect_positions,
    num_slots,
)
from sparse_indexer.ops import kv_gather, sparse_softmax
from sparse_indexer.torch_ops import kv_gather as torch_kv_gather
from sparse_indexer.torch_ops import sparse_softmax as torch_sparse_softmax

_log = logging.getLogger("sparse_indexer")
_KERNELS = (kv_gather.KERNEL, sparse_softmax.KERNEL)
_ALIGNMENT = 16  # elements of a KV row: 64 bytes of float32, 32 of halves


class _Route(NamedTuple):
    """What a call runs on, and in which dtype."""

    gather: Callable[..., None]
    softmax: Callable[..., None]
    operands: torch.dtype  # KV rows, queries and probabilities, as they are multiplied
    gather_bytes: int  # scratch of the gather, an element that it writes
    logit_bytes: int  # an element of the logits, with the scratch of the softmax


@torch.no_grad()
def sparse_attention(
    q: torch.Tensor,
    kv_pool: torch.Tensor | KVPool,
    positions: torch.Tensor,
    *,
    sink: torch.Tensor | None = None,
    scale: float,
    value_dim: int | None = None,
    memory_budget: int = 256 << 20,
) -> torch.Tensor:
    """Attention over each row's selected KV rows, each one shared by all heads as key and value.

    With `kv[j]` the KV row of slot `positions[r, j]`:

        p[r, h] = softmax over used j, and the sink, of (scale * q[r, h] . kv[j], sink[h])
        out[r, h] = sum_j p[r, h, j] * kv[j, :value_dim]

    A slot that is named twice counts twice; a row without used slots gives zeros. Nothing of pool
    rows that a row does not name reaches its result, NaN included; NaN and infinities of those that
    it does give what the formula gives. No gradient is recorded.

    Logits, softmax and sums are float32, and the result is rounded once. What is multiplied depends
    on where:

    - On a CPU, and wherever queries or pool are float32, float32: nothing else is rounded (on a GPU
      products are as torch's float32 matmuls are set).
    - On a GPU, of half queries and a half or fp8 pool, q's dtype, but float16 for bfloat16 below
      capability 8.0, whose tensor cores have no other: KV rows, dequantized, and probabilities are
      rounded to it once each, and below 8.0 bfloat16 queries, too. Beyond 65,504 float16 has
      infinity.

    On a GPU gather and softmax are kernels, built at the first call. Where they cannot be built it
    is all plain torch in float32, which is said once a device, at level WARNING of
    `sparse_indexer`.

    A row's result depends on that row alone; on a CPU to the bit, whatever the budget, given
    torch's number of threads, while on a GPU the last bits may depend on how many rows a tile has.

    Args:
        q: `[rows, heads, dim]` float16, bfloat16 or float32 queries, any row and head strides.
        kv_pool: `[slots, dim]` float16, bfloat16 or float32, any row stride, or a `KVPool`.
        positions: `[rows, k]` int32 slots of the pool, in any order; negative ones, anywhere in
            the row, are unused.
        sink: `[heads]` float32 logits of the attention sink, which takes part in the softmax and
            contributes no value; not scaled.
        scale: of the logits.
        value_dim: leading elements of a KV row that are its value; default all.
        memory_budget: bytes of scratch, at most, beside the result.

    Returns:
        `[rows, heads, value_dim]` of q's dtype.

    Raises:
        ValueError: a wrong shape, dtype, device or number; a budget below what one row takes. On a
            CPU also a slot beyond the pool (on a GPU it is unused: seeing it would take a
            synchronization).
        JitError: the kernels are not loaded, and a CUDA graph is being captured; call
            `sparse_indexer.jit.warmup` before.
    """
    expect_tensor("q", q, ("rows", "heads", "dim"), KV_DTYPES)
    if q.device.type == "meta":
        raise mismatch("q", "a tensor that has values", q)
    rows, heads, dim = q.shape
    if not heads or not dim:
        raise mismatch("q", "at least 1 head and 1 element", q)
    expect_kv_pool(kv_pool, dim, q.device)
    expect_positions(positions, (rows, "k"), num_slots(kv_pool), q.device)
    if sink is not None:
        expect_tensor("sink", sink, (heads,), (torch.float32,), q.device)
    real = isinstance(scale, Real) and not isinstance(scale, bool)
    if not real or not abs(scale) <= torch.finfo(torch.float32).max:
        raise mismatch("scale", "a finite float32", describe(scale))
    value_dim = dim if value_dim is None else expect_int("value_dim", value_dim, 1, dim)
    k = positions.shape[1]
    route = _route(q, kv_pool)
    least = _row_bytes(route, heads, dim, k, value_dim)
    memory_budget = expect_int("memory_budget", memory_budget, 0)
    if memory_budget < least:
        raise mismatch("memory_budget", f"at least {least} bytes", str(memory_budget))
    out = q.new_zeros(rows, heads, value_dim)
    if k:
        tile = memory_budget // least
        with current(q.device):
            for start in range(0, rows, tile):
                some = slice(start, start + tile)
                _attend(route, q[some], kv_pool, positions[some], sink, float(scale), out[some])
    return out


def _route(q: torch.Tensor, kv_pool: torch.Tensor | KVPool) -> _Route:
    gather: Callable[..., None]
    softmax: Callable[..., None]
    if q.device.type != "cuda" or not _has_kernels(q.device):
        gather, softmax = torch_kv_gather.kv_gather, torch_sparse_softmax.sparse_softmax
        return _Route(gather, softmax, torch.float32, gather_bytes=10, logit_bytes=8)
    capability = torch.cuda.get_device_capability(q.device)
    operands = _operands(q, kv_pool, capability)
    gather, softmax = kv_gather.kv_gather, sparse_softmax.sparse_softmax
    return _Route(gather, softmax, operands, gather_bytes=0, logit_bytes=4)


def _operands(
    q: torch.Tensor, kv_pool: torch.Tensor | KVPool, capability: tuple[int, int]
) -> torch.dtype:
    """What the kernels' matmuls multiply on a GPU of this capability."""
    if isinstance(kv_pool, torch.Tensor) and kv_pool.dtype == torch.float32:
        return torch.float32
    if q.dtype == torch.bfloat16 and capability < (8, 0):
        return torch.float16
    return q.dtype


@cache
def _has_kernels(device: torch.device) -> bool:
    """Whether the kernels are loaded there or can be; decided once, but not in a graph capture."""
    if forbids_loading(device):
        for kernel in _KERNELS:
            load(kernel, device)  # JitError if it is not loaded
    try:
        build_kernels(_KERNELS, device, "sparse_attention")
    except BackendUnavailable as error:
        _log.warning("in plain torch: %s", error)
        return False
    return True


def _row_bytes(route: _Route, heads: int, dim: int, k: int, value_dim: int) -> int:
    """Scratch of a row of a tile: its KV rows, reading them, queries, logits, sums."""
    size = route.operands.itemsize
    gathered = k * (size * _padded(dim) + route.gather_bytes * dim + 32)
    return gathered + heads * (size * dim + route.logit_bytes * k + 4 * value_dim + 32) + 2048


def _padded(dim: int) -> int:
    return -(-dim // _ALIGNMENT) * _ALIGNMENT


def _attend(
    route: _Route,
    q: torch.Tensor,
    kv_pool: torch.Tensor | KVPool,
    positions: torch.Tensor,
    sink: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
) -> None:
    """One tile of rows; its scratch is freed on return.

    On a CPU the last bits of a product depend on how many rows are multiplied at once and on their
    addresses modulo 64 bytes. So there it is one row at a time, at aligned addresses.
    """
    (rows, k), dim = positions.shape, q.shape[2]
    padded = q.new_empty(rows, k, _padded(dim), dtype=route.operands)
    kv = padded[..., :dim]
    route.gather(kv_pool, positions, out=kv)
    on_cpu = q.device.type == "cpu"
    step = 1 if on_cpu else rows
    options = {"num_slots": num_slots(kv_pool), "scale": scale, "sink": sink}
    for start in range(0, rows, step):
        some = slice(start, start + step)
        queries = q[some].to(route.operands, copy=on_cpu, memory_format=torch.contiguous_format)
        logits = _bmm(queries, kv[some].transpose(1, 2))
        weights = logits
        if route.operands != torch.float32:  # each row and head where its logits begin
            weights = logits.view(route.operands)[..., :k]
        route.softmax(logits, positions[some], **options, out=weights)
        out[some] = _bmm(weights, kv[some, :, : out.shape[2]])


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The products of matrices in float32, of halves, too."""
    with no_autocast(a.device):
        if a.dtype == torch.float32:
            return torch.bmm(a, b)
        return torch.bmm(a, b, out_dtype=torch.float32)
