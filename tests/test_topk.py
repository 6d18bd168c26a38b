# SPDX-License-Identifier: Apache-2.0
"""The topk kernel against the packed selection in torch, which the loop oracle validates."""

import math

import pytest
import torch

from sparse_indexer.ops.topk import topk
from sparse_indexer.torch_ops.topk import FORCED, UNUSED, indices, ordered, pack

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
NAN, INF = math.nan, math.inf


def reference(
    keys: torch.Tensor, lens: torch.Tensor, k: int, *, per_column: int = 1, force_last: bool = False
) -> torch.Tensor:
    columns = (lens.clamp(min=0).long() + per_column - 1) // per_column
    columns = columns.clamp(max=keys.shape[1])[:, None]
    order = ordered(keys.float())
    at = torch.arange(keys.shape[1], device=keys.device)
    if force_last:
        order = torch.where(at == columns - 1, FORCED, order)
    packed = pack(order, at < columns, 0)
    short = max(0, k - packed.shape[1])
    packed = torch.nn.functional.pad(packed, (0, short), value=UNUSED)
    return indices(packed.topk(k, dim=1).values, -1)


def select(keys: torch.Tensor, lens: torch.Tensor, k: int, **options: object) -> torch.Tensor:
    """The kernel's output, in the middle of poisoned memory that must stay as it is."""
    buffer = torch.full((len(keys) + 2, k + 9), 7, dtype=torch.int32, device=keys.device)
    out = buffer[1:-1, 4 : 4 + k]
    topk(keys, lens, out=out, **options)
    result = out.clone()
    out.fill_(7)
    assert (buffer == 7).all()
    return result


def check(keys: torch.Tensor, lens: torch.Tensor, k: int, **options: object) -> None:
    got = select(keys, lens, k, **options)
    want = reference(keys, lens, k, **options)
    bad = (got != want).any(1).nonzero().flatten().tolist()
    assert not bad, f"rows {bad[:9]}: {got[bad[0]].tolist()[:20]} {want[bad[0]].tolist()[:20]}"


def lens_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random_keys(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "k"),
    [(1, 1), (7, 3), (255, 64), (2047, 512), (2048, 500), (2049, 2048), (16_384, 512),
     (16_384, 1024), (20_001, 2051), (32_768, 2048), (90_000, 512), (131_072, 2048),
     (262_144, 2048)],
)  # fmt: skip
def test_random_keys(width: int, k: int, dtype: torch.dtype) -> None:
    edges = [0, 1, k - 1, k, k + 1, width - 1, width, width + 5, -3]
    lens = lens_of(*edges, *[width - i for i in range(16)])
    check(random_keys(len(lens), width, dtype), lens, k)


def sampled(n: int) -> torch.Tensor:
    """The columns of whose keys the kernel takes a sample."""
    group = torch.arange(n) // 64
    return (group ^ group >> 3 ^ group >> 6) % 8 == torch.arange(n) // 8 % 8


PATTERNS = {
    "all equal": lambda n: torch.full((n,), 0.7),
    "two values": lambda n: (torch.arange(n) % 3 == 0).float(),
    "all -inf": lambda n: torch.full((n,), -INF),
    "all +inf": lambda n: torch.full((n,), INF),
    "all NaN": lambda n: torch.full((n,), NAN),
    "-NaN": lambda n: torch.full((n,), -NAN),
    "83 % NaN": lambda n: torch.where(torch.rand(n) < 0.83, NAN, torch.randn(n)),
    "zeros of both signs": lambda n: torch.where(torch.rand(n) < 0.5, 0.0, -0.0),
    "last ten bits": lambda n: (torch.randint(0, 1024, (n,)) + 0x3F900000).int().view(torch.float),
    "one bin, all distinct": lambda n: 1 + torch.randperm(n) * 2.0**-20,
    "falling": lambda n: torch.arange(n, 0, -1).float(),
    "rising": lambda n: torch.arange(n).float(),
    "negative": lambda n: -torch.rand(n) - 1,
    "denormal": lambda n: torch.randint(-500, 500, (n,)).float() * 2.0**-149,
    "any bits": lambda n: torch.randint(-(2**31), 2**31, (n,)).int().view(torch.float32),
    "the sample too low": lambda n: torch.where(sampled(n), -1.0, torch.rand(n)),
    "the sample too high": lambda n: torch.where(sampled(n), 1.0, 0.0) + torch.rand(n),
    "few above ties": lambda n: torch.where(torch.rand(n) < 0.01, torch.rand(n), 0.0),
    "one large": lambda n: torch.where(torch.arange(n) == n // 3, 1e30, 0.0),
    "repeating": lambda n: torch.randn(1024)[torch.arange(n) % 1024] + 0.02 * torch.randn(n),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("times", [1, 30])  # few rows and many take CTAs of different sizes
@pytest.mark.parametrize(
    ("width", "k"), [(16_384, 512), (16_384, 9000), (32_768, 2048), (140_000, 2048)]
)
def test_hard_rows(width: int, k: int, times: int, name: str) -> None:
    torch.manual_seed(0)
    rows = torch.stack([PATTERNS[name](width) for _ in range(4)]).to(DEVICE)
    rows = torch.cat((rows, random_keys(2, width, torch.float32)))[[4, 0, 1, 5, 2, 3]]
    lens = lens_of(width, width, width - 1, width, k + 1, width // 2)
    for dtype in (torch.float32, torch.bfloat16):
        check(rows.to(dtype).repeat(times, 1), lens.repeat(times), k)


def test_block_keys_count_positions_and_force_the_newest() -> None:
    width, k = 4096, 2048
    keys = torch.full((7, width), INF, device=DEVICE)
    keys[3:] = random_keys(4, width, torch.float32)
    positions = lens_of(8 * k - 1, 8 * k, 8 * k + 1, 8 * k + 1, 8 * width, 8 * width - 7, 8 * k + 9)
    check(keys, positions, k, per_column=8, force_last=True)
    got = select(keys, positions, k, per_column=8, force_last=True)
    assert got[2].tolist() == [*range(k - 1), k]  # all tie at +inf: the newest, then the oldest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [255, 256, 257, 5003])
def test_any_row_stride_and_padding_is_not_read(width: int, dtype: torch.dtype) -> None:
    for extra, first in ((0, 0), (1, 0), (3, 1), (8, 2)):
        wide = torch.full((9, first + width + extra), NAN, dtype=dtype, device=DEVICE)
        keys = wide[:, first : first + width]
        keys.copy_(random_keys(9, width, dtype))
        lens = lens_of(*[width - 3 * i for i in range(9)])
        for row, length in enumerate(lens.tolist()):
            keys[row, length:] = INF
        check(keys, lens, 100)


def test_maps_through_blocks_starts_and_pages() -> None:
    rows, n, k, page_size = 6, 64, 50, 16
    generator = torch.Generator().manual_seed(1)
    blocks = torch.stack(
        [torch.randperm(500, generator=generator)[:n].sort().values for _ in range(rows)]
    )
    blocks = blocks.int().to(DEVICE)
    keys = random_keys(rows, 8 * n, torch.float32)
    lens = lens_of(8 * n, 8 * n - 3, k, k - 1, 0, 8 * n)
    request_of_row = lens_of(0, 1, 2, 2, 1, 0)
    starts = lens_of(0, 70_000, 900_000)
    table = torch.randperm(1000, generator=generator)[: 3 * 250].view(3, 250).int().to(DEVICE)

    columns = reference(keys, lens, k).long()
    used = columns >= 0
    c = columns.clamp(min=0)
    positions = blocks.gather(1, c // 8).long() * 8 + c % 8
    request = request_of_row.long()[:, None]
    pages = table[request, positions // page_size].long()
    slots = pages * page_size + positions % page_size
    cases = [
        ({"blocks": blocks}, positions),
        ({"blocks": blocks, "request_of_row": request_of_row, "request_starts": starts},
         positions + starts[request]),
        ({"blocks": blocks, "request_of_row": request_of_row, "page_table": table,
          "page_size": page_size}, slots),
        ({"request_of_row": request_of_row, "request_starts": starts}, c + starts[request]),
    ]  # fmt: skip
    for options, want in cases:
        got = select(keys, lens, k, **options)
        assert torch.equal(got, torch.where(used, want, -1).int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_rows", [9, 400])  # few and many: both numbers of threads
@pytest.mark.parametrize(
    ("width", "k", "pattern"),
    [(1000, 64, "rising"), (16_384, 512, "negative"), (20_001, 512, "all equal"),
     (40_000, 2048, "one bin, all distinct"), (140_000, 512, "any bits")],
)  # fmt: skip
def test_rows_of_keys_stand_for_other_rows(
    width: int, k: int, pattern: str, key_rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    num_rows = 2 * key_rows + 3
    rows = torch.randperm(num_rows)[:key_rows].int()
    rows[1::4] = -1
    wide = torch.full((key_rows, width + 8), NAN, dtype=dtype, device=DEVICE)
    keys = wide[:, :width]
    keys.copy_(random_keys(key_rows, width, dtype))
    keys[::3] = PATTERNS[pattern](width).to(DEVICE, dtype)
    lens = torch.randint(k, width + 9, (key_rows,), dtype=torch.int32)
    lens[[2, 4, 7, 8]] = torch.tensor([0, 1, k, k + 1], dtype=torch.int32)
    rows, lens = rows.to(DEVICE), lens.to(DEVICE)
    named = rows >= 0
    to = rows[named].long()
    want = torch.full((num_rows, k), 7, dtype=torch.int32, device=DEVICE)
    want[to] = reference(keys[named], lens[named], k)
    buffer = torch.full((num_rows + 2, k + 9), 7, dtype=torch.int32, device=DEVICE)
    topk(keys, lens, out=buffer[1:-1, 4 : 4 + k], rows=rows)
    assert torch.equal(buffer[1:-1, 4 : 4 + k], want)
    buffer[1:-1, 4 : 4 + k] = 7
    assert (buffer == 7).all()


def test_rows_with_maps_and_what_is_written_past_a_count() -> None:
    n, k, page_size, unused = 64, 50, 16, 2**31 - 1
    generator = torch.Generator().manual_seed(2)
    keys = random_keys(4, 8 * n, torch.float32)
    rows = lens_of(5, -1, 0, 3)
    lens = lens_of(8 * n, 1 << 30, 8 * n - 3, k - 1)
    request_of_row = lens_of(1, 1 << 30, -5, 2, 1 << 30, 0)
    blocks = torch.full((4, n), unused, dtype=torch.int32)
    for row in (0, 2, 3):
        blocks[row] = torch.randperm(500, generator=generator)[:n].sort().values.int()
    blocks = blocks.to(DEVICE)
    starts = lens_of(0, 70_000, 900_000)
    table = torch.randperm(1000, generator=generator)[: 3 * 250].view(3, 250).int().to(DEVICE)

    used_rows, of_keys = torch.tensor([5, 0, 3], device=DEVICE), [0, 2, 3]
    columns = reference(keys[of_keys], lens[of_keys], k).long()
    c = columns.clamp(min=0)
    positions = blocks[of_keys].gather(1, c // 8).long() * 8 + c % 8
    request = request_of_row[used_rows].long()[:, None]
    pages = table[request, positions // page_size].long()
    to_pages = {"page_table": table, "page_size": page_size}
    cases = [
        ({}, c),
        ({"blocks": blocks}, positions),
        ({"blocks": blocks, "request_of_row": request_of_row, "request_starts": starts},
         positions + starts[request]),
        ({"blocks": blocks, "request_of_row": request_of_row} | to_pages,
         pages * page_size + positions % page_size),
    ]  # fmt: skip
    for options, mapped in cases:
        want = torch.full((6, k), 7, dtype=torch.int32, device=DEVICE)
        want[used_rows] = torch.where(columns >= 0, mapped, unused).int()
        out = torch.full_like(want, 7)
        topk(keys, lens, out=out, rows=rows, unused=unused, **options)
        assert torch.equal(out, want)


def test_only_rows_that_stand_for_none() -> None:
    keys, none = random_keys(3, 64, torch.float32), lens_of(-1, -1, -1)
    out = torch.full((2, 8), 7, dtype=torch.int32, device=DEVICE)
    topk(keys, lens_of(64, 64, 64), out=out, rows=none)
    topk(keys[:0], lens_of(), out=out, rows=none[:0])
    assert (out == 7).all()
    topk(keys, lens_of(64, 64, 64), out=out[:0], rows=none)


@pytest.mark.parametrize("unused", [-(2**31), -1, 0, 2**31 - 1])
def test_what_is_written_past_a_count(unused: int) -> None:
    keys = random_keys(5, 4096, torch.float32)
    lens = lens_of(0, 1, 63, 64, 4096)
    want = reference(keys, lens, 64)
    got = select(keys, lens, 64, unused=unused)
    assert torch.equal(got, torch.where(want == -1, unused, want))
    positions = lens_of(0, 8, 8 * 63 - 5, 8 * 64, 8 * 4096)
    got = select(keys, positions, 64, per_column=8, force_last=True, unused=unused)
    want = reference(keys, positions, 64, per_column=8, force_last=True)
    assert torch.equal(got, torch.where(want == -1, unused, want))


@pytest.mark.parametrize("n", [8, 2048])
def test_columns_that_count_are_those_of_visible_positions(n: int) -> None:
    """`lens` is the length of a row's candidate logits, or its compressed_lens."""
    width = 8 * n
    seen = [0, 1, 7, 8, 9, *range(width - 9, width + 19), 3 * width - 1, 5 * width + 3, 1 << 20]
    generator = torch.Generator().manual_seed(n)
    blocks = torch.full((len(seen), n), 2**31 - 1, dtype=torch.int32)
    for row, visible in enumerate(seen):
        newest = (visible + 7) // 8 - 1
        if newest < n:
            blocks[row, : newest + 1] = torch.arange(newest + 1)
        else:
            older = torch.randperm(newest, generator=generator)[: n - 1].sort().values
            blocks[row] = torch.cat((older, torch.tensor([newest])))
    blocks = blocks.to(DEVICE)
    positions = (blocks.long()[:, :, None] * 8 + torch.arange(8, device=DEVICE)).flatten(1)
    compressed_lens = lens_of(*seen)
    allowed = positions < compressed_lens[:, None]
    lens_of_logits = allowed.sum(1).int()
    keys = torch.where(allowed, random_keys(len(seen), width, torch.float32), INF)
    for k in (5, 60, width - 4):
        packed = pack(ordered(keys), allowed, 0).topk(k, dim=1).values
        columns = indices(packed, -1).long()
        want = torch.where(columns >= 0, positions.gather(1, columns.clamp(min=0)), -1).int()
        assert torch.equal(select(keys, compressed_lens, k, blocks=blocks), want)
        assert torch.equal(select(keys, lens_of_logits, k, blocks=blocks), want)
    newest = select(keys, compressed_lens, 1, blocks=blocks, force_last=True)
    assert torch.equal(newest[:, 0], compressed_lens - 1)


def test_rows_do_not_depend_on_each_other_or_the_run() -> None:
    keys = random_keys(300, 20_000, torch.float32)
    keys[::7] = 1.0
    keys[3::11] = NAN
    lens = lens_of(*[20_000 - 61 * i for i in range(300)])
    first = select(keys, lens, 512)
    for _ in range(20):
        assert torch.equal(select(keys, lens, 512), first)
    for row in (0, 7, 14, 299):
        alone = select(keys[row : row + 1], lens[row : row + 1], 512)
        assert torch.equal(alone, first[row : row + 1])


def test_more_rows_than_65535_and_more_elements_than_2_to_the_31() -> None:
    keys = random_keys(65_537, 64, torch.float32)
    lens = torch.full((65_537,), 64, dtype=torch.int32, device=DEVICE)
    check(keys, lens, 8)
    del keys
    width = 1 << 20
    keys = torch.empty(2049, width, device=DEVICE)
    keys.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
    lens = torch.full((2049,), width, dtype=torch.int32, device=DEVICE)
    got = select(keys, lens, 512)
    some = [0, 1024, 2047, 2048]
    assert torch.equal(got[some], reference(keys[some], lens[some], 512))


def test_empty_batches() -> None:
    assert select(torch.empty(0, 64, device=DEVICE), lens_of(), 8).shape == (0, 8)
    assert select(torch.empty(3, 64, device=DEVICE), lens_of(1, 2, 3), 0).shape == (3, 0)
    got = select(torch.empty(2, 0, device=DEVICE), lens_of(0, 5), 4)
    assert got.tolist() == [[-1] * 4] * 2


def test_side_stream_and_graph_replay_with_other_lengths() -> None:
    keys = random_keys(40, 16_384, torch.float32)
    lens = torch.full((40,), 16_384, dtype=torch.int32, device=DEVICE)
    out = torch.empty(40, 512, dtype=torch.int32, device=DEVICE)
    topk(keys, lens, out=out)
    want = reference(keys, lens, 512)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out.fill_(7)
        topk(keys, lens, out=out)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        topk(keys, lens, out=out)
    for length in (256, 257, 1, 16_000, 16_384):
        lens.fill_(length)
        keys.copy_(random_keys(40, 16_384, torch.float32, seed=length))
        out.fill_(7)
        graph.replay()
        assert torch.equal(out, reference(keys, lens, 512))


def test_mistakes_are_named() -> None:
    keys, lens = random_keys(3, 64, torch.float32), lens_of(1, 2, 3)
    out = torch.empty(3, 8, dtype=torch.int32, device=DEVICE)
    bad = {
        r"lens: expected \[3\] int32 on cuda:0, got \[2\] int32": {"lens": lens[:2]},
        r"lens: expected \[3\] int32 on cuda:0, got \[3\] int64": {"lens": lens.long()},
        r"keys: expected \[rows, width\] float32 or bfloat16 on cuda": {"keys": keys.half()},
        r"keys: expected a contiguous last dimension": {"keys": keys.t().contiguous().t()},
        r"out: expected \[3, k\] int32": {"out": out[:2]},
        r"lens: expected \[3\] int32 on cuda:0, got \[3\] int32 on cpu": {"lens": lens.cpu()},
        r"blocks: expected at least width / 8 = 8 columns, got 7": {
            "blocks": torch.zeros(3, 7, dtype=torch.int32, device=DEVICE)
        },
        r"per_column: expected an int of 1 to 8, got 0": {"per_column": 0},
        r"rows: expected \[3\] int32 on cuda:0, got \[2\] int32": {"rows": lens[:2]},
        r"unused: expected an int of -2147483648 to 2147483647, got 2147483648": {
            "unused": 1 << 31
        },
        r"per_column: expected 1 with blocks, got 8": {
            "blocks": torch.zeros(3, 8, dtype=torch.int32, device=DEVICE),
            "per_column": 8,
        },
        r"request_of_row: expected a tensor with": {"request_starts": lens},
    }
    for message, change in bad.items():
        arguments = {"keys": keys, "lens": lens, "out": out, **change}
        with pytest.raises(ValueError, match=message):
            topk(arguments.pop("keys"), arguments.pop("lens"), **arguments)
