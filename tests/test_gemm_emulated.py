# SPDX-License-Identifier: Apache-2.0
"""The GEMM route of the sm70 backend on a CPU: emulated kernels around torch's matmul there."""

from pathlib import Path

import pytest
from jit_support import needs_gxx, run_python

# In a process of its own, whose libcuda.so.1 runs kernels.
START = """
from emulation import emulate, sm70_on_cpu
from gemm_support import KERNELS, TOLERANCE, gemm_logits
from sparse_indexer.jit.kernel import all_kernels
names = KERNELS + {more!r}
emulate([all_kernels()[name] for name in names], {capability}, Path({folder!r}))

import fused_support, sm90_support, test_gemm_scoring as tests
from sparse_indexer.testing import check_backend
fused_support.DEVICE = sm90_support.DEVICE = tests.DEVICE = torch.device("cpu")
def gemm(route="gemm", memory_budget=64 << 20, **options):
    return sm70_on_cpu(route, memory_budget=memory_budget, **options)
tests.gemm = gemm
"""
FUSED = ["row_quads", "index_q", "candidate_quads"]
FUSED += ["fused_logits", "fused_block_keys", "fused_candidate_logits"]
CALLS = {
    "exact data, 3 heads": 'test_exact_data(("fp8", "fp8"), 3)',
    "exact data, 32 heads": 'test_exact_data(("fp4", "fp4"), 32)',
    "exact data, 64 heads": 'test_exact_data(("bf16", "fp4"), 64)',
    "exact data, 96 heads": 'test_exact_data(("fp16", "fp16"), 96)',
    "random data": 'test_random_data(("fp8", "fp8"), 64)',
    "random data of fp4": 'test_random_data(("fp4", "fp4"), 96)',
    "random data in halves": 'test_random_data(("bf16", "bf16"), 3)',
    "random data, mixed": 'test_random_data(("fp8", "bf16"), 32)',
    "wide range": "test_bf16_far_beyond_float16()",
    "as mask, 3 heads": 'test_exact_data_gives_what_mask_gives("flat", 3)',
    "as mask, 32 heads": 'test_exact_data_gives_what_mask_gives("planar", 32)',
    "as mask, 96 heads": 'test_exact_data_gives_what_mask_gives("planar", 96)',
    "few blocks": 'test_more_positions_than_blocks_and_none({"topk": 60, "topk_blocks": 6})',
    "no positions": 'test_more_positions_than_blocks_and_none({"topk": 0, "topk_blocks": 9})',
    "slices": "test_other_shapes_of_arguments()",
    "autocast": "test_autocast_changes_no_bit()",
    "nothing": "test_rows_that_see_nothing_and_none([[0, 0], []])",
    "no row": "test_rows_that_see_nothing_and_none([])",
}
BESIDE_FUSED = {
    "rounded": 'test_scores_are_rounded_as_with_half_scores("fp8", 64)',
    "rounded halves": 'test_scores_are_rounded_as_with_half_scores("fp16", 32)',
    "rounded, 96 heads": 'test_scores_are_rounded_as_with_half_scores("bf16", 96)',
    "closer": 'test_the_fused_route_is_closer_to_float64("fp8", 32)',
    "closer, 64 heads": 'test_the_fused_route_is_closer_to_float64("fp4", 64)',
    "closer in halves": 'test_the_fused_route_is_closer_to_float64("bf16", 64)',
    "candidates": "test_candidates_and_tails_of_other_backends()",
}


def script(folder: Path, calls: dict[str, str], *more: str, capability: int) -> str:
    text = START.format(more=list(more), capability=capability, folder=str(folder))
    return text + "".join(f"tests.{call}\nprint({name!r})\n" for name, call in calls.items())


@needs_gxx
def test_emulated(emulated: Path) -> None:
    text = script(emulated, CALLS, capability=70)
    assert run_python(text).splitlines() == list(CALLS)


@needs_gxx
@pytest.mark.parametrize("capability", [70, 75])
def test_emulated_beside_the_fused_route(capability: int, emulated: Path) -> None:
    text = script(emulated, BESIDE_FUSED, *FUSED, capability=capability)
    assert run_python(text).splitlines() == list(BESIDE_FUSED)


KIT = """
indexer = gemm({route!r}, topk=4, topk_blocks=6, memory_budget=500 << 10)
report = check_backend(
    indexer, heads=[{heads}], tolerance=TOLERANCE, own_logits=gemm_logits
)
report.raise_if_failed()
print(report.backend, report.selecting_rows > 300)
"""


@needs_gxx
@pytest.mark.parametrize(("heads", "route"), [(32, "gemm"), (64, "gemm"), (96, "auto")])
def test_emulated_backend(heads: int, route: str, emulated: Path) -> None:
    """It passes the conformance kit in all formats, in many tiles."""
    text = script(emulated, {}, capability=75) + KIT.format(heads=heads, route=route)
    assert run_python(text) == "sm70 True\n"


MEMORY = """
from memory_support import PeakMemory
from sm90_support import layers, poisoned
import sparse_indexer.gemm_scoring as scoring
lens = [[5000 - i for i in range(40)], [], [4800 - i for i in range(30)], [4990] * 9]
budget, rows = 2 << 20, 79
source, consumer = layers(lens, "fp8", heads=96)
indexer = gemm(topk=40, topk_blocks=60, memory_budget=budget)
out = poisoned(source, 40)
chunks = []
relu_head_sum = scoring.relu_head_sum
def spy(scores, *args, **kwargs):
    chunks.append((scores.data_ptr(), scores.shape, kwargs["start"]))
    relu_head_sum(scores, *args, **kwargs)
scoring.relu_head_sum = spy
kept = None
for name, call in {
    "publish": lambda: indexer.publish_prefill(source),
    "own": lambda: indexer.publish_prefill(source, out),
    "select": lambda: indexer.select_prefill(kept, consumer, out),
    "topk": lambda: indexer.topk_prefill(consumer, out),
}.items():
    chunks.clear()
    given = [] if kept is None else [kept.blocks]
    for of in (source, consumer):
        given += [of.index_q.values, of.index_q.scales, of.head_weights]
    with PeakMemory([out, *source.plan.tensors, source.index_k.pages, *given]) as peak:
        made = call()
    tables = 0 if made is None else made.blocks.nbytes
    kept = kept if made is None else made
    assert budget // 2 < peak.peak <= budget + tables + 30 * rows + 4096, (name, peak.peak)
    first = [at for at, _, start in chunks if start == 0]
    assert len(first) > 6, first  # tiles
    assert len(chunks) > 2 * len(first)  # and chunks of each
    for (at, _, start), (before, _, _) in zip(chunks[1:], chunks):
        assert at == before or start == 0  # the same memory
    print(name)
"""


@needs_gxx
def test_the_peak_is_one_budget(emulated: Path) -> None:
    """Over requests, tiles and chunks, of all that torch allocates."""
    text = script(emulated, {}, capability=70) + MEMORY
    assert run_python(text).splitlines() == ["publish", "own", "select", "topk"]
