# SPDX-License-Identifier: Apache-2.0
"""Which route the sm70 backend takes, and what it says of it; stand-ins for both, on a CPU."""

import logging
from collections.abc import Iterator

import pytest
import torch
from emulation import on_cpu

from sparse_indexer import PrefillIndexerInputs
from sparse_indexer.backends import sm70
from sparse_indexer.backends.gemm_indexer import GemmCandidates
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.backends.sm70 import FusedIndexer, Sm70Indexer
from sparse_indexer.protocol import Candidates
from sparse_indexer.testing import make_inputs, palette_keys, palette_queries


class Spy(MaskIndexer):
    """Writes down what it is asked for."""

    def __init__(self, log: list[str], route: str) -> None:
        super().__init__("cpu", topk=4, topk_blocks=6)
        self.log, self.route = log, route

    def publish_prefill(self, inputs, out_positions=None):  # type: ignore[no-untyped-def]
        self.log.append(f"publish {self.route}")
        return super().publish_prefill(inputs, out_positions)

    def select_prefill(self, candidates, inputs, out_positions):  # type: ignore[no-untyped-def]
        self.log.append(f"select {self.route}")
        super().select_prefill(candidates, inputs, out_positions)

    def prefill_tail(self, candidates, tail_lens):  # type: ignore[no-untyped-def]
        self.log.append(f"tail {self.route}")
        return super().prefill_tail(candidates, tail_lens)

    def topk_prefill(self, inputs, out_positions):  # type: ignore[no-untyped-def]
        self.log.append(f"topk {self.route}")
        super().topk_prefill(inputs, out_positions)


def inputs_of(heads: int) -> PrefillIndexerInputs:
    queries = palette_queries(2, heads, "fp8", seed=1)
    return make_inputs(*queries, [palette_keys(90, "fp8", seed=2)], [89, 70], [2])


def spied(route: str) -> tuple[Sm70Indexer, list[str]]:
    log: list[str] = []
    fused = None if route == "gemm" else Spy(log, "fused")
    gemm = None if route == "fused" else Spy(log, "gemm")
    return on_cpu(Sm70Indexer, route=route, topk=4, _fused=fused, _gemm=gemm), log


@pytest.fixture
def fresh_log() -> Iterator[None]:
    sm70._log_route.cache_clear()
    yield
    sm70._log_route.cache_clear()


@pytest.mark.parametrize(
    ("route", "heads", "taken"),
    [
        ("auto", 1, "fused"),
        ("auto", 64, "fused"),
        ("auto", 65, "gemm"),
        ("auto", 128, "gemm"),
        ("gemm", 32, "gemm"),
        ("gemm", 65, "gemm"),
        ("fused", 65, "fused"),  # which refuses them
    ],
)
def test_the_route_taken(route: str, heads: int, taken: str) -> None:
    indexer, log = spied(route)
    inputs, out = inputs_of(heads), torch.empty(2, 4, dtype=torch.int32)
    candidates = indexer.publish_prefill(inputs)
    indexer.select_prefill(candidates, inputs, out)
    indexer.topk_prefill(inputs, out)
    assert log == [f"publish {taken}", f"select {taken}", f"topk {taken}"]


@pytest.mark.parametrize(
    ("route", "of_gemm", "taken"),
    [
        ("auto", False, "fused"),
        ("auto", True, "gemm"),
        ("fused", True, "fused"),
        ("gemm", False, "gemm"),
    ],
)
def test_a_tail_is_cut_by_the_route_that_published(route: str, of_gemm: bool, taken: str) -> None:
    indexer, log = spied(route)
    plan, blocks = inputs_of(3).plan, torch.zeros(2, 6, dtype=torch.int32)
    candidates = GemmCandidates(plan, blocks) if of_gemm else Candidates(blocks, plan)
    indexer.prefill_tail(candidates, [1])
    assert log == [f"tail {taken}"]


def test_each_route_is_logged_once_per_device(
    fresh_log: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sparse_indexer")
    out = torch.empty(2, 4, dtype=torch.int32)
    for _ in range(2):
        indexer, _ = spied("auto")
        for heads in (64, 65, 32, 96):
            indexer.topk_prefill(inputs_of(heads), out)
            indexer.publish_prefill(inputs_of(heads))
    assert caplog.messages == [
        "sm70 scores by the fused route on cpu",
        "sm70 scores by the GEMM route on cpu",
    ]
    indexer.device = torch.device("cuda", 1)
    indexer.topk_prefill(inputs_of(3), out)
    assert caplog.messages[2:] == ["sm70 scores by the fused route on cuda:1"]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^route: expected 'auto' or 'fused' or 'gemm', got 'x'$"):
        Sm70Indexer("cuda", route="x")  # type: ignore[arg-type]
    for route in ("auto", "fused", "gemm"):
        with pytest.raises(ValueError, match=r"^device: expected a CUDA device, got cpu$"):
            Sm70Indexer("cpu", route=route)  # type: ignore[arg-type]
    fused = on_cpu(FusedIndexer, topk=4, topk_blocks=6, memory_budget=1 << 20)
    with pytest.raises(ValueError, match=r"^index_q values: expected at most 64 heads"):
        fused.publish_prefill(inputs_of(65))
    indexer, _ = spied("auto")
    with pytest.raises(ValueError, match=r"^inputs: expected PrefillIndexerInputs, got None$"):
        indexer.publish_prefill(None)  # type: ignore[arg-type]
