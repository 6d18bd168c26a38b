# SPDX-License-Identifier: Apache-2.0
"""Of every op, arguments that it takes, on a GPU that no machine has."""

from collections.abc import Callable
from typing import Any

import torch
from jit_support import PretendCuda

from sparse_indexer import FlatIndexK, IndexKPool, IndexQ, KVPool
from sparse_indexer.ops.block_keys import block_keys
from sparse_indexer.ops.candidate_logits import candidate_logits
from sparse_indexer.ops.candidate_quads import candidate_quads
from sparse_indexer.ops.candidate_table import candidate_table
from sparse_indexer.ops.candidate_topk import candidate_topk
from sparse_indexer.ops.dense_block_keys import dense_block_keys
from sparse_indexer.ops.fused_block_keys import fused_block_keys
from sparse_indexer.ops.fused_candidate_logits import fused_candidate_logits
from sparse_indexer.ops.fused_logits import fused_logits
from sparse_indexer.ops.index_k import index_k
from sparse_indexer.ops.index_q import index_q
from sparse_indexer.ops.kv_gather import kv_gather
from sparse_indexer.ops.relu_head_sum import relu_head_sum
from sparse_indexer.ops.row_quads import row_quads
from sparse_indexer.ops.sparse_softmax import sparse_softmax
from sparse_indexer.ops.topk import topk


def cuda(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype).as_subclass(PretendCuda)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


INTS, TABLE = cuda(2), cuda(2, 8)
FLOATS, BYTES = cuda(2, 8, dtype=torch.float32), cuda(2, 128, dtype=torch.uint8)
SCALES = cuda(2, dtype=torch.float32)
OUTPUTS = {"out_starts": INTS, "out_values": BYTES, "out_scales": SCALES}
POOL = IndexKPool(cuda(1, 8448, dtype=torch.uint8), 64, "fp8")
FLAT = FlatIndexK(cuda(2, 128, dtype=torch.float8_e4m3fn), SCALES, "fp8")
HEADS = cuda(2, 3, dtype=torch.float32)
FP8_QUERIES = IndexQ(cuda(2, 3, 128, dtype=torch.float8_e4m3fn), HEADS)
FP4_QUERIES = IndexQ(cuda(2, 3, 64, dtype=torch.uint8), cuda(2, 3))
BF16_QUERIES = IndexQ(cuda(2, 3, 128, dtype=torch.bfloat16))
HALF_QUERIES = IndexQ(cuda(2, 3, 128, dtype=torch.float16))
QUADS, COUNTS = cuda(4), cuda(4, 2)
PACKED_KEYS = cuda(64, 1152, dtype=torch.uint8)
PACKED_QUERIES = cuda(4, 128, 128, dtype=torch.uint8)
PACKED_WEIGHTS = cuda(4, 4, 32, dtype=torch.float32)
SCORED = {"keys": PACKED_KEYS, "queries": PACKED_QUERIES, "weights": PACKED_WEIGHTS}
PACKED = {"out_values": PACKED_QUERIES, "out_weights": PACKED_WEIGHTS}
KV_POOL = KVPool(
    cuda(2, 128, dtype=torch.float8_e4m3fn), cuda(2, 1, dtype=torch.float32),
    cuda(2, 8, dtype=torch.bfloat16),
)  # fmt: skip
SCORES = {"scores": cuda(6, 8, dtype=torch.float16), "weights": HEADS}

# An op and arguments that it takes.
CALLS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "topk": (
        topk,
        {"keys": FLOATS, "lens": INTS, "out": TABLE, "per_column": 1, "force_last": False}
        | {"blocks": TABLE, "request_of_row": INTS, "page_table": TABLE, "page_size": 8},
    ),
    "topk, flat": (
        topk,
        {"keys": FLOATS, "lens": INTS, "out": TABLE}
        | {"request_of_row": INTS, "request_starts": INTS},
    ),
    "topk, of rows": (
        topk,
        {"keys": FLOATS, "lens": INTS, "out": cuda(5, 8), "rows": INTS, "unused": 2**31 - 1},
    ),
    "block_keys": (
        block_keys,
        {"logits": FLOATS, "lens": INTS, "out": FLOATS[:, :1], "skip_blocks": 1},
    ),
    "candidate_table": (
        candidate_table,
        {"selected": TABLE, "compressed_lens": INTS, "out_blocks": TABLE, "out_lens": INTS}
        | {"rows": INTS.long(), "request_of_row": INTS, "page_table": TABLE, "page_size": 8}
        | {"out_slots": TABLE},
    ),
    "index_k": (index_k, {"keys": POOL, "where": TABLE, "lens": INTS, "max_len": 1} | OUTPUTS),
    "index_k, flat": (
        index_k,
        {"keys": FLAT, "where": INTS, "lens": INTS, "max_len": 1} | OUTPUTS,
    ),
    "index_k, packed": (
        index_k,
        {"keys": POOL, "where": TABLE, "lens": INTS, "max_len": 1, "out_starts": INTS}
        | {"out_values": cuda(3, 1152, dtype=torch.uint8)},
    ),
    "row_quads": (
        row_quads,
        {"request_of_row": INTS, "lens": INTS, "requests": [(0, 4, 0, 8), (4, 0, 1, 0)]}
        | {"out_rows": cuda(4, 4), "out_slots": INTS, "out_slot_lens": cuda(4, 4)}
        | {"out_lens": QUADS, "out_first": QUADS}
        | {"out_request_lens": INTS, "out_request_first": INTS},
    ),
    "index_q": (
        index_q,
        {"queries": FP8_QUERIES, "head_weights": HEADS, "rows": cuda(4, 4), "counts": COUNTS}
        | PACKED,
    ),
    "index_q, fp4": (
        index_q,
        {"queries": FP4_QUERIES, "head_weights": HEADS.bfloat16(), "rows": cuda(4, 4)} | PACKED,
    ),
    "candidate_quads": (
        candidate_quads,
        {"blocks": cuda(4, 4, 10), "max_blocks": 33, "pairs": True, "out_entries": cuda(4, 33)}
        | {"out_ranks": cuda(4, 2, 4, dtype=torch.int16), "out_counts": COUNTS},
    ),
    "dense_block_keys": (
        dense_block_keys,
        SCORED
        | {"quad_lens": QUADS, "quad_first": QUADS, "out": cuda(16, 64, dtype=torch.float32)},
    ),
    "candidate_logits": (
        candidate_logits,
        SCORED
        | {"entries": cuda(4, 33), "ranks": cuda(4, 2, 4, dtype=torch.int16), "counts": COUNTS}
        | {"quad_first": QUADS, "out": cuda(16, 80, dtype=torch.float32)},
    ),
    "candidate_topk": (
        candidate_topk,
        SCORED
        | {"entries": cuda(4, 33), "ranks": cuda(4, 2, 4, dtype=torch.int16), "counts": COUNTS}
        | {"quad_first": QUADS, "lens": cuda(16), "rows": cuda(16), "blocks": cuda(16, 10)}
        | {"slots": cuda(3, 3, 4, 80, dtype=torch.float32), "counters": QUADS, "out": cuda(5, 8)}
        | {"request_of_row": cuda(5), "request_starts": INTS},
    ),
    "kv_gather": (
        kv_gather,
        {"kv_pool": KV_POOL, "positions": cuda(2, 3)}
        | {"out": cuda(2, 3, 136, dtype=torch.float16)},
    ),
    "kv_gather, plain": (
        kv_gather,
        {"kv_pool": cuda(2, 8, dtype=torch.float16), "positions": cuda(2, 3)}
        | {"out": cuda(2, 3, 8, dtype=torch.float32)},
    ),
    "sparse_softmax": (
        sparse_softmax,
        {"logits": cuda(2, 3, 8, dtype=torch.float32), "positions": TABLE, "num_slots": 4}
        | {"scale": 0.5, "sink": cuda(3, dtype=torch.float32)}
        | {"out": cuda(2, 3, 8, dtype=torch.float16)},
    ),
    "relu_head_sum": (
        relu_head_sum,
        SCORES | {"lens": INTS, "start": 8, "out_keys": cuda(2, 1, dtype=torch.float32)},
    ),
    "relu_head_sum, logits": (
        relu_head_sum,
        SCORES | {"key_scales": cuda(8, dtype=torch.float32), "out_logits": FLOATS},
    ),
    "fused_logits": (
        fused_logits,
        SCORED
        | {"slot_lens": cuda(4, 4), "quad_first": QUADS, "half_scores": False}
        | {"out": cuda(16, 100, dtype=torch.float32)[:, :77]},
    ),
    "fused_block_keys": (
        fused_block_keys,
        SCORED
        | {"slot_lens": cuda(4, 4), "quad_first": QUADS, "half_scores": True}
        | {"out": cuda(16, 10, dtype=torch.float32)},
    ),
    "fused_candidate_logits": (
        fused_candidate_logits,
        SCORED
        | {"entries": cuda(4, 33), "ranks": cuda(4, 2, 4, dtype=torch.int16), "counts": COUNTS}
        | {"quad_first": QUADS, "out": cuda(16, 80, dtype=torch.float32), "half_scores": False},
    ),
}
