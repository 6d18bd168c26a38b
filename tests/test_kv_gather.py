# SPDX-License-Identifier: Apache-2.0
"""The kv_gather kernel against its definition in torch, to the bit."""

import pytest
import torch

from sparse_indexer import KVPool
from sparse_indexer.ops.kv_gather import kv_gather
from sparse_indexer.torch_ops import kv_gather as torch_ops

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
HALVES = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
DTYPES = tuple(HALVES)
SLOTS = 1000


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, generator=generator)


def make_pool(fmt: torch.dtype | str, slots: int, dim: int) -> torch.Tensor | KVPool:
    """Every e4m3 code, NaN among them; scales from subnormal to infinite."""
    if isinstance(fmt, torch.dtype):
        pool = (random(slots, dim, seed=1) * 2 ** (8 * random(slots, 1, seed=2))).to(fmt)
        pool[:, ::37] = torch.nan
        pool[:, 1::41] = -torch.inf
        return pool
    fp8_dim = dim // 128 * 128
    codes = torch.arange(slots * fp8_dim, device=DEVICE).mul(7).to(torch.uint8)
    scales = 2 ** (12 * random(slots, fp8_dim // 128, seed=3))
    scales[:5] = torch.tensor([[0.0], [1e-40], [torch.inf], [torch.nan], [-3e38]], device=DEVICE)
    rope = random(slots, dim - fp8_dim, seed=4).bfloat16()
    rope[7] = -0.0
    return KVPool(codes.view(slots, fp8_dim).view(torch.float8_e4m3fn), scales, rope)


def make_positions(rows: int, k: int) -> torch.Tensor:
    """A third unused: negative, or beyond the pool."""
    positions = torch.randint(-SLOTS // 4, SLOTS + SLOTS // 4, (rows, k), device=DEVICE).int()
    positions[:, ::11] = torch.iinfo(torch.int32).max
    positions[:, 1::13] = torch.iinfo(torch.int32).min
    return positions


def check(
    pool: torch.Tensor | KVPool, positions: torch.Tensor, out: torch.Tensor, whole: torch.Tensor
) -> None:
    """`out`, a view of `whole`, gets torch's bits (any NaN is as good), the rest keeps its 7."""
    whole.fill_(7)
    kv_gather(pool, positions, out=out)
    want = torch.empty(out.shape, dtype=out.dtype, device=DEVICE)
    torch_ops.kv_gather(pool, positions, out=want)
    assert torch.equal(out.isnan(), want.isnan())
    ints = HALVES[out.dtype]
    kept = torch.where(out.isnan(), 0, out.contiguous()).view(ints)
    assert torch.equal(kept, torch.where(want.isnan(), 0, want).view(ints))
    out.fill_(7)
    assert (whole == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", [*DTYPES, "fp8"], ids=str)
@pytest.mark.parametrize("dim", [576, 128, 512, 640, 132, 133])
def test_equals_the_definition(dim: int, fmt: torch.dtype | str, dtype: torch.dtype) -> None:
    """Aligned, and with strides that are not."""
    pool, positions = make_pool(fmt, SLOTS, dim), make_positions(5, 70)
    whole = torch.empty(5, 71, dim + 8, dtype=dtype, device=DEVICE)
    check(pool, positions, whole[:, 1:, :dim], whole)
    whole = torch.empty(5, 71, dim + 9, dtype=dtype, device=DEVICE)
    check(pool, positions, whole[:, :70, 1 : dim + 1], whole)
    wide = torch.zeros(5, 75, dtype=torch.int32, device=DEVICE)
    wide[:, 1:71] = positions
    check(pool, wide[:, 1:71], whole[:, :70, 1 : dim + 1], whole)


@pytest.mark.parametrize("offset", [0, 4])
def test_rows_of_656_bytes_are_read_where_they_lie(offset: int) -> None:
    """At multiples of 16 bytes, and of 4."""
    memory = torch.zeros(SLOTS, 672, dtype=torch.uint8, device=DEVICE)
    made = make_pool("fp8", SLOTS, 576)
    assert isinstance(made, KVPool)
    rows = memory[:, offset : offset + 656]
    rows[:, :512] = made.values.view(torch.uint8)
    rows[:, 512:528] = made.scales.view(torch.uint8)
    rows[:, 528:] = made.rope.view(torch.uint8)
    out = torch.empty(3, 50, 576, dtype=torch.float16, device=DEVICE)
    positions = make_positions(3, 50)
    check(KVPool.from_rows(rows), positions, out, out)


def test_strided_plain_pools() -> None:
    wide = torch.full((SLOTS, 2, 136), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 1, :128] = make_pool(torch.bfloat16, SLOTS, 128)
    out = torch.empty(3, 50, 128, dtype=torch.float16, device=DEVICE)
    check(wide[:, 1, :128], make_positions(3, 50), out, out)


@pytest.mark.parametrize("fmt", [torch.float16, "fp8"], ids=str)
def test_the_same_bits_in_any_grid(fmt: torch.dtype | str) -> None:
    pool, positions = make_pool(fmt, SLOTS, 576), make_positions(40, 64)
    out = torch.empty(40, 64, 576, dtype=torch.float16, device=DEVICE)
    kv_gather(pool, positions, out=out)
    for shape in ((1, 2560), (2560, 1), (320, 8)):
        again = torch.full((*shape, 576), 7.0, dtype=torch.float16, device=DEVICE)
        kv_gather(pool, positions.view(shape), out=again)
        assert torch.equal(again.view(torch.int16).flatten(), out.view(torch.int16).flatten())
    one = torch.full((1, 1, 576), 7.0, dtype=torch.float16, device=DEVICE)
    for row, j in ((0, 3), (39, 63)):
        kv_gather(pool, positions[row : row + 1, j : j + 1], out=one)
        assert torch.equal(one.view(torch.int16)[0, 0], out.view(torch.int16)[row, j])


def test_pools_and_outputs_beyond_four_gigabytes() -> None:
    slots = (9 << 29) // 576
    pool = torch.zeros(slots, 576, dtype=torch.float16, device=DEVICE)
    pool[-1] = torch.arange(576, device=DEVICE)
    positions = torch.full((1, slots), -1, dtype=torch.int32, device=DEVICE)
    positions[0, -1] = slots - 1
    out = torch.full((1, slots, 576), 7.0, dtype=torch.float16, device=DEVICE)
    kv_gather(pool, positions, out=out)
    assert torch.equal(out[0, -1], pool[-1])
    assert not out[0, :-1].any()


def test_empty_calls_and_mistakes() -> None:
    pool, positions = make_pool("fp8", SLOTS, 192), make_positions(3, 5)
    out = torch.full((3, 5, 192), 7.0, device=DEVICE)
    kv_gather(pool, positions[:0], out=out[:0])
    kv_gather(pool, positions[:, :0], out=out[:, :0])
    none = KVPool(pool.values[:0], pool.scales[:0], pool.rope[:0])
    kv_gather(none, positions, out=out)
    assert not out.any()
    with pytest.raises(ValueError, match=r"out: expected \[3, 5, 192\] .*, got \[3, 5, 191\]"):
        kv_gather(pool, positions, out=out[..., :191])
    with pytest.raises(ValueError, match=r"positions: expected \[3, 5\] int32 .*, got \[3, 4\]"):
        kv_gather(pool, positions[:, :4], out=out)
    with pytest.raises(ValueError, match="out: expected a contiguous last dimension"):
        kv_gather(pool, positions, out=torch.empty(3, 192, 5, device=DEVICE).mT)
