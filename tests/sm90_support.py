# SPDX-License-Identifier: Apache-2.0
"""What the tests of the sm90 backend share: inputs of two layers, and what it selects from."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from sparse_indexer import (
    IndexQ,
    PrefillIndexerInputs,
    PrefillPlan,
    make_candidate_indexer,
    quad_scoring,
)
from sparse_indexer.backends.sm90 import Sm90Indexer
from sparse_indexer.formats import KeyFormat
from sparse_indexer.inputs import BLOCK_SIZE, flat_index_k
from sparse_indexer.ops.topk import topk
from sparse_indexer.protocol import CandidateIndexer
from sparse_indexer.testing import (
    make_inputs,
    palette_keys,
    palette_queries,
    random_queries,
    with_queries,
)
from sparse_indexer.testing.data import Layout

DEVICE = torch.device("cuda:0")
POISON = 7
TOLERANCE = 5e-4  # of a row's largest |logit|: Hopper's fp8 tensor cores against fp64

needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability(0) != (9, 0),
    reason="needs compute capability 9.0",
)


def sm90(**options: int) -> Sm90Indexer:
    """What `auto` makes on Hopper."""
    indexer = make_candidate_indexer(DEVICE, **options)
    assert isinstance(indexer, Sm90Indexer)
    assert indexer.name == "sm90"
    return indexer


class Layers(NamedTuple):
    """A source and a consumer with other queries over the same keys."""

    source: PrefillIndexerInputs
    consumer: PrefillIndexerInputs


def layers(
    lens: Sequence[Sequence[int]],
    form: KeyFormat = "fp8",
    *,
    queries: KeyFormat | None = None,
    heads: int = 32,
    palette: bool = False,
    layout: Layout = "planar",
    seed: int = 0,
) -> Layers:
    """Per request, the lengths its rows see; logits are exact with a palette, else normal."""
    keys = []
    for i, request in enumerate(lens):
        positions = max(request, default=0)
        if palette:
            keys.append(palette_keys(positions, form, seed=100 * seed + i, device=DEVICE))
            continue
        generator = torch.Generator(DEVICE).manual_seed(100 * seed + i)
        values = torch.randn(positions, 128, device=DEVICE, generator=generator)
        values *= torch.rand(positions, 1, device=DEVICE, generator=generator) + 0.5
        keys.append(flat_index_k(values, form))
    flat = [n for request in lens for n in request]
    make = palette_queries if palette else random_queries
    of_layers = [
        make(len(flat), heads, queries or form, seed=1000 + 100 * seed + i, device=DEVICE)
        for i in range(2)
    ]
    positions_of_rows, counts = [n - 1 for n in flat], [len(request) for request in lens]
    source = make_inputs(*of_layers[0], keys, positions_of_rows, counts, layout=layout)
    return Layers(source, with_queries(source, *of_layers[1]))


def pick(inputs: PrefillIndexerInputs, rows: Sequence[int]) -> PrefillIndexerInputs:
    """These rows, in this order, of the same requests and keys."""
    plan, q = inputs.plan, inputs.index_q
    index = torch.tensor(rows, dtype=torch.long, device=DEVICE)
    of_row = plan.request_of_row[index]
    picked = PrefillPlan(
        compressed_lens=plan.compressed_lens[index],
        request_of_row=of_row,
        rows_per_request=torch.bincount(of_row, minlength=plan.num_requests).tolist(),
        context_lens=plan.context_lens,
        page_table=plan.page_table,
        key_starts=plan.key_starts,
        request_starts=plan.request_starts,
    )
    queries = IndexQ(q.values[index], None if q.scales is None else q.scales[index])
    return PrefillIndexerInputs(picked, queries, inputs.head_weights[index], inputs.index_k)


def poisoned(inputs: PrefillIndexerInputs, columns: int) -> torch.Tensor:
    shape = (inputs.plan.num_rows, columns)
    return torch.full(shape, POISON, dtype=torch.int32, device=DEVICE)


class Results(NamedTuple):
    """All that an indexer writes, row by row."""

    blocks: torch.Tensor
    own: torch.Tensor
    selected: torch.Tensor
    full: torch.Tensor


def same(a: Results, b: Results) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run(indexer: CandidateIndexer, source: PrefillIndexerInputs, consumer: Any) -> Results:
    own, selected, full = (poisoned(source, indexer.topk) for _ in range(3))
    candidates = indexer.publish_prefill(source, own)
    indexer.select_prefill(candidates, consumer, selected)
    indexer.topk_prefill(consumer, full)
    return Results(candidates.blocks, own, selected, full)


class Call(NamedTuple):
    """A call of `topk`, as the backend made it; what it wrote is in `out`."""

    keys: torch.Tensor
    lens: torch.Tensor
    options: dict[str, Any]

    @property
    def of_blocks(self) -> bool:
        return self.options.get("force_last", False)


@contextmanager
def spying() -> Iterator[list[Call]]:
    """The calls of `topk` that the backend makes meanwhile."""
    calls: list[Call] = []

    def kept(value: object) -> object:
        return value.clone() if isinstance(value, torch.Tensor) else value

    def spy(keys: torch.Tensor, lens: torch.Tensor, **options: Any) -> None:
        before = keys.clone()
        topk(keys, lens, **options)
        options = {name: kept(value) for name, value in options.items()}
        calls.append(Call(before, lens.clone(), options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quad_scoring, "topk", spy)
        yield calls


def own_logits(inputs: PrefillIndexerInputs) -> torch.Tensor:
    """`[rows, max(context_lens)]` float32: what sm90 selects from, if all blocks are candidates.

    NaN where a row sees nothing.
    """
    longest = max(inputs.plan.context_lens, default=0)
    indexer = sm90(topk=1, topk_blocks=max(1, -(-longest // BLOCK_SIZE)))
    candidates = indexer.publish_prefill(inputs)
    with spying() as calls:
        indexer.select_prefill(candidates, inputs, poisoned(inputs, 1))
    logits = torch.full((inputs.plan.num_rows, longest), torch.nan, device=DEVICE)
    for call in calls:
        assert not call.of_blocks
        slots = (call.options["rows"] >= 0).nonzero().flatten()
        rows = call.options["rows"][slots].long()
        columns = torch.arange(call.keys.shape[1], device=DEVICE)
        blocks = call.options["blocks"][slots][:, columns // BLOCK_SIZE].long()
        positions = blocks * BLOCK_SIZE + columns % BLOCK_SIZE
        seen = positions < call.lens[slots][:, None]
        of_row = rows[:, None].expand_as(positions)
        logits[of_row[seen], positions[seen]] = call.keys[slots][seen]
    return logits
