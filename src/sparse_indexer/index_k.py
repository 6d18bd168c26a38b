# SPDX-License-Identifier: Apache-2.0
"""Where index keys live: a paged pool, or flat tensors."""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

import msgspec
import torch

from sparse_indexer.devices import resolve_device
from sparse_indexer.errors import (
    describe,
    expect_indices,
    expect_int,
    expect_tensor,
    mismatch,
)
from sparse_indexer.formats import (
    FLOATS,
    FORMATS,
    HEAD_DIM,
    FormatSpec,
    KeyFormat,
    quantize_fp4,
    quantize_fp8,
)

BLOCK_SIZE = 8  # positions of a candidate block


class StoredKeys(NamedTuple):
    """Keys of some positions as they are stored, gathered into contiguous tensors."""

    values: torch.Tensor  # [n, width] of the format's values dtype
    scales: torch.Tensor | None  # [n] fp32 (fp8) or int32 (fp4: four ue8m0 codes)


class IndexKPool(msgspec.Struct, frozen=True, eq=False, dict=True, weakref=True):
    """Index keys in pages.

    `page_size` positions a page, a multiple of 8. A page holds `page_size * bytes_per_position`
    bytes: `layout="planar"` all values, then all scales; `"interleaved"` values and scale position
    by position. Both have the same byte count, so nothing but this argument tells them apart;
    fp16 and bf16 have no scales and no difference.

    `pages` is `[num_pages, ...]`: uint8 for fp4 and fp8, the format's own dtype for fp16 and bf16;
    the dimensions after the first hold one page and are contiguous. The page stride is free, so
    a slice of a bigger tensor (padded pages, one layer of many) needs no copy.

    Raises:
        ValueError: a wrong shape, dtype, stride, page size, format or layout.
    """

    pages: torch.Tensor
    page_size: int
    format: KeyFormat
    layout: Literal["planar", "interleaved"] = "planar"

    def __post_init__(self) -> None:
        spec = _spec(self.format)
        if self.layout not in ("planar", "interleaved"):
            raise mismatch("layout", "'planar' or 'interleaved'", describe(self.layout))
        page_size = expect_int("page_size", self.page_size, BLOCK_SIZE)
        msgspec.structs.force_setattr(self, "page_size", page_size)
        if self.page_size % BLOCK_SIZE:
            raise mismatch("page_size", "a multiple of 8", str(self.page_size))
        dtype = torch.uint8 if spec.scale_bytes else spec.values_dtype
        elements = self.page_size * _position_bytes(spec) // dtype.itemsize
        expected = (
            f"[num_pages, {elements}] {str(dtype).removeprefix('torch.')} "
            f"({self.page_size} positions of {self.format}; slice padded pages to that)"
        )
        pages = self.pages
        if not isinstance(pages, torch.Tensor) or pages.ndim < 2 or pages.dtype != dtype:
            raise mismatch("pages", expected, pages)
        if math.prod(pages.shape[1:]) != elements:
            raise mismatch("pages", expected, pages)
        if len(pages) and not pages[0].is_contiguous():
            strides = f"strides {list(pages.stride())}"
            raise mismatch("pages", "contiguous dimensions after the first", strides)
        if len(pages) > 1 and pages.stride(0) < elements:
            raise mismatch("pages", f"a page stride of at least {elements}", str(pages.stride(0)))

    @classmethod
    def empty(
        cls,
        num_pages: int,
        page_size: int,
        format: KeyFormat,
        layout: Literal["planar", "interleaved"] = "planar",
        *,
        device: torch.device | str = "cpu",
        page_stride: int | None = None,
    ) -> IndexKPool:
        """A pool of `num_pages` pages of zero bytes (zero keys).

        Args:
            page_stride: bytes from a page to the next; default: what a page holds.

        Raises:
            ValueError: a number out of range, or more bytes than can be addressed.
        """
        spec = _spec(format)
        num_pages = expect_int("num_pages", num_pages, 0)
        page_size = expect_int("page_size", page_size, BLOCK_SIZE)
        dtype = torch.uint8 if spec.scale_bytes else spec.values_dtype
        elements = page_size * _position_bytes(spec) // dtype.itemsize
        size, step = elements * dtype.itemsize, dtype.itemsize
        stride = size if page_stride is None else expect_int("page_stride", page_stride, size)
        if stride % step:
            raise mismatch("page_stride", f"a multiple of {step} bytes", str(stride))
        if max(1, num_pages) * stride >= 1 << 63:
            got = f"{num_pages} pages of {stride}"
            raise mismatch("num_pages, page_size", "a pool of fewer than 2^63 bytes", got)
        where = resolve_device(device)
        pages = torch.zeros(num_pages, stride // step, dtype=dtype, device=where)
        return cls(pages[:, :elements], page_size, format, layout)

    @property
    def num_pages(self) -> int:
        """Pages of the pool; a page id is 0 to `num_pages - 1`."""
        return self.pages.shape[0]

    def read(self, slots: torch.Tensor) -> StoredKeys:
        """Gather the keys of `slots` (`[n]` int32 or int64, page * page_size + offset).

        Raises:
            ValueError: another shape, dtype or device; on a CPU also a slot that is not there.
        """
        expect_indices("slots", slots, self.num_pages * self.page_size, self.pages.device)
        values, scales = self._views
        page, offset = slots // self.page_size, slots % self.page_size
        spec = FORMATS[self.format]
        stored = values[page, offset].view(spec.values_dtype)
        if scales is None or spec.scales_dtype is None:
            return StoredKeys(stored, None)
        return StoredKeys(stored, scales[page, offset].view(spec.scales_dtype).squeeze(-1))

    def read_pages(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather whole pages (`[n]` int32 or int64) of an fp4 or fp8 pool.

        Returns:
            `[n, page_size, ...]` values and `[n, page_size]` scales, contiguous.

        Raises:
            ValueError: another shape, dtype or device; keys that have no scales; on a CPU also a
                page that is not there.
        """
        if not FORMATS[self.format].scale_bytes:
            raise mismatch("index_k format", "'fp4' or 'fp8'", repr(self.format))
        expect_indices("pages", pages, self.num_pages, self.pages.device)
        return self.gather_pages(pages)

    def gather_pages(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`read_pages` without its checks, which cost at every layer: the ids are in range."""
        spec = FORMATS[self.format]
        values = torch.index_select(self._views[0], 0, pages)
        scales = torch.index_select(self._scales, 0, pages)
        if values.dtype != spec.values_dtype:
            values = values.view(spec.values_dtype)
        return values, scales if scales.ndim == 2 else _as_scales(scales, spec)

    def write(self, slots: torch.Tensor, keys: torch.Tensor | FlatIndexK) -> None:
        """Store keys at `slots` (`[n]` int32 or int64, page * page_size + offset).

        A negative slot is skipped.

        Args:
            slots: where; distinct, but for the skipped ones.
            keys: `[n, 128]` of any float dtype, quantized here (`flat_index_k`), or `FlatIndexK`
                of the pool's format, stored as it is.

        Raises:
            ValueError: a wrong shape, dtype, device or format; on a CPU also a slot beyond the
                pool (on a GPU it is skipped: seeing it would take a synchronization).
        """
        device = self.pages.device
        expect_tensor("slots", slots, ("n",), (torch.int32, torch.int64), device)
        if not isinstance(keys, FlatIndexK):
            expect_tensor("keys", keys, (len(slots), HEAD_DIM), FLOATS, device)
        stored = keys if isinstance(keys, FlatIndexK) else flat_index_k(keys, self.format)
        if stored.format != self.format:
            raise mismatch("keys", f"format {self.format!r}", repr(stored.format))
        spec = FORMATS[self.format]
        shape = (len(slots), spec.values_width)
        expect_tensor("keys", stored.values, shape, (spec.values_dtype,), device)
        total = self.num_pages * self.page_size
        if device.type == "cpu" and len(slots) and int(slots.max()) >= total:
            raise mismatch("slots", f"slots below {total}", str(int(slots.max())))
        if not total or not len(slots):
            return
        # Counting what is kept would be a synchronization. Instead what is skipped writes, once
        # more, what one of the others writes; if there are none, what is there.
        kept = (slots >= 0) & (slots < total)
        any_kept = kept.any()
        one = kept.to(torch.uint8).argmax(0, keepdim=True)
        source = torch.where(kept, torch.arange(len(slots), device=device), one)
        places = torch.index_select(slots, 0, source).long().clamp_(0, total - 1)
        page, offset = places // self.page_size, places % self.page_size
        values, scales = self._views
        pairs = [(values, stored.values.view(values.dtype))]
        if scales is not None and stored.scales is not None:
            pairs.append((scales, stored.scales[:, None].view(torch.uint8)))
        for held, new in pairs:
            new = torch.index_select(new, 0, source)
            held[page, offset] = torch.where(any_kept, new, held[page, offset])

    @functools.cached_property
    def _views(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The storage as values `[pages, page_size, ...]` and scale bytes `[.., 4]`, no copy."""
        spec, pages = FORMATS[self.format], self.pages
        shape = (self.num_pages, self.page_size)
        start, stride = pages.storage_offset(), pages.stride(0)
        if not spec.scale_bytes:
            return pages.as_strided((*shape, HEAD_DIM), (stride, HEAD_DIM, 1), start), None
        if self.layout == "planar":
            steps = (spec.payload_bytes, spec.scale_bytes)
            offset = self.page_size * spec.payload_bytes
        else:
            steps = (_position_bytes(spec),) * 2
            offset = spec.payload_bytes
        values = pages.as_strided((*shape, spec.payload_bytes), (stride, steps[0], 1), start)
        scales = pages.as_strided((*shape, spec.scale_bytes), (stride, steps[1], 1), start + offset)
        return values, scales

    @functools.cached_property
    def _scales(self) -> torch.Tensor:
        """The scales, `[pages, page_size]` of their dtype; scale bytes if they are not aligned."""
        scales = self._views[1]
        assert scales is not None
        places = (scales.data_ptr(), scales.storage_offset(), *scales.stride()[:2])
        aligned = all(place % scales.shape[-1] == 0 for place in places)
        return _as_scales(scales, FORMATS[self.format]) if aligned else scales


class FlatIndexK(msgspec.Struct, frozen=True, eq=False):
    """Index keys without pages: all requests' keys in one tensor, contiguous per request.

    `values` is `[columns, 64]` uint8 (fp4), `[columns, 128]` float8_e4m3fn (fp8), float16 or
    bfloat16; `scales` `[columns]` int32 (fp4: four ue8m0 codes) or float32 (fp8), else `None`.

    Raises:
        ValueError: a wrong shape, dtype, device or format.
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    format: KeyFormat

    def __post_init__(self) -> None:
        spec = _spec(self.format)
        shape = ("columns", spec.values_width)
        values = expect_tensor("values", self.values, shape, (spec.values_dtype,))
        if spec.scales_dtype is None:
            if self.scales is not None:
                raise mismatch("scales", f"None with {self.format}", self.scales)
            return
        shape_ = (len(values),)
        expect_tensor("scales", self.scales, shape_, (spec.scales_dtype,), values.device)

    def read(self, slots: torch.Tensor) -> StoredKeys:
        """Gather the keys of columns `slots` (`[n]` int32 or int64).

        Raises:
            ValueError: another shape, dtype or device; on a CPU also a column that is not there.
        """
        expect_indices("slots", slots, len(self.values), self.values.device)
        return StoredKeys(self.values[slots], None if self.scales is None else self.scales[slots])


@torch.no_grad()
def flat_index_k(keys: torch.Tensor, format: KeyFormat) -> FlatIndexK:
    """Quantize or convert `keys` (`[columns, 128]`, any float dtype) to flat keys of `format`.

    No gradient is recorded.

    Raises:
        ValueError: a wrong shape, dtype or format.
    """
    spec = _spec(format)
    expect_tensor("keys", keys, ("n", HEAD_DIM), FLOATS)
    if format == "fp8":
        return FlatIndexK(*quantize_fp8(keys), format)
    if format == "fp4":
        return FlatIndexK(*quantize_fp4(keys), format)
    return FlatIndexK(keys.to(spec.values_dtype).contiguous(), None, format)


def _spec(format: object) -> FormatSpec:
    if not isinstance(format, str) or format not in FORMATS:
        raise mismatch("format", " or ".join(map(repr, FORMATS)), describe(format))
    return FORMATS[format]


def _position_bytes(spec: FormatSpec) -> int:
    return spec.payload_bytes + spec.scale_bytes


def _as_scales(scales: torch.Tensor, spec: FormatSpec) -> torch.Tensor:
    """Scale bytes `[.., 4]` as `[..]` of the scales' dtype."""
    assert spec.scales_dtype is not None
    return scales.view(spec.scales_dtype).squeeze(-1)
