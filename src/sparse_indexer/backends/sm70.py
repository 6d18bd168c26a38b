# SPDX-License-Identifier: Apache-2.0
"""The `sm70` backend: Volta's and Turing's tensor cores score, no matrix of logits is written."""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal

import torch

from sparse_indexer.backends.gemm_indexer import GemmCandidates, GemmIndexer
from sparse_indexer.backends.quad_indexer import QuadIndexer
from sparse_indexer.errors import describe, mismatch
from sparse_indexer.inputs import PrefillIndexerInputs
from sparse_indexer.plan import HostInts
from sparse_indexer.protocol import CandidateIndexer, Candidates
from sparse_indexer.quad_scoring import MAX_HEADS, MMA_SYNC

_log = logging.getLogger("sparse_indexer")

Route = Literal["auto", "fused", "gemm"]
_ROUTES = ("auto", "fused", "gemm")


class FusedIndexer(QuadIndexer):
    """`CandidateIndexer` by the kernels that score with mma.sync; see `Sm70Indexer`."""

    name = "sm70"
    kernels = MMA_SYNC


class Sm70Indexer:
    """`CandidateIndexer` on Volta and Turing (compute capability 7.0 and 7.5).

    Products are those of float16, sums float32. fp8 and fp4 keys and queries come to it as what
    they store (`index_k` says when fp4 is rounded); of bf16 it makes float16 with a scale a
    position and a query. It runs on newer GPUs, too, if made by name of its class.

    There are two routes. The *fused* kernels take at most 64 heads, padded with zeros to 32 or 64,
    and keep scores of heads in float32 in their registers. The *GEMM* route takes any number:
    cuBLAS writes each head's score, which is **rounded to float16**, and `relu_head_sum` adds them
    up in float32, a request at a time, so many short ones take many launches. cuBLAS may sum
    otherwise for other shapes of a call, so there bits of a logit may depend on the other rows and
    on the budget (and a row that is published and then selected from may, in such last bits,
    differ from its own positions); with the fused route they depend on the row and the position
    alone. `allow_fp16_reduced_precision_reduction` and `allow_fp16_accumulation` of
    `torch.backends.cuda.matmul` are heeded.

    With the fused route ReLU is x + |x|: infinite keys, or products that overflow float32, may give
    NaN where the formula gives an infinity or 0. With the GEMM route given float16 keys and queries
    may overflow: a head's score beyond 2^24 is infinite.

    Args:
        device: a CUDA device.
        topk: positions a row selects.
        topk_blocks: blocks of 8 positions a row publishes.
        memory_budget: bytes of scratch beside inputs, outputs and tables, at most. The keys of a
            request are packed in it: 144 bytes a position, 272 in halves, 260 with the GEMM route.
            Tables are what a publish returns (the candidates of another backend are put into
            such), and 16 bytes a row, 30 with the GEMM route. cuBLAS's workspace is torch's.
        route: `"auto"`: fused, or GEMM if there are more than 64 heads; or one of the two for all.
            Which one is taken is logged once per device, at level INFO of `sparse_indexer`.
            Candidates of either are taken by both.

    Its kernels are built and loaded here, so that calls need no compiler and can be captured.

    Raises:
        ValueError: an option is out of range; from the methods also: more than 64 heads with
            `route="fused"`, or a budget below what the longest request takes (the message says how
            much that is).
        BackendUnavailable: a kernel can be neither built nor loaded.
    """

    name = "sm70"

    def __init__(
        self,
        device: torch.device | str,
        *,
        topk: int = 512,
        topk_blocks: int = 2048,
        memory_budget: int = 256 << 20,
        route: Route = "auto",
    ) -> None:
        if route not in _ROUTES:
            raise mismatch("route", " or ".join(map(repr, _ROUTES)), describe(route))
        options = {"topk": topk, "topk_blocks": topk_blocks, "memory_budget": memory_budget}
        self.route = route
        self._fused = None if route == "gemm" else FusedIndexer(device, **options)
        self._gemm = None if route == "fused" else GemmIndexer(device, **options)
        made = self._fused or self._gemm
        assert made is not None
        self.device, self.topk, self.topk_blocks = made.device, made.topk, made.topk_blocks
        self.memory_budget = made.memory_budget

    def publish_prefill(
        self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor | None = None
    ) -> Candidates:
        """See `CandidateIndexer.publish_prefill`. The tables live in a pool of their own."""
        return self._of(inputs).publish_prefill(inputs, out_positions)

    def select_prefill(
        self, candidates: Candidates, inputs: PrefillIndexerInputs, out_positions: torch.Tensor
    ) -> None:
        """See `CandidateIndexer.select_prefill`. Takes any backend's candidates."""
        self._of(inputs).select_prefill(candidates, inputs, out_positions)

    def prefill_tail(self, candidates: Candidates, tail_lens: HostInts) -> Candidates:
        """See `CandidateIndexer.prefill_tail`. By the route that published, if it is here."""
        first, other = self._fused, self._gemm
        by_gemm = first is None or (other is not None and isinstance(candidates, GemmCandidates))
        route: CandidateIndexer | None = other if by_gemm else first
        assert route is not None
        return route.prefill_tail(candidates, tail_lens)

    def topk_prefill(self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor) -> None:
        """See `CandidateIndexer.topk_prefill`."""
        self._of(inputs).topk_prefill(inputs, out_positions)

    def _of(self, inputs: PrefillIndexerInputs) -> CandidateIndexer:
        """The route for these inputs, which it checks."""
        many = isinstance(inputs, PrefillIndexerInputs) and inputs.num_heads > MAX_HEADS
        if self._gemm is not None and (many or self._fused is None):
            _log_route("GEMM", str(self.device))
            return self._gemm
        assert self._fused is not None
        _log_route("fused", str(self.device))
        return self._fused


@cache
def _log_route(route: str, device: str) -> None:
    _log.info("sm70 scores by the %s route on %s", route, device)
