# SPDX-License-Identifier: Apache-2.0
"""Where the latent KV rows of sparse attention live: a plain tensor, or compressed fp8."""

from __future__ import annotations

import msgspec
import torch

from sparse_indexer.errors import (
    Shape,
    describe,
    expect_indices,
    expect_int,
    expect_tensor,
    mismatch,
)

KV_GROUP = 128  # elements that share a scale
KV_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of a plain pool


class KVPool(msgspec.Struct, frozen=True, eq=False):
    """Latent KV rows of an fp8 part and a plain part.

    Element d of slot s is

        values[s, d] * scales[s, d // 128]     d < fp8_dim
        rope[s, d - fp8_dim]                   d >= fp8_dim

    DeepSeek's 656-byte rows (512 e4m3, 4 float32, 64 bfloat16) are read where they lie by
    `KVPool.from_rows`. Row strides are free: views of an engine's cache need no copy.

    Attributes:
        values: `[slots, fp8_dim]` float8_e4m3fn, `fp8_dim` a multiple of 128.
        scales: `[slots, fp8_dim / 128]` float32.
        rope: `[slots, rope_dim]` bfloat16; `rope_dim` may be 0.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """

    values: torch.Tensor
    scales: torch.Tensor
    rope: torch.Tensor

    def __post_init__(self) -> None:
        fp8 = (torch.float8_e4m3fn,)
        values = expect_tensor("kv_pool values", self.values, ("slots", "fp8_dim"), fp8)
        slots, width = values.shape
        if not width or width % KV_GROUP:
            raise mismatch("kv_pool values", f"a positive multiple of {KV_GROUP} columns", values)
        where, groups = values.device, width // KV_GROUP
        expect_tensor("kv_pool scales", self.scales, (slots, groups), (torch.float32,), where)
        expect_tensor("kv_pool rope", self.rope, (slots, "rope_dim"), (torch.bfloat16,), where)

    @classmethod
    def from_rows(cls, rows: torch.Tensor, *, rope_dim: int = 64) -> KVPool:
        """A view of rows that hold e4m3 values, their float32 scales and the bfloat16 rest.

        Args:
            rows: `[slots, bytes]` uint8 of any row stride that is a multiple of 4, 132 bytes for
                each 128 values and 2 for each of the `rope_dim` elements: 656 for 512 and 64.
            rope_dim: plain elements.

        Raises:
            ValueError: a wrong shape, dtype or width, or rows that are not aligned to 4 bytes.
        """
        rope_dim = expect_int("rope_dim", rope_dim, 0)
        expect_tensor("rows", rows, ("slots", "bytes"), (torch.uint8,))
        groups, rest = divmod(rows.shape[1] - 2 * rope_dim, KV_GROUP + 4)
        if groups < 1 or rest:
            raise mismatch("rows", f"{KV_GROUP + 4} n + {2 * rope_dim} columns, n >= 1", rows)
        places = (rows.data_ptr(), rows.storage_offset(), rows.stride(0))
        if any(place % 4 for place in places):
            want = "an address, a storage offset and a row stride that are multiples of 4"
            raise mismatch("rows", want, "{}, {} and {}".format(*places))
        scales, rope = groups * KV_GROUP, groups * (KV_GROUP + 4)  # where they begin
        return cls(
            rows[:, :scales].view(torch.float8_e4m3fn),
            rows[:, scales:rope].view(torch.float32),
            rows[:, rope:].view(torch.bfloat16),
        )

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.values.shape[1] + self.rope.shape[1]

    @torch.no_grad()
    def read(self, slots: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Gather and dequantize rows: `[n]` int32 or int64 slots to `[n, dim]` of `dtype`.

        A value times its scale is rounded to float32; for a half, that is rounded once more, and
        what it does not hold becomes infinite.

        Raises:
            ValueError: `dtype` is none of float16, bfloat16 and float32; `slots` are of another
                shape, dtype or device; on a CPU also a slot that the pool does not have.
        """
        expect_indices("slots", slots, len(self.values), self.values.device)
        if dtype not in KV_DTYPES:
            raise mismatch("dtype", " or ".join(map(str, KV_DTYPES)), str(dtype))
        wide, scales = self.values[slots].to(torch.float32), self.scales[slots]
        wide.view(*scales.shape, KV_GROUP).mul_(scales[..., None])
        return torch.cat((wide.to(dtype), self.rope[slots].to(dtype)), 1)


def read_slots(
    kv_pool: torch.Tensor | KVPool, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`KVPool.read` of either kind of pool."""
    if isinstance(kv_pool, KVPool):
        return kv_pool.read(slots, dtype)
    return kv_pool[slots].to(dtype)


def num_slots(kv_pool: torch.Tensor | KVPool) -> int:
    """Slots of either kind of pool."""
    return len(kv_pool.values if isinstance(kv_pool, KVPool) else kv_pool)


def expect_kv_pool(kv_pool: object, dim: int, device: torch.device) -> None:
    """Check either kind of pool.

    Raises:
        ValueError: it is neither kind, or has another `dim` or device.
    """
    if isinstance(kv_pool, KVPool):
        if kv_pool.dim != dim:
            parts = f"{kv_pool.values.shape[1]} + {kv_pool.rope.shape[1]}"
            raise mismatch("kv_pool", f"rows of {dim} elements", parts)
        if kv_pool.values.device != device:
            raise mismatch("kv_pool", f"tensors on {device}", kv_pool.values)
    elif isinstance(kv_pool, torch.Tensor):
        expect_tensor("kv_pool", kv_pool, ("slots", dim), KV_DTYPES, device)
    else:
        raise mismatch("kv_pool", "a tensor or a KVPool", describe(kv_pool))


def expect_positions(positions: object, shape: Shape, slots: int, device: torch.device) -> None:
    """Check the slots that rows read, of a pool of so many.

    Raises:
        ValueError: a wrong shape, dtype or device; on a CPU also a slot beyond the pool.
    """
    tensor = expect_tensor("positions", positions, shape, (torch.int32,), device)
    if device.type == "cpu" and tensor.numel() and int(tensor.max()) >= slots:
        raise mismatch("positions", f"slots below {slots}", str(int(tensor.max())))
