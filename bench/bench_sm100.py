# SPDX-License-Identifier: Apache-2.0
"""Host time and memory of the sm100 backend: `python bench/bench_sm100.py [--json FILE]`.

DeepGEMM is a stand-in with its signatures that computes nothing, so any GPU from capability 8.0 on
will do. Host time: it returns tensors made before, so that all that is measured is ours, launches
included; under `torch.inference_mode`, as engines call it, but for rows that say otherwise. Memory:
it allocates what DeepGEMM does. bench/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timing import environment
from torch import Tensor

from sparse_indexer import PrefillIndexerInputs, plan_prefill
from sparse_indexer.backends.sm100 import Sm100Indexer
from sparse_indexer.testing import make_inputs, random_keys, random_queries, with_queries

DEVICE = torch.device("cuda:0")
CONTEXT, TOPK, BLOCKS = 262_144, 512, 2048
ROWS = (128, 2048, 8192)
GRADIENTS_ON = "select, gradients on"
CALLS = 256  # timed of each
IN_A_ROW = 64, 4  # before a synchronization: calls that score once; and at least
CHUNK, CONSUMERS = 16_384, 4  # rows of a chunk, consumer layers: of the memory table
MiB = 1 << 20


class Stub:
    """DeepGEMM 0.2.5 that returns logits and schedules of the right shapes.

    Args:
        make: makes a tensor of a shape and dtype, or finds one.
    """

    __version__ = "0.2.5"

    def __init__(self, make: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> None:
        self._make = make
        self.calls = 0  # that score

    def fp8_fp4_mqa_logits(
        self,
        q: tuple[Tensor, Tensor],
        kv: tuple[Tensor, Tensor],
        weights: Tensor,
        cu_seq_len_k_start: Tensor,
        cu_seq_len_k_end: Tensor,
        max_seqlen_k: int,
        schedule_meta: Tensor | None = None,
    ) -> Tensor:
        self.calls += 1
        shape = (weights.shape[0], -(-max_seqlen_k // 512) * 512)
        return self._make(shape, torch.bfloat16)[:, :max_seqlen_k]

    def get_paged_sparse_mqa_logits_metadata(
        self,
        context_lens: Tensor,
        block_table: Tensor,
        indices: Tensor,
        page_kv: int,
        sparse_kv_block_indices: Tensor,
        qk_dtype: torch.dtype,
        sparse_block_kv: int,
    ) -> Tensor:
        rows, blocks = sparse_kv_block_indices.shape
        return self._make((rows * -(-blocks // 80) * 672,), torch.uint8)

    def fp8_fp4_paged_sparse_mqa_logits(
        self,
        q: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        weights: Tensor,
        metadata: Tensor,
        num_max_sparse_blocks: int,
        sparse_block_kv: int,
    ) -> Tensor:
        self.calls += 1
        shape = (weights.shape[0], num_max_sparse_blocks * sparse_block_kv)
        return self._make(shape, torch.bfloat16)


def kept() -> Callable[[tuple[int, ...], torch.dtype], Tensor]:
    """Makes each shape once."""
    made: dict[tuple[int, ...], Tensor] = {}

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if shape not in made:
            made[shape] = fresh(shape, dtype)
            if dtype == torch.bfloat16:
                made[shape].normal_()
        return made[shape]

    return make


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


class Layers(NamedTuple):
    source: PrefillIndexerInputs
    consumer: PrefillIndexerInputs


def layers(rows: int, heads: int) -> Layers:
    """The last rows of one request."""
    keys = random_keys(CONTEXT, "fp4", seed=1, device=DEVICE)
    first, second = (random_queries(rows, heads, "fp4", seed=i, device=DEVICE) for i in (2, 3))
    source = make_inputs(*first, [keys], range(CONTEXT)[-rows:], [rows])
    return Layers(source, with_queries(source, *second))


def host_us(call: Callable[[], object], in_a_row: int) -> tuple[float, float]:
    """Median microseconds that a call keeps the host busy, and `torch.mul` between the calls.

    The queue is never full. What a host takes for either changes by half from minute to minute.
    """
    taken: tuple[list[float], list[float]] = [], []
    x = torch.empty(128, 32, device=DEVICE)
    y = torch.empty_like(x)
    for i in range(CALLS + in_a_row):
        if i % in_a_row == 0:
            torch.cuda.synchronize()
        for times, timed in zip(taken, (call, lambda: torch.mul(x, 2, out=y)), strict=True):
            start = time.perf_counter()
            result = timed()
            times.append((time.perf_counter() - start) * 1e6)
            del result
    torch.cuda.synchronize()
    own, mul = (statistics.median(times[in_a_row:]) for times in taken)
    return own, mul


def host_rows() -> list[dict[str, Any]]:
    of_rows(ROWS[0], 32)  # for the machine to warm up
    columns = "case | rows | heads | calls | us | us a call | us of a further call | torch.mul us"
    print("host time:", columns)
    return [row for heads in (32, 64) for row in of_heads(heads)]


def of_heads(heads: int) -> list[dict[str, Any]]:
    """All methods; what a further call takes is the slope over the row counts."""
    found: list[dict[str, Any]] = []
    fewest: dict[str, tuple[int, float]] = {}
    for rows in ROWS:
        for case, (calls, us, mul) in of_rows(rows, heads).items():
            few, less = fewest.setdefault(case, (calls, us))
            further = (us - less) / (calls - few) if calls > few else None
            values = {
                "us": us,
                "us_a_call": us / calls,
                "us_of_a_further_call": further,
                "mul": mul,
            }
            found.append({"case": case, "rows": rows, "heads": heads, "calls": calls} | values)
            shown = (f"{x:.1f}" if x is not None else "" for x in values.values())
            print(case, rows, heads, calls, *shown, sep=" | ", flush=True)
    return found


def of_rows(rows: int, heads: int) -> dict[str, tuple[int, float, float]]:
    """(calls of DeepGEMM's that score, microseconds of ours, of torch.mul) of each method."""
    source, consumer = layers(rows, heads)
    stub = Stub(kept())
    indexer = Sm100Indexer(DEVICE, topk=TOPK, topk_blocks=BLOCKS, deep_gemm=stub)
    out = torch.empty(rows, TOPK, dtype=torch.int32, device=DEVICE)
    candidates = indexer.publish_prefill(source)
    in_bf16 = with_queries(consumer, consumer.index_q, consumer.head_weights.bfloat16())
    calls: dict[str, Callable[[], object]] = {
        GRADIENTS_ON: lambda: indexer.select_prefill(candidates, consumer, out),
        "select": lambda: indexer.select_prefill(candidates, consumer, out),
        "select, weights in bfloat16": lambda: indexer.select_prefill(candidates, in_bf16, out),
        "publish": lambda: indexer.publish_prefill(source),
        "publish with own top-k": lambda: indexer.publish_prefill(source, out),
        "topk": lambda: indexer.topk_prefill(consumer, out),
        "prefill_tail to 128 rows": lambda: indexer.prefill_tail(candidates, [128]),
    }
    measured = {}
    for case, call in calls.items():
        stub.calls = 0
        with torch.inference_mode(case != GRADIENTS_ON):
            call()
            times = max(stub.calls, 1)
            measured[case] = times, *host_us(call, max(IN_A_ROW[0] // times, IN_A_ROW[1]))
    return measured


def prefill(indexer: Sm100Indexer, whole: Layers, chunks: range) -> None:
    """Chunk after chunk: a source, its consumers; the last candidates go when there are new."""
    table, pool = whole.source.plan.page_table, whole.source.index_k
    candidates = None
    out = torch.empty(CHUNK, TOPK, dtype=torch.int32, device=DEVICE)
    for chunk in chunks:
        plan = plan_prefill(range(chunk * CHUNK, (chunk + 1) * CHUNK), [CHUNK], page_table=table)
        source, consumer = (
            PrefillIndexerInputs(plan, x.index_q, x.head_weights, pool) for x in whole
        )
        candidates = indexer.publish_prefill(source, out)
        for _ in range(CONSUMERS):
            indexer.select_prefill(candidates, consumer, out)
    del candidates
    torch.cuda.synchronize()


def memory_rows() -> list[dict[str, Any]]:
    print("memory: pool | phase | reserved MiB | peak allocated MiB")
    whole, found = layers(CHUNK, 32), []
    for pool in ("on", "off"):
        stub = Stub(fresh)
        indexer = Sm100Indexer(DEVICE, topk=TOPK, topk_blocks=BLOCKS, deep_gemm=stub)
        if pool == "off":
            indexer._lasting = contextlib.nullcontext  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()
        every = range(CONTEXT // CHUNK)
        for phase, chunks in (
            ("flush", range(0)),
            ("cold", every),
            ("cold again", every),
            ("warm", every[-1:]),
        ):
            torch.cuda.reset_peak_memory_stats()
            prefill(indexer, whole, chunks)
            sizes = [torch.cuda.memory_reserved() / MiB, torch.cuda.max_memory_allocated() / MiB]
            found.append({"pool": pool, "phase": phase, "reserved": sizes[0], "peak": sizes[1]})
            print(pool, phase, *(f"{size:.0f}" for size in sizes), sep=" | ", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE, too")
    args = parser.parse_args()
    print(environment())
    numbers = {"environment": environment(), "host": host_rows(), "memory": memory_rows()}
    if args.json is not None:
        args.json.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
