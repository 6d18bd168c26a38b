# SPDX-License-Identifier: Apache-2.0
"""The conformance kit: what "write your own backend" means.

`check_backend(indexer)` runs every case of `CASES` through an indexer and says which checks
failed. Its parts are public, too: the plain-Python oracle, the case and data makers, and the
comparators. `DeepGemmEmulator` and `OlderDeepGemmEmulator` stand in for DeepGEMM where there is no
datacenter Blackwell.
"""

from typing import Any

from sparse_indexer.testing.cases import CASES, Case, CaseConfig
from sparse_indexer.testing.check import Failure, Report, check_backend
from sparse_indexer.testing.compare import (
    block_values,
    blocks_problem,
    equal_problem,
    logits_problem,
    near_floor_problem,
    positions_problem,
)
from sparse_indexer.testing.data import (
    dictated,
    hostile_pool,
    index_q,
    make_inputs,
    palette_keys,
    palette_queries,
    random_keys,
    random_queries,
    tail_inputs,
    with_queries,
)
from sparse_indexer.testing.oracle import oracle_logits, oracle_publish, oracle_select
from sparse_indexer.testing.overlap import block_overlap, block_union, overlapping_queries
from sparse_indexer.testing.sparse_attention import sparse_attention_reference

__all__ = [
    "CASES",
    "Case",
    "CaseConfig",
    "DeepGemmEmulator",
    "Failure",
    "OlderDeepGemmEmulator",
    "Report",
    "block_overlap",
    "block_union",
    "block_values",
    "blocks_problem",
    "check_backend",
    "dictated",
    "equal_problem",
    "hostile_pool",
    "index_q",
    "logits_problem",
    "make_inputs",
    "near_floor_problem",
    "oracle_logits",
    "oracle_publish",
    "oracle_select",
    "overlapping_queries",
    "palette_keys",
    "palette_queries",
    "positions_problem",
    "random_keys",
    "random_queries",
    "sparse_attention_reference",
    "tail_inputs",
    "with_queries",
]


def __getattr__(name: str) -> Any:
    if name in ("DeepGemmEmulator", "OlderDeepGemmEmulator"):  # not before they are wanted
        from sparse_indexer.testing import deep_gemm

        return getattr(deep_gemm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
