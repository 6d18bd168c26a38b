# SPDX-License-Identifier: Apache-2.0
"""How quads are laid out in a budget, before there is a tensor."""

import random
from functools import partial

import pytest
import torch
from budgets import named_budget

from sparse_indexer.quad_scopes import Scoring, _planned
from sparse_indexer.quads import _layout

MiB = 1 << 20


def plan(rows: list[int], contexts: list[int], budget: int, **changed: int) -> list[object]:
    options = {"few": 65, "tables": True, "dense": True, "select": True, **changed}
    ctas = options.pop("ctas", 0)
    call = Scoring(torch.uint8, 32, 100, **options, one_kernel=ctas > 0, budget=budget)
    requests = _layout(tuple(rows), tuple(contexts))
    made, nbytes = _planned(tuple(rows), requests, call, ctas, 8)
    assert nbytes <= budget
    covered = [quad for one in made for tile in one.tiles for quad in range(tile.start, tile.stop)]
    assert covered == list(range(sum(request.quads for request in requests)))
    assert [n for one in made for n in range(one.group.begin, one.group.stop) if rows[n]] == [
        n for n, count in enumerate(rows) if count
    ]
    return [(one.scored, one.own_tables) for one in made]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tables": False, "few": 100},
        {"select": False, "few": 100},
        {"dense": False, "few": 100},
        {"dense": False, "few": 100, "ctas": 2},
    ],
    ids=["own positions", "topk", "publish", "select", "select by one kernel"],
)
def test_the_budget_that_a_refusal_names_is_the_least_that_works(options: dict[str, int]) -> None:
    """Of contexts around the 100 blocks that are published, and others; the longest is not always
    what takes the most.
    """
    chance = random.Random(0)
    for _ in range(100):
        count = chance.randint(1, 6)
        rows = [chance.choice([0, 1, 5, 16, 17, 90]) for _ in range(count)]
        sizes = [1, 300, 799, 800, 801, 860, 1100, 9000]
        contexts = [chance.choice(sizes) if n else 0 for n in rows]
        if not any(rows):
            assert plan(rows, contexts, 1, **options) == []
            continue
        least = named_budget(partial(plan, rows, contexts, 1, **options), 1)
        plan(rows, contexts, least, **options)
        plan(rows, contexts, least + chance.randint(0, MiB), **options)
        less = partial(plan, rows, contexts, least - 1, **options)
        assert named_budget(less, least - 1) == least


def test_few_blocks_are_scored_only_of_contexts_with_more_than_are_published() -> None:
    assert plan([20], [801], 64 * MiB) == [(65, True)]
    assert plan([20], [800], 64 * MiB) == [(100, False)]
    assert plan([20, 3], [900, 400], 64 * MiB) == [(65, True)]
    assert plan([20], [801], 64 * MiB, few=100) == [(100, False)]
    assert plan([20], [801], 64 * MiB, few=101) == [(100, False)]
    assert plan([20], [800], 64 * MiB, tables=False) == [(100, True)]
