# SPDX-License-Identifier: Apache-2.0
"""Outputs in the memory of what is read."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from sm100_support import COPIES, exact_layers, mask, sm100

from sparse_indexer.aliasing import place, shares_memory


def shares(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return shares_memory(tensor, [], [place(other)])


def test_memory_is_shared_where_an_element_is() -> None:
    memory = torch.zeros(20, 100, dtype=torch.int32)
    columns, rows = memory[:, :30], memory[3:7]
    assert shares(columns, rows)
    assert shares(rows, columns)
    assert shares(memory[3], memory[3:])
    assert shares(memory[:, 29:31], columns)
    assert not shares(memory[:, 30:], columns)  # side by side
    assert not shares(columns, memory[:, 30:])
    assert not shares(memory[::2], memory[1::2])
    assert not shares(memory[:7], memory[7:])
    assert not shares(columns, memory.clone())
    assert not shares(columns, memory[:0])
    assert not shares(memory[5, :0], memory)
    assert shares(memory.view(torch.uint8)[5, 3:4], memory)
    assert shares(memory.view(torch.uint8)[5, 399:], memory)
    assert not shares(memory.view(torch.uint8)[5, 120:], columns)


def test_a_place_is_from_the_first_to_the_last_byte() -> None:
    memory = torch.zeros(20, 100, dtype=torch.int32)
    at = memory.data_ptr()
    assert place(memory)[:2] == (at, at + 8000)
    assert place(memory[2:4, 5:7])[:2] == (at + 820, at + 1228)
    assert place(memory.view(torch.uint8)[1:3, 4:9])[:2] == (at + 404, at + 809)
    first, stop, tensor = place(memory[3:3])
    assert first == stop
    assert tensor.shape == (0, 100)


@pytest.mark.parametrize(
    "make",
    [lambda: mask(memory_budget=4 << 20), lambda: sm100("0.2.5")],
    ids=["mask", "sm100"],
)
def test_positions_are_not_written_into_what_is_read(make: Callable[[], Any]) -> None:
    """Of candidates, and of each tensor of a plan."""
    source, consumer = exact_layers([[700 - i for i in range(16)]], request_starts=[3])
    indexer = make()
    out = torch.full((16, 16), 7, dtype=torch.int32)
    candidates = indexer.publish_prefill(source, out)
    refused = r"^out_positions: expected memory of its own, .*, got a tensor of the same memory$"
    with pytest.raises(ValueError, match=refused):
        indexer.select_prefill(candidates, consumer, candidates.blocks[:, 8:])
    plan = source.plan
    memory = torch.zeros(16, 40, dtype=torch.int32)
    memory[0, :16] = plan.compressed_lens
    shared = msgspec.structs.replace(plan, compressed_lens=memory[0, :16])
    layer = msgspec.structs.replace(source, plan=shared)
    for call in (
        lambda out: indexer.publish_prefill(layer, out),
        lambda out: indexer.select_prefill(candidates, layer, out),
        lambda out: indexer.topk_prefill(layer, out),
    ):
        with pytest.raises(ValueError, match=refused):
            call(memory[:, :16])
        call(memory[:, 20:36])  # beside it
    assert torch.equal(memory[0, :16], plan.compressed_lens)
    assert len(plan.places) == len(plan.tensors) == 4


@COPIES
def test_copies_of_candidates_have_places_of_their_own(copied: Callable[[Any], Any]) -> None:
    source, consumer = exact_layers([[700 - i for i in range(16)]])
    indexer = mask()
    candidates, out = indexer.publish_prefill(source), torch.zeros(16, 16, dtype=torch.int32)
    indexer.select_prefill(candidates, consumer, out)
    other = copied(candidates)
    other.plan = candidates.plan
    assert torch.equal(other.blocks, candidates.blocks)
    with pytest.raises(ValueError, match=r"^out_positions: expected memory of its own"):
        indexer.select_prefill(other, consumer, other.blocks[:, 8:])
    want = out.clone()
    indexer.select_prefill(other, consumer, out)
    assert torch.equal(out, want)
