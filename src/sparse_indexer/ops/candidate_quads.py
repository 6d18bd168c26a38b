# SPDX-License-Identifier: Apache-2.0
"""The blocks that a quad of rows has as candidates, each once."""

from __future__ import annotations

import torch

from sparse_indexer.errors import blame_argument
from sparse_indexer.jit import Kernel, load

RANK_EVERY = 32  # entries from one of `out_ranks` to the next, as in kernels/candidate_quads.h

KERNEL = Kernel("candidate_quads", {"candidate_quads": "sparse_indexer::CandidateQuads"})


def candidate_quads(
    blocks: torch.Tensor,
    *,
    max_blocks: int,
    pairs: bool = False,
    out_entries: torch.Tensor,
    out_ranks: torch.Tensor,
    out_counts: torch.Tensor,
) -> None:
    """Merge the candidate blocks of the rows of each quad (`row_quads`).

    Args:
        blocks: `[quads, 4, n]` int32, contiguous: ascending ids, then INT32_MAX.
        max_blocks: ids at or past it are left out; at most 2^24.
        pairs: a quad whose rows have little in common gets two lists, of its first two rows and,
            from the next multiple of 32 on, of the others, if `candidate_logits` then takes less.
        out_entries: `[quads, width]` int32: ascending block ids, bit 24 + r set if row r of the
            quad has the block. `width` is at least `min(4 * n, max_blocks)`, or entries are lost.
        out_ranks: `[quads, ceil(width / 32), 4]` int16, its bits unsigned: of every 32nd entry, how
            many blocks before it each row has.
        out_counts: `[quads, 2]` int32: entries of the first list and of the second, -1: there is
            one for all rows; past a list's entries nothing is written.
    """
    try:
        load(KERNEL, blocks.device).candidate_quads(
            blocks, max_blocks, pairs, out_entries, out_ranks, out_counts
        )
    except Exception as error:
        blame_argument(error, candidate_quads, locals())
        raise
