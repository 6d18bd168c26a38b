# SPDX-License-Identifier: Apache-2.0
"""The candidate_quads kernel against a plain Python model."""

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from sparse_indexer.jit.kernel import SOURCES
from sparse_indexer.ops.candidate_quads import RANK_EVERY, candidate_quads

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
POISON = 7
NONE = 2**31 - 1
CONFIG = (SOURCES / "kernels/candidate_quads.h").read_text()
PAIR_COST = int(re.findall(r"kPairCost = (\d+)", CONFIG)[0])  # of a block, in percent of a quad's

Quad = list[list[int]]  # the block ids of its four rows


class Tables(NamedTuple):
    entries: torch.Tensor  # [quads, width] int32
    ranks: torch.Tensor  # [quads, ceil(width / 32), 4] int16
    counts: torch.Tensor  # [quads, 2] int32


def empty(quads: int, width: int) -> Tables:
    shapes = ((quads, width), (quads, -(-width // RANK_EVERY), 4), (quads, 2))
    dtypes = (torch.int32, torch.int16, torch.int32)
    return Tables(*(torch.full(s, POISON, dtype=d) for s, d in zip(shapes, dtypes, strict=True)))


def model(quads: list[Quad], max_blocks: int, width: int, in_two: list[bool]) -> Tables:
    """`in_two`: which quads have two lists. What nobody writes stays poisoned."""
    want = empty(len(quads), width)
    for quad, rows in enumerate(quads):
        kept = [{block for block in row if block < max_blocks} for row in rows]
        start = 0
        for part, members in enumerate(((0, 1), (2, 3)) if in_two[quad] else ((0, 1, 2, 3),)):
            union = sorted(set().union(*(kept[r] for r in members)))[: width - start]
            before = [0] * 4
            for i, block in enumerate(union, start):
                if i % RANK_EVERY == 0:
                    unsigned = torch.tensor(before, dtype=torch.int32)
                    want.ranks[quad, i // RANK_EVERY] = unsigned.to(torch.int16)
                having = [r for r in members if block in kept[r]]
                want.entries[quad, i] = block | sum(1 << (24 + r) for r in having)
                for r in having:
                    before[r] += 1
            want.counts[quad, part] = len(union)
            start = -(-len(union) // RANK_EVERY) * RANK_EVERY
        if not in_two[quad]:
            want.counts[quad, 1] = -1
    return want


def made(quads: list[Quad], n: int, max_blocks: int, width: int, *, pairs: bool = False) -> Tables:
    """The op's outputs; the quad before them and the one behind must stay poisoned."""
    padded = [[row + [NONE] * (n - len(row)) for row in rows] for rows in quads]
    blocks = torch.tensor(padded, dtype=torch.int32, device=DEVICE).view(-1, 4, n)
    buffers = [t.to(DEVICE) for t in empty(len(quads) + 2, width)]
    entries, ranks, counts = (buffer[1:-1] for buffer in buffers)
    candidate_quads(
        blocks,
        max_blocks=max_blocks,
        pairs=pairs,
        out_entries=entries,
        out_ranks=ranks,
        out_counts=counts,
    )
    for buffer in buffers:
        assert (buffer[[0, -1]] == POISON).all()
    return Tables(entries.cpu(), ranks.cpu(), counts.cpu())


def check(quads: list[Quad], n: int, max_blocks: int, width: int | None = None) -> None:
    width = min(4 * n, max_blocks) if width is None else width
    want = model(quads, max_blocks, width, [False] * len(quads))
    for got, expected in zip(made(quads, n, max_blocks, width), want, strict=True):
        assert torch.equal(got, expected)


def some(count: int, below: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return sorted(torch.randperm(below, generator=generator)[:count].tolist())


def apart(n: int, below: int) -> Quad:
    return [some(n, below, seed) for seed in range(4)]


def alike(n: int, below: int) -> Quad:
    return [some(n, below, 0)] * 4


def two_and_two(n: int, below: int) -> Quad:
    return [some(n, below, 0), some(n, below, 0), some(n, below, 1), some(n, below, 1)]


def in_a_row(n: int, below: int) -> Quad:
    """Each row's blocks right behind those of the row before."""
    return [[r * n + i for i in range(n) if r * n + i < below] for r in range(4)]


def ragged(n: int, below: int) -> Quad:
    return [some(n // (r + 1), below, r) for r in range(4)]


def rows_without(n: int, below: int) -> Quad:
    return [[], some(n, below, 1), [], []]


def none(n: int, below: int) -> Quad:
    return [[], [], [], []]


def first_and_last(n: int, below: int) -> Quad:
    return [[0], [below - 1], [0, below - 1][:n], []]


QUADS: dict[str, Callable[[int, int], Quad]] = {
    make.__name__: make
    for make in (apart, alike, two_and_two, in_a_row, ragged, rows_without, none, first_and_last)
}


@pytest.mark.parametrize(
    ("n", "below"),
    [(1, 1), (1, 40), (8, 31), (8, 33), (12, 4096), (100, 128), (2048, 2500), (2048, 32_768),
     (2048, 32_769), (2048, 131_072)],
)  # fmt: skip
def test_entries_ranks_and_counts(n: int, below: int) -> None:
    quads = [[row[:n] for row in make(min(n, below), below)] for make in QUADS.values()]
    check(quads, n, below)


def test_ids_at_or_past_max_blocks_are_left_out() -> None:
    quads = [apart(40, 100), alike(40, 100), in_a_row(40, 160), [[99], [100], [101], [NONE - 1]]]
    for max_blocks in (0, 1, 63, 64, 65, 100, 101):
        check(quads, 40, max_blocks)
    quads = [apart(40, 70_000), [[32_767, 32_768], [65_535], [65_536], [69_999]]]
    for max_blocks in (32_767, 32_768, 32_769, 65_536, 65_537, 1 << 24):
        check(quads, 40, max_blocks, 160)


def test_the_largest_id() -> None:
    check([[[(1 << 24) - 1], [5, (1 << 24) - 2], [(1 << 24) - 1], []]], 2, 1 << 24, 8)


def test_entries_past_the_width_are_lost() -> None:
    quads = [apart(100, 400), alike(100, 400), none(100, 400)]
    for width in (0, 1, 31, 32, 33, 200):
        check(quads, 100, 400, width)


def test_ranks_are_unsigned() -> None:
    everything = list(range(40_000))
    check([[everything, everything[::2], everything[:33_000], [39_999]]], 40_000, 40_000)


def test_many_quads_and_none() -> None:
    quads = [[some((i * 7 + r) % 9, 50, i + r) for r in range(4)] for i in range(700)]
    check(quads, 8, 50)
    assert made([], 8, 50, 32).counts.shape == (0, 2)


def cost_of(quad: Quad, in_two: bool) -> int:
    """Of scoring its lists, in percent of a block for a quad."""
    rows = [set(row) for row in quad]
    pairs = [rows[0] | rows[1], rows[2] | rows[3]]
    return PAIR_COST * sum(map(len, pairs)) if in_two else 100 * len(pairs[0] | pairs[1])


@pytest.mark.parametrize(("n", "below"), [(1, 40), (100, 600), (2048, 32_768), (2048, 70_000)])
def test_rows_with_little_in_common_get_two_lists(n: int, below: int) -> None:
    quads = [[row[:n] for row in make(n, below)] for make in QUADS.values()]
    width = 4 * n + RANK_EVERY
    got = made(quads, n, below, width, pairs=True)
    in_two = [count >= 0 for count in got.counts[:, 1].tolist()]
    for quad, two in zip(quads, in_two, strict=True):
        assert cost_of(quad, two) <= cost_of(quad, not two)
    if n > 1:
        chosen = dict(zip(QUADS, in_two, strict=True))
        assert chosen["two_and_two"]
        assert chosen["in_a_row"]
        assert not chosen["alike"]
        assert not chosen["none"]
    for one, expected in zip(got, model(quads, below, width, in_two), strict=True):
        assert torch.equal(one, expected)


@pytest.mark.parametrize(("width", "fits"), [(200, False), (227, False), (228, True), (400, True)])
def test_two_lists_have_to_fit(width: int, fits: bool) -> None:
    quad = [list(range(100)), list(range(50)), list(range(200, 300)), list(range(250, 300))]
    want = model([quad], 400, width, [fits])
    assert want.counts.tolist() == ([[100, 100]] if fits else [[200, -1]])
    for got, expected in zip(made([quad], 100, 400, width, pairs=True), want, strict=True):
        assert torch.equal(got, expected)
