# SPDX-License-Identifier: Apache-2.0
"""The kernels for Volta and Turing without a GPU: their text, compiled for and run by the CPU."""

from pathlib import Path

import pytest
from jit_support import needs_gxx, run_python

# In a process of its own, whose libcuda.so.1 runs kernels.
SCRIPT = """
from emulation import emulate
from sparse_indexer.jit.kernel import all_kernels
names = ["row_quads", "index_k", "index_q", "candidate_quads"]
names += ["fused_logits", "fused_block_keys", "fused_candidate_logits"]
emulate([all_kernels()[name] for name in names], {capability}, Path({folder!r}))

import fused_support, test_fused_scoring as tests
fused_support.DEVICE = tests.DEVICE = torch.device("cpu")
tests.LENS = [[0, 1, 7, 8, 9, 31, 32, 33, 64, 65, 100], [], [304 - 13 * i for i in range(11)], [5]]
tests.ROWS, tests.WIDTH = sum(map(len, tests.LENS)), 304
"""
CALLS = {
    "exact data": 'test_exact_data(("fp8", "fp8"), 32)',
    "exact data, 64 heads": 'test_exact_data(("fp8", "fp8"), 64)',
    "exact data in halves": 'test_exact_data(("bf16", "fp4"), 40)',
    "random data": 'test_random_data(("fp4", "fp4"), 64)',
    "random data in halves": 'test_random_data(("fp16", "fp16"), 32)',
    "block keys": 'test_block_keys_are_the_maxima_of_the_logits(("fp8", "fp8"), 32, False)',
    "candidates": 'test_logits_of_candidates(("fp8", "fp8"), 32, False, 1.0)',
    "candidates, 64 heads": 'test_logits_of_candidates(("bf16", "bf16"), 64, True, 0.4)',
    "half scores": 'test_half_scores("fp16", 64)',
    "half scores of e4m3": 'test_half_scores("fp8", 32)',
    "NaN": 'test_nan_and_infinity("fp8", 32)',
    "infinity": 'test_nan_and_infinity("bf16", 64)',
    "nothing": "test_nothing_to_score([[0, 0, 0]])",
}


TOPK = """
from emulation import emulate
from sparse_indexer.jit.kernel import all_kernels
emulate([all_kernels()["topk"]], 75, Path({folder!r}))
import test_topk as tests
tests.DEVICE = torch.device("cpu")
for width, k in ((7, 3), (2049, 2048), (8000, 500), (16_384, 512), (32_768, 2048)):
    tests.test_random_keys(width, k, torch.float32)
    tests.test_random_keys(width, k, torch.bfloat16)
for name in tests.PATTERNS:
    tests.test_hard_rows(16_384, 512, 1, name)
    tests.test_hard_rows(20_000, 6000, 1, name)  # no list
tests.test_block_keys_count_positions_and_force_the_newest()
tests.test_maps_through_blocks_starts_and_pages()
print("done")
"""


@needs_gxx
def test_emulated_topk_within_48_kilobytes(emulated: Path) -> None:
    """More is no launch; see emulated_cuda.cc."""
    assert run_python(TOPK.format(folder=str(emulated))) == "done\n"


BACKEND = """
from emulation import emulate, sm70_on_cpu
from sparse_indexer.jit.kernel import all_kernels
from sparse_indexer.testing import check_backend
names = ["row_quads", "index_k", "index_q", "candidate_quads", "topk"]
names += ["fused_block_keys", "fused_candidate_logits"]
emulate([all_kernels()[name] for name in names], {capability}, Path({folder!r}))
indexer = sm70_on_cpu(topk=4, topk_blocks=6, memory_budget=1 << 20)
report = check_backend(indexer, formats=[{form!r}], tolerance=2e-5)
report.raise_if_failed()
print(report.backend, report.selecting_rows > 80)
"""


@needs_gxx
@pytest.mark.parametrize(("capability", "form"), [(70, "fp8"), (75, "bf16")])
def test_emulated_backend(capability: int, form: str, emulated: Path) -> None:
    """It passes the conformance kit."""
    script = BACKEND.format(capability=capability, form=form, folder=str(emulated))
    assert run_python(script) == "sm70 True\n"


MEMORY = """
from emulation import emulate, sm70_on_cpu
from memory_support import PeakMemory
from sparse_indexer.jit.kernel import all_kernels
names = ["row_quads", "index_k", "index_q", "candidate_quads", "topk"]
names += ["fused_block_keys", "fused_candidate_logits"]
emulate([all_kernels()[name] for name in names], 75, Path({folder!r}))
import sm90_support
sm90_support.DEVICE = torch.device("cpu")
lens, budget = [[3000 - i for i in range(8)] for _ in range(4)], 900 << 10
source, consumer = sm90_support.layers(lens, "fp8", heads=32)
indexer = sm70_on_cpu("fused", topk=8, topk_blocks=12, memory_budget=budget)
out, candidates = sm90_support.poisoned(source, 8), indexer.publish_prefill(source)
q, plan = consumer.index_q, source.plan
given = [out, q.values, q.scales, consumer.head_weights, source.index_k.pages, *plan.tensors]
given += [source.index_q.values, source.index_q.scales, source.head_weights]
given += [*candidates.tables, *candidates.quads[1:]]
published = sum(x.nbytes for x in (*candidates.tables, *candidates.quads[1:]))
for call, kept in (
    (lambda: indexer.publish_prefill(source, out), published),
    (lambda: indexer.topk_prefill(consumer, out), 0),
    (lambda: indexer.select_prefill(candidates, consumer, out), 0),
):
    with PeakMemory(given) as peak:
        call()
    print(budget // 2 < peak.peak - kept <= budget + 4096, end=" ")
"""


@needs_gxx
def test_the_peak_is_one_budget(emulated: Path) -> None:
    """Of requests whose keys do not fit together, one after the other."""
    assert run_python(MEMORY.format(folder=str(emulated))) == "True True True "


@needs_gxx
@pytest.mark.parametrize("capability", [70, 75])
def test_emulated(capability: int, emulated: Path) -> None:
    """Both layouts of fragments, and all around them, by the definition of the instructions."""
    script = SCRIPT.format(capability=capability, folder=str(emulated))
    script += "".join(f"tests.{call}\nprint({name!r})\n" for name, call in CALLS.items())
    assert run_python(script).splitlines() == list(CALLS)
