# SPDX-License-Identifier: Apache-2.0
"""Sparse-attention indexers for every NVIDIA GPU, exact and alike to the bit."""

from sparse_indexer.errors import BackendUnavailable
from sparse_indexer.factory import make_candidate_indexer
from sparse_indexer.formats import (
    dequantize_fp4,
    dequantize_fp8,
    quantize_fp4,
    quantize_fp8,
)
from sparse_indexer.inputs import (
    FlatIndexK,
    IndexKPool,
    IndexQ,
    PrefillIndexerInputs,
    PrefillPlan,
    expand_index_page_table,
    flat_index_k,
    plan_prefill,
)
from sparse_indexer.protocol import CandidateIndexer, Candidates

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "CandidateIndexer",
    "Candidates",
    "FlatIndexK",
    "IndexKPool",
    "IndexQ",
    "PrefillIndexerInputs",
    "PrefillPlan",
    "dequantize_fp4",
    "dequantize_fp8",
    "expand_index_page_table",
    "flat_index_k",
    "make_candidate_indexer",
    "plan_prefill",
    "quantize_fp4",
    "quantize_fp8",
]
