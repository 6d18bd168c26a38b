# SPDX-License-Identifier: Apache-2.0
"""The index_k kernel against the exact dequantizers."""

import math

import pytest
import torch

from sparse_indexer import FlatIndexK, IndexKPool
from sparse_indexer.formats import INT32_MAX, dequantize_fp4
from sparse_indexer.ops.index_k import index_k
from sparse_indexer.testing import hostile_pool, random_keys

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
DTYPES = {"fp8": torch.float8_e4m3fn, "fp16": torch.float16, "bf16": torch.bfloat16}
PAIRS = [
    ("fp4", "fp8"), ("fp4", "fp16"), ("fp4", "bf16"), ("fp8", "fp8"), ("fp8", "fp16"),
    ("fp8", "bf16"), ("fp16", "fp16"), ("bf16", "bf16"), ("bf16", "fp16"),
]  # fmt: skip


def exact(keys: FlatIndexK) -> torch.Tensor:
    if keys.format == "fp4":
        return dequantize_fp4(keys.values, keys.scales, dtype=torch.float64)
    values = keys.values.double()
    return values if keys.scales is None else values * keys.scales.double()[:, None]


def convert(
    held: IndexKPool | FlatIndexK, where: torch.Tensor, lens: list[int], to: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(values, scales) of each request; everything around them must stay poisoned."""
    starts = [3 + sum(lens[:i]) + 5 * i for i in range(len(lens))]
    total = 3 + sum(lens) + 5 * len(lens)
    values = torch.full((total, 128), 7.0, device=DEVICE).to(DTYPES[to])
    scales = torch.full((total,), 7.0, device=DEVICE)
    index_k(
        held,
        where,
        lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        max_len=max(lens, default=0),
        out_starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        out_values=values,
        out_scales=scales,
    )
    made = [
        (values[s : s + n].clone(), scales[s : s + n].clone())
        for s, n in zip(starts, lens, strict=True)
    ]
    for start, n in zip(starts, lens, strict=True):
        values.view(torch.uint8)[start : start + n] = (
            torch.full((n, 128), 7.0, device=DEVICE).to(DTYPES[to]).view(torch.uint8)
        )
        scales[start : start + n] = 7
    assert (values.double() == 7).all()
    assert (scales == 7).all()
    return made


def pack(
    made: list[tuple[torch.Tensor, torch.Tensor]], starts: list[int], blocks: int
) -> torch.Tensor:
    """The bytes of those packed blocks, request i from block starts[i] on, 7 where nothing is."""
    of_values = made[0][0].itemsize * 128
    packed = torch.full((blocks, 8 * of_values + 128), 7, dtype=torch.uint8, device=DEVICE)
    for (values, scales), start in zip(made, starts, strict=True):
        p = torch.arange(len(values), device=DEVICE)[:, None]
        byte = torch.arange(of_values, device=DEVICE)
        at = byte // 16 * 128 + p % 8 * 16 + byte % 16
        packed[start + p // 8, at] = values.view(torch.uint8)
        at = 8 * of_values + p % 8 * 4 + torch.arange(4, device=DEVICE)
        packed[start + p // 8, at] = scales[:, None].view(torch.uint8)
    return packed


def product(made: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return made[0].double() * made[1].double()[:, None]


@pytest.mark.parametrize(("form", "to"), PAIRS)
@pytest.mark.parametrize("layout", ["planar", "interleaved", "flat"])
def test_values_times_scale_are_the_stored_keys(form: str, to: str, layout: str) -> None:
    lens = [0, 1, 77, 1300, 128, 129]
    keys = [random_keys(n, form, seed=n, device=DEVICE) for n in lens]
    if layout == "flat":
        scales = None if keys[0].scales is None else torch.cat([k.scales for k in keys])
        held = FlatIndexK(torch.cat([k.values for k in keys]), scales, form)
        starts = [sum(lens[:i]) for i in range(len(lens))]
        where = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    else:
        held, where = hostile_pool(keys, layout, page_size=24 if form == "fp16" else 64)
    for made, k in zip(convert(held, where, lens, to), keys, strict=True):
        assert torch.equal(product(made), exact(k))


@pytest.mark.parametrize(("form", "to"), PAIRS)
@pytest.mark.parametrize("layout", ["planar", "interleaved", "flat"])
def test_packed_blocks_are_those_values_and_scales(form: str, to: str, layout: str) -> None:
    lens = [0, 1, 77, 1300, 7, 8, 9, 128, 129]
    keys = [random_keys(n, form, seed=n, device=DEVICE) for n in lens]
    if layout == "flat":
        scales = None if keys[0].scales is None else torch.cat([k.scales for k in keys])
        held = FlatIndexK(torch.cat([k.values for k in keys]), scales, form)
        where = [sum(lens[:i]) for i in range(len(lens))]
        where[-1] += 100  # the last 100 of its columns do not exist
        where = torch.tensor(where, dtype=torch.int32, device=DEVICE)
    else:
        held, where = hostile_pool(keys, layout, page_size=24 if form == "fp16" else 64)
        where[-1, 1] = -1
    made = convert(held, where, lens, to)
    assert made[-1][1].isnan().any()

    starts = [2 + sum((n + 7) // 8 for n in lens[:i]) + i for i in range(len(lens))]
    want = pack(made, starts, starts[-1] + 20)
    width = 1152 if to == "fp8" else 1088
    dtypes = (torch.float8_e4m3fn, torch.uint8) if to == "fp8" else (DTYPES[to],)
    for dtype in dtypes:
        got = torch.full_like(want, 7).view(dtype)
        assert got.shape[1] == width
        index_k(
            held,
            where,
            lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
            max_len=max(lens),
            out_starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            out_values=got,
        )
        assert torch.equal(got.view(torch.uint8), want)


def test_packed_blocks_beyond_two_gigabytes() -> None:
    keys = random_keys(9, "fp8", seed=1, device=DEVICE)
    where = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    blocks = (5 << 29) // 2176
    made = convert(keys, where, [9], "fp16")
    packed = torch.zeros(blocks, 1088, dtype=torch.float16, device=DEVICE)
    packed[-2:].view(torch.uint8).fill_(7)
    index_k(
        keys,
        where,
        lens=torch.tensor([9], dtype=torch.int32, device=DEVICE),
        max_len=9,
        out_starts=torch.tensor([blocks - 2], dtype=torch.int32, device=DEVICE),
        out_values=packed,
    )
    assert torch.equal(packed[-2:].view(torch.uint8), pack(made, [0], 2))
    assert not packed[:-2].any()


def fp4_of(codes: torch.Tensor, exponents: torch.Tensor) -> FlatIndexK:
    """Keys whose every element has that e2m1 code (`[n, 128]`) and ue8m0 code (`[n, 4]`)."""
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scales = exponents.to(torch.uint8).contiguous().view(torch.int32).squeeze(1)
    return FlatIndexK(packed.to(torch.uint8).to(DEVICE), scales.to(DEVICE), "fp4")


@pytest.mark.parametrize(("to", "reach"), [("fp8", 14), ("fp16", 23), ("bf16", 254)])
def test_fp4_groups_are_exact_within_reach(to: str, reach: int) -> None:
    codes = torch.arange(16).repeat(8)
    n = reach + 1
    exponents = torch.full((n, 4), 254)
    exponents[:, 1] = 254 - torch.arange(n)
    exponents[:, 2] = 254 - torch.arange(n).flip(0)
    keys = fp4_of(codes.expand(n, 128), exponents)
    where = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    (made,) = convert(keys, where, [n], to)
    want = exact(keys)
    if to == "bf16":  # what a float32 does not hold, a bfloat16 does not either
        want = want.float().double()
    assert torch.equal(product(made), want)


def test_fp4_groups_out_of_reach_are_rounded() -> None:
    codes = torch.arange(16).repeat(8)
    gaps = torch.arange(15, 80)
    exponents = torch.full((len(gaps), 4), 200)
    exponents[:, 3] = 200 - gaps
    keys = fp4_of(codes.expand(len(gaps), 128), exponents)
    (made,) = convert(keys, torch.zeros(1, dtype=torch.int32, device=DEVICE), [len(gaps)], "fp8")
    want = exact(keys)
    unit = 2.0 ** (200 - 127 - 6 - 9)  # the spacing of e4m3's subnormals at that scale
    rounded = (want / unit).round() * unit  # torch rounds to nearest even
    assert torch.equal(product(made), torch.where(want.abs() < 8 * unit, rounded, want))


def test_edge_scales_of_fp4() -> None:
    codes = torch.randint(0, 16, (6, 128), generator=torch.Generator().manual_seed(0))
    exponents = torch.tensor(
        [
            [0, 0, 0, 0],
            [0, 3, 1, 2],
            [250, 251, 254, 253],
            [100, 255, 100, 100],
            [127] * 4,
            [90] * 4,
        ]
    )
    codes[5, :96] = 0  # groups of zeros with a larger scale have no say
    exponents[5, :3] = 200
    keys = fp4_of(codes, exponents)
    where = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for to in ("fp8", "fp16"):
        (made,) = convert(keys, where, [6], to)
        good = [0, 1, 2, 4, 5]
        assert torch.equal(product(made)[good], exact(keys)[good])
        assert made[1][3].isnan()


def test_every_e4m3_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = codes.view(256, 1).expand(256, 128).contiguous().to(DEVICE)
    keys = FlatIndexK(values, torch.full((256,), 0.75, device=DEVICE), "fp8")
    where = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for to in ("fp8", "fp16", "bf16"):
        (made,) = convert(keys, where, [256], to)
        torch.testing.assert_close(product(made), exact(keys), rtol=0, atol=0, equal_nan=True)


def test_bf16_beyond_fp16() -> None:
    values = torch.zeros(4, 128, dtype=torch.bfloat16)
    values[0, :3] = torch.tensor([1e38, -3e38, 1e33])
    values[1, :3] = torch.tensor([1e-38, 3e-38, 1e-40])
    values[2, :3] = torch.tensor([math.inf, 5.0, -math.inf])
    values[3, :3] = torch.tensor([math.nan, 70_000.0, 1.0])
    keys = FlatIndexK(values.to(DEVICE), None, "bf16")
    where = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    (made,) = convert(keys, where, [4], "fp16")
    torch.testing.assert_close(product(made), exact(keys), rtol=0, atol=0, equal_nan=True)


def test_places_that_do_not_exist_give_nan() -> None:
    keys = random_keys(256, "fp8", seed=1, device=DEVICE)
    pool = IndexKPool.empty(4, 64, "fp8", device=DEVICE)
    pool.write(torch.arange(256, device=DEVICE), keys)
    table = torch.tensor([[1, -1, 4, INT32_MAX, 2]], dtype=torch.int32, device=DEVICE)
    (made,) = convert(pool, table, [320], "fp8")
    assert torch.equal(product(made)[:64], exact(keys)[64:128])
    assert made[1][64:256].isnan().all()
    assert torch.equal(product(made)[256:], exact(keys)[128:192])
    (made,) = convert(keys, torch.tensor([250], dtype=torch.int32, device=DEVICE), [9], "fp8")
    assert torch.equal(product(made)[:6], exact(keys)[250:])
    assert made[1][6:].isnan().all()


def test_pages_beyond_two_gigabytes_and_many_requests() -> None:
    page_bytes = 8 * 132
    pages = torch.zeros((5 << 29) // page_bytes, page_bytes, dtype=torch.uint8, device=DEVICE)
    pool = IndexKPool(pages, 8, "fp8")
    keys = random_keys(8, "fp8", seed=1, device=DEVICE)
    last = pool.num_pages - 1
    pool.write(last * 8 + torch.arange(8, device=DEVICE), keys)
    (made,) = convert(pool, torch.tensor([[last]], dtype=torch.int32, device=DEVICE), [8], "fp8")
    assert torch.equal(product(made), exact(keys))
    requests = 70_000
    table = torch.full((requests, 1), last, dtype=torch.int32, device=DEVICE)
    values = torch.empty(requests, 128, device=DEVICE, dtype=torch.float16)
    scales = torch.empty(requests, device=DEVICE)
    ones = torch.ones(requests, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(requests, dtype=torch.int32, device=DEVICE)
    index_k(
        pool, table, lens=ones, max_len=1, out_starts=starts, out_values=values, out_scales=scales
    )
    assert torch.equal(product((values, scales)), exact(keys)[:1].expand(requests, 128))


def test_what_would_quantize_is_refused() -> None:
    where = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for form, to in (("fp16", "fp8"), ("bf16", "fp8"), ("fp16", "bf16")):
        keys = random_keys(8, form, seed=1, device=DEVICE)
        with pytest.raises(
            ValueError, match=f"out_values: expected a dtype that holds {form}, got {to}"
        ):
            convert(keys, where, [8], to)
        packed = torch.zeros(1, 1152 if to == "fp8" else 1088, device=DEVICE).to(DTYPES[to])
        with pytest.raises(ValueError, match=f"out_values: expected a dtype that holds {form}"):
            index_k(keys, where, lens=where, max_len=8, out_starts=where, out_values=packed)
