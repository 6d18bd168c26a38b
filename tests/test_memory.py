# SPDX-License-Identifier: Apache-2.0
"""The mask backend's scratch: tiles fit the budget, results do not depend on it."""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from budgets import named_budget

from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.testing import make_inputs, random_keys, random_queries

# In a process of its own: the peak of resident memory above what inputs and outputs take, the
# libraries' own buffers warmed up by a small call first.
MEASURE = """
import hashlib, json, sys
import torch
from sparse_indexer import FlatIndexK, IndexQ, PrefillIndexerInputs, plan_prefill
from sparse_indexer.backends.mask import MaskIndexer

rows, positions, heads, budget = map(int, sys.argv[1:])

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

def make(rows, positions):
    generator = torch.Generator().manual_seed(0)
    def codes(*shape):
        bits = torch.randint(0, 120, shape, generator=generator, dtype=torch.uint8)
        signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) << 7
        return (bits | signs).view(torch.float8_e4m3fn)
    keys = FlatIndexK(codes(positions, 128), torch.rand(positions, generator=generator), "fp8")
    queries = IndexQ(codes(rows, heads, 128), torch.rand(rows, heads, generator=generator))
    weights = torch.randn(rows, heads, generator=generator)
    plan = plan_prefill([positions - 1 - row for row in range(rows)][::-1], [rows])
    return PrefillIndexerInputs(plan, queries, weights, keys)

indexer = MaskIndexer("cpu", memory_budget=budget)
small = make(rows, 2048)
indexer.publish_prefill(small, torch.empty(rows, 512, dtype=torch.int32))
inputs, out = make(rows, positions), torch.zeros(rows, 512, dtype=torch.int32)
open("/proc/self/clear_refs", "w").write("5")  # the peak starts from here
before = status("VmRSS")
blocks = indexer.publish_prefill(inputs, out).blocks
peak = status("VmHWM") - before
digest = hashlib.sha256(out.numpy().tobytes() + blocks.numpy().tobytes()).hexdigest()
print(json.dumps({"peak": peak, "outputs": blocks.nbytes + out.nbytes, "digest": digest}))
"""


def measure(rows: int, positions: int, heads: int, budget: int) -> dict:
    arguments = map(str, (rows, positions, heads, budget))
    command = [sys.executable, "-c", MEASURE, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_256_rows_by_131072_positions_by_64_heads_in_64_mib() -> None:
    small = measure(256, 131_072, 64, 64 << 20)
    large = measure(256, 131_072, 64, 1 << 30)
    assert small["peak"] <= (64 << 20) + small["outputs"]
    assert large["peak"] <= (1 << 30) + large["outputs"]
    assert small["digest"] == large["digest"]


def budget_for(rows: int) -> int:
    return MaskIndexer("cpu", topk=64, topk_blocks=128).workspace_bytes(rows, 1024)


@pytest.mark.parametrize("rows", [1, 3, 127, 129, 255, 256, 257, 511, 513])
def test_budgets_that_allow_some_rows(rows: int) -> None:
    indexer = MaskIndexer("cpu", topk=64, topk_blocks=128, memory_budget=budget_for(rows))
    tile_rows, positions = indexer._tile_shape()
    assert tile_rows == min(rows, 256)
    assert indexer.workspace_bytes(tile_rows, positions) <= indexer.memory_budget


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_results_do_not_depend_on_the_budget(fmt: str) -> None:
    queries, weights = random_queries(150, 2, fmt, seed=1)
    keys = [random_keys(1200, fmt, seed=2)]
    inputs = make_inputs(queries, weights, keys, list(range(1050, 1200)), [150])
    least = MaskIndexer("cpu", topk=64, topk_blocks=128).workspace_bytes(1, 64)
    results = []
    for budget in (least, budget_for(1), budget_for(3), budget_for(129), 1 << 30):
        indexer = MaskIndexer("cpu", topk=64, topk_blocks=128, memory_budget=budget)
        out = torch.empty(150, 64, dtype=torch.int32)
        blocks = indexer.publish_prefill(inputs, out).blocks
        results.append(torch.cat((blocks, out), 1))
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_budget_below_one_row_says_what_one_row_takes() -> None:
    indexer = MaskIndexer("cpu", topk=64, topk_blocks=128)
    least = indexer.workspace_bytes(1, 64)
    queries, weights = random_queries(1, 3, "fp8", seed=1)
    inputs = make_inputs(queries, weights, [random_keys(20, "fp8", seed=2)], [19], [1])
    tight = MaskIndexer("cpu", topk=64, topk_blocks=128, memory_budget=least - 1)
    assert named_budget(partial(tight.publish_prefill, inputs), least - 1) == least
    assert least < 2 << 20
