# SPDX-License-Identifier: Apache-2.0
"""Time prefill beside its peers: `python bench/bench_prefill.py [--quick] [--cases TEXT]`.

One line of environment, then a row a case; bench/README.md says what the columns mean. A setup is
the last rows of one request, its keys in shuffled pages. All its calls, peers too, take turns after
each has been checked against the `mask` backend in fp32 on a sample of rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timing import Call, environment, medians

from sparse_indexer import make_candidate_indexer, testing
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.formats import FORMATS, KeyFormat, decode_ue8m0, dequantize_fp4, dequantize_fp8
from sparse_indexer.inputs import FlatIndexK, IndexQ, PrefillIndexerInputs, flat_index_k
from sparse_indexer.ops.topk import topk
from sparse_indexer.protocol import CandidateIndexer
from sparse_indexer.trace import load_trace

DEVICE = torch.device("cuda:0")
TOPK, BLOCKS = 512, 2048  # positions a row selects, blocks of 8 it publishes
ROWS = {65_536: (128, 4096, 16_384), 262_144: (128, 4096, 16_384), 1_048_576: (128, 1024)}
MOST, TAIL = 16_384, 128  # rows of the largest setup, of a tail
SAMPLE = (*range(1, TAIL + 1, 8), *range(500, MOST + 1, 1444))  # rows checked; 1 is the last
TOLERANCE = 5e-4  # of a row's largest |logit|
NOISE = 0.02  # of the rms of a trace's keys and queries: repeated ones are no ties
LOGITS_BYTES, TORCH_BYTES, TORCH_ROWS = 4 << 30, 1 << 30, 256  # of peers: tiles; rows measured
SECONDS = 1.0  # measured a setup, about; each call at least 5 times, at most 30

PUBLISH, OWN, SELECT, FULL = "publish", "publish with own top-k", "select", "topk"
CUT, MEMORY, GRAPHS = (
    f"prefill_tail to {TAIL} rows",
    "memory",
    (f"graph: {OWN}", f"graph: {SELECT}"),
)
DENSE, PLAIN = "DeepGEMM logits", "plain torch in bf16"
EXACT = (f"{DENSE} + topk", f"{DENSE} + torch.topk", PLAIN)  # of a layer; select's peers
MODEL = "source + 4 consumers"  # beside 5 layers of the fastest of EXACT


class Setup(NamedTuple):
    rows: int
    context: int
    heads: int
    data: str  # random, fp4, overlap SHARE, trace
    methods: tuple[str, ...]

    def flops(self, case: str) -> int:
        """2 * heads * 128 a row and visible position; of a consumer: and candidate position."""
        if case == CUT:
            return 0
        if case == MODEL:
            return self.flops(OWN) + 4 * self.flops(SELECT)
        most = 8 * BLOCKS if SELECT in case else self.context
        lens = range(self.context - self.rows + 1, self.context + 1)
        return 2 * self.heads * 128 * sum(min(most, length) for length in lens)

    def bytes(self) -> int:
        """Keys, queries, weights, blocks, selected positions: each read or written once."""
        stored = FORMATS[form_of(self.data)].payload_bytes + 4
        of_row = self.heads * (stored + 4) + 4 * (BLOCKS + TOPK)
        return self.context * stored + self.rows * of_row


def all_setups() -> list[Setup]:
    setups = []
    for context, counts in ROWS.items():
        for heads in (32, 64):
            for data in ("random", "fp4", "overlap 0.86", "overlap 0.6", "trace"):
                for rows in counts:
                    methods = (PUBLISH, OWN, SELECT, *((FULL,) if data == "random" else ()))
                    if context == 262_144:
                        methods += {128: GRAPHS, MOST: (CUT, MEMORY)}.get(rows, ())
                    setups.append(Setup(rows, context, heads, data, methods))
    return setups


def quick_setups() -> list[Setup]:
    """What the bars of the design need."""
    bars = {
        (4096, "random"): (PUBLISH,),
        (4096, "fp4"): (PUBLISH,),
        (TAIL, "random"): (OWN, SELECT, *GRAPHS),
        (MOST, "random"): (OWN, SELECT),
        (TAIL, "overlap 0.86"): (OWN, SELECT, *GRAPHS),
        (MOST, "overlap 0.86"): (OWN, SELECT, CUT, MEMORY),
    }
    return [Setup(rows, 262_144, 32, data, methods) for (rows, data), methods in bars.items()]


def form_of(data: str) -> KeyFormat:
    return "fp4" if data == "fp4" else "fp8"


@cache
def keys_of(data: str, context: int) -> FlatIndexK:
    if data != "trace":
        return testing.random_keys(context, form_of(data), seed=1, device=DEVICE)
    stored = load_trace().source.index_k
    assert stored.scales is not None
    once = dequantize_fp8(stored.values, stored.scales).to(DEVICE)
    return flat_index_k(noisy(once.repeat(-(-context // len(once)), 1)[:context]), "fp8")


@cache
def queries_of(data: str, context: int, heads: int) -> tuple[IndexQ, torch.Tensor]:
    """Of a source layer's rows, as many as this context has at most."""
    most = max(ROWS[context])
    if data.startswith("overlap"):
        keys, overlap = keys_of("random", context), float(data.split()[1])
        return testing.overlapping_queries(
            most, heads, keys, overlap=overlap, topk_blocks=BLOCKS, seed=2
        )
    if data != "trace":
        return last(most, *random_of(form_of(data), heads, 3))
    layer = load_trace().source
    values, scales = layer.index_q.values, layer.index_q.scales
    assert scales is not None
    rows, copies = torch.arange(most) % len(values), torch.arange(heads) % values.shape[1]
    weights = (layer.head_weights / copies.bincount())[:, copies][rows]
    queries = dequantize_fp8(values, scales)[:, copies].to(DEVICE)[rows.to(DEVICE)]
    return testing.index_q(noisy(queries), "fp8"), weights.to(DEVICE)


@cache
def random_of(form: KeyFormat, heads: int, seed: int) -> tuple[IndexQ, torch.Tensor]:
    return testing.random_queries(MOST, heads, form, seed=seed, device=DEVICE)


def noisy(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(x.device).manual_seed(4)
    noise = torch.randn(x.shape, generator=generator, device=x.device)
    return x + noise * (NOISE * x.square().mean().sqrt())


def last(rows: int, queries: IndexQ, weights: torch.Tensor) -> tuple[IndexQ, torch.Tensor]:
    scales = None if queries.scales is None else queries.scales[-rows:]
    return IndexQ(queries.values[-rows:], scales), weights[-rows:]


def layers(setup: Setup) -> tuple[PrefillIndexerInputs, PrefillIndexerInputs, FlatIndexK]:
    """The source's inputs; a consumer's, whose queries are random; the keys of both."""
    rows, context, heads, data, _ = setup
    keys = keys_of("random" if data.startswith("overlap") else data, context)
    queries = last(rows, *queries_of(data, context, heads))
    source = testing.make_inputs(*queries, [keys], range(context)[-rows:], [rows])
    others = last(rows, *random_of(form_of(data), heads, 5))
    return source, testing.with_queries(source, *others), keys


@lru_cache(2)
def sampled_logits(context: int, heads: int, data: str) -> list[torch.Tensor]:
    """The mask backend's, of the source and of the consumer, at `SAMPLE`'s rows, last row first."""
    most = max(ROWS[context])
    at, found = [most - n for n in SAMPLE if n <= most], []
    source, consumer, keys = layers(Setup(most, context, heads, data, ()))
    for inputs in (source, consumer):
        q, weights = inputs.index_q, inputs.head_weights[at]
        queries = IndexQ(q.values[at], None if q.scales is None else q.scales[at])
        positions = [context - most + row for row in at]
        rows = testing.make_inputs(queries, weights, [keys], positions, [len(at)])
        found.append(MaskIndexer(DEVICE, accumulate=torch.float32).dense_logits(rows))
    return found


def expect(what: str, problem: str | None) -> None:
    if problem is not None:
        raise AssertionError(f"{what}: {problem}")


def expect_best(
    what: str, out: torch.Tensor, stops: torch.Tensor, at: list[int], values: torch.Tensor
) -> None:
    """Each row of `out` ascends and ends below its stop; rows `at` hold the best of `values`."""
    bad = (out[:, 0] < 0) | (out[:, -1] >= stops) | (out.diff(dim=1) <= 0).any(1)
    expect(what, f"{int(bad.sum())} rows are malformed" if bad.any() else None)
    want = values.topk(out.shape[1]).indices
    bounds = 2 * TOLERANCE * values.nan_to_num(0.0, 0.0, 0.0).abs().amax(1)
    expect(what, testing.near_floor_problem(*(x.cpu() for x in (out[at], want, values, bounds))))


def captured(call: Call) -> Call:
    call(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(0)
    return lambda i: graph.replay()


def scratch_mib(call: Call) -> float:
    """The peak above what is held before the call and what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = call(0)
    held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    del kept
    return (peak - held) / 2**20


def own_calls(
    setup: Setup, indexer: CandidateIndexer, source: PrefillIndexerInputs, consumer: Any
) -> tuple[dict[str, Call], float]:
    """A setup's calls, checked; blocks that 4 rows have together, as a multiple of one row's."""
    lens, rows = source.plan.compressed_lens, setup.rows
    own, selected, exact = torch.full((3, rows, TOPK), -7, dtype=torch.int32, device=DEVICE)
    candidates = indexer.publish_prefill(source, own)
    calls: dict[str, Call] = {
        PUBLISH: lambda i: indexer.publish_prefill(source),
        OWN: lambda i: indexer.publish_prefill(source, own),
        SELECT: lambda i: indexer.select_prefill(candidates, consumer, selected),
        FULL: lambda i: indexer.topk_prefill(consumer, exact),
        CUT: lambda i: indexer.prefill_tail(candidates, [TAIL]),
    }
    calls[SELECT](0)
    at = [rows - n for n in SAMPLE if n <= rows]
    logits, others = (x[: len(at)] for x in sampled_logits(*setup[1:4]))
    blocks, newest = candidates.blocks, (lens - 1) // 8
    keys = testing.block_values(logits).scatter(1, newest[at, None].long(), torch.inf)
    expect_best("blocks", blocks, newest + 1, at, keys)
    expect_best("own positions", own, lens, at, logits)
    published = torch.zeros_like(keys, dtype=torch.bool).scatter(1, blocks[at].long(), True)
    among = others.where(published.repeat_interleave(8, 1), -torch.inf)
    expect_best("select", selected, lens, at, among)
    if FULL in setup.methods:
        calls[FULL](0)
        expect_best("topk", exact, lens, at, others)
    together = blocks.view(-1, 4 * BLOCKS).sort(1).values
    union = ((together.diff(dim=1) > 0).sum(1) + 1).float().mean().item() / BLOCKS
    calls |= {n: captured(calls[n.removeprefix("graph: ")]) for n in GRAPHS if n in setup.methods}
    return calls, union


def as_e4m3(values: torch.Tensor, scales: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What fp8 or fp4 vectors store, exactly, in e4m3 with one fp32 scale each."""
    if values.dtype != torch.uint8:
        return values, scales
    scale = decode_ue8m0(scales[..., None].contiguous().view(torch.uint8).amax(-1))
    return (dequantize_fp4(values, scales) / scale[..., None]).to(torch.float8_e4m3fn), scale


def peer_calls(
    setup: Setup, deep_gemm: Any, source: PrefillIndexerInputs, keys: FlatIndexK
) -> dict[str, Call]:
    """The peers' calls, checked: on the source's queries, the keys contiguous."""
    rows, context, heads, _, methods = setup
    lens, weights = source.plan.compressed_lens, source.head_weights
    (q, q_scale), (k, k_scale) = (as_e4m3(x.values, x.scales) for x in (source.index_q, keys))
    folded, starts = weights * q_scale, torch.zeros_like(lens)
    out = torch.empty(rows, TOPK, dtype=torch.int32, device=DEVICE)
    k16, w16 = (k.float() * k_scale[:, None]).bfloat16().t(), weights.bfloat16()[:, None]
    columns = torch.arange(context, device=DEVICE)

    def dense(part: Any, clean: bool = False) -> torch.Tensor:
        some = (q[part], (k, k_scale), folded[part], starts[part], lens[part])
        logits: torch.Tensor = deep_gemm.fp8_mqa_logits(*some, clean_logits=clean)
        return logits

    def plain(part: Any) -> torch.Tensor:
        queries = (q[part].float() * q_scale[part][..., None]).bfloat16()
        scores = (queries.flatten(0, 1) @ k16).relu_().view(-1, heads, context)
        logits = torch.bmm(w16[part], scores).squeeze(1)
        return logits.masked_fill_(columns >= lens[part][:, None], -torch.inf)

    def tiled(act: Callable[[slice], object], count: int, step: int) -> Call:
        """The last `count` rows, `step` at a time; what a tile makes is freed before the next."""
        parts = [slice(i, min(i + step, rows)) for i in range(rows - count, rows, step)]

        def call(i: int) -> None:
            for part in parts:
                act(part)

        return call

    at = [rows - n for n in SAMPLE if n <= rows][:16]
    want, seen = sampled_logits(*setup[1:4])[0][: len(at)], lens[at].tolist()
    calls, layer = {}, bool(set(methods) - {PUBLISH, CUT})
    if deep_gemm is not None:
        expect(DENSE, testing.logits_problem(dense(at), want, seen, TOLERANCE))
        step = LOGITS_BYTES // (4 * context)
        calls[DENSE] = tiled(dense, rows, step)
        if layer:
            calls[EXACT[0]] = tiled(lambda p: topk(dense(p), lens[p], out=out[p]), rows, step)
            calls[EXACT[1]] = tiled(lambda p: dense(p, True).topk(TOPK), rows, step)
    if layer:
        expect(PLAIN, testing.logits_problem(plain(at), want, seen, 0.02))
        step = max(1, TORCH_BYTES // (2 * heads * context))
        calls[PLAIN] = tiled(lambda p: plain(p).topk(TOPK), min(rows, TORCH_ROWS), step)
    return calls


def measure(
    setup: Setup, indexer: CandidateIndexer, deep_gemm: Any, limit: float
) -> list[dict[str, Any]]:
    source, consumer, keys = layers(setup)
    own, union = own_calls(setup, indexer, source, consumer)
    calls = {name: own[name] for name in setup.methods if name in own}
    calls |= peer_calls(setup, deep_gemm, source, keys)
    once = sum(medians(list(calls.values()), repeats=1))
    repeats = max(5, min(30, int(SECONDS * 1e6 / once)))
    us = dict(zip(calls, medians(list(calls.values()), repeats=repeats), strict=True))
    if PLAIN in us:
        us[PLAIN] *= setup.rows / min(setup.rows, TORCH_ROWS)
    if OWN in us and SELECT in us:
        us[MODEL] = us[OWN] + 4 * us[SELECT]
    best = min((name for name in EXACT if name in us), key=us.__getitem__, default="")
    rows = []
    for case, time in us.items():
        peer = DENSE if PUBLISH in case else best if case not in (CUT, DENSE, *EXACT) else ""
        ratio = us[peer] * (5 if case == MODEL else 1) / time if peer in us else None
        data = f"{setup.data}, union {union:.2f}x" if SELECT in case else setup.data
        rate = setup.flops(case) / time * 1e-6
        scaled = f", {TORCH_ROWS} rows scaled" * (case == PLAIN and setup.rows > TORCH_ROWS)
        shape = {"rows": setup.rows, "context": setup.context, "heads": setup.heads, "data": data}
        row = {"case": case + scaled, **shape, "us": time, "peer": peer, "vs_peer": ratio}
        rows.append({**row, "tflops": rate, "limit_share": rate / limit, "bytes": setup.bytes()})
        beside = "" if ratio is None else f"{ratio:.2f} {peer}"
        shown = f"{rate:.0f} | {100 * rate / limit:.0f}" if rate else " | "
        print(*list(row.values())[:5], f"{time:.1f}", beside, shown, sep=" | ", flush=True)
    for name in (OWN, SELECT) if MEMORY in setup.methods else ():
        mib = scratch_mib(own[name])
        rows.append({"case": f"{MEMORY}: {name}", **shape, "scratch_mib": mib})
        print(f"{name}, {setup.rows} rows: {mib:.1f} MiB beyond inputs and tables", flush=True)
    return rows


def fp8_limit() -> float:
    """TFLOPS of an 8192^3 product of random e4m3."""
    a, b = (torch.randn(8192, 8192, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=DEVICE)
    call = lambda i: torch._scaled_mm(  # noqa: E731
        a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    (us,) = medians([call], repeats=100)
    return 2 * 8192**3 / us * 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE, too")
    parser.add_argument("--quick", action="store_true", help="what the design's bars need")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only where the row has TEXT")
    parser.add_argument("--backend", default="sm90")
    args = parser.parse_args()
    indexer = make_candidate_indexer(DEVICE, topk=TOPK, topk_blocks=BLOCKS, backend=args.backend)
    try:
        deep_gemm = import_module("deep_gemm")
    except Exception as error:  # its import compiles and looks for CUDA
        print(f"no DeepGEMM: {error}")
        deep_gemm = None
    limit = fp8_limit()
    about = f"{environment()}, backend {indexer.name}, fp8 limit {limit:.0f} TFLOPS"
    print(about)
    print("case | rows | context | heads | data | us | vs peer | TFLOPS | % of fp8 limit")
    rows: list[dict[str, Any]] = []
    failed = False
    for setup in quick_setups() if args.quick else all_setups():
        shape = " | ".join(map(str, setup[:4]))
        methods = tuple(m for m in setup.methods if args.cases in f"{m} | {shape}")
        if not methods:
            continue
        try:
            rows += measure(setup._replace(methods=methods), indexer, deep_gemm, limit)
        except Exception as error:  # the other setups are worth their time
            failed = True
            print(f"FAILED | {shape} | {type(error).__name__}: {error}", flush=True)
        if args.json is not None:
            numbers = {"environment": about, "fp8_tflops": limit, "rows": rows}
            args.json.write_text(json.dumps(numbers, indent=1))
    sys.exit(failed)


if __name__ == "__main__":
    main()
