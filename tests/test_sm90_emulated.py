# SPDX-License-Identifier: Apache-2.0
"""The kernels for Hopper that score candidates, without a GPU: their text, run by the CPU.

Copies and MMAs come early or late, by chance: see emulated_hopper.h.
"""

from pathlib import Path

import pytest
from jit_support import needs_gxx, run_python

# In a process of its own, whose libcuda.so.1 runs kernels.
SCRIPT = """
from emulation import emulate
from sparse_indexer.jit.kernel import all_kernels
names = ["row_quads", "index_k", "index_q", "candidate_quads", "topk"]
names += ["candidate_logits", "candidate_topk"]
emulate([all_kernels()[name] for name in names], 90, Path({folder!r}))

import sm90_support, test_candidate_topk as tests
from candidate_topk_support import make_case
from test_candidate_topk import check, falling
sm90_support.DEVICE = tests.DEVICE = torch.device("cpu")
tests.CTAS, tests.ROWS = 5, 13
"""
CASES = {
    "lists": "check(make_case([falling(33, 9000), [], [0, 0, 5]], n=500), 40, [1, 5, 40])",
    "pairs": "check(make_case([falling(25, 9000)], n=300, alike=0.0), 300, [1, 4, 7])",
    "64 heads": "check(make_case([falling(9, 9000)], heads=64, n=500, alike=0.9), 64, [1, 5, 9])",
    "64 heads, pairs": "check(make_case([falling(9, 9000)], heads=64, n=300, alike=0.0), 64, [5])",
    "fp4": 'check(make_case([falling(9, 5000)], "fp4", n=500, alike=0.9), 64, [3])',
    "2048": "check(make_case([falling(9, 30_000)], n=2048, alike=0.9), 2048, [1, 5])",
    "nothing": "tests.test_nothing_at_all()",
    "empty slots": "tests.test_slots_without_a_row_and_rows_without_candidates()",
    "starts": "tests.test_positions_of_flat_keys()",
    "left out": "tests.test_more_candidates_than_columns()",
    "NaN": "tests.test_nan_and_infinity()",
    "ties": "tests.test_ties(32)",
}


@needs_gxx
@pytest.mark.parametrize("name", CASES)
def test_emulated(name: str, emulated: Path) -> None:
    script = SCRIPT.format(folder=str(emulated)) + f"{CASES[name]}\nprint('done')\n"
    assert run_python(script) == "done\n"
