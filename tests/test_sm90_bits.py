# SPDX-License-Identifier: Apache-2.0
"""The sm90 backend's bits: keys are maxima of logits, a row depends on itself alone (rule 5)."""

from collections.abc import Callable, Sequence

import pytest
import torch
from budgets import named_budget
from sm90_support import (
    DEVICE,
    Layers,
    Results,
    layers,
    needs_hopper,
    own_logits,
    pick,
    poisoned,
    run,
    same,
    sm90,
    spying,
)

from sparse_indexer.backends.sm90 import Sm90Indexer
from sparse_indexer.formats import FORMATS, INT32_MAX, KeyFormat
from sparse_indexer.inputs import BLOCK_SIZE

pytestmark = [pytest.mark.gpu, needs_hopper]

MiB = 1 << 20
LENS = [[5000 - 7 * i for i in range(50)], [], [1900 - i for i in range(20)],
        [3000 + 5 * i for i in range(37)], [0, 3, 801]]  # fmt: skip
ROWS = sum(map(len, LENS))
OPTIONS = {"topk": 64, "topk_blocks": 100}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("form", FORMATS)
def test_block_keys_are_the_maxima_of_candidate_logits(form: KeyFormat, heads: int) -> None:
    """Of every block that its row sees whole; the newest one's key is of no meaning."""
    lens = [[5000 - 7 * i for i in range(37)], [4990 + i for i in range(11)]]
    source, _ = layers(lens, form, heads=heads)
    blocks = 5000 // BLOCK_SIZE
    indexer = sm90(topk=8, topk_blocks=blocks - 1)  # all but one, else no keys are scored
    with spying() as calls:
        candidates = indexer.publish_prefill(source)
        indexer.select_prefill(candidates, source, poisoned(source, 8))
    assert [call.of_blocks for call in calls] == [True, False]
    keys, logits, tables = calls[0].keys, calls[1].keys, calls[1].options["blocks"]
    assert calls[1].lens.equal(calls[0].lens)
    maxima = logits.unflatten(1, (-1, BLOCK_SIZE)).amax(2)
    tables = tables[:, : maxima.shape[1]]
    whole = (tables != INT32_MAX) & ((tables.long() + 1) * BLOCK_SIZE <= calls[0].lens[:, None])
    assert whole.sum() > 0.99 * sum(n // BLOCK_SIZE for request in lens for n in request)
    of_tables = keys.gather(1, torch.where(whole, tables, 0).long())
    assert torch.equal(bits(of_tables[whole]), bits(maxima[whole]))


def base(form: KeyFormat, heads: int) -> Layers:
    return layers(LENS, form, heads=heads, seed=3)


def permuted(rows: int) -> list[int]:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(4)).tolist()


SUBSETS: dict[str, Sequence[int]] = {
    "permuted": permuted(ROWS),
    "reversed": range(ROWS - 1, -1, -1),
    "some": [0, 3, 4, 5, 49, 50, 69, 70, 71, 72, 90, 106, 107, 108, 109],
    "every third": range(2, ROWS, 3),
    "first request": range(50),
    "third request": range(50, 70),
    "two requests": [*range(50, 70), *range(70, 107)],
    "one row": [33],
    "twice": [*range(70, 90), *range(70, 90)],
    "none": [],
}
KINDS = [("fp8", 32), ("fp4", 64), ("bf16", 32)]


@pytest.fixture(scope="module")
def known() -> Callable[[KeyFormat, int], tuple[Layers, Results]]:
    """Inputs and what is selected of them, made once a kind."""
    made: dict[tuple[str, int], tuple[Layers, Results]] = {}

    def get(form: KeyFormat, heads: int) -> tuple[Layers, Results]:
        if (form, heads) not in made:
            both = base(form, heads)
            made[form, heads] = both, run(sm90(**OPTIONS), *both)
        return made[form, heads]

    return get


Known = Callable[[KeyFormat, int], tuple[Layers, Results]]


@pytest.mark.parametrize("name", SUBSETS)
@pytest.mark.parametrize(("form", "heads"), KINDS)
def test_other_rows_do_not_matter(known: Known, form: KeyFormat, heads: int, name: str) -> None:
    both, want = known(form, heads)
    rows = SUBSETS[name]
    got = run(sm90(**OPTIONS), *(pick(inputs, rows) for inputs in both))
    index = torch.tensor(list(rows), dtype=torch.long, device=DEVICE)
    assert same(got, Results(*(of_all[index] for of_all in want)))


@pytest.mark.parametrize(("form", "heads"), KINDS)
def test_logits_have_the_same_bits_among_other_rows(form: KeyFormat, heads: int) -> None:
    source, _ = base(form, heads)
    want = own_logits(source)
    order = SUBSETS["permuted"]
    assert torch.equal(bits(own_logits(pick(source, order))), bits(want[order]))
    alone = own_logits(pick(source, [70]))
    assert torch.equal(bits(alone), bits(want[70:71]))


@pytest.mark.parametrize(("form", "heads"), KINDS)
def test_the_budget_does_not_matter(known: Known, form: KeyFormat, heads: int) -> None:
    (source, consumer), want = known(form, heads)
    tiles = []
    for budget in (2 * MiB if form == "bf16" else MiB, 3 * MiB, 1 << 30):
        with spying() as calls:
            got = run(sm90(**OPTIONS, memory_budget=budget), source, consumer)
        assert same(got, want)
        tiles.append(len(calls))
    # Publish: keys for the table, those for its own positions, logits; topk: keys, logits; select.
    assert tiles[0] > tiles[1] >= tiles[2] == 6


@pytest.mark.parametrize(("form", "heads"), KINDS)
def test_the_run_does_not_matter(known: Known, form: KeyFormat, heads: int) -> None:
    both, want = known(form, heads)
    indexer = sm90(**OPTIONS)
    for _ in range(10):
        assert same(run(indexer, *both), want)


@pytest.mark.parametrize(("topk", "topk_blocks"), [(64, 100), (100, 64), (0, 1), (1, 1), (2, 40)])
def test_the_options_do_not_matter_to_logits(topk: int, topk_blocks: int) -> None:
    """What is published follows from the same logits, whatever its size."""
    source, consumer = base("fp8", 32)
    indexer = sm90(topk=topk, topk_blocks=topk_blocks)
    got = run(indexer, source, consumer)
    few, many = run(sm90(**OPTIONS), source, consumer).blocks, got.blocks
    if many.shape[1] < few.shape[1]:
        few, many = many, few
    for row, (some, more) in enumerate(zip(few.tolist(), many.tolist(), strict=True)):
        assert set(some) <= set(more) | {INT32_MAX}, row


CONTEXTS: dict[str, list[list[int]]] = {
    "one request": [[3000 + i for i in range(100)]],
    "the longest last": [[100], [900], [5000], [20]],
    "many short ones": [[60 + i] for i in range(40)],
    "rows of one request only": [[], [], [700], []],
    "more blocks than are published, and as many": [[860 + i for i in range(20)], [800, 799]],
}
METHODS: dict[str, Callable[[Sm90Indexer, Layers], None]] = {
    "publish": lambda indexer, both: indexer.publish_prefill(both.source) and None,
    "publish, own positions": lambda indexer, both: (
        indexer.publish_prefill(both.source, poisoned(both.source, indexer.topk)) and None
    ),
    "select": lambda indexer, both: indexer.select_prefill(
        sm90(**OPTIONS).publish_prefill(both.source),
        both.consumer,
        poisoned(both.source, indexer.topk),
    ),
    "topk": lambda indexer, both: indexer.topk_prefill(
        both.consumer, poisoned(both.source, indexer.topk)
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("contexts", CONTEXTS)
@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_a_budget_too_small_is_refused_and_the_named_one_works(
    form: KeyFormat, contexts: str, method: str
) -> None:
    both, call = layers(CONTEXTS[contexts], form), METHODS[method]
    least = named_budget(lambda: call(sm90(**OPTIONS, memory_budget=1), both), 1)
    less = sm90(**OPTIONS, memory_budget=least - 1)
    assert named_budget(lambda: call(less, both), least - 1) == least
    call(sm90(**OPTIONS, memory_budget=least), both)
    assert least < 2 * MiB
