# SPDX-License-Identifier: Apache-2.0
"""Time every op beside torch's own: `python bench/bench_ops.py [--json FILE] [--only NAME]`.

One line of environment, then a row a case. GB/s counts what an op must move: each input read once,
each output written once, the formula beside each case. `% copy` is that over the rate of a large
copy in the same run. `torch` is the op in its title, on the same inputs, timed in turns with ours.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from timing import copy_rate, environment, host_medians, medians

from sparse_indexer import IndexKPool, KVPool, sparse_attention
from sparse_indexer.ops.block_keys import block_keys
from sparse_indexer.ops.candidate_table import candidate_table
from sparse_indexer.ops.index_k import index_k
from sparse_indexer.ops.kv_gather import kv_gather
from sparse_indexer.ops.relu_head_sum import relu_head_sum
from sparse_indexer.ops.sparse_softmax import sparse_softmax
from sparse_indexer.ops.topk import topk
from sparse_indexer.torch_ops import kv_gather as torch_kv_gather
from sparse_indexer.torch_ops import sparse_softmax as torch_sparse_softmax

CUDA = torch.device("cuda:0")


@dataclass
class Case:
    name: str
    title: str  # of torch's op
    bytes: int
    ours: Callable[[int], object]
    torchs: Callable[[int], object] | None
    sets: int = 1


@dataclass
class Row:
    case: str
    us: float
    gb_s: float
    copy_share: float
    torch_us: float | None
    torch_op: str


def int32(rows: int, value: int) -> torch.Tensor:
    return torch.full((rows,), value, dtype=torch.int32, device=CUDA)


def block_keys_cases() -> Iterator[Case]:
    for rows, dtype in ((4096, torch.float32), (4096, torch.bfloat16), (128, torch.float32)):
        width = 262_144
        logits = torch.empty(rows, width, dtype=dtype, device=CUDA).normal_()
        lens, out = int32(rows, width), torch.empty(rows, width // 8, device=CUDA)
        yield Case(
            f"block_keys {rows} x {width} {str(dtype)[6:]}",
            "view(-1, 8).amax(-1)",
            logits.nbytes + out.nbytes,
            lambda i: block_keys(logits, lens, out=out),
            lambda i: logits.view(rows, -1, 8).amax(-1),
        )


def repeat_columns(x: torch.Tensor, period: int, noise: float) -> torch.Tensor:
    parts = x.unflatten(1, (-1, period))
    first = parts[:, :1].clone()
    parts.mul_(noise).add_(first)
    return x


FILLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "random": lambda x: x.normal_(),
    "all equal": lambda x: x.fill_(0.7),
    "two values": lambda x: x.copy_(x.uniform_() < 0.5),
    "all -inf": lambda x: x.fill_(-torch.inf),
    "repeating": lambda x: repeat_columns(x.normal_(), 1024, noise=0.02),
}


def topk_cases() -> Iterator[Case]:
    shapes = (
        (4096, 32_768, 2048, torch.float32, tuple(FILLS)),
        (16_384, 16_384, 512, torch.float32, tuple(FILLS)),
        (16_384, 16_384, 512, torch.bfloat16, ("random",)),
        (128, 32_768, 2048, torch.float32, ("random",)),
        (128, 16_384, 512, torch.float32, ("random",)),
        (1, 16_384, 512, torch.float32, ("random",)),
        (1024, 131_072, 2048, torch.float32, ("random", "repeating")),
        (1024, 262_144, 512, torch.float32, ("random", "repeating")),
    )
    for rows, width, k, dtype, fills in shapes:
        sets = 4 if rows <= 128 else 1
        keys = [torch.empty(rows, width, dtype=dtype, device=CUDA) for _ in range(sets)]
        lens, out = int32(rows, width), torch.empty(rows, k, dtype=torch.int32, device=CUDA)
        for fill in fills:
            for x in keys:
                FILLS[fill](x)
            yield Case(
                f"topk {k} of {rows} x {width} {str(dtype)[6:]}, {fill}",
                "topk",
                keys[0].nbytes + out.nbytes,
                lambda i: topk(keys[i], lens, out=out),
                lambda i: torch.topk(keys[i], k),
                sets,
            )


def index_k_cases() -> Iterator[Case]:
    positions, page_size = 262_144, 64
    table = torch.randperm(positions // page_size, device=CUDA).int()[None]
    lens, starts = int32(1, positions), int32(1, 0)
    scales = torch.empty(positions, device=CUDA)
    for form, to in (("fp4", "fp8"), ("fp8", "fp8"), ("fp8", "fp16"), ("bf16", "bf16")):
        pool = IndexKPool.empty(positions // page_size, page_size, form, device=CUDA)
        pool.write(torch.arange(positions, device=CUDA), torch.randn(positions, 128, device=CUDA))
        dtype = {"fp8": torch.float8_e4m3fn, "fp16": torch.float16, "bf16": torch.bfloat16}[to]
        values = torch.empty(positions, 128, dtype=dtype, device=CUDA)
        yield Case(
            f"index_k {positions} {form} to {to}",
            "index_select of pages",
            pool.pages.nbytes + values.nbytes + scales.nbytes,
            lambda i: index_k(
                pool, table, lens=lens, max_len=positions, out_starts=starts,
                out_values=values, out_scales=scales,
            ),
            lambda i: pool.pages.index_select(0, table[0]),
        )  # fmt: skip


def candidate_table_cases() -> Iterator[Case]:
    for rows in (16_384, 128):
        n, context, page_size = 2048, 262_144, 64
        old = torch.rand(rows, context // 8 - 1, device=CUDA).topk(n - 1).indices.sort().values
        selected = torch.nn.functional.pad(old, (0, 1), value=context // 8 - 1).int()
        table = torch.randperm(context // page_size, device=CUDA).int()[None]
        blocks, slots = torch.empty(2, rows, n, dtype=torch.int32, device=CUDA)
        lens, out_lens, request = int32(rows, context), int32(rows, 0), int32(rows, 0)
        yield Case(
            f"candidate_table {rows} x {n}",
            "gather of pages",
            selected.nbytes + blocks.nbytes + slots.nbytes,
            lambda i: candidate_table(
                selected, lens, request_of_row=request, page_table=table, page_size=page_size,
                out_blocks=blocks, out_slots=slots, out_lens=out_lens,
            ),
            lambda i: table[0][(selected // 8).long()] * 8 + selected % 8,
        )  # fmt: skip


def relu_head_sum_cases() -> Iterator[Case]:
    width = 1024
    for rows, heads, tiles in ((508, 64, 64), (508, 32, 64), (2032, 64, 16)):
        shape = (tiles, rows * heads, width)
        scores = torch.empty(shape, dtype=torch.float16, device=CUDA).normal_()
        weights = torch.randn(rows, heads, device=CUDA)
        logits = torch.empty(tiles, rows, width, device=CUDA)
        keys, lens = torch.empty(tiles, rows, width // 8, device=CUDA), int32(rows, width)

        def in_torch(tile: int) -> torch.Tensor:
            return (scores[tile].view(rows, heads, width).relu() * weights[..., None]).sum(1)

        for out, name, argument in ((logits, "logits", "out_logits"), (keys, "keys", "out_keys")):
            # Views made before: the host would else be slower than the kernel.
            options = {"weights": weights, "lens": lens}
            calls = [
                functools.partial(relu_head_sum, scores[t], **options, **{argument: out[t]})
                for t in range(tiles)
            ]
            yield Case(
                f"relu_head_sum to {name}, {tiles} x [{rows} x {heads}, {width}]",
                "(relu() * weights).sum(1)",
                scores.nbytes + tiles * (weights.nbytes + lens.nbytes) + out.nbytes,
                lambda i: [call() for call in calls],
                lambda i: [in_torch(t) for t in range(tiles)],
            )


def sparse_softmax_cases() -> Iterator[Case]:
    slots = 1 << 20
    for rows, heads, k in (
        (128, 64, 640), (2048, 64, 640), (128, 64, 2176), (1024, 64, 2176), (256, 64, 8192)
    ):  # fmt: skip
        logits = torch.empty(rows, heads, k, device=CUDA).normal_()
        positions = torch.randint(-slots // 8, slots, (rows, k), device=CUDA).int()
        out = torch.empty(rows, heads, k, dtype=torch.float16, device=CUDA)
        options = {"num_slots": slots, "scale": 0.1, "sink": torch.zeros(heads, device=CUDA)}
        yield Case(
            f"sparse_softmax {rows} x {heads} x {k} to float16",
            "mul, masked_fill, softmax by steps",
            logits.nbytes + positions.nbytes + out.nbytes,
            lambda i: sparse_softmax(logits, positions, **options, out=out),
            lambda i: torch_sparse_softmax.sparse_softmax(logits, positions, **options, out=out),
        )


def kv_gather_cases() -> Iterator[Case]:
    slots = 1 << 19
    stored = torch.randint(0, 120, (slots, 656), dtype=torch.uint8, device=CUDA)  # no NaN
    pool = KVPool.from_rows(stored)
    plain = torch.zeros(slots, 576, dtype=torch.bfloat16, device=CUDA)
    for rows, k in ((128, 2048), (128, 640), (1, 2048)):
        positions = torch.randint(0, slots, (rows, k), dtype=torch.int32, device=CUDA)
        read = positions.nbytes + rows * k * (512 + 16 + 128)
        for dtype in (torch.float16, torch.bfloat16):
            out = torch.empty(rows, k, 576, dtype=dtype, device=CUDA)
            yield Case(
                f"kv_gather {rows} x {k} of 656 bytes to {str(dtype)[6:]}",
                "index, dequantize, cat by steps",
                read + out.nbytes,
                lambda i: kv_gather(pool, positions, out=out),
                lambda i: torch_kv_gather.kv_gather(pool, positions, out=out),
            )
        yield Case(
            f"kv_gather {rows} x {k} of bfloat16 to bfloat16",
            "index_select",
            positions.nbytes + 2 * out.nbytes,
            lambda i: kv_gather(plain, positions, out=out),
            lambda i: plain.index_select(0, positions.flatten()),
        )


def sparse_attention_cases() -> Iterator[Case]:
    """Bytes: what is read and written at least, KV rows, queries and result."""
    slots, heads = 1 << 19, 64
    stored = torch.randint(0, 60, (slots, 656), dtype=torch.uint8, device=CUDA)  # below 1.5
    pool = KVPool.from_rows(stored)
    pool.scales.fill_(1.0)
    for rows, k in ((128, 640), (128, 2176)):
        positions = torch.randint(0, slots, (rows, k), dtype=torch.int32, device=CUDA)
        q = torch.randn(rows, heads, 576, device=CUDA).half()
        options = {"scale": 0.05, "sink": torch.zeros(heads, device=CUDA), "value_dim": 512}
        plain = pool.read(positions.flatten().long(), torch.float16).view(rows, k, 576)

        def matmuls() -> torch.Tensor:
            weights = torch.bmm(q, plain.transpose(1, 2)).softmax(2)
            return torch.bmm(weights, plain[..., :512])

        yield Case(
            f"sparse_attention {rows} x {heads} x {k}",
            "bmm, softmax, bmm alone, KV rows there",
            rows * k * 660 + q.nbytes + rows * heads * 512 * 2,
            lambda i: sparse_attention(q, pool, positions, memory_budget=1 << 30, **options),
            lambda i: matmuls(),
        )


GROUPS = {
    "block_keys": block_keys_cases,
    "topk": topk_cases,
    "index_k": index_k_cases,
    "candidate_table": candidate_table_cases,
    "relu_head_sum": relu_head_sum_cases,
    "sparse_softmax": sparse_softmax_cases,
    "kv_gather": kv_gather_cases,
    "sparse_attention": sparse_attention_cases,
}


def host_overhead() -> dict[str, float]:
    """Microseconds a call keeps the host busy, outputs preallocated, launch included."""
    x, y = torch.randn(2, 64, 64, device=CUDA)
    keys, lens = torch.randn(64, 64, device=CUDA), int32(64, 64)
    out, tops = torch.empty(64, 8, device=CUDA), torch.empty(64, 8, dtype=torch.int32, device=CUDA)
    pool = IndexKPool.empty(1, 64, "fp8", device=CUDA)
    table, one, zero = int32(1, 0)[None], int32(1, 64), int32(1, 0)
    values, scales = torch.empty(64, 128, dtype=torch.uint8, device=CUDA), out[:, 0].contiguous()
    calls = {
        "torch.mul(x, 2, out=y)": lambda i: torch.mul(x, 2, out=y),
        "block_keys": lambda i: block_keys(keys, lens, out=out),
        "topk": lambda i: topk(keys, lens, out=tops),
        "index_k": lambda i: index_k(
            pool, table, lens=one, max_len=64, out_starts=zero, out_values=values, out_scales=scales
        ),
        "candidate_table": lambda i: candidate_table(tops, lens, out_blocks=tops, out_lens=lens),
    }
    return dict(zip(calls, host_medians(list(calls.values())), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE, too")
    parser.add_argument("--only", choices=GROUPS, help="the cases of one op")
    args = parser.parse_args()
    rate = copy_rate()
    print(f"{environment()}, copy {rate:.0f} GB/s")
    print("case | us | GB/s | % copy | torch us | torch op")
    rows = []
    for name, cases in GROUPS.items():
        if args.only not in (None, name):
            continue
        for case in cases():
            calls = [case.ours] if case.torchs is None else [case.ours, case.torchs]
            us, *torch_us = medians(calls, sets=case.sets)
            gb_s = case.bytes / us * 1e-3
            peer = torch_us[0] if torch_us else None
            row = Row(case.name, us, gb_s, gb_s / rate, peer, case.title)
            rows.append(row)
            beside = "" if peer is None else f"{peer:.1f}"
            share = 100 * row.copy_share
            print(f"{row.case} | {us:.1f} | {gb_s:.0f} | {share:.0f} | {beside} | {case.title}")
    overhead = host_overhead()
    for name, us in overhead.items():
        print(f"host time of {name} | {us:.1f} | | | |")
    if args.json is not None:
        numbers = {"environment": environment(), "copy_gb_s": rate, "host_us": overhead}
        args.json.write_text(json.dumps({**numbers, "rows": [asdict(r) for r in rows]}, indent=1))


if __name__ == "__main__":
    main()
