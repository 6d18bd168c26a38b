# SPDX-License-Identifier: Apache-2.0
"""The protocol every backend obeys.

The rules of a selection (bit for bit given the same logits):

1. Used entries come first, ascending, unique, each visible to its row; the rest are -1. Exactly
   `min(topk, candidates visible)` are used.
2. Preference: larger logit, then lower position. -0.0 equals +0.0. A NaN logit counts as -inf; a
   visible -inf position still beats an unused entry.
3. A block's key is the max of its visible logits. The block of the row's last visible position is
   always published, whatever the others hold. Ties: lower block id. A row with at most
   `topk_blocks` blocks publishes all of them.
4. A row that sees nothing selects nothing and publishes nothing.
5. The result of a row depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from sparse_indexer.aliasing import Place, place, shares_memory
from sparse_indexer.devices import current
from sparse_indexer.errors import describe, expect_tensor, mismatch
from sparse_indexer.inputs import PrefillIndexerInputs, PrefillPlan, expect_out_positions
from sparse_indexer.plan import HostInts

_Indexer = TypeVar("_Indexer", bound="CandidateIndexer")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Candidates:
    """What a source layer publishes. Keep it alive and hand it back unread.

    `plan` is the plan of its rows: inputs with that very object need no comparison with it.
    `blocks` and `num_rows` are for tests and integrators; what a backend's subclass adds belongs
    to the backend that made it.

    Raises:
        ValueError: `plan` is no `PrefillPlan`.
    """

    def __init__(self, blocks: torch.Tensor, plan: PrefillPlan) -> None:
        if not isinstance(plan, PrefillPlan):
            raise mismatch("plan", "a PrefillPlan", describe(plan))
        self._blocks = blocks
        self.plan = plan

    @property
    def blocks(self) -> torch.Tensor:
        """`[rows, topk_blocks]` int32: ascending ids of each row's blocks, then `INT32_MAX`."""
        return self._blocks

    @cached_property
    def places(self) -> Sequence[Place]:
        """Where the blocks are that `blocks` gives; none if a subclass makes them anew."""
        blocks = vars(self).get("_blocks")
        return (place(blocks),) if isinstance(blocks, torch.Tensor) else ()

    def __getstate__(self) -> dict[str, Any]:
        """Without `places`: the blocks of a copy are elsewhere."""
        return {name: value for name, value in vars(self).items() if name != "places"}

    @property
    def num_rows(self) -> int:
        """Rows published."""
        return self.plan.num_rows


class CandidateIndexer(Protocol):
    """A sparse-attention indexer for prefill.

    All methods raise `ValueError` for a wrong shape, dtype, device or length, and for
    `out_positions` in the memory of the plan or of candidates that are read; none of them reads a
    device value back on the host, except those of the `mask` backend on a CPU or in float64.
    """

    name: str
    """The backend's name, as `make_candidate_indexer` takes it."""
    device: torch.device
    topk: int
    topk_blocks: int

    def publish_prefill(
        self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor | None = None
    ) -> Candidates:
        """Source layer: score the visible context once, publish each row's best blocks.

        Args:
            inputs: the layer's inputs.
            out_positions: `[rows, topk]` int32 or `None`. If given, the source's own selection is
                written there: what `select_prefill` gives for the same inputs.
        """
        ...

    def select_prefill(
        self, candidates: Candidates, inputs: PrefillIndexerInputs, out_positions: torch.Tensor
    ) -> None:
        """Consumer layer: each row's best `topk` positions among its published blocks.

        Args:
            candidates: what the source published for these rows.
            inputs: the consumer's own queries and weights, and the keys to score.
            out_positions: `[rows, topk]` int32, fully written.
        """
        ...

    def prefill_tail(self, candidates: Candidates, tail_lens: HostInts) -> Candidates:
        """Keep the last `tail_lens[i]` rows of each request i, in row order, without scoring.

        What a publish of `PrefillPlan.tail(tail_lens)`'s rows would have given.

        Args:
            candidates: what a source published, or a tail of that.
            tail_lens: `[requests]` ints on the host: a sequence, an array or a tensor.
        """
        ...

    def topk_prefill(self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor) -> None:
        """Full layer: each row's best `topk` of all visible positions, no candidates.

        Args:
            inputs: the layer's inputs.
            out_positions: `[rows, topk]` int32, fully written.
        """
        ...


def on_its_device(
    method: Callable[Concatenate[_Indexer, _Arguments], _Result],
) -> Callable[Concatenate[_Indexer, _Arguments], _Result]:
    """An indexer's method with its GPU the current one, and without gradients.

    Costs nothing where engines call it, which have both already.
    """
    without = torch.no_grad()(method)

    @wraps(method)
    def call(indexer: _Indexer, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with current(indexer.device):
            return (without if torch.is_grad_enabled() else method)(indexer, *args, **kwargs)

    return call


def expect_call(
    indexer: CandidateIndexer,
    inputs: PrefillIndexerInputs,
    out_positions: torch.Tensor | None,
    candidates: object = None,
    *,
    wanted: bool = False,
) -> None:
    """`ValueError` unless these are an indexer's inputs and, given or `wanted`, its output.

    Nor may that be written into the plan, or into the blocks of `candidates`.
    """
    if not isinstance(inputs, PrefillIndexerInputs):
        raise mismatch("inputs", "PrefillIndexerInputs", describe(inputs))
    plan = inputs.plan
    if plan.device != indexer.device:
        raise mismatch("inputs", f"tensors on {indexer.device}", str(plan.device))
    if wanted or out_positions is not None:
        out = expect_out_positions(out_positions, plan.num_rows, indexer.topk, indexer.device)
        published = candidates.places if isinstance(candidates, Candidates) else ()
        if shares_memory(out, plan.places, published):
            want = "memory of its own, neither the plan's nor the candidates'"
            raise mismatch("out_positions", want, "a tensor of the same memory")


def expect_candidates(
    candidates: Candidates, inputs: PrefillIndexerInputs, device: torch.device
) -> torch.Tensor:
    """The candidates' blocks if they fit these inputs; `ValueError` if not.

    On a CPU also if they were published for rows that see other positions.
    """
    blocks = expect_published(candidates, device)
    plan, own = inputs.plan, candidates.plan
    if candidates.num_rows != plan.num_rows:
        want = f"{plan.num_rows} rows, as the inputs have"
        raise mismatch("candidates", want, f"{candidates.num_rows} rows")
    if own is not plan and device.type == "cpu":
        for name in ("compressed_lens", "request_of_row"):
            if not torch.equal(getattr(own, name), getattr(plan, name)):
                raise mismatch("candidates", f"a plan with the {name} of the inputs", "another")
    return blocks


def expect_published(candidates: Candidates, device: torch.device) -> torch.Tensor:
    """The candidates' blocks if they are those of their own plan's rows; `ValueError` if not."""
    if not isinstance(candidates, Candidates):
        raise mismatch("candidates", "Candidates", candidates)
    if candidates.plan.device != device:
        raise mismatch("candidates", f"a plan on {device}", str(candidates.plan.device))
    shape = (candidates.num_rows, "topk_blocks")
    return expect_tensor("candidates.blocks", candidates.blocks, shape, (torch.int32,), device)
