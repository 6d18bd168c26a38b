# SPDX-License-Identifier: Apache-2.0
"""The `sm90` backend: Hopper's tensor cores score, no matrix of logits is ever written."""

from __future__ import annotations

from sparse_indexer.backends.quad_indexer import QuadIndexer
from sparse_indexer.quad_scoring import WGMMA


class Sm90Indexer(QuadIndexer):
    """`CandidateIndexer` on Hopper (compute capability 9.0).

    fp8 and fp4 keys and queries are scored in e4m3, exactly what they store (`index_k` says when
    fp4 is rounded); if one of them is fp16 or bf16, both are scored in halves. At most 64 heads.

    Heads are padded with zeros to 32 or 64, and ReLU is x + |x|: infinite keys, or products that
    overflow float32, may give NaN where the formula gives an infinity or 0.

    Args:
        device: a CUDA device.
        topk: positions a row selects.
        topk_blocks: blocks of 8 positions a row publishes.
        memory_budget: bytes of scratch beside inputs, outputs and tables, at most. The keys of a
            request are packed in it: 144 bytes a position, 272 in halves. Tables are what a publish
            returns (the candidates of another backend are put into such), and 16 bytes a row.

    Its kernels are built and loaded here, so that calls need no compiler and can be captured.

    Raises:
        ValueError: an option is out of range; from the methods also: more than 64 heads, or a
            budget below what the longest request takes (the message says how much that is).
        BackendUnavailable: a kernel can be neither built nor loaded.
    """

    name = "sm90"
    kernels = WGMMA
