# SPDX-License-Identifier: Apache-2.0
"""Exact comparators: each returns what is wrong, in words with values, or `None`."""

from __future__ import annotations

from itertools import pairwise

import torch

from sparse_indexer.formats import INT32_MAX
from sparse_indexer.inputs import BLOCK_SIZE, PrefillPlan
from sparse_indexer.protocol import Candidates
from sparse_indexer.torch_ops.block_keys import block_max


def equal_problem(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """The first row in which two `[rows, n]` tensors differ, and how."""
    if got.shape != want.shape:
        return f"shape: expected {list(want.shape)}, got {list(got.shape)}"
    rows = (got != want).any(1).nonzero().flatten().tolist()
    if not rows:
        return None
    row = rows[0]
    have, need = set(got[row].tolist()), set(want[row].tolist())
    if have == need:
        column = int((got[row] != want[row]).nonzero()[0])
        values = f"{int(want[row, column])}, got {int(got[row, column])}"
        return f"{len(rows)} rows differ, row {row} in order: column {column} expected {values}"
    missing, extra = sorted(need - have)[:5], sorted(have - need)[:5]
    return f"{len(rows)} rows differ, row {row}: missing {missing}, instead {extra}"


def positions_problem(
    out: torch.Tensor, plan: PrefillPlan, candidates: Candidates | None
) -> str | None:
    """Breaches of rule 1: order, range, visibility, count, padding.

    Args:
        out: `[rows, topk]` int32.
        candidates: those selected from; `None`: all visible positions.
    """
    topk = out.shape[1]
    lens = plan.compressed_lens.tolist()
    starts = [0] * plan.num_requests
    if plan.request_starts is not None:
        starts = plan.request_starts.tolist()
    requests = plan.request_of_row.tolist()
    for row, length in enumerate(lens):
        entries = [p - starts[requests[row]] if p >= 0 else p for p in out[row].tolist()]
        allowed = length
        if candidates is not None:
            blocks = [b for b in candidates.blocks[row].tolist() if b != INT32_MAX]
            allowed = sum(max(0, min(BLOCK_SIZE, length - b * BLOCK_SIZE)) for b in blocks)
            outside = {p // BLOCK_SIZE for p in entries if p >= 0} - set(blocks)
            if outside:
                return f"row {row}: blocks {sorted(outside)[:5]} are not among its candidates"
        used = [p for p in entries if p != -1]
        if len(used) != min(topk, allowed):
            return f"row {row}: expected {min(topk, allowed)} positions, got {len(used)}"
        if entries != used + [-1] * (topk - len(used)):
            return f"row {row}: -1 before a position"
        if any(a >= b for a, b in pairwise(used)):
            return f"row {row}: positions are not ascending and unique"
        if used and (used[0] < 0 or used[-1] >= length):
            return f"row {row}: positions {used[0]} to {used[-1]}, the row sees 0 to {length - 1}"
    return None


def blocks_problem(candidates: Candidates) -> str | None:
    """Breaches of rules 3 and 4: order, range, the newest block, count, padding."""
    width = candidates.blocks.shape[1]
    for row, length in enumerate(candidates.plan.compressed_lens.tolist()):
        entries = candidates.blocks[row].tolist()
        used = [b for b in entries if b != INT32_MAX]
        visible = -(-length // BLOCK_SIZE)
        if len(used) != min(width, visible):
            return f"row {row}: expected {min(width, visible)} blocks, got {len(used)}"
        if entries != used + [INT32_MAX] * (width - len(used)):
            return f"row {row}: INT32_MAX before a block"
        if any(a >= b for a, b in pairwise(used)) or (used and used[0] < 0):
            return f"row {row}: blocks are not ascending and unique from 0"
        if used and used[-1] != visible - 1:
            return f"row {row}: expected the newest block {visible - 1} last, got {used[-1]}"
    return None


def logits_problem(
    got: torch.Tensor, want: torch.Tensor, lens: list[int], tolerance: float
) -> str | None:
    """The first row whose visible logits differ by more than `tolerance` x its largest |logit|."""
    for row, length in enumerate(lens):
        a, b = got[row, :length].double(), want[row, :length].double()
        finite = b[b.isfinite()]
        bound = tolerance * float(finite.abs().max()) if len(finite) else 0.0
        same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= bound)
        if not same.all():
            n = int((~same).nonzero()[0])
            return f"row {row}, position {n}: expected {float(b[n])}, got {float(a[n])}"
    return None


def near_floor_problem(
    got: torch.Tensor, want: torch.Tensor, values: torch.Tensor, bounds: torch.Tensor
) -> str | None:
    """The first entry of one selection only that is farther than its bound from the floor.

    The floor is the worst value that `want` selects.

    Args:
        got, want: `[rows, n]` int32 indices into `values`; beyond its columns or negative: unused.
        values: `[rows, width]` what was selected from.
        bounds: `[rows]`.
    """
    width = values.shape[1]
    for row, row_values in enumerate(values.double()):
        have = {i for i in got[row].tolist() if 0 <= i < width}
        need = {i for i in want[row].tolist() if 0 <= i < width}
        if have == need:
            continue
        floor = float(row_values[sorted(need)].min())
        for i in sorted(have ^ need):
            value = float(row_values[i])
            if abs(value - floor) > float(bounds[row]):
                fault = "is missing" if i in need else "does not belong"
                return f"row {row}: {i} {fault}: it has {value}, the floor is {floor}"
    return None


def block_values(logits: torch.Tensor) -> torch.Tensor:
    """The max of each block of 8 columns: `[rows, n]` to `[rows, blocks]`."""
    return block_max(logits, -torch.inf)
