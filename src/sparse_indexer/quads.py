# SPDX-License-Identifier: Apache-2.0
"""Rows of a plan by request, four at a time, as Hopper's kernels score them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_indexer.index_k import BLOCK_SIZE
from sparse_indexer.ops.row_quads import row_quads
from sparse_indexer.plan import PrefillPlan

GROUP_QUADS = 4  # a request has a multiple of them: what a CTA scores together


class RequestQuads(NamedTuple):
    """Where a request's rows and packed keys are; all on the host."""

    first_quad: int
    quads: int
    first_block: int
    blocks: int  # packed, of 8 positions; 0 if the request has no rows


class Quads(NamedTuple):
    """A plan's rows in slots, four slots a quad; tensors are int32, on the plan's device."""

    requests: list[RequestQuads]
    rows: torch.Tensor  # [quads, 4]: the row of each slot, -1: none
    slots: torch.Tensor  # [rows]: the slot of each row
    slot_lens: torch.Tensor  # [quads, 4]: positions the slot's row sees
    lens: torch.Tensor  # [quads]: the most of each quad's
    first: torch.Tensor  # [quads]: its request's first packed block
    request_lens: torch.Tensor  # [requests]: most positions a row of the request sees
    request_first: torch.Tensor  # [requests]: its first packed block


def make_quads(plan: PrefillPlan) -> Quads:
    """Sort the rows into quads, each of one request; reads nothing back from the device."""
    requests = []
    quad = block = 0
    for rows, context in zip(plan.rows_per_request, plan.context_lens, strict=True):
        quads = -(-rows // (4 * GROUP_QUADS)) * GROUP_QUADS
        blocks = -(-context // BLOCK_SIZE) if rows else 0
        requests.append(RequestQuads(quad, quads, block, blocks))
        quad, block = quad + quads, block + blocks

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=plan.device)

    count = len(requests)
    made = Quads(
        requests,
        rows=empty(quad, 4),
        slots=empty(plan.num_rows),
        slot_lens=empty(quad, 4),
        lens=empty(quad),
        first=empty(quad),
        request_lens=empty(count),
        request_first=empty(count),
    )
    row_quads(
        plan.request_of_row,
        plan.compressed_lens,
        requests=[(r.first_quad, r.quads, r.first_block, r.blocks * BLOCK_SIZE) for r in requests],
        out_rows=made.rows,
        out_slots=made.slots,
        out_slot_lens=made.slot_lens,
        out_lens=made.lens,
        out_first=made.first,
        out_request_lens=made.request_lens,
        out_request_first=made.request_first,
    )
    return made
