# SPDX-License-Identifier: Apache-2.0
"""Index keys in pages and flat: which byte holds what, and what is refused."""

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_indexer import (
    FlatIndexK,
    IndexKPool,
    KVPool,
    flat_index_k,
    quantize_fp4,
    quantize_fp8,
)
from sparse_indexer.index_k import StoredKeys

BYTES = {"fp4": (64, 4), "fp8": (128, 4), "fp16": (256, 0), "bf16": (256, 0)}  # payload, scale
DTYPES = {"fp4": "uint8", "fp8": "uint8", "fp16": "float16", "bf16": "bfloat16"}  # of the pages
POISON = 0xAA
PAGES = 3

EVERY_FORMAT = pytest.mark.parametrize("form", BYTES)
EVERY_LAYOUT = pytest.mark.parametrize("layout", ["planar", "interleaved"])
EVERY_SLOT_DTYPE = pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])


def page_bytes(form: str, page_size: int) -> int:
    return page_size * sum(BYTES[form])


def places(form: str, layout: str, page_size: int, offset: int) -> tuple[int, int]:
    """First bytes of a position's payload and of its scale, in its page."""
    payload, scale = BYTES[form]
    if layout == "planar":
        return offset * payload, page_size * payload + offset * scale
    return offset * (payload + scale), offset * (payload + scale) + payload


def some_keys(count: int, form: str, seed: int = 0) -> FlatIndexK:
    """Keys whose values and scales differ from position to position."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(count, 1, generator=generator) * 18 - 9
    return flat_index_k(torch.randn(count, 128, generator=generator) * 2.0**sizes, form)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """`[n, bytes]`: the bytes of each row."""
    rows = tensor[:, None] if tensor.ndim == 1 else tensor.flatten(1)
    return rows.contiguous().view(torch.uint8)


def poisoned(shape: tuple[int, ...], form: str) -> torch.Tensor:
    """Pages of poison; the last dimension is given in bytes."""
    return torch.full(shape, POISON, dtype=torch.uint8).view(getattr(torch, DTYPES[form]))


def tight_pool(form: str, layout: str, page_size: int, pages: int = PAGES) -> IndexKPool:
    shape = (pages, page_bytes(form, page_size))
    return IndexKPool(poisoned(shape, form), page_size, form, layout)


def assert_stored(stored: StoredKeys, keys: FlatIndexK) -> None:
    assert stored.values.dtype == keys.values.dtype
    assert torch.equal(raw(stored.values), raw(keys.values))
    if keys.scales is None:
        assert stored.scales is None
    else:
        assert stored.scales is not None
        assert stored.scales.dtype == keys.scales.dtype
        assert torch.equal(stored.scales, keys.scales)


def refused(message: str) -> AbstractContextManager[Any]:
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


@EVERY_FORMAT
@EVERY_LAYOUT
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
def test_every_byte_has_its_place(form: str, layout: str, page_size: int) -> None:
    last = PAGES * page_size - 1
    slots = [page_size, 0, last, 1, 2 * page_size - 1, page_size + 3, last - 1, page_size - 1]
    keys = some_keys(len(slots), form)
    pool = tight_pool(form, layout, page_size)
    assert pool.num_pages == PAGES
    pool.write(torch.tensor(slots), keys)

    payload, scale = BYTES[form]
    right = torch.full((PAGES, page_bytes(form, page_size)), POISON, dtype=torch.uint8)
    for i, slot in enumerate(slots):
        page = right[slot // page_size]
        start, scale_start = places(form, layout, page_size, slot % page_size)
        page[start : start + payload] = raw(keys.values)[i]
        if keys.scales is not None:
            page[scale_start : scale_start + scale] = raw(keys.scales)[i]
    assert torch.equal(raw(pool.pages), right)
    assert_stored(pool.read(torch.tensor(slots)), keys)


# Leading dimensions of a storage, spare bytes in its last one, which part of it is the pool.
GEOMETRIES: dict[str, tuple[tuple[int, ...], int, Callable[..., torch.Tensor]]] = {
    "padded pages": ((PAGES,), 64, lambda s, size, n: s[:, :n]),
    "512-byte gaps": ((PAGES,), 512, lambda s, size, n: s[:, :n]),
    "gaps on both sides": ((PAGES,), 512, lambda s, size, n: s[:, 256 : 256 + n]),
    "odd multiple of two bytes": ((PAGES,), 6, lambda s, size, n: s[:, 2 : 2 + n]),
    "one layer of five": ((5, PAGES), 0, lambda s, size, n: s[3]),
    "one of five layers in each page": ((PAGES, 5), 0, lambda s, size, n: s[:, 3]),
    "every other page": ((2 * PAGES,), 0, lambda s, size, n: s[1::2]),
    "one dimension a position": ((PAGES,), 0, lambda s, size, n: s.view(PAGES, size, 1, -1)),
    "dimensions of one": ((PAGES,), 32, lambda s, size, n: s[:, None, None, :n]),
    "one page": ((1,), 512, lambda s, size, n: s[:, :n]),
}


@EVERY_FORMAT
@EVERY_LAYOUT
@pytest.mark.parametrize("page_size", [8, 64])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_strided_pool_equals_its_copy(
    form: str, layout: str, page_size: int, geometry: str
) -> None:
    """No copy is made, and what is between the pages stays as it was."""
    leading, spare, part = GEOMETRIES[geometry]
    size = page_bytes(form, page_size)
    storage = torch.full((*leading, size + spare), POISON, dtype=torch.uint8)
    right = storage.clone()
    view = part(storage, page_size, size)
    pages = view.view(getattr(torch, DTYPES[form]))
    pool = IndexKPool(pages, page_size, form, layout)
    tight = tight_pool(form, layout, page_size, len(pages))

    generator = torch.Generator().manual_seed(5)
    slots = torch.randperm(len(pages) * page_size, generator=generator)[: 2 * page_size]
    keys = some_keys(len(slots), form)
    pool.write(slots, keys)
    tight.write(slots, keys)
    part(right, page_size, size).copy_(raw(tight.pages).view(view.shape))
    assert torch.equal(storage, right)
    assert_stored(pool.read(slots), keys)


@pytest.mark.parametrize("form", ["fp4", "fp8"])
@EVERY_LAYOUT
@pytest.mark.parametrize(("start", "spare"), [(0, 0), (4, 32), (0, 1), (1, 0), (2, 4)])
def test_whole_pages_are_gathered(form: str, layout: str, start: int, spare: int) -> None:
    """Wherever they lie: scales need not be aligned."""
    size = page_bytes(form, 8)
    generator = torch.Generator().manual_seed(5)
    length = start + PAGES * (size + spare)
    storage = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
    pages = storage.as_strided((PAGES, size), (size + spare, 1), start)
    pool = IndexKPool(pages, 8, form, layout)
    chosen = torch.tensor([PAGES - 1, 0, PAGES - 1], dtype=torch.int32)
    values, scales = pool.read_pages(chosen)
    want = pool.read((chosen[:, None] * 8 + torch.arange(8)).flatten())
    assert values.is_contiguous()
    assert scales.is_contiguous()
    assert (values.dtype, scales.dtype) == (want.values.dtype, want.scales.dtype)
    assert torch.equal(raw(values), raw(want.values).view(raw(values).shape))
    assert torch.equal(raw(scales), raw(want.scales).view(raw(scales).shape))


NO_INDICES = {
    "list": ([0], "a list"),
    "none": (None, "None"),
    "float": (torch.zeros(1), r"\[1\] float32 on cpu"),
    "bool": (torch.zeros(1, dtype=torch.bool), r"\[1\] bool on cpu"),
    "two dimensions": (torch.zeros(1, 1, dtype=torch.int64), r"\[1, 1\] int64 on cpu"),
    "no dimension": (torch.tensor(0), r"\[\] int64 on cpu"),
    "elsewhere": (torch.zeros(1, dtype=torch.int64, device="meta"), r"\[1\] int64 on meta"),
}
READERS = {  # what reads, what it calls its indices, and how many there are
    "pool": (lambda i: tight_pool("fp8", "planar", 8).read(i), "slots", 8 * PAGES),
    "pages": (lambda i: tight_pool("fp4", "planar", 8).read_pages(i), "pages", PAGES),
    "flat": (lambda i: some_keys(5, "fp4").read(i), "slots", 5),
    "no keys": (lambda i: some_keys(0, "bf16").read(i), "slots", 0),
    "kv": (lambda i: KVPool.from_rows(torch.zeros(7, 656, dtype=torch.uint8)).read(i), "slots", 7),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("bad", NO_INDICES)
def test_what_is_read_is_named_by_indices(reader: str, bad: str) -> None:
    read, name, _ = READERS[reader]
    indices, got = NO_INDICES[bad]
    message = rf"^{name}: expected \[n\] int32 or int64 on cpu, got {got}$"
    with pytest.raises(ValueError, match=message):
        read(indices)


@pytest.mark.parametrize("reader", READERS)
@EVERY_SLOT_DTYPE
def test_only_what_is_there_is_read(reader: str, slot_dtype: torch.dtype) -> None:
    """Nothing is counted from the end."""
    read, name, count = READERS[reader]
    bounds = f"0 to {count - 1}" if count else "none, as there are none"
    for bad in (-1, count, -(2**31)):
        with pytest.raises(ValueError, match=f"^{name}: expected {bounds}, got {bad}$"):
            read(torch.tensor([*range(count), bad], dtype=slot_dtype))
    read(torch.arange(2 * count, dtype=slot_dtype)[::2] // 2)


def test_pages_of_keys_without_scales_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^index_k format: expected 'fp4' or 'fp8', got 'bf16'$"):
        tight_pool("bf16", "planar", 8).read_pages(torch.tensor([0]))


def test_values_of_indices_are_read_on_a_cpu_alone() -> None:
    """The meta device stands for a GPU: what would read a value back cannot."""
    indices = torch.tensor([3], device="meta")
    pool = IndexKPool.empty(2, 8, "fp8", device="meta")
    assert pool.read(indices).values.shape == (1, 128)
    assert pool.read_pages(indices)[0].shape == (1, 8, 128)
    flat = FlatIndexK(*pool.read(indices), "fp8")
    assert flat.read(indices).values.shape == (1, 128)
    rows = torch.zeros(7, 656, dtype=torch.uint8, device="meta")
    parts = (rows[:, :512].view(torch.float8_e4m3fn), rows[:, 512:528].view(torch.float32))
    kv = KVPool(*parts, rows[:, 528:].view(torch.bfloat16))
    assert kv.read(indices).shape == (1, 576)


@pytest.mark.parametrize("num_pages", [0, 1, 2**40])
def test_a_pool_beyond_all_memory_is_refused(num_pages: int) -> None:
    for options in ({"page_size": 2**60}, {"page_size": 8, "page_stride": 2**63}):
        got = f"{num_pages} pages of {options.get('page_stride', 132 * 2**60)}"
        message = f"num_pages, page_size: expected a pool of fewer than 2^63 bytes, got {got}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            IndexKPool.empty(num_pages, format="fp8", **options)


@pytest.mark.parametrize("gapped", [False, True], ids=["many pages", "distant pages"])
@EVERY_LAYOUT
def test_pages_lie_beyond_2_to_the_31_bytes(layout: str, gapped: bool) -> None:
    """2 GiB are reserved; only the few pages that are touched become memory."""
    size = page_bytes("fp8", 64)
    before = resident_bytes()
    if gapped:
        shape, stride = (2, size), 2**31 + 64
    else:
        shape, stride = (2**31 // size + 3, size), size
    storage = torch.empty((shape[0] - 1) * stride + size, dtype=torch.uint8)
    pages = storage.as_strided(shape, (stride, 1))
    pages[[0, -1]] = POISON
    pool = IndexKPool(pages, 64, "fp8", layout)
    slots = torch.tensor([63, 64 * (shape[0] - 1), 64 * shape[0] - 1])
    keys = some_keys(3, "fp8")
    pool.write(slots, keys)
    assert_stored(pool.read(slots), keys)
    start = (shape[0] - 1) * stride + places("fp8", layout, 64, 63)[0]
    assert start > 2**31
    assert torch.equal(storage[start : start + 128], raw(keys.values)[2])
    assert resident_bytes() - before < 100 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@EVERY_FORMAT
@EVERY_SLOT_DTYPE
def test_negative_slots_are_skipped(form: str, slot_dtype: torch.dtype) -> None:
    pool = tight_pool(form, "planar", 8)
    untouched = raw(pool.pages).clone()
    keys = some_keys(5, form)
    pool.write(torch.tensor([-1, -8, 9, -24, -(2**31)], dtype=slot_dtype), keys)
    assert torch.equal(raw(pool.pages)[[0, 2]], untouched[[0, 2]])
    assert_stored(pool.read(torch.tensor([9])), flat_rows(keys, [2]))
    written = (raw(pool.pages)[1] != POISON).nonzero()
    assert 0 < len(written) <= sum(BYTES[form])


@EVERY_FORMAT
def test_a_write_reads_no_value(form: str) -> None:
    """As on a GPU, where that is a synchronization; a tensor on `meta` has none to read."""
    pool = IndexKPool.empty(3, 8, form, device="meta")  # type: ignore[arg-type]
    slots = torch.empty(5, dtype=torch.int32, device="meta")
    pool.write(slots, torch.empty(5, 128, device="meta"))


def flat_rows(keys: FlatIndexK, rows: list[int]) -> FlatIndexK:
    return FlatIndexK(*keys.read(torch.tensor(rows, dtype=torch.int64)), keys.format)


@EVERY_FORMAT
@EVERY_SLOT_DTYPE
@pytest.mark.parametrize("pages", [0, PAGES])
def test_an_empty_write_changes_nothing(form: str, slot_dtype: torch.dtype, pages: int) -> None:
    pool = tight_pool(form, "interleaved", 8, pages)
    untouched = raw(pool.pages).clone() if pages else None
    pool.write(torch.empty(0, dtype=slot_dtype), torch.empty(0, 128))
    pool.write(torch.full((2,), -1, dtype=slot_dtype), torch.ones(2, 128))
    assert pool.num_pages == pages
    assert len(pool.read(torch.empty(0, dtype=torch.int64)).values) == 0
    if untouched is not None:
        assert torch.equal(raw(pool.pages), untouched)


@EVERY_FORMAT
@EVERY_SLOT_DTYPE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_float_keys_are_quantized(form: str, slot_dtype: torch.dtype, dtype: torch.dtype) -> None:
    keys = torch.linspace(-3, 4, 1024).view(4, 256).to(dtype)[:, 64:192]
    slots = torch.tensor([23, 0, 8, 7], dtype=slot_dtype)
    pool = tight_pool(form, "planar", 8)
    pool.write(slots, keys)
    assert_stored(pool.read(slots.long()), flat_index_k(keys, form))


@EVERY_FORMAT
@EVERY_LAYOUT
def test_strided_flat_keys_are_written_as_they_are(form: str, layout: str) -> None:
    keys = some_keys(9, form)
    values = keys.values.repeat(1, 2)[::2, : keys.values.shape[1]]
    scales = None if keys.scales is None else keys.scales[::2].contiguous()
    strided = FlatIndexK(values, scales, form)
    assert not strided.values.is_contiguous()
    pool = tight_pool(form, layout, 8)
    slots = torch.tensor([1, 20, 3, 9, 8])
    pool.write(slots, strided)
    assert_stored(pool.read(slots), flat_rows(keys, [0, 2, 4, 6, 8]))


LIBRARY = {form: some_keys(64, form, seed=1) for form in BYTES}


@settings(deadline=None, max_examples=60)
@given(
    form=st.sampled_from(list(BYTES)),
    layout=st.sampled_from(["planar", "interleaved"]),
    writes=st.lists(
        st.dictionaries(st.integers(-4, 8 * PAGES - 1), st.integers(0, 63)), max_size=4
    ),
)
def test_a_slot_holds_what_was_written_last(
    form: str, layout: str, writes: list[dict[int, int]]
) -> None:
    pool = IndexKPool.empty(PAGES, 8, form, layout)
    held: dict[int, int] = {}
    for write in writes:
        slots = torch.tensor(list(write), dtype=torch.int64)
        pool.write(slots, flat_rows(LIBRARY[form], list(write.values())))
        held |= {slot: key for slot, key in write.items() if slot >= 0}
    written = torch.tensor(list(held), dtype=torch.int64)
    assert_stored(pool.read(written), flat_rows(LIBRARY[form], list(held.values())))
    rest = [slot for slot in range(8 * PAGES) if slot not in held]
    unwritten = pool.read(torch.tensor(rest, dtype=torch.int64))
    assert not raw(unwritten.values).any()
    assert unwritten.scales is None or not unwritten.scales.any()


@EVERY_FORMAT
@EVERY_LAYOUT
def test_an_empty_pool_holds_zero_keys(form: str, layout: str) -> None:
    pool = IndexKPool.empty(2, 16, form, layout)
    assert (pool.num_pages, pool.page_size, pool.format, pool.layout) == (2, 16, form, layout)
    assert pool.pages.device == torch.device("cpu")
    assert pool.pages.nbytes == 2 * page_bytes(form, 16)
    assert not raw(pool.pages).any()
    assert IndexKPool.empty(2, 16, form, layout, device="meta").pages.is_meta


@EVERY_FORMAT
def test_an_empty_pool_may_have_padded_pages(form: str) -> None:
    pool = IndexKPool.empty(3, 64, form, page_stride=64 * 264)
    assert pool.pages.stride(0) * pool.pages.itemsize == 64 * 264
    assert pool.pages[0].nbytes == page_bytes(form, 64)
    with refused(f"page_stride: expected an int of at least {page_bytes(form, 64)}, got 8"):
        IndexKPool.empty(3, 64, form, page_stride=8)
    if form in ("fp16", "bf16"):
        with refused("page_stride: expected a multiple of 2 bytes, got 16897"):
            IndexKPool.empty(3, 64, form, page_stride=16_897)


def test_planar_is_the_default() -> None:
    assert IndexKPool.empty(1, 8, "fp8").layout == "planar"
    assert IndexKPool(torch.zeros(1, 8 * 132, dtype=torch.uint8), 8, "fp8").layout == "planar"


@pytest.mark.parametrize("field", ["pages", "page_size", "format", "layout"])
def test_a_pool_is_frozen(field: str) -> None:
    pool = IndexKPool.empty(1, 8, "fp8")
    with pytest.raises(AttributeError, match="immutable"):
        setattr(pool, field, getattr(pool, field))


def a_page(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


FORMAT_NAMES = "'fp4' or 'fp8' or 'fp16' or 'bf16'"
FP8_OF_8 = "[num_pages, 1056] uint8 (8 positions of fp8; slice padded pages to that)"
BAD_POOLS = {
    "format": ((a_page(2, 1056), 8, "int8"), f"format: expected {FORMAT_NAMES}, got 'int8'"),
    "no format": ((a_page(2, 1056), 8, None), f"format: expected {FORMAT_NAMES}, got None"),
    "list of formats": ((a_page(2, 8), 8, ["fp8"]), f"format: expected {FORMAT_NAMES}, got a list"),
    "layout": (
        (a_page(2, 1056), 8, "fp8", "packed"),
        "layout: expected 'planar' or 'interleaved', got 'packed'",
    ),
    "page size 12": (
        (a_page(2, 12 * 132), 12, "fp8"),
        "page_size: expected a multiple of 8, got 12",
    ),
    "page size 4": (
        (a_page(2, 4 * 132), 4, "fp8"),
        "page_size: expected an int of at least 8, got 4",
    ),
    "page size 0": ((a_page(2, 0), 0, "fp8"), "page_size: expected an int of at least 8, got 0"),
    "page size -8": (
        (a_page(2, 1056), -8, "fp8"),
        "page_size: expected an int of at least 8, got -8",
    ),
    "page size True": ((a_page(2, 132), True, "fp8"), "page_size: expected an int, got True"),
    "page size 8.0": ((a_page(2, 1056), 8.0, "fp8"), "page_size: expected an int, got 8.0"),
    "dtype": (
        (a_page(2, 1056, dtype=torch.int8), 8, "fp8"),
        f"pages: expected {FP8_OF_8}, got [2, 1056] int8 on cpu",
    ),
    "fp16 as bytes": (
        (a_page(2, 2048), 8, "fp16"),
        "pages: expected [num_pages, 1024] float16 (8 positions of fp16; slice padded pages to "
        "that), got [2, 2048] uint8 on cpu",
    ),
    "bf16 as fp16": (
        (a_page(2, 1024, dtype=torch.float16), 8, "bf16"),
        "pages: expected [num_pages, 1024] bfloat16 (8 positions of bf16; slice padded pages to "
        "that), got [2, 1024] float16 on cpu",
    ),
    "fp4 in fp8 pages": (
        (a_page(2, 1056), 8, "fp4"),
        "pages: expected [num_pages, 544] uint8 (8 positions of fp4; slice padded pages to that), "
        "got [2, 1056] uint8 on cpu",
    ),
    "unsliced padding": (
        (a_page(2, 1120), 8, "fp8"),
        f"pages: expected {FP8_OF_8}, got [2, 1120] uint8 on cpu",
    ),
    "a byte short": (
        (a_page(2, 1055), 8, "fp8"),
        f"pages: expected {FP8_OF_8}, got [2, 1055] uint8 on cpu",
    ),
    "no bytes in a page": (
        (a_page(1, 0), 8, "fp8"),
        f"pages: expected {FP8_OF_8}, got [1, 0] uint8 on cpu",
    ),
    "no pages of other bytes": (
        (a_page(0, 5), 8, "fp8"),
        f"pages: expected {FP8_OF_8}, got [0, 5] uint8 on cpu",
    ),
    "one dimension": (
        (a_page(1056), 8, "fp8"),
        f"pages: expected {FP8_OF_8}, got [1056] uint8 on cpu",
    ),
    "no dimension": ((a_page(), 8, "fp8"), f"pages: expected {FP8_OF_8}, got [] uint8 on cpu"),
    "no tensor": (([0] * 1056, 8, "fp8"), f"pages: expected {FP8_OF_8}, got a list"),
    "last stride 2": (
        (a_page(2, 2112)[:, ::2], 8, "fp8"),
        "pages: expected contiguous dimensions after the first, got strides [2112, 2]",
    ),
    "gaps between positions": (
        (a_page(2, 8, 144)[:, :, :132], 8, "fp8"),
        "pages: expected contiguous dimensions after the first, got strides [1152, 144, 1]",
    ),
    "one page for all": (
        (a_page(1, 1056).expand(3, -1), 8, "fp8"),
        "pages: expected a page stride of at least 1056, got 0",
    ),
    "overlapping pages": (
        (a_page(9999).as_strided((3, 1056), (1055, 1)), 8, "fp8"),
        "pages: expected a page stride of at least 1056, got 1055",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_POOLS.values(), ids=BAD_POOLS.keys())
def test_a_pool_refuses(arguments: tuple, message: str) -> None:
    with refused(message):
        IndexKPool(*arguments)


BAD_EMPTY = {
    "no int": ((2, "8", "fp8"), "page_size: expected an int, got '8'"),
    "float": ((2, 8.0, "fp8"), "page_size: expected an int, got 8.0"),
    "bool": ((2, True, "fp8"), "page_size: expected an int, got True"),
    "negative": ((2, -8, "fp8"), "page_size: expected an int of at least 8, got -8"),
    "zero": ((2, 0, "fp8"), "page_size: expected an int of at least 8, got 0"),
    "twelve": ((2, 12, "fp8"), "page_size: expected a multiple of 8, got 12"),
    "format": ((2, 8, "fp6"), f"format: expected {FORMAT_NAMES}, got 'fp6'"),
    "layout": ((2, 8, "fp8", "flat"), "layout: expected 'planar' or 'interleaved', got 'flat'"),
    "fewer than no pages": ((-1, 8, "fp8"), "num_pages: expected an int of at least 0, got -1"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_EMPTY.values(), ids=BAD_EMPTY.keys())
def test_an_empty_pool_refuses(arguments: tuple, message: str) -> None:
    with refused(message):
        IndexKPool.empty(*arguments)


@pytest.mark.parametrize("shape", [(0, 1056), (0, 8, 132), (0, 8, 1, 132)])
def test_a_pool_may_have_no_pages(shape: tuple[int, ...]) -> None:
    assert IndexKPool(a_page(*shape), 8, "fp8").num_pages == 0


SLOTS = torch.tensor([0, 1])
ANY_FLOAT = "float16 or bfloat16 or float32 or float64"
BAD_WRITES = {
    "slots dtype": (
        (torch.tensor([0.0, 1.0]), torch.ones(2, 128)),
        "slots: expected [n] int32 or int64 on cpu, got [2] float32 on cpu",
    ),
    "slots shape": (
        (torch.tensor([[0, 1]]), torch.ones(2, 128)),
        "slots: expected [n] int32 or int64 on cpu, got [1, 2] int64 on cpu",
    ),
    "slots device": (
        (SLOTS.to("meta"), torch.ones(2, 128)),
        "slots: expected [n] int32 or int64 on cpu, got [2] int64 on meta",
    ),
    "slots stride": (
        (torch.arange(4)[::2], torch.ones(2, 128)),
        "slots: expected a contiguous last dimension, got strides [2]",
    ),
    "no slots tensor": (
        ([0, 1], torch.ones(2, 128)),
        "slots: expected [n] int32 or int64 on cpu, got a list",
    ),
    "just beyond the pool": (
        (torch.tensor([0, 24]), torch.ones(2, 128)),
        "slots: expected slots below 24, got 24",
    ),
    "far beyond the pool": (
        (torch.tensor([2**40, -1]), torch.ones(2, 128)),
        f"slots: expected slots below 24, got {2**40}",
    ),
    "another format": ((SLOTS, some_keys(2, "fp4")), "keys: expected format 'fp8', got 'fp4'"),
    "more keys than slots": (
        (SLOTS, torch.ones(3, 128)),
        f"keys: expected [2, 128] {ANY_FLOAT} on cpu, got [3, 128] float32 on cpu",
    ),
    "fewer keys than slots": (
        (SLOTS, some_keys(1, "fp8")),
        "keys: expected [2, 128] float8_e4m3fn on cpu, got [1, 128] float8_e4m3fn on cpu",
    ),
    "keys device": (
        (SLOTS, torch.ones(2, 128, device="meta")),
        f"keys: expected [2, 128] {ANY_FLOAT} on cpu, got [2, 128] float32 on meta",
    ),
    "keys dtype": (
        (SLOTS, torch.ones(2, 128).int()),
        f"keys: expected [2, 128] {ANY_FLOAT} on cpu, got [2, 128] int32 on cpu",
    ),
    "no keys": ((SLOTS, None), f"keys: expected [2, 128] {ANY_FLOAT} on cpu, got None"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_WRITES.values(), ids=BAD_WRITES.keys())
def test_a_refused_write_changes_nothing(arguments: tuple, message: str) -> None:
    pool = tight_pool("fp8", "planar", 8)
    with refused(message):
        pool.write(*arguments)
    assert (pool.pages == POISON).all()


def test_a_pool_without_pages_has_no_slot() -> None:
    with refused("slots: expected slots below 0, got 0"):
        IndexKPool.empty(0, 8, "fp8").write(torch.tensor([0]), torch.ones(1, 128))


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [0, 1, 5])
def test_flat_keys_are_the_quantized_keys(form: str, dtype: torch.dtype, columns: int) -> None:
    keys = torch.linspace(-3, 4, 200 * columns).view(columns, 200).to(dtype)[:, 8:136]
    flat = flat_index_k(keys, form)
    if form in ("fp16", "bf16"):
        want = (keys.to(getattr(torch, DTYPES[form])), None)
    else:
        want = {"fp8": quantize_fp8, "fp4": quantize_fp4}[form](keys)
    assert flat.format == form
    assert flat.values.is_contiguous()
    assert_stored(StoredKeys(flat.values, flat.scales), FlatIndexK(*want, form))


@EVERY_FORMAT
def test_flat_keys_are_read_by_column(form: str) -> None:
    keys = some_keys(6, form)
    columns = [5, 0, 0, 3]
    stored = keys.read(torch.tensor(columns))
    assert torch.equal(raw(stored.values), raw(keys.values)[columns])
    assert (stored.scales is None) == (form in ("fp16", "bf16"))
    if keys.scales is not None:
        assert stored.scales is not None
        assert stored.scales.tolist() == [keys.scales.tolist()[c] for c in columns]


@pytest.mark.parametrize("field", ["values", "scales", "format"])
def test_flat_keys_are_frozen(field: str) -> None:
    keys = some_keys(1, "fp8")
    with pytest.raises(AttributeError, match="immutable"):
        setattr(keys, field, getattr(keys, field))


FP8 = some_keys(3, "fp8")
FP4 = some_keys(3, "fp4")
BF16 = some_keys(3, "bf16")
BAD_FLAT = {
    "format": ((FP8.values, FP8.scales, "e4m3"), f"format: expected {FORMAT_NAMES}, got 'e4m3'"),
    "fp8 values": (
        (FP8.values.view(torch.uint8), FP8.scales, "fp8"),
        "values: expected [columns, 128] float8_e4m3fn, got [3, 128] uint8 on cpu",
    ),
    "fp4 width": (
        (FP4.values.repeat(1, 2), FP4.scales, "fp4"),
        "values: expected [columns, 64] uint8, got [3, 128] uint8 on cpu",
    ),
    "three dimensions": (
        (BF16.values[None], None, "bf16"),
        "values: expected [columns, 128] bfloat16, got [1, 3, 128] bfloat16 on cpu",
    ),
    "values stride": (
        (BF16.values.repeat(1, 2)[:, ::2], None, "bf16"),
        "values: expected a contiguous last dimension, got strides [256, 2]",
    ),
    "no values": ((None, None, "fp16"), "values: expected [columns, 128] float16, got None"),
    "scales with bf16": (
        (BF16.values, FP8.scales, "bf16"),
        "scales: expected None with bf16, got [3] float32 on cpu",
    ),
    "no scales with fp8": (
        (FP8.values, None, "fp8"),
        "scales: expected [3] float32 on cpu, got None",
    ),
    "fp4 scales with fp8": (
        (FP8.values, FP4.scales, "fp8"),
        "scales: expected [3] float32 on cpu, got [3] int32 on cpu",
    ),
    "fp8 scales with fp4": (
        (FP4.values, FP8.scales, "fp4"),
        "scales: expected [3] int32 on cpu, got [3] float32 on cpu",
    ),
    "one scale for all": (
        (FP8.values, torch.ones(1), "fp8"),
        "scales: expected [3] float32 on cpu, got [1] float32 on cpu",
    ),
    "scales device": (
        (FP8.values, torch.ones(3, device="meta"), "fp8"),
        "scales: expected [3] float32 on cpu, got [3] float32 on meta",
    ),
    "scales stride": (
        (FP8.values, torch.ones(6)[::2], "fp8"),
        "scales: expected a contiguous last dimension, got strides [2]",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_FLAT.values(), ids=BAD_FLAT.keys())
def test_flat_keys_refuse(arguments: tuple, message: str) -> None:
    with refused(message):
        FlatIndexK(*arguments)


FLOATS = "float16 or bfloat16 or float32 or float64"
BAD_KEYS = {
    "format": ((torch.ones(2, 128), "fp32"), f"format: expected {FORMAT_NAMES}, got 'fp32'"),
    "width": (
        (torch.ones(2, 64), "fp16"),
        f"keys: expected [n, 128] {FLOATS}, got [2, 64] float32 on cpu",
    ),
    "heads": (
        (torch.ones(2, 1, 128), "fp8"),
        f"keys: expected [n, 128] {FLOATS}, got [2, 1, 128] float32 on cpu",
    ),
    "dtype": (
        (FP8.values, "fp8"),
        f"keys: expected [n, 128] {FLOATS}, got [3, 128] float8_e4m3fn on cpu",
    ),
    "stride": (
        (torch.ones(2, 256)[:, ::2], "fp4"),
        "keys: expected a contiguous last dimension, got strides [256, 2]",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_KEYS.values(), ids=BAD_KEYS.keys())
def test_flat_index_k_refuses(arguments: tuple, message: str) -> None:
    with refused(message):
        flat_index_k(*arguments)
