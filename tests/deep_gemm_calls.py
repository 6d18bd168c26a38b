# SPDX-License-Identifier: Apache-2.0
"""Calls of DeepGEMM's functions, made of a layer's inputs, for the tests of its emulator."""

from typing import Any, NamedTuple

import torch

from sparse_indexer import IndexKPool, PrefillIndexerInputs
from sparse_indexer.inputs import BLOCK_SIZE, FlatIndexK
from sparse_indexer.testing import random_keys, random_queries
from sparse_indexer.testing.data import Layout, make_inputs
from sparse_indexer.testing.deep_gemm import DeepGemmEmulator, OlderDeepGemmEmulator

LENS = [[70, 71, 9], [], [130, 8], [1]]  # positions that each row sees, request by request
UNSEEN = 2**31 - 1

Emulator = DeepGemmEmulator | OlderDeepGemmEmulator


class SparseCall(NamedTuple):
    """Keyword arguments of the two functions of the sparse logits, metadata left out."""

    metadata: dict[str, Any]
    logits: dict[str, Any]

    def run(self, deep_gemm: Emulator) -> torch.Tensor:
        metadata = deep_gemm.get_paged_sparse_mqa_logits_metadata(**self.metadata)
        return deep_gemm.fp8_fp4_paged_sparse_mqa_logits(metadata=metadata, **self.logits)

    def changed(self, **arguments: Any) -> "SparseCall":
        assert set(arguments) <= set(self.metadata) | set(self.logits)
        new = [{k: arguments.get(k, v) for k, v in old.items()} for old in self]
        return SparseCall(*new)


def layer(
    lens: list[list[int]] = LENS,
    *,
    heads: int = 32,
    layout: Layout = "planar",
    page_size: int = 64,
    seed: int = 0,
) -> PrefillIndexerInputs:
    """fp4 keys and queries of normal numbers."""
    keys = [random_keys(max(n, default=0), "fp4", seed=seed + i) for i, n in enumerate(lens)]
    positions = [n - 1 for request in lens for n in request]
    queries, weights = random_queries(len(positions), heads, "fp4", seed=seed)
    counts = [len(n) for n in lens]
    return make_inputs(
        queries, weights, keys, positions, counts, layout=layout, page_size=page_size, seed=seed
    )


def rounded_weights(inputs: PrefillIndexerInputs) -> PrefillIndexerInputs:
    """The same with weights that bfloat16 holds."""
    weights = inputs.head_weights.to(torch.bfloat16).to(torch.float32)
    return PrefillIndexerInputs(inputs.plan, inputs.index_q, weights, inputs.index_k)


def pair_ids(inputs: PrefillIndexerInputs) -> torch.Tensor:
    """`[rows]` int32: one id for two neighbors of one request, another for the next two."""
    ids: list[int] = []
    in_pair = 0
    requests = inputs.plan.request_of_row.tolist()
    for row, request in enumerate(requests):
        goes_on = row > 0 and requests[row - 1] == request and in_pair == 1
        in_pair = 2 if goes_on else 1
        ids.append(ids[-1] if goes_on else row)
    return torch.tensor(ids, dtype=torch.int32)


def all_blocks(inputs: PrefillIndexerInputs, width: int) -> torch.Tensor:
    """`[rows, width]` int32: all blocks of a row, or without the first odd ones."""
    out = torch.full((inputs.plan.num_rows, width), UNSEEN, dtype=torch.int32)
    for row, length in enumerate(inputs.plan.compressed_lens.tolist()):
        ids = list(range(-(-length // BLOCK_SIZE)))
        ids = sorted(set(ids) - set(ids[1::2][: max(0, len(ids) - width)]))
        assert len(ids) == min(width, -(-length // BLOCK_SIZE))
        out[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return out


def sparse_call(inputs: PrefillIndexerInputs, width: int = 12) -> SparseCall:
    pool, plan = inputs.index_k, inputs.plan
    assert isinstance(pool, IndexKPool)
    assert plan.page_table is not None
    assert inputs.index_q.scales is not None
    size = pool.page_size
    cache = pool.pages.as_strided((len(pool.pages), size, 1, 68), (pool.pages.stride(0), 68, 68, 1))
    q = (inputs.index_q.values.view(torch.int8)[:, None], inputs.index_q.scales[:, None])
    metadata = {
        "context_lens": plan.compressed_lens,
        "block_table": plan.page_table[plan.request_of_row.long()],
        "indices": pair_ids(inputs),
        "page_kv": size,
        "sparse_kv_block_indices": all_blocks(inputs, width),
        "qk_dtype": torch.int8,
        "sparse_block_kv": BLOCK_SIZE,
    }
    logits = {
        "q": q,
        "kv_cache": cache,
        "weights": inputs.head_weights.to(torch.bfloat16),
        "num_max_sparse_blocks": width,
        "sparse_block_kv": BLOCK_SIZE,
    }
    return SparseCall(metadata, logits)


def dense_call(inputs: PrefillIndexerInputs) -> dict[str, Any]:
    """Arguments that both generations of the dense function have; the keys are flat."""
    keys, plan, index_q = inputs.index_k, inputs.plan, inputs.index_q
    assert isinstance(keys, FlatIndexK)
    assert plan.key_starts is not None
    starts = plan.key_starts[plan.request_of_row.long()]
    weights = inputs.head_weights.to(torch.float32)
    q: Any = (index_q.values.view(torch.int8), index_q.scales)
    kv = (keys.values, keys.scales)
    if keys.format == "fp8":
        q = index_q.values
        weights = weights if index_q.scales is None else weights * index_q.scales
    else:
        kv = (keys.values.view(torch.int8), keys.scales)
    return {
        "q": q,
        "kv": kv,
        "weights": weights,
        "cu_seq_len_k_start": starts,
        "cu_seq_len_k_end": starts + plan.compressed_lens,
    }


def head_terms(inputs: PrefillIndexerInputs) -> torch.Tensor:
    """`[rows, positions]`: `sum_h |w[r, h]| relu(q . k)`, what rounding errors are relative to."""
    return PrefillIndexerInputs(
        inputs.plan, inputs.index_q, inputs.head_weights.abs(), inputs.index_k
    ).dense_scores()
