# SPDX-License-Identifier: Apache-2.0
"""What every op says about arguments that it cannot take, on a machine without a GPU."""

import inspect
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from jit_support import needs_gxx
from op_calls import (
    BF16_QUERIES,
    BYTES,
    CALLS,
    FLAT,
    FLOATS,
    FP8_QUERIES,
    HALF_QUERIES,
    HEADS,
    INTS,
    KV_POOL,
    PACKED_KEYS,
    PACKED_QUERIES,
    PACKED_WEIGHTS,
    POOL,
    QUADS,
    SCALES,
    cuda,
    on_cpu,
)

from sparse_indexer import FlatIndexK, IndexKPool, IndexQ, KVPool
from sparse_indexer.jit import load
from sparse_indexer.jit.kernel import all_kernels

ARGUMENTS = [(name, argument) for name, (_, given) in CALLS.items() for argument in given]
TENSORS = [(n, a) for n, a in ARGUMENTS if isinstance(CALLS[n][1][a], torch.Tensor)]
NUMBERS = [(n, a) for n, a in ARGUMENTS if isinstance(CALLS[n][1][a], int)]


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host entries that are said to be loaded on cuda:63, without any kernel."""
    for kernel in all_kernels().values():
        monkeypatch.setitem(kernel.loaded, INTS.device, load(kernel, torch.device("cpu")))


def refusal(name: str, **wrong: object) -> str:
    """What the `ValueError` of an op says that is given these instead of good arguments."""
    op, given = CALLS[name]
    with pytest.raises(ValueError, match=r": expected .*, got ") as caught:
        op(**given | wrong)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


@needs_gxx
@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize("name", CALLS)
def test_good_arguments_are_checked_up_to_the_launch(name: str) -> None:
    op, given = CALLS[name]
    with pytest.raises(RuntimeError, match="kernels are not loaded on cuda:63"):
        op(**given)


@needs_gxx
@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_a_tensor_of_the_cpu_is_refused_by_name(name: str, argument: str) -> None:
    """By the host entry, with the shape that it expects, whichever the argument is."""
    message = refusal(name, **{argument: on_cpu(CALLS[name][1][argument])})
    assert re.match(
        rf"{argument}: expected \[.*\] \w+.* on cuda(:63)?, got \[.*\] .* on cpu$", message
    )


@needs_gxx
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("topk", "keys: expected [rows, width] float32 or bfloat16 on cuda, got [2, 8] float32"),
        ("block_keys", "logits: expected [rows, width] float32 or bfloat16 on cuda, got [2, 8]"),
        ("candidate_table", "selected: expected [source rows, n] int32 on cuda, got [2, 8] int32"),
        ("index_k", "keys pages: expected [num_pages, 8448] uint8 on cuda, got [1, 8448] uint8"),
        ("index_k, flat", "keys values: expected [columns, 128] uint8 on cuda, got [2, 128] uint8"),
        ("row_quads", "request_of_row: expected [rows] int32 on cuda, got [2] int32"),
        ("index_q", "queries values: expected [rows, heads, 128] uint8 on cuda, got [2, 3, 128]"),
        ("candidate_quads", "blocks: expected [quads, 4, n] int32 on cuda, got [4, 4, 10] int32"),
        ("dense_block_keys", "keys: expected [blocks, 1152] uint8 on cuda, got [64, 1152] uint8"),
        ("candidate_logits", "keys: expected [blocks, 1152] uint8 on cuda, got [64, 1152] uint8"),
        ("candidate_topk", "keys: expected [blocks, 1152] uint8 on cuda, got [64, 1152] uint8"),
        (
            "kv_gather",
            "kv_pool values: expected [slots, fp8_dim] uint8 on cuda, got [2, 128] uint8",
        ),
        ("kv_gather, plain", "kv_pool: expected [slots, dim] float16 or bfloat16 or float32 on"),
        ("sparse_softmax", "logits: expected [rows, heads, k] float32 on cuda, got [2, 3, 8]"),
        ("relu_head_sum", "weights: expected [rows, heads] float32 on cuda, got [2, 3] float32"),
        ("fused_logits", "keys: expected [blocks, 1152] uint8 on cuda, got [64, 1152] uint8"),
        ("fused_block_keys", "keys: expected [blocks, 1152] uint8 on cuda, got [64, 1152] uint8"),
        ("fused_candidate_logits", "keys: expected [blocks, 1152] uint8 on cuda, got"),
    ],
)
def test_all_tensors_of_the_cpu(name: str, message: str) -> None:
    given = {k: on_cpu(v) if isinstance(v, torch.Tensor) else v for k, v in CALLS[name][1].items()}
    if "keys" in given and given["keys"] is POOL:
        given["keys"] = IndexKPool(on_cpu(POOL.pages), 64, "fp8")
    if "keys" in given and given["keys"] is FLAT:
        given["keys"] = FlatIndexK(on_cpu(FLAT.values), on_cpu(SCALES), "fp8")
    if name == "kv_gather":
        parts = (KV_POOL.values, KV_POOL.scales, KV_POOL.rope)
        given["kv_pool"] = KVPool(*map(on_cpu, parts))
    if name == "index_q":
        given["queries"] = IndexQ(on_cpu(FP8_QUERIES.values), on_cpu(HEADS))
    assert refusal(name, **given).startswith(message)


NO_TENSORS = {
    "list": ([1, 2], "a list"),
    "str": ("keys", "'keys'"),
    "object": (object(), "an object"),
    "of another library": (SimpleNamespace(device=1.5), "a SimpleNamespace"),
    "array": (np.zeros((2, 8), np.int32), "[2, 8] int32, a numpy array"),
    "array of objects": (np.array([None]), "[1] object, a numpy array"),
    "meta": (torch.zeros(2, 8, device="meta"), "[2, 8] float32 on meta"),
    "sparse": (torch.zeros(2, 8).to_sparse(), "[2, 8] float32 sparse_coo on cpu"),
    "no numbers": (torch.empty(2, dtype=torch.bits8), "[2] bits8 on cpu"),
    "nested": (
        torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),
        "a nested tensor on cpu",
    ),
}


@needs_gxx
@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_what_is_no_tensor_is_refused_by_name(name: str, argument: str) -> None:
    optional = inspect.signature(CALLS[name][0]).parameters[argument].default is None
    also = "None" if optional else "KVPool" if argument == "kv_pool" else ""
    expected = "a dense CUDA tensor" + (f" or {also}" if also else "")
    for wrong, got in NO_TENSORS.values():
        assert refusal(name, **{argument: wrong}) == f"{argument}: expected {expected}, got {got}"
    if not optional:
        assert refusal(name, **{argument: None}) == f"{argument}: expected {expected}, got None"


@needs_gxx
@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize(("name", "argument"), NUMBERS)
def test_what_is_no_number_is_refused_by_name(name: str, argument: str) -> None:
    bools = ("force_last", "pairs", "half_scores")
    kind = "Python bool" if argument in bools else "64-bit int"
    wrong = [1.5, None, "8", [8], 1 << 70, np.float32(8), torch.tensor(8)]
    got = ["1.5", "None", "'8'", "a list", str(1 << 70), "a numpy float32", "[] int64 on cpu"]
    for value, text in zip(wrong, got, strict=True):
        message = refusal(name, **{argument: value})
        assert message == f"{argument}: expected a {kind}, got {text}"


@needs_gxx
@pytest.mark.usefixtures("entries")
def test_keys_of_index_k() -> None:
    for wrong in (None, [1], BYTES):
        message = refusal("index_k", keys=wrong)
        assert message.startswith("keys: expected an IndexKPool or FlatIndexK, got ")
    pool = IndexKPool.empty(1, 64, "fp8", device="meta")
    assert refusal("index_k", keys=pool) == (
        "keys pages: expected a dense CUDA tensor, got [1, 8448] uint8 on meta"
    )


@needs_gxx
@pytest.mark.usefixtures("entries")
def test_queries_of_index_q() -> None:
    for wrong in (None, [1], BYTES):
        message = refusal("index_q", queries=wrong)
        assert message.startswith("queries: expected an IndexQ, got ")
    meta = torch.zeros(2, 3, 128, dtype=torch.float16, device="meta")
    assert refusal("index_q", queries=IndexQ(meta)) == (
        "queries values: expected a dense CUDA tensor, got [2, 3, 128] float16 on meta"
    )


REQUESTS = {
    "none": (None, "requests: expected a list, got None"),
    "number": (3, "requests: expected a list, got 3"),
    "numbers": ([0, 4, 0, 8], "requests[0]: expected four 32-bit ints, got 0"),
    "three": ([(0, 4, 0, 8), (4, 0, 1)], "requests[1]: expected four 32-bit ints, got (4, 0, 1)"),
    "five": ([(0, 4, 0, 8, 1)], "requests[0]: expected four 32-bit ints, got (0, 4, 0, 8, 1)"),
    "three and five": (
        [(0, 4, 0), (8, 4, 0, 1, 0)],
        "requests[0]: expected four 32-bit ints, got (0, 4, 0)",
    ),
    "fraction": ([(0, 4.0, 0, 8)], "requests[0]: expected four 32-bit ints, got (0, 4.0, 0, 8)"),
    "text": (["0408"], "requests[0]: expected four 32-bit ints, got '0408'"),
    "33 bits": (
        [(0, 4, 1 << 31, 8)],
        "requests[0]: expected four 32-bit ints, got (0, 4, 2147483648, 8)",
    ),
    "one too few": ([(0, 4, 0, 8)], "out_request_lens: expected [1] int32 on cuda:63, got [2]"),
    "beyond the quads": (
        [(0, 4, 0, 8), (4, 1, 1, 0)],
        "requests[1]: expected quads within the 4 of out_rows, got 4 and 1 from there",
    ),
    "before the quads": (
        [(-1, 4, 0, 8), (4, 0, 1, 0)],
        "requests[0]: expected quads within the 4 of out_rows, got -1 and 4 from there",
    ),
    "fewer than no quads": (
        [(4, -4, 0, 8), (4, 0, 1, 0)],
        "requests[0]: expected quads within the 4 of out_rows, got 4 and -4 from there",
    ),
}


@needs_gxx
@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize(("requests", "message"), REQUESTS.values(), ids=REQUESTS)
def test_requests_of_row_quads(requests: object, message: str) -> None:
    assert refusal("row_quads", requests=requests).startswith(message)


ON = "on cuda:63"


@needs_gxx
@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("topk", {"per_column": 8}, "per_column: expected 1 with blocks, got 8"),
        ("topk, of rows", {"rows": cuda(3)}, f"rows: expected [2] int32 {ON}, got [3] int32 {ON}"),
        ("topk, of rows", {"rows": INTS.long()}, f"rows: expected [2] int32 {ON}, got [2] int64"),
        ("topk, of rows", {"rows": cuda(4)[::2]}, "rows: expected a contiguous tensor, got"),
        (
            "topk, of rows",
            {"rows": None},
            f"out: expected [2, k] int32 {ON}, got [5, 8] int32 {ON}",
        ),
        ("topk, of rows", {"lens": cuda(5)}, f"lens: expected [2] int32 {ON}, got [5] int32"),
        ("topk, of rows", {"blocks": cuda(5, 1)}, f"blocks: expected [2, width / 8] int32 {ON}"),
        ("topk, of rows", {"unused": 1 << 31}, "unused: expected an int of -2147483648 to"),
        ("topk", {"rows": INTS, "out": cuda(5, 8)}, f"request_of_row: expected [5] int32 {ON}"),
        (
            "index_k, packed",
            {"out_values": BYTES},
            f"out_values: expected [2, 1152] uint8 {ON}, got [2, 128] uint8 {ON}",
        ),
        (
            "index_k, packed",
            {"out_values": cuda(3, 1152, dtype=torch.bfloat16)},
            f"out_values: expected [3, 1088] float16 or bfloat16 {ON}, got [3, 1152] bfloat16",
        ),
        (
            "index_k, packed",
            {"out_values": cuda(3, 1168, dtype=torch.uint8)[:, :1152]},
            "out_values: expected a contiguous tensor, got strides [1168, 1]",
        ),
        (
            "index_k, packed",
            {"out_scales": SCALES},
            f"out_values: expected [3, 128] uint8 or float16 or bfloat16 {ON}, got [3, 1152] uint8",
        ),
        ("index_k", {"out_scales": None}, "out_values: expected [2, 1152] uint8 on"),
        ("row_quads", {"lens": cuda(3)}, f"lens: expected [2] int32 {ON}, got [3] int32 {ON}"),
        ("row_quads", {"out_slots": cuda(3)}, f"out_slots: expected [2] int32 {ON}, got [3]"),
        ("row_quads", {"out_lens": cuda(5)}, f"out_lens: expected [4] int32 {ON}, got [5] int32"),
        ("index_q", {"queries": BF16_QUERIES}, "out_values: expected a dtype that holds bf16, got"),
        ("index_q", {"queries": HALF_QUERIES}, "out_values: expected a dtype that holds fp16, got"),
        (
            "index_q",
            {"queries": HALF_QUERIES, "out_values": PACKED_QUERIES.bfloat16()},
            "out_values: expected a dtype that holds fp16, got bf16",
        ),
        (
            "index_q",
            {"out_weights": cuda(4, 4, 48, dtype=torch.float32)},
            "out_weights: expected 32 or 64 heads, at least 3, got 48",
        ),
        (
            "index_q",
            {"queries": IndexQ(cuda(2, 33, 128, dtype=torch.float16))}
            | {"head_weights": cuda(2, 33, dtype=torch.float32)},
            "out_weights: expected 32 or 64 heads, at least 33, got 32",
        ),
        ("index_q", {"head_weights": HEADS[:, :2]}, "head_weights: expected [2, 3] float32 or"),
        ("index_q", {"rows": cuda(3, 4)}, f"out_weights: expected [3, 4, out heads] float32 {ON}"),
        ("index_q", {"counts": QUADS}, f"counts: expected [4, 2] int32 {ON}, got [4] int32 {ON}"),
        ("candidate_quads", {"max_blocks": (1 << 24) + 1}, "max_blocks: expected an int of 0 to"),
        (
            "candidate_quads",
            {"blocks": cuda(4, 4, 1 << 16)},
            "blocks n: expected an int of 0 to 65535, got 65536",
        ),
        (
            "candidate_quads",
            {"out_ranks": cuda(4, 1, 4, dtype=torch.int16)},
            f"out_ranks: expected [4, 2, 4] int16 {ON}, got [4, 1, 4] int16 {ON}",
        ),
        (
            "dense_block_keys",
            {"keys": cuda(64, 1088, dtype=torch.bfloat16)},
            f"queries: expected [4, 128, 128] bfloat16 {ON}, got [4, 128, 128] uint8 {ON}",
        ),
        (
            "dense_block_keys",
            {"out": cuda(16, 72, dtype=torch.float32)},
            "out: expected a width that is a multiple of 64, got 72",
        ),
        (
            "dense_block_keys",
            {"queries": PACKED_QUERIES[:2], "weights": PACKED_WEIGHTS[:2]}
            | {"quad_lens": INTS, "quad_first": INTS, "out": cuda(8, 64, dtype=torch.float32)},
            "quads: expected a multiple of 4, got 2",
        ),
        (
            "candidate_logits",
            {"out": cuda(16, 84, dtype=torch.float32)},
            "out: expected columns of at most 65535 whole blocks, got 84",
        ),
        (
            "candidate_logits",
            {"weights": cuda(4, 4, 48, dtype=torch.float32)},
            "weights: expected 32 or 64 heads, got 48",
        ),
        ("candidate_logits", {"entries": cuda(4, 65)}, f"ranks: expected [4, 3, 4] int16 {ON}"),
        (
            "candidate_topk",
            {"slots": cuda(3, 3, 4, 84, dtype=torch.float32)},
            "slots: expected columns of at most 65535 whole blocks, got 84",
        ),
        (
            "candidate_topk",
            {"slots": cuda(3, 2, 4, 80, dtype=torch.float32)},
            f"slots: expected [3, 3, 4, columns] float32 {ON}, got [3, 2, 4, 80] float32 {ON}",
        ),
        ("candidate_topk", {"counters": cuda(3)}, f"counters: expected [4] int32 {ON}, got [3]"),
        (
            "candidate_topk",
            {"blocks": cuda(16, 9)},
            "blocks: expected at least columns / 8 = 10 columns, got 9",
        ),
        ("candidate_topk", {"lens": cuda(4, 4)}, f"lens: expected [16] int32 {ON}, got [4, 4]"),
        (
            "candidate_topk",
            {"request_starts": None},
            "request_of_row: expected a tensor with request_starts, else None, got a tensor",
        ),
        (
            "candidate_topk",
            {"keys": cuda(64, 1088, dtype=torch.bfloat16)}
            | {"queries": PACKED_QUERIES.bfloat16().as_subclass(type(QUADS))},
            "keys: expected uint8, got halves",
        ),
        (
            "kv_gather",
            {"out": cuda(2, 3, 128, dtype=torch.float16)},
            f"out: expected [2, 3, 136] float16 or bfloat16 or float32 {ON}, got [2, 3, 128]",
        ),
        ("kv_gather", {"positions": cuda(2, 4)}, f"positions: expected [2, 3] int32 {ON}, got"),
        (
            "sparse_softmax",
            {"positions": cuda(2, 4)},
            f"positions: expected [2, 8] int32 {ON}, got",
        ),
        ("sparse_softmax", {"sink": SCALES}, f"sink: expected [3] float32 {ON}, got [2] float32"),
        ("sparse_softmax", {"scale": math.nan}, "scale: expected a finite float32, got nan"),
        ("sparse_softmax", {"scale": 1e39}, "scale: expected a finite float32, got 99999"),
        ("sparse_softmax", {"scale": "1"}, "scale: expected a number, got '1'"),
        ("sparse_softmax", {"scale": None}, "scale: expected a number, got None"),
        ("sparse_softmax", {"num_slots": -1}, "num_slots: expected an int of 0 to"),
        ("relu_head_sum", {"lens": None}, "lens: expected a tensor with out_keys, got None"),
        ("relu_head_sum", {"start": 4}, "start: expected a multiple of 8, got 4"),
        (
            "relu_head_sum",
            {"out_logits": FLOATS},
            "out_logits, out_keys: expected one of the two, got both",
        ),
        (
            "relu_head_sum",
            {"scores": cuda(4, 8, dtype=torch.float16)},
            f"scores: expected [6, positions] float16 {ON}, got [4, 8] float16 {ON}",
        ),
        (
            "relu_head_sum, logits",
            {"scores": cuda(6, 9, dtype=torch.float16)[:, :8]},
            "scores: expected rows at multiples of 16 bytes, got strides [9, 1]",
        ),
        (
            "fused_logits",
            {"keys": cuda(64, 1088, dtype=torch.bfloat16)},
            "keys: expected uint8 or float16, got bfloat16",
        ),
        (
            "fused_logits",
            {"queries": PACKED_QUERIES[:1], "weights": PACKED_WEIGHTS[:1]}
            | {"slot_lens": cuda(1, 4), "quad_first": cuda(1)}
            | {"out": cuda(4, 64, dtype=torch.float32)},
            "quads: expected a multiple of 2, got 1",
        ),
        ("fused_logits", {"slot_lens": QUADS}, f"slot_lens: expected [4, 4] int32 {ON}, got [4]"),
        (
            "fused_logits",
            {"out": cuda(64, 16, dtype=torch.float32).t()},
            "out: expected a contiguous last dimension, got strides [1, 16]",
        ),
        (
            "fused_block_keys",
            {"weights": cuda(4, 4, 48, dtype=torch.float32)},
            "weights: expected 32 or 64 heads, got 48",
        ),
        (
            "fused_candidate_logits",
            {"out": cuda(16, 84, dtype=torch.float32)},
            "out: expected columns of at most 65535 whole blocks, got 84",
        ),
        (
            "fused_candidate_logits",
            {"entries": cuda(4, 65)},
            f"ranks: expected [4, 3, 4] int16 {ON}",
        ),
    ],
)
def test_what_does_not_fit_together(name: str, wrong: dict[str, Any], message: str) -> None:
    assert refusal(name, **wrong).startswith(message)


@needs_gxx
@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.uint8, 1152), (torch.float8_e4m3fn, 1152), (torch.float16, 1088),
     (torch.bfloat16, 1088)],
)  # fmt: skip
def test_packed_blocks_of_every_dtype(dtype: torch.dtype, width: int) -> None:
    op, given = CALLS["index_k, packed"]
    with pytest.raises(RuntimeError, match="kernels are not loaded on cuda:63"):
        op(**given | {"out_values": cuda(3, width, dtype=dtype)})


@needs_gxx
@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize(
    "name",
    [name for name, (_, given) in CALLS.items() if given.get("keys") is PACKED_KEYS],
)
def test_keys_of_other_widths_and_dtypes(name: str) -> None:
    wide = cuda(64, 1152, dtype=torch.float16)
    assert refusal(name, keys=wide).startswith("keys: expected [64, 1088] float16 on cuda")
    both = "[blocks, 1152] uint8 or [blocks, 1088] float16 or bfloat16"
    floats = cuda(64, 1152, dtype=torch.float32)
    assert refusal(name, keys=floats) == f"keys: expected {both}, got float32"


@needs_gxx
@pytest.mark.usefixtures("entries")
def test_a_tensor_without_memory() -> None:
    """As torch.compile and sharded parameters have them."""
    lens = cuda(2)
    lens.untyped_storage().resize_(0)
    assert refusal("topk", lens=lens) == "lens: expected a tensor with memory, got a null pointer"


@needs_gxx
@pytest.mark.usefixtures("entries")
def test_a_complex_tensor_is_described() -> None:
    lens = torch.zeros(2, dtype=torch.complex64)
    assert (
        refusal("topk", lens=lens)
        == "lens: expected [2] int32 on cuda:63, got [2] complex64 on cpu"
    )


def test_without_a_compiler_the_tensor_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that has neither a GPU nor g++."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("SPARSE_INDEXER_CACHE_DIR", str(tmp_path))
    for kernel in all_kernels().values():
        monkeypatch.delitem(kernel.loaded, torch.device("cpu"), raising=False)
    logits = torch.zeros(2, 8)
    assert refusal("block_keys", logits=logits) == (
        "logits: expected a dense CUDA tensor, got [2, 8] float32 on cpu"
    )


def test_all_ops_are_found() -> None:
    assert set(all_kernels()) == {op.__name__ for op, _ in CALLS.values()}
