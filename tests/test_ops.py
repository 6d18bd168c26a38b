# SPDX-License-Identifier: Apache-2.0
"""Without a GPU: every op builds its host entry, which refuses a CPU tensor by name."""

import pytest
import torch
from jit_support import needs_gxx

from sparse_indexer import IndexKPool
from sparse_indexer.jit.kernel import all_kernels
from sparse_indexer.ops.block_keys import block_keys
from sparse_indexer.ops.candidate_table import candidate_table
from sparse_indexer.ops.index_k import index_k
from sparse_indexer.ops.topk import topk

INTS = torch.zeros(2, dtype=torch.int32)
TABLE = torch.zeros(2, 8, dtype=torch.int32)
FLOATS = torch.zeros(2, 8)
POOL = IndexKPool.empty(1, 64, "fp8")

CALLS = {
    "topk": (
        lambda: topk(FLOATS, INTS, out=TABLE),
        r"keys: expected \[rows, width\] float32 or bfloat16 on cuda, got \[2, 8\] float32 on cpu",
    ),
    "block_keys": (
        lambda: block_keys(FLOATS, INTS, out=FLOATS),
        r"logits: expected \[rows, width\] float32 or bfloat16 on cuda, got \[2, 8\]",
    ),
    "candidate_table": (
        lambda: candidate_table(TABLE, INTS, out_blocks=TABLE, out_lens=INTS),
        r"selected: expected \[source rows, n\] int32 on cuda, got \[2, 8\] int32 on cpu",
    ),
    "index_k": (
        lambda: index_k(
            POOL, TABLE, lens=INTS, max_len=1, out_starts=INTS, out_values=FLOATS, out_scales=FLOATS
        ),
        r"pages: expected \[num_pages, 8448\] uint8 on cuda, got \[1, 8448\] uint8 on cpu",
    ),
}


@needs_gxx
@pytest.mark.parametrize("name", CALLS)
def test_a_cpu_tensor_is_refused_by_name(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_all_ops_are_found() -> None:
    assert set(all_kernels()) == set(CALLS)
