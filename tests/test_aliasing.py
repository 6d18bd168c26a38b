# SPDX-License-Identifier: Apache-2.0
"""Outputs in the memory of what is read."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from sm100_support import exact_layers, mask, sm100

from sparse_indexer.aliasing import addresses, expect_apart


def refused(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        expect_apart("out", tensor, "ours", lambda: (other,), (addresses(other),))
    except ValueError:
        return True
    return False


def test_memory_is_shared_where_an_element_is() -> None:
    memory = torch.zeros(20, 100, dtype=torch.int32)
    columns, rows = memory[:, :30], memory[3:7]
    assert refused(columns, rows)
    assert refused(rows, columns)
    assert refused(memory[3], memory[3:])
    assert refused(memory[:, 29:31], columns)
    assert not refused(memory[:, 30:], columns)  # side by side
    assert not refused(columns, memory[:, 30:])
    assert not refused(memory[::2], memory[1::2])
    assert not refused(memory[:7], memory[7:])
    assert not refused(columns, memory.clone())
    assert not refused(columns, memory[:0])
    assert not refused(memory[5, :0], memory)
    assert refused(memory.view(torch.uint8)[5, 3:4], memory)


def test_addresses_are_those_of_the_first_and_last_byte() -> None:
    memory = torch.zeros(20, 100, dtype=torch.int32)
    at = memory.data_ptr()
    assert addresses(memory) == (at, at + 8000)
    assert addresses(memory[2:4, 5:7]) == (at + 820, at + 1228)
    first, stop = addresses(memory[3:3])
    assert first == stop


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
    where = r"^out_positions: expected memory that is not the "
    with pytest.raises(ValueError, match=where + "candidates', got a tensor of the same memory$"):
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
        with pytest.raises(ValueError, match=where + "plan's, got a tensor of the same memory$"):
            call(memory[:, :16])
        call(memory[:, 20:36])  # beside it
    assert torch.equal(memory[0, :16], plan.compressed_lens)
    assert len(plan.addresses) == len(plan.tensors) == 4
