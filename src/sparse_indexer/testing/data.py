# SPDX-License-Identifier: Apache-2.0
"""Making inputs: keys into hostile pools, exact palettes, dictated logits, random data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from sparse_indexer.errors import expect_int, mismatch
from sparse_indexer.formats import (
    FORMATS,
    FP4_GROUP,
    HEAD_DIM,
    INT32_MAX,
    KeyFormat,
    quantize_fp4,
    quantize_fp8,
)
from sparse_indexer.inputs import (
    FlatIndexK,
    IndexKPool,
    IndexQ,
    PrefillIndexerInputs,
    flat_index_k,
    plan_prefill,
)
from sparse_indexer.plan import HostInts

Layout = Literal["planar", "interleaved", "flat"]

_DIGIT_BITS: dict[KeyFormat, int] = {"fp4": 2, "fp8": 4, "fp16": 8, "bf16": 8}


def index_q(queries: torch.Tensor, format: KeyFormat) -> IndexQ:
    """Queries `[rows, heads, 128]` of any float dtype as keys of `format` are scored with."""
    if format == "fp8":
        return IndexQ(*quantize_fp8(queries))
    if format == "fp4":
        return IndexQ(*quantize_fp4(queries))
    return IndexQ(queries.to(FORMATS[format].values_dtype))


def hostile_pool(
    keys: Sequence[FlatIndexK], layout: Layout, *, page_size: int = 64, seed: int = 0
) -> tuple[IndexKPool, torch.Tensor]:
    """Put each request's keys into a pool that punishes a wrong read.

    Pages are shuffled, lie in a slice of a bigger tensor with gaps between them, and every byte
    that holds no key is 0xFF: NaN in all formats and scales. Page 0 belongs to nobody. Unused
    page-table slots hold -1, INT32_MAX or an id just beyond the pool.

    Returns:
        The pool, and the page table `[requests, max_pages]` int32 with two columns to spare.

    Raises:
        ValueError: `layout` is "flat", or the keys are of several formats.
    """
    if layout == "flat":
        raise mismatch("layout", "'planar' or 'interleaved'", repr(layout))
    form, device = keys[0].format, keys[0].values.device
    if any(k.format != form for k in keys):
        raise mismatch("keys", "one format", str(sorted({k.format for k in keys})))
    pages_of = [-(-len(k.values) // page_size) for k in keys]
    num_pages = sum(pages_of) + 3
    spec = FORMATS[form]
    page_bytes = page_size * (spec.payload_bytes + spec.scale_bytes)
    storage = torch.full((num_pages, 2, page_bytes + 512), 0xFF, dtype=torch.uint8, device=device)
    dtype = torch.uint8 if spec.scale_bytes else spec.values_dtype
    pages = storage.view(dtype)[:, 1, 256 // dtype.itemsize :]
    pool = IndexKPool(pages[:, : page_bytes // dtype.itemsize], page_size, form, layout)

    shuffled = torch.randperm(num_pages - 1, generator=_generator(seed)).to(device) + 1
    hostile = torch.tensor([-1, INT32_MAX, num_pages], dtype=torch.int32)
    columns = max(pages_of, default=0) + 2
    table = hostile.repeat(-(-len(keys) * columns // 3))[: len(keys) * columns]
    table = table.view(len(keys), columns).to(device)
    taken = 0
    for request, (k, count) in enumerate(zip(keys, pages_of, strict=True)):
        own = shuffled[taken : taken + count]
        taken += count
        table[request, :count] = own.to(torch.int32)
        positions = torch.arange(len(k.values), device=device)
        pool.write(own[positions // page_size] * page_size + positions % page_size, k)
    return pool, table


def make_inputs(
    queries: IndexQ,
    head_weights: torch.Tensor,
    keys: Sequence[FlatIndexK],
    positions: Sequence[int],
    rows_per_request: Sequence[int],
    *,
    layout: Layout = "planar",
    page_size: int = 64,
    request_of_row: Sequence[int] | None = None,
    request_starts: Sequence[int] | None = None,
    seed: int = 0,
) -> PrefillIndexerInputs:
    """Inputs over each request's keys, in a hostile pool or ("flat") packed one after the other.

    Args:
        queries: of all rows; head_weights: `[rows, heads]`.
        keys: one `FlatIndexK` a request, of one format.
        positions: the last position each row sees, -1 for none (compress ratio 1).
        rows_per_request, request_of_row, request_starts: as in `plan_prefill`.
    """
    device = queries.values.device
    table = key_starts = None
    held: IndexKPool | FlatIndexK
    if layout == "flat":
        lens = [len(k.values) for k in keys]
        key_starts = [sum(lens[:i]) for i in range(len(keys))]
        scales = [k.scales for k in keys if k.scales is not None]
        values = torch.cat([k.values for k in keys])
        held = FlatIndexK(values, torch.cat(scales) if scales else None, keys[0].format)
    else:
        held, table = hostile_pool(keys, layout, page_size=page_size, seed=seed)
    plan = plan_prefill(
        positions,
        rows_per_request,
        device=device,
        page_table=table,
        key_starts=key_starts,
        request_of_row=request_of_row,
        request_starts=request_starts,
    )
    return PrefillIndexerInputs(plan, queries, head_weights, held)


def with_queries(
    inputs: PrefillIndexerInputs, queries: IndexQ, head_weights: torch.Tensor
) -> PrefillIndexerInputs:
    """The same rows and keys with other queries: a consumer layer."""
    return PrefillIndexerInputs(inputs.plan, queries, head_weights, inputs.index_k)


def tail_inputs(inputs: PrefillIndexerInputs, tail_lens: HostInts) -> PrefillIndexerInputs:
    """The inputs of the tail rows alone."""
    rows = inputs.plan.tail_rows(tail_lens)
    q = inputs.index_q
    queries = IndexQ(q.values[rows], None if q.scales is None else q.scales[rows])
    plan = inputs.plan.tail(tail_lens)
    return PrefillIndexerInputs(plan, queries, inputs.head_weights[rows], inputs.index_k)


def palette_queries(
    rows: int, heads: int, format: KeyFormat, *, seed: int, device: torch.device | str = "cpu"
) -> tuple[IndexQ, torch.Tensor]:
    """Random queries and weights whose logits against `palette_keys` are exact in fp32.

    Query elements are 0, +-0.5, +-1 or +-2, fp8 scales 1/2 to 2 and weights multiples of 1/16 in
    [-1, 1]: with 128 dims and 64 heads no sum needs more than 24 bits, in any order, and no head's
    dot product more than 11, so a route that rounds it to fp16 is exact as well.
    """
    generator = _generator(seed)
    choices = torch.tensor([0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0])
    picked = torch.randint(len(choices), (rows, heads, HEAD_DIM), generator=generator)
    queries = choices[picked].to(device)
    weights = torch.randint(-16, 17, (rows, heads), generator=generator) / 16
    if format == "fp8":
        scales = torch.randint(-1, 2, (rows, heads), generator=generator).to(torch.float32).exp2()
        return IndexQ(queries.to(torch.float8_e4m3fn), scales.to(device)), weights.to(device)
    return index_q(queries, format), weights.to(device)


def palette_keys(
    positions: int, format: KeyFormat, *, seed: int, device: torch.device | str = "cpu"
) -> FlatIndexK:
    """Random keys for `palette_queries`: elements 0, +-1 or +-2; fp8 scales 1/4 to 4."""
    generator = _generator(seed)
    choices = torch.tensor([0.0, 1.0, -1.0, 2.0, -2.0])
    picked = torch.randint(len(choices), (positions, HEAD_DIM), generator=generator)
    keys = choices[picked].to(device)
    if format != "fp8":
        return flat_index_k(keys, format)
    scales = torch.randint(-2, 3, (positions,), generator=generator).to(torch.float32).exp2()
    return FlatIndexK(keys.to(torch.float8_e4m3fn), scales.to(device), "fp8")


def dictated(
    integers: Sequence[Sequence[int]],
    format: KeyFormat,
    *,
    shift: int = 17,
    heads: int = 32,
    device: torch.device | str = "cpu",
) -> tuple[IndexQ, torch.Tensor, FlatIndexK]:
    """Queries, weights and keys whose logit of row r at position n is `integers[r][n] / 2^shift`.

    A row's integers are written in base 4 (fp4), 16 (fp8) or 256 (fp16, bf16), one digit in one
    key dimension of the row's own; one head a digit has a one-hot query there, and the weight is
    the digit's value. Each head's dot product is one digit, so large sums happen in the head sum
    only, and are exact below 2^24.

    Args:
        integers: per row, as many non-negative integers below 2^24 as there are positions.

    Raises:
        ValueError: an integer is out of range, or there are more rows x digits than 128
            dimensions, or more digits than heads.
    """
    bits = _DIGIT_BITS[format]
    largest = max((max(row, default=0) for row in integers), default=0)
    for r, row in enumerate(integers):
        for n, value in enumerate(row):
            expect_int(f"integers[{r}][{n}]", value, 0, (1 << 24) - 1)
    digits = max(1, math.ceil(largest.bit_length() / bits))
    rows, positions = len(integers), len(integers[0])
    if digits > heads:
        raise mismatch("heads", f"at least {digits}, one a digit", str(heads))
    if rows * digits > HEAD_DIM:
        raise mismatch("integers", f"at most {HEAD_DIM // digits} rows", f"{rows} rows")
    values = torch.tensor([list(row) for row in integers], dtype=torch.int64)
    queries = torch.zeros(rows, heads, HEAD_DIM)
    weights = torch.zeros(rows, heads)
    keys = torch.zeros(positions, HEAD_DIM)
    groups = HEAD_DIM // FP4_GROUP
    for r in range(rows):
        for digit in range(digits):
            place = r * digits + digit
            dim = place % groups * FP4_GROUP + place // groups  # spread over the scale groups
            head = (digit * (heads // digits) + r) % heads
            queries[r, head, dim] = 1.0
            weights[r, head] = 2.0 ** (bits * digit - shift)
            keys[:, dim] = ((values[r] >> (bits * digit)) & ((1 << bits) - 1)).float()
    queries, weights, keys = queries.to(device), weights.to(device), keys.to(device)
    if format == "fp8":
        ones = torch.ones(positions, device=device)
        stored = FlatIndexK(keys.to(torch.float8_e4m3fn), ones, "fp8")
        return IndexQ(queries.to(torch.float8_e4m3fn)), weights, stored
    return index_q(queries, format), weights, flat_index_k(keys, format)


def random_queries(
    rows: int, heads: int, format: KeyFormat, *, seed: int, device: torch.device | str = "cpu"
) -> tuple[IndexQ, torch.Tensor]:
    """Unit-normal queries and weights, quantized."""
    generator = _generator(seed)
    queries = torch.randn(rows, heads, HEAD_DIM, generator=generator)
    weights = torch.randn(rows, heads, generator=generator) / heads**0.5
    return index_q(queries.to(device), format), weights.to(device)


def random_keys(
    positions: int, format: KeyFormat, *, seed: int, device: torch.device | str = "cpu"
) -> FlatIndexK:
    """Unit-normal keys whose norms vary from position to position, quantized."""
    generator = _generator(seed)
    keys = torch.randn(positions, HEAD_DIM, generator=generator)
    keys *= torch.rand(positions, 1, generator=generator) + 0.5
    return flat_index_k(keys.to(device), format)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
