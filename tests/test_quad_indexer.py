# SPDX-License-Identifier: Apache-2.0
"""Candidates of the backends that score quads, on a CPU: what is read when, and recorded."""

from contextlib import nullcontext

import pytest
import torch
from sm100_support import exact_layers, mask

from sparse_indexer import PrefillPlan, plan_prefill
from sparse_indexer.backends import quad_indexer
from sparse_indexer.backends.quad_indexer import QuadIndexer, _QuadCandidates
from sparse_indexer.lasting import Ready
from sparse_indexer.quad_scoring import WGMMA
from sparse_indexer.quads import Quads, Tables


def no_quads(plan: PrefillPlan) -> Quads:
    none = torch.empty(0, dtype=torch.int32)
    slots = torch.arange(plan.num_rows, dtype=torch.int32)
    return Quads((), none, slots, none, none, none, none, none)


def no_tables(quads: Quads, n: int) -> Tables:
    none = torch.empty(0, 4, n, dtype=torch.int32)
    return Tables(none, none, none, none)


def test_a_tail_of_another_stream_is_waited_for_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, waited = [], set()
    monkeypatch.setattr(quad_indexer, "make_quads", no_quads)
    monkeypatch.setattr(quad_indexer, "plan_tables", no_tables)
    monkeypatch.setattr(quad_indexer, "fill_tables", lambda *_, **__: None)
    indexer = QuadIndexer.__new__(QuadIndexer)
    indexer.device = torch.device("cpu")
    monkeypatch.setattr(QuadIndexer, "kernels", WGMMA, raising=False)
    indexer._lasting = nullcontext
    plan = plan_prefill([10, 11, 12], [2, 1], request_starts=[0, 5])
    source = _QuadCandidates(plan, no_quads(plan), no_tables(no_quads(plan), 8), WGMMA)
    tail = indexer.prefill_tail(source, [1, 1])
    assert source.places == ()  # nobody else has what is read

    def wait(ready: Ready) -> None:
        seen.append("waited" if ready is tail.ready else "other")
        waited.update(map(id, ready.tensors))

    rows_by_request = PrefillPlan.rows_by_request

    def read(plan: PrefillPlan) -> torch.Tensor:
        seen.append("read")
        return rows_by_request(plan)

    monkeypatch.setattr(Ready, "wait", wait)
    monkeypatch.setattr(PrefillPlan, "rows_by_request", read)
    indexer.prefill_tail(tail, [1, 0])
    assert seen == ["waited", "read"]
    own = tail.plan
    for tensor in (own.compressed_lens, own.request_of_row, own.request_starts, own.key_starts):
        assert id(tensor) in waited
    assert {id(tail.tables.blocks), id(tail.quads.slots)} <= waited


def test_positions_are_not_written_into_the_blocks_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose candidates hold what others will read."""
    monkeypatch.setattr(QuadIndexer, "kernels", WGMMA, raising=False)
    indexer = QuadIndexer.__new__(QuadIndexer)
    indexer.device, indexer.topk = torch.device("cpu"), 16
    source, consumer = exact_layers([[700 - i for i in range(16)]])
    candidates = mask().publish_prefill(source)
    with pytest.raises(ValueError, match=r"^out_positions: expected memory of its own"):
        indexer.select_prefill(candidates, consumer, candidates.blocks[:, :16])
