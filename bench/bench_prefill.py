# SPDX-License-Identifier: Apache-2.0
"""Time prefill beside its peers: `python bench/bench_prefill.py [--quick] [--cases TEXT]`.

bench/README.md says what the columns mean. A setup is the last rows of one request. Its calls, the
peers' too, are checked against `mask` in fp32 on a sample of rows; then they take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from timing import Call, environment, medians
from torch import Tensor

from sparse_indexer import make_candidate_indexer, testing
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.formats import KeyFormat, decode_ue8m0, dequantize_fp4, dequantize_fp8
from sparse_indexer.inputs import FlatIndexK, IndexQ, flat_index_k
from sparse_indexer.inputs import PrefillIndexerInputs as Inputs
from sparse_indexer.ops.topk import topk
from sparse_indexer.trace import load_trace

Calls = dict[str, Call]
DEVICE = torch.device("cuda:0")
DATA = ("random", "fp4", "overlap 0.86", "overlap 0.6", "trace")
TOPK, BLOCKS = 512, 2048  # positions a row selects, blocks of 8 it publishes
ROWS = {65_536: (128, 4096, 16_384), 262_144: (128, 4096, 16_384), 1_048_576: (128, 1024)}
MOST, TAIL = 16_384, 128  # rows of the largest setup, of a tail
SAMPLE = (*range(1, TAIL + 1, 8), *range(500, MOST + 1, 1444))  # rows checked; 1 is the last
TOLERANCE, OF_PEERS = 5e-4, 0.02  # of a row's largest |logit|
NOISE = 0.02  # of the rms of a trace's keys and queries: repeated ones are no ties
LOGITS_BYTES, TORCH_BYTES, TORCH_ROWS = 4 << 30, 1 << 30, 256  # of peers: tiles; rows measured
SECONDS = 0.5  # measured a setup, about; each call at least 5 times, at most 30

PUBLISH, OWN, SELECT, FULL = "publish", "publish with own top-k", "select", "topk"
CUT, MEMORY = f"prefill_tail to {TAIL} rows", "memory"
GRAPHS = (f"graph: {OWN}", f"graph: {SELECT}")
DENSE, PLAIN = "DeepGEMM logits", "plain torch in bf16"
EXACT = (f"{DENSE} + topk", f"{DENSE} + torch.topk", PLAIN)  # a layer's top-k
MODEL = "source + 4 consumers"  # beside 5 layers of the fastest of EXACT


class Setup(NamedTuple):
    rows: int
    context: int
    heads: int
    data: str
    methods: tuple[str, ...]

    def flops(self, case: str) -> int:
        """2 * heads * 128 a row and visible position; a consumer's: a candidate as well."""
        if case == MODEL:
            return self.flops(OWN) + 4 * self.flops(SELECT)
        most = 0 if case == CUT else 8 * BLOCKS if SELECT in case else self.context
        lens = range(self.context - self.rows + 1, self.context + 1)
        return 2 * self.heads * 128 * sum(min(most, length) for length in lens)

    def bytes(self) -> int:
        """Keys, queries with scale and weight, blocks, selected positions: each moved once."""
        of_key = 68 if self.data == "fp4" else 132
        return of_key * self.context + self.rows * (self.heads * (of_key + 4) + 4 * (BLOCKS + TOPK))


def setups(quick: bool) -> list[Setup]:
    some = ((32,), DATA[:3], (262_144,))  # what the bars of the design are about
    usual, more = (PUBLISH, OWN, SELECT, FULL), {TAIL: GRAPHS, MOST: (CUT, MEMORY)}
    return [
        Setup(rows, context, heads, data, (*usual, *more.get(rows, ())))
        for heads, data, context in product(*(some if quick else ((32, 64), DATA, ROWS)))
        for rows in ROWS[context]
    ]


random_keys, random_queries = cache(testing.random_keys), cache(testing.random_queries)


def traced(context: int, heads: int) -> tuple[FlatIndexK, IndexQ, Tensor]:
    """The shipped trace's source, its keys, rows and heads over and over, each with some noise."""
    layer, noise = load_trace().source, torch.Generator(DEVICE).manual_seed(2)

    def some(x: Any, *picked: Tensor) -> Tensor:
        vectors = dequantize_fp8(x.values, x.scales)[picked].to(DEVICE)
        rms = vectors.square().mean().sqrt()
        return vectors + NOISE * rms * torch.empty_like(vectors).normal_(generator=noise)

    q, n = layer.index_q.values, torch.arange(max(context, MOST))
    rows, copies = n[:MOST, None] % len(q), n[:heads] % q.shape[1]
    keys = some(layer.index_k, n[:context] % len(layer.index_k.values))
    weights = (layer.head_weights / copies.bincount())[rows, copies].to(DEVICE)
    queries = testing.index_q(some(layer.index_q, rows, copies), "fp8")
    return flat_index_k(keys, "fp8"), queries, weights


@lru_cache(1)
def layers(context: int, heads: int, data: str) -> tuple[Inputs, Inputs, FlatIndexK]:
    """`MOST` rows: a source; a consumer with random queries; the keys of both."""
    form: KeyFormat = "fp4" if data == "fp4" else "fp8"
    keys = random_keys(context, form, seed=1, device=DEVICE)
    queries, weights = random_queries(MOST, heads, form, seed=3, device=DEVICE)
    others = random_queries(MOST, heads, form, seed=5, device=DEVICE)
    if data == "trace":
        keys, queries, weights = traced(context, heads)
    elif data.startswith("overlap"):
        queries, weights = testing.overlapping_queries(
            MOST, heads, keys, overlap=float(data.split()[1]), topk_blocks=BLOCKS, seed=4
        )
    source = testing.make_inputs(queries, weights, [keys], range(context)[-MOST:], [MOST])
    return source, testing.with_queries(source, *others), keys


def rows_of(inputs: Inputs, rows: slice | list[int]) -> Inputs:
    q, plan = inputs.index_q, inputs.plan
    queries = IndexQ(q.values[rows], None if q.scales is None else q.scales[rows])
    part = {x: getattr(plan, x)[rows] for x in ("compressed_lens", "request_of_row")}
    plan = msgspec.structs.replace(plan, rows_per_request=[len(queries.values)], **part)
    return Inputs(plan, queries, inputs.head_weights[rows], inputs.index_k)


@lru_cache(1)
def sampled_logits(context: int, heads: int, data: str) -> list[Tensor]:
    """The mask backend's, of source and consumer, at the rows of `SAMPLE`."""
    oracle = MaskIndexer(DEVICE, accumulate=torch.float32)
    at = [-n for n in SAMPLE if n <= max(ROWS[context])]
    return [oracle.dense_logits(rows_of(x, at)) for x in layers(context, heads, data)[:2]]


def expect_best(what: str, out: Tensor, stops: Tensor, at: list[int], values: Tensor) -> None:
    """Each row of `out` ascends and ends below its stop; rows `at` hold the best of `values`."""
    bad = (out[:, 0] < 0) | (out[:, -1] >= stops) | (out.diff(dim=1) <= 0).any(1)
    assert not bad.any(), f"{what}: {int(bad.sum())} rows are malformed"
    want = values.topk(out.shape[1]).indices
    bounds = 2 * TOLERANCE * values.nan_to_num(0.0, 0.0, 0.0).abs().amax(1)
    problem = testing.near_floor_problem(*(x.cpu() for x in (out[at], want, values, bounds)))
    assert problem is None, f"{what}: {problem}"


def own_calls(setup: Setup, indexer: Any, source: Inputs, consumer: Inputs) -> tuple[Calls, float]:
    """Checked calls of all methods; blocks that 4 rows have together, in multiples of one row's."""

    def captured(call: Call) -> Call:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(0)
        return lambda i: graph.replay()

    lens, rows = source.plan.compressed_lens, setup.rows
    own, selected, exact = torch.full((3, rows, TOPK), -7, dtype=torch.int32, device=DEVICE)
    candidates = indexer.publish_prefill(source, own)
    calls: Calls = {
        PUBLISH: lambda i: indexer.publish_prefill(source),
        OWN: lambda i: indexer.publish_prefill(source, own),
        SELECT: lambda i: indexer.select_prefill(candidates, consumer, selected),
        FULL: lambda i: indexer.topk_prefill(consumer, exact),
        CUT: lambda i: indexer.prefill_tail(candidates, [TAIL]),
    }
    calls[SELECT](0)
    at = [-n for n in SAMPLE if n <= rows]
    logits, others = (x[: len(at)] for x in sampled_logits(*setup[1:4]))
    blocks, newest = candidates.blocks, (lens - 1) // 8
    keys = testing.block_values(logits).scatter(1, newest[at][:, None].long(), torch.inf)
    expect_best("blocks", blocks, newest + 1, at, keys)
    expect_best("own positions", own, lens, at, logits)
    published = torch.zeros_like(keys, dtype=torch.bool).scatter(1, blocks[at].long(), True)
    among = others.where(published.repeat_interleave(8, 1), -torch.inf)
    expect_best("select", selected, lens, at, among)
    calls[FULL](0)
    expect_best("topk", exact, lens, at, others)
    together = blocks.view(-1, 4 * BLOCKS).sort(1).values.diff(dim=1).sign().sum(1) + 1
    calls |= {n: captured(calls[n.removeprefix("graph: ")]) for n in GRAPHS if n in setup.methods}
    return calls, together.float().mean().item() / BLOCKS


def as_e4m3(values: Tensor, scales: Any) -> tuple[Tensor, Tensor]:
    """What fp8 or fp4 vectors store, exactly, in e4m3 with one fp32 scale each."""
    if values.dtype != torch.uint8:
        return values, scales
    scale = decode_ue8m0(scales[..., None].contiguous().view(torch.uint8).amax(-1))
    return (dequantize_fp4(values, scales) / scale[..., None]).to(torch.float8_e4m3fn), scale


def peer_calls(setup: Setup, deep_gemm: Any, source: Inputs, keys: FlatIndexK) -> Calls:
    """Checked calls of the peers, on the source's queries and keys in one piece."""
    rows, context, heads = setup[:3]
    lens, weights = source.plan.compressed_lens, source.head_weights
    (q, q_scale), (k, k_scale) = (as_e4m3(x.values, x.scales) for x in (source.index_q, keys))
    folded, starts = weights * q_scale, torch.zeros_like(lens)
    out = torch.empty(rows, TOPK, dtype=torch.int32, device=DEVICE)
    k16, positions = (k.float() * k_scale[:, None]).bfloat16().t(), torch.arange(context).to(DEVICE)

    def dense(part: Any, clean: bool = False) -> Tensor:
        some = (q[part], (k, k_scale), folded[part], starts[part], lens[part])
        return deep_gemm.fp8_mqa_logits(*some, clean_logits=clean)  # type: ignore[no-any-return]

    def plain(part: Any) -> Tensor:
        queries = (q[part].float() * q_scale[part][..., None]).bfloat16()
        scores = (queries.flatten(0, 1) @ k16).relu_().view(-1, heads, context)
        logits = torch.bmm(weights[part][:, None].bfloat16(), scores).squeeze(1)
        return logits.masked_fill_(positions >= lens[part][:, None], -torch.inf)

    def tiled(act: Callable[[slice], object], count: int, step: int) -> Call:
        """Of the last rows; what a tile makes is freed before the next."""
        parts = [slice(i, min(i + step, rows)) for i in range(rows - count, rows, max(1, step))]
        return lambda i: [act(part) is None for part in parts]

    at = [-n for n in SAMPLE if n <= rows][:16]
    want, seen = sampled_logits(*setup[1:4])[0][: len(at)], lens[at].tolist()
    step = TORCH_BYTES // (2 * heads * context)
    calls = {PLAIN: tiled(lambda p: plain(p).topk(TOPK), min(rows, TORCH_ROWS), step)}
    problem = testing.logits_problem(plain(at), want, seen, OF_PEERS)
    if deep_gemm is not None:
        problem = problem or testing.logits_problem(dense(at), want, seen, OF_PEERS)
        step = LOGITS_BYTES // (4 * context)
        calls[DENSE] = tiled(dense, rows, step)
        calls[EXACT[0]] = tiled(lambda p: topk(dense(p), lens[p], out=out[p]), rows, step)
        calls[EXACT[1]] = tiled(lambda p: dense(p, True).topk(TOPK), rows, step)
    assert problem is None, f"peers: {problem}"
    return calls


def measure(setup: Setup, indexer: Any, deep_gemm: Any, limit: float) -> list[dict[str, Any]]:
    *both, keys = layers(*setup[1:4])
    source, other = (rows_of(x, slice(-setup.rows, None)) for x in both)
    consumer = testing.with_queries(source, other.index_q, other.head_weights)
    own, union = own_calls(setup, indexer, source, consumer)
    calls = {name: own[name] for name in setup.methods if name in own}
    calls |= peer_calls(setup, deep_gemm, source, keys)
    repeats = max(5, min(30, int(SECONDS * 1e6 / sum(medians([*calls.values()], repeats=1)))))
    us = dict(zip(calls, medians([*calls.values()], repeats=repeats), strict=True))
    us[PLAIN] *= max(1, setup.rows / TORCH_ROWS)
    best = min((name for name in EXACT if name in us), key=us.__getitem__)
    if OWN in us and SELECT in us:
        us[MODEL] = us[OWN] + 4 * us[SELECT]
    rows: list[dict[str, Any]] = []
    for case, time in us.items():
        peer = DENSE if PUBLISH in case else "" if case in (CUT, DENSE, *EXACT) else best
        ratio = us[peer] * (5 if case == MODEL else 1) / time if peer in us else None
        rate = setup.flops(case) / time * 1e-6
        name = case + f", {TORCH_ROWS} rows scaled" * (case == PLAIN and setup.rows > TORCH_ROWS)
        data = setup.data + f", union {union:.2f}x" * (SELECT in case or case == MODEL)
        shown, beside = (name, *setup[:3], data), f"{ratio:.2f} {peer}" if ratio else ""
        rates = f"{rate:.0f} | {100 * rate / limit:.0f}" if rate else " | "
        print(*shown, f"{time:.1f}", beside, rates, sep=" | ", flush=True)
        numbers = {"us": time, "peer": peer, "vs_peer": ratio, "bytes": setup.bytes()}
        numbers |= {"tflops": rate, "limit_share": rate / limit}
        rows.append(dict(zip(("case", *Setup._fields[:4]), shown, strict=True)) | numbers)
    for name in (OWN, SELECT) if MEMORY in setup.methods else ():
        torch.cuda.reset_peak_memory_stats()
        kept = own[name](0)  # candidates are no scratch
        mib = (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) / 2**20
        del kept
        rows.append({"case": f"scratch of {name}", "rows": setup.rows, "mib": mib})
        print(f"scratch of {name} | {setup.rows} | {mib:.1f} MiB beyond inputs and tables")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE, too")
    parser.add_argument("--quick", action="store_true", help="what the design's bars need")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only where the row has TEXT")
    parser.add_argument("--backend", default="sm90")
    args = parser.parse_args()
    indexer = make_candidate_indexer(DEVICE, topk=TOPK, topk_blocks=BLOCKS, backend=args.backend)
    try:
        deep_gemm, peer = import_module("deep_gemm"), f"DeepGEMM {version('sgl-deep-gemm')}"
    except Exception as error:  # it compiles, and looks for CUDA, when imported
        deep_gemm, peer = None, f"no DeepGEMM ({error})"
    a, b = (torch.randn(8192, 8192, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=DEVICE)
    operands: Any = (a, b.t(), one, one, None, None, torch.bfloat16, True)
    limit = 2 * 8192**3 / medians([lambda i: torch._scaled_mm(*operands)], repeats=100)[0] * 1e-6
    about = f"{environment()}, {indexer.name}, {peer}, fp8 limit {limit:.0f} TFLOPS"
    print(f"{about}\ncase | rows | context | heads | data | us | vs peer | TFLOPS | % of fp8 limit")
    rows, failed = list[dict[str, Any]](), False
    for setup in setups(args.quick):
        shape = " | ".join(map(str, setup[:4]))
        methods = tuple(m for m in setup.methods if args.cases in f"{m} | {shape}")
        try:
            if methods:
                rows += measure(setup._replace(methods=methods), indexer, deep_gemm, limit)
        except Exception as error:  # the other setups are worth their time
            failed = True
            print(f"FAILED | {shape} | {type(error).__name__}: {error}", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps({"environment": about, "rows": rows}, indent=1))
    sys.exit(failed)


if __name__ == "__main__":
    main()
