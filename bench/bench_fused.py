# SPDX-License-Identifier: Apache-2.0
"""Time scoring by mma.sync beside a GEMM in float16: `python bench/bench_fused.py [--quick]`.

Rows see all positions of one request, as a chunk late in a long prompt does. TFLOPS count
2 * rows * heads * 128 * positions (of candidates: listed positions). The peer is the other route of
`sm70`: one GEMM a chunk of positions that writes each head's score in float16 (at most 256 MiB of
them, in the same memory each time), then the op `relu_head_sum`, to logits. Beside it "GEMM"
without the rest, and "GEMM + torch" with relu, weights and sum of heads in plain torch instead.
Outputs are compared with the peer's before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from timing import environment, medians

from sparse_indexer import IndexQ
from sparse_indexer.inputs import flat_index_k
from sparse_indexer.ops.candidate_quads import candidate_quads
from sparse_indexer.ops.fused_block_keys import fused_block_keys
from sparse_indexer.ops.fused_candidate_logits import fused_candidate_logits
from sparse_indexer.ops.fused_logits import fused_logits
from sparse_indexer.ops.index_k import index_k
from sparse_indexer.ops.index_q import index_q
from sparse_indexer.ops.relu_head_sum import relu_head_sum

CUDA = torch.device("cuda:0")
SCORES_BYTES = 256 << 20
LISTED = 2048  # candidate blocks a row


def ints(*shape: int, fill: int = 0) -> torch.Tensor:
    return torch.full(shape, fill, dtype=torch.int32, device=CUDA)


def measure(rows: int, heads: int, positions: int, form: str) -> None:
    queries = torch.randn(rows, heads, 128, device=CUDA).half()
    keys = torch.randn(positions, 128, device=CUDA)
    weights = torch.randn(rows, heads, device=CUDA) / heads**0.5
    blocks, quads = -(-positions // 8), rows // 4
    if form == "fp8":
        element, stored = torch.uint8, flat_index_k(keys, "fp8")
        q = IndexQ(queries.to(torch.float8_e4m3fn))
        queries = q.values.half()
        assert stored.scales is not None
        widened, scales = stored.values.half(), stored.scales
    else:
        element, stored = torch.float16, flat_index_k(keys, "fp16")
        q = IndexQ(queries)
        widened, scales = stored.values, torch.ones(positions, device=CUDA)
    packed = torch.zeros(blocks, 1152 if form == "fp8" else 1088, dtype=element, device=CUDA)
    index_k(stored, ints(1), lens=ints(1, fill=positions), max_len=positions, out_starts=ints(1),
            out_values=packed)  # fmt: skip
    values = torch.empty(quads, 4 * heads, 128, dtype=element, device=CUDA)
    packed_weights = torch.empty(quads, 4, heads, device=CUDA)
    of_quads = torch.arange(rows, dtype=torch.int32, device=CUDA).view(quads, 4)
    index_q(q, weights, rows=of_quads, out_values=values, out_weights=packed_weights)
    operands = {"keys": packed, "queries": values, "weights": packed_weights}
    dense = {"slot_lens": ints(quads, 4, fill=positions), "quad_first": ints(quads)}
    logits = torch.empty(rows, positions, device=CUDA)
    block_keys = torch.empty(rows, blocks, device=CUDA)

    step = SCORES_BYTES // (2 * rows * heads) // 8 * 8
    flat, padded = queries.flatten(0, 1), torch.zeros(blocks * 8, 128, device=CUDA).half()
    padded[:positions] = widened
    memory = torch.empty(SCORES_BYTES // 2, dtype=torch.float16, device=CUDA)
    chunks = [slice(start, min(start + step, blocks * 8)) for start in range(0, blocks * 8, step)]
    lens, peer_logits = ints(rows, fill=positions), torch.empty(rows, blocks * 8, device=CUDA)
    padded_scales = torch.zeros(blocks * 8, device=CUDA)
    padded_scales[:positions] = scales
    factor = 2.0**-16 if form == "fp8" else 2.0**-8  # scores stay within float16
    peer_weights = weights / factor

    def scores_of(chunk: slice) -> torch.Tensor:
        scores = memory[: rows * heads * (chunk.stop - chunk.start)].view(rows * heads, -1)
        return scores.addmm_(flat, padded[chunk].t(), beta=0, alpha=factor)

    def gemm(_: int) -> None:
        for chunk in chunks:
            scores_of(chunk)

    def peer(_: int) -> None:
        for chunk in chunks:
            its = {"key_scales": padded_scales[chunk], "lens": lens, "start": chunk.start}
            relu_head_sum(scores_of(chunk), peer_weights, **its, out_logits=peer_logits[:, chunk])

    def in_torch(_: int) -> torch.Tensor:
        parts = []
        for chunk in chunks:
            of_heads = scores_of(chunk).view(rows, heads, -1)
            parts.append((of_heads.relu_() * peer_weights[..., None]).sum(1))
        return torch.cat(parts, 1).mul_(padded_scales)

    n = min(LISTED, blocks)
    shared = torch.rand(1, blocks, device=CUDA) + 0.5 * torch.rand(rows, blocks, device=CUDA)
    listed = shared.topk(n, 1).indices.sort(1).values.int()
    width = min(4 * n, blocks)
    entries, counts = ints(quads, width), ints(quads, 2)
    ranks = torch.empty(quads, -(-width // 32), 4, dtype=torch.int16, device=CUDA)
    candidate_quads(listed.view(quads, 4, n), max_blocks=blocks, out_entries=entries,
                    out_ranks=ranks, out_counts=counts)  # fmt: skip
    union = counts[:, 0].float().mean().item() / n
    of_candidates = torch.empty(rows, 8 * n, device=CUDA)
    tables = {"entries": entries, "ranks": ranks, "counts": counts, "quad_first": ints(quads)}

    flop = 2 * rows * heads * 128 * positions
    calls: dict[str, tuple[Callable[[int], object], float]] = {
        "GEMM": (gemm, flop),
        "GEMM + torch": (in_torch, flop),
        "GEMM + relu_head_sum": (peer, flop),
        "logits": (lambda i: fused_logits(**operands, **dense, out=logits), flop),
        "block keys": (lambda i: fused_block_keys(**operands, **dense, out=block_keys), flop),
        f"candidates, {union:.2f} x {n} blocks a quad": (
            lambda i: fused_candidate_logits(**operands, **tables, out=of_candidates),
            2 * rows * heads * 128 * 8 * n,
        ),
    }
    for call, _ in calls.values():
        call(0)
    want = peer_logits[:, :positions]
    largest = want.abs().amax(1, keepdim=True)
    for got in (logits, in_torch(0)[:, :positions]):
        relative = ((got - want).abs() / largest).max().item()
        assert relative < 2e-3, f"logits differ by {relative:.1e} of a row's largest"
    whole = logits[:, : positions // 8 * 8 - 8].unflatten(1, (-1, 8)).amax(2)
    assert torch.equal(block_keys[:, : whole.shape[1]], whole)
    at = (listed.long()[..., None] * 8 + torch.arange(8, device=CUDA)).flatten(1)
    inside = at < positions
    assert torch.equal(of_candidates[inside], logits.gather(1, at.clamp(max=positions - 1))[inside])
    times = medians([call for call, _ in calls.values()], repeats=10)
    theirs = times[2]
    for (name, (_, work)), us in zip(calls.items(), times, strict=True):
        print(
            f"{name} | {form} | {rows} | {heads} | {positions} | {us:.0f} | {theirs / us:.2f} "
            f"| {work / us * 1e-6:.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="64 heads, fp8 only")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(environment())
    print("case | keys | rows | heads | positions | us | GEMM + relu_head_sum / it | TFLOPS")
    shapes = [(512, 64, 37_500, "fp8")]
    if not args.quick:
        shapes += [(512, 64, 37_500, "fp16"), (512, 32, 37_500, "fp8"), (2048, 32, 65_536, "fp8")]
    for shape in shapes:
        measure(*shape)


if __name__ == "__main__":
    main()
