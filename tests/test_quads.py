# SPDX-License-Identifier: Apache-2.0
"""Rows by request, four at a time, against a plain Python model."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from gpu_support import no_synchronization

from sparse_indexer import PrefillPlan
from sparse_indexer.ops.row_quads import row_quads
from sparse_indexer.quads import make_quads

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
POISON = 7
INT32 = 2**31
OUTPUTS = ("rows", "slots", "slot_lens", "lens", "first", "request_lens", "request_first")

Requests = list[tuple[int, int, int, int]]  # first quad, quads, first block, positions held


class Case(NamedTuple):
    request_of_row: Sequence[int]
    lens: Sequence[int]
    requests: Requests
    quads: int


def model(case: Case) -> dict[str, list[int]]:
    """What each output holds, flat; what nobody writes stays poisoned."""
    rows, count = len(case.lens), len(case.requests)
    sizes = (case.quads * 4, rows, case.quads * 4, case.quads, case.quads, count, count)
    want = {name: [POISON] * size for name, size in zip(OUTPUTS, sizes, strict=True)}
    for request, (first_quad, quads, first_block, held) in enumerate(case.requests):
        own = [row for row in range(rows) if case.request_of_row[row] == request][: 4 * quads]
        longest = 0
        for i in range(4 * quads):
            slot, row = 4 * first_quad + i, own[i] if i < len(own) else -1
            seen = min(max(case.lens[row], 0), held) if row >= 0 else 0
            want["rows"][slot], want["slot_lens"][slot] = row, seen
            if row >= 0:
                want["slots"][row] = slot
            longest = max(longest, seen)
        for quad in range(first_quad, first_quad + quads):
            want["lens"][quad] = max(want["slot_lens"][4 * quad : 4 * quad + 4])
            want["first"][quad] = first_block
        want["request_lens"][request], want["request_first"][request] = longest, first_block
    return want


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def made(case: Case) -> dict[str, list[int]]:
    """The op's outputs, in the middle of poisoned memory that must stay as it is."""
    rows, count = len(case.lens), len(case.requests)
    shapes = ((case.quads, 4), (rows,), (case.quads, 4), (case.quads,), (case.quads,), (count,))
    outputs, buffers = {}, []
    for name, shape in zip(OUTPUTS, (*shapes, (count,)), strict=True):
        size = torch.Size(shape).numel()
        buffers.append(torch.full((size + 10,), POISON, dtype=torch.int32, device=DEVICE))
        outputs[f"out_{name}"] = buffers[-1][5 : size + 5].view(shape)
    row_quads(ints(case.request_of_row), ints(case.lens), requests=case.requests, **outputs)
    for buffer in buffers:
        assert (buffer[:5] == POISON).all()
        assert (buffer[len(buffer) - 5 :] == POISON).all()
    return {name: outputs[f"out_{name}"].flatten().tolist() for name in OUTPUTS}


def requests_of(counts: Sequence[int], held: Sequence[int], gap: int = 0) -> tuple[Requests, int]:
    """As `make_quads` lays them out, `gap` quads between two; and all quads."""
    requests, quad, block = [], 0, 0
    for rows, positions in zip(counts, held, strict=True):
        quads = -(-rows // 16) * 4
        requests.append((quad, quads, block, positions))
        quad, block = quad + quads + gap, block + -(-positions // 8)
    return requests, quad


def spread(counts: Sequence[int], order: str, seed: int = 0) -> list[int]:
    """The request of each row: one after the other, in turn, or at random."""
    if order == "in turn":
        left = list(counts)
        turns = []
        while any(left):
            for request in [i for i, rows in enumerate(left) if rows]:
                turns.append(request)
                left[request] -= 1
        return turns
    flat = [request for request, rows in enumerate(counts) for _ in range(rows)]
    if order == "at random":
        generator = torch.Generator().manual_seed(seed)
        flat = [flat[i] for i in torch.randperm(len(flat), generator=generator).tolist()]
    return flat


def case_of(counts: Sequence[int], order: str = "one after the other", gap: int = 0) -> Case:
    held = [8 * (3 + 5 * i % 11) for i in range(len(counts))]
    requests, quads = requests_of(counts, held, gap)
    of_row = spread(counts, order)
    lens = [(37 * row + 11) % (held[request] + 1) for row, request in enumerate(of_row)]
    return Case(of_row, lens, requests, quads)


def beyond_what_is_held() -> Case:
    case = case_of([17, 5])
    lens = [case.requests[r][3] + row - 8 for row, r in enumerate(case.request_of_row)]
    return case._replace(lens=[*lens[:-3], INT32 - 1, -1, -INT32])


def hostile_requests() -> Case:
    """Rows of requests that do not exist are rows of none."""
    case = case_of([20, 30], "in turn")
    of_row = list(case.request_of_row)
    of_row[3::7] = [(-1, 2, INT32 - 1, -INT32, 240)[i % 5] for i in range(len(of_row[3::7]))]
    return case._replace(request_of_row=of_row)


def more_rows_than_slots() -> Case:
    case = case_of([16, 16])
    return Case([0] * 20 + [1] * 7, list(range(27)), case.requests, case.quads)


CASES = {
    "one request": case_of([37]),
    "one row": case_of([1]),
    "ragged": case_of([0, 1, 15, 16, 17, 0, 33, 0]),
    "in turn": case_of([0, 1, 15, 16, 17, 0, 33, 0], "in turn"),
    "gaps": case_of([5, 0, 40], "at random", gap=3),
    "240 requests": case_of([1] * 240, "at random"),
    "241 requests": case_of([1] * 241, "at random"),
    "500 requests": case_of([2] * 480 + [0, 17, 1] + [0] * 17, "at random"),
    "4096 rows": case_of([4096]),
    "4097 rows": case_of([4097]),
    "9001 rows": case_of([4000, 1, 5000], "at random"),
    "beyond what is held": beyond_what_is_held(),
    "hostile requests": hostile_requests(),
    "more rows than slots": more_rows_than_slots(),
    "requests without rows": case_of([0, 0]),
    "nothing": Case([], [], [], 0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_row_quads(case: Case) -> None:
    want, got = model(case), made(case)
    for name in OUTPUTS:
        assert got[name] == want[name], name


def plan_of(counts: Sequence[int], contexts: Sequence[int], order: str) -> PrefillPlan:
    of_row = spread(counts, order)
    lens = [(37 * row + 11) % (contexts[request] + 1) for row, request in enumerate(of_row)]
    return PrefillPlan(
        compressed_lens=ints(lens),
        request_of_row=ints(of_row),
        rows_per_request=list(counts),
        context_lens=list(contexts),
        key_starts=ints([0] * len(counts)),
    )


@pytest.mark.parametrize("order", ["one after the other", "in turn", "at random"])
@pytest.mark.parametrize(
    ("counts", "contexts"),
    [
        ([1], [9]),
        ([0, 1, 15, 16, 17, 0, 33], [77, 0, 8, 1300, 7, 9, 129]),
        ([2] * 300, [*range(300)]),
        ([0, 0], [5, 0]),
        ([], []),
    ],
)
def test_make_quads(counts: list[int], contexts: list[int], order: str) -> None:
    plan = plan_of(counts, contexts, order)
    quads = make_quads(plan)
    first_quad = first_block = 0
    for request, its in enumerate(quads.requests):
        blocks = -(-contexts[request] // 8) if counts[request] else 0
        assert its == (first_quad, -(-counts[request] // 16) * 4, first_block, blocks)
        first_quad, first_block = first_quad + its.quads, first_block + blocks
    requests = [(r.first_quad, r.quads, r.first_block, 8 * r.blocks) for r in quads.requests]
    lens, of_row = plan.compressed_lens.tolist(), plan.request_of_row.tolist()
    want = model(Case(of_row, lens, requests, first_quad))
    assert quads.rows.shape == quads.slot_lens.shape == (first_quad, 4)
    for name in OUTPUTS:
        assert getattr(quads, name).flatten().tolist() == want[name], name
    assert sorted(quads.rows[quads.rows >= 0].tolist()) == list(range(plan.num_rows))


def test_make_quads_does_not_synchronize() -> None:
    plan = plan_of([3, 300], [77, 1300], "in turn")
    make_quads(plan)
    with no_synchronization():
        make_quads(plan)
