# SPDX-License-Identifier: Apache-2.0
"""Sparse-attention indexers for every NVIDIA GPU, exact and alike to the bit.

Names are imported when first used, so that `import sparse_indexer` alone loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparse_indexer.attention import sparse_attention
    from sparse_indexer.errors import BackendUnavailable, JitError
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
        pool_slots,
    )
    from sparse_indexer.kv_pool import KVPool
    from sparse_indexer.protocol import CandidateIndexer, Candidates

__version__ = "0.1.0"

_HOMES = {
    "BackendUnavailable": "sparse_indexer.errors",
    "CandidateIndexer": "sparse_indexer.protocol",
    "Candidates": "sparse_indexer.protocol",
    "FlatIndexK": "sparse_indexer.inputs",
    "IndexKPool": "sparse_indexer.inputs",
    "IndexQ": "sparse_indexer.inputs",
    "JitError": "sparse_indexer.errors",
    "KVPool": "sparse_indexer.kv_pool",
    "PrefillIndexerInputs": "sparse_indexer.inputs",
    "PrefillPlan": "sparse_indexer.inputs",
    "dequantize_fp4": "sparse_indexer.formats",
    "dequantize_fp8": "sparse_indexer.formats",
    "expand_index_page_table": "sparse_indexer.inputs",
    "flat_index_k": "sparse_indexer.inputs",
    "make_candidate_indexer": "sparse_indexer.factory",
    "plan_prefill": "sparse_indexer.inputs",
    "pool_slots": "sparse_indexer.inputs",
    "quantize_fp4": "sparse_indexer.formats",
    "quantize_fp8": "sparse_indexer.formats",
    "sparse_attention": "sparse_indexer.attention",
}

__all__ = [
    "BackendUnavailable",
    "CandidateIndexer",
    "Candidates",
    "FlatIndexK",
    "IndexKPool",
    "IndexQ",
    "JitError",
    "KVPool",
    "PrefillIndexerInputs",
    "PrefillPlan",
    "dequantize_fp4",
    "dequantize_fp8",
    "expand_index_page_table",
    "flat_index_k",
    "make_candidate_indexer",
    "plan_prefill",
    "pool_slots",
    "quantize_fp4",
    "quantize_fp8",
    "sparse_attention",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
