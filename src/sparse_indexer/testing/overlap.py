# SPDX-License-Identifier: Apache-2.0
"""Data whose neighboring rows share blocks, as the rows of a real text do."""

from __future__ import annotations

import torch

from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.errors import expect_int, mismatch
from sparse_indexer.formats import HEAD_DIM, INT32_MAX
from sparse_indexer.inputs import (
    BLOCK_SIZE,
    FlatIndexK,
    IndexQ,
    PrefillIndexerInputs,
    plan_prefill,
)
from sparse_indexer.testing.data import index_q

_DRIFT_ROWS = 512  # rows after which the common part of the queries has turned by about a radian
_SAMPLE_ROWS = 64
_SAMPLE_POSITIONS = 16384


def block_union(blocks: torch.Tensor, rows: int) -> float:
    """Blocks that `rows` consecutive rows publish together, as a multiple of what one publishes.

    Args:
        blocks: `[rows, topk_blocks]` int32 as in `Candidates.blocks`, ascending.
        rows: at least 1; windows slide by one row.

    Returns:
        The mean over all windows; 1 if neighbors publish the same blocks.
    """
    expect_int("rows", rows, 1, len(blocks))
    ratios = []
    for first in range(len(blocks) - rows + 1):
        window = blocks[first : first + rows]
        used = window[window != INT32_MAX].tolist()
        ratios.append(rows * len(set(used)) / max(1, len(used)))
    return sum(ratios) / len(ratios)


def block_overlap(blocks: torch.Tensor) -> float:
    """The mean share of its blocks that a row has in common with the row before it."""
    return 2.0 - block_union(blocks, 2)


def overlapping_queries(
    rows: int,
    heads: int,
    keys: FlatIndexK,
    *,
    overlap: float,
    topk_blocks: int,
    seed: int = 0,
) -> tuple[IndexQ, torch.Tensor]:
    """Queries and weights of consecutive rows that share `overlap` of their published blocks.

    A row is a slowly turning direction that all rows have in common plus noise of its own: then
    the union of n rows' blocks grows as it does on text (overlap 0.86: about 1.3 times one row's
    for 4 rows, 1.5 for 8), not as if each row replaced 0.14 of the row before. How much noise
    gives the overlap is found by bisection on a sample of the keys.

    Args:
        keys: the request's keys, on the device where the queries shall be; their format is the
            queries' as well.
        overlap: share of blocks in common with the row before, see `block_overlap`.
        topk_blocks: blocks published of all these keys.

    Returns:
        Queries `[rows, heads, 128]` and weights `[rows, heads]`.

    Raises:
        ValueError: no amount of noise gives this overlap; or so few keys that all are published.
    """
    device, positions = keys.values.device, len(keys.values)
    sample = min(positions, _SAMPLE_POSITIONS)
    sample_blocks = max(1, round(topk_blocks * sample / positions))
    if sample_blocks * BLOCK_SIZE >= sample:
        raise mismatch("topk_blocks", f"fewer than the {sample // BLOCK_SIZE} blocks", topk_blocks)
    sampled_scales = None if keys.scales is None else keys.scales[:sample]
    sampled = FlatIndexK(keys.values[:sample], sampled_scales, keys.format)
    plan = plan_prefill([sample - 1] * _SAMPLE_ROWS, [_SAMPLE_ROWS], device=device)
    indexer = MaskIndexer(device, topk=0, topk_blocks=sample_blocks, accumulate=torch.float32)

    def measure(noise: float) -> float:
        queries, weights = _queries(_SAMPLE_ROWS, heads, noise, seed)
        inputs = PrefillIndexerInputs(
            plan, index_q(queries.to(device), keys.format), weights.to(device), sampled
        )
        return block_overlap(indexer.publish_prefill(inputs).blocks)

    low, high = 0.0, 8.0
    reach = (measure(high), measure(low))
    if not reach[0] <= overlap <= reach[1]:
        raise mismatch("overlap", f"{reach[0]:.3f} to {reach[1]:.3f}", overlap)
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if measure(middle) > overlap else (low, middle)
    queries, weights = _queries(rows, heads, (low + high) / 2, seed)
    return index_q(queries.to(device), keys.format), weights.to(device)


def _queries(rows: int, heads: int, noise: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[rows, heads, 128]` and weights `[rows, heads]` in fp32."""
    generator = torch.Generator().manual_seed(seed)
    shape = (heads, HEAD_DIM + 1)  # the last column becomes the weight
    ends = torch.randn(2, *shape, generator=generator)
    angle = torch.arange(rows, dtype=torch.float32)[:, None, None] / _DRIFT_ROWS
    common = angle.cos() * ends[0] + angle.sin() * ends[1]
    own = torch.randn(rows, *shape, generator=generator)
    mixed = (common + noise * own) / (1 + noise**2) ** 0.5
    return mixed[..., :HEAD_DIM], mixed[..., HEAD_DIM] / heads**0.5
