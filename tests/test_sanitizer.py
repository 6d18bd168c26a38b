# SPDX-License-Identifier: Apache-2.0
"""Every kernel under memcheck and racecheck, in small shapes; needs compute-sanitizer on PATH."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from sanitized import CASES

from sparse_indexer.jit.kernel import all_kernels

pytestmark = pytest.mark.gpu

SANITIZER = shutil.which("compute-sanitizer")
FOUND = 77  # its exit code if it found anything
RUNS = [(tool, case) for tool in ("memcheck", "racecheck") for case in CASES]
NOT_RUN = {("racecheck", "gemm"): "racecheck of CUDA 13.0 ends in cuBLAS's kernels"}


def sanitize(tool: str, case: str) -> tuple[int, str]:
    """Exit code and output; torch's own kernels are not looked at."""
    assert SANITIZER is not None
    command = [SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND)]
    symbols = [symbol for kernel in all_kernels().values() for symbol in kernel.variants]
    for symbol in (*symbols, "faulty"):
        command += ["--kernel-name", f"kernel_substring={symbol}"]
    command += [sys.executable, "-W", "ignore", str(Path(__file__).with_name("sanitized.py")), case]
    environ = dict(os.environ)
    if tool == "racecheck":
        command.append("--racecheck")
    else:
        environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor its own memory
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future]]:
    """All that is asked for, several at a time."""
    asked = [
        (item.callspec.params["tool"], item.callspec.params["case"])
        for item in request.session.items
        if item.path == Path(__file__) and hasattr(item, "callspec")
    ]
    with ThreadPoolExecutor(6) as pool:
        yield {run: pool.submit(sanitize, *run) for run in asked if run not in NOT_RUN}


@pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize(("tool", "case"), RUNS)
def test_nothing_is_found(tool: str, case: str, runs: dict[tuple[str, str], Future]) -> None:
    if (tool, case) in NOT_RUN:
        pytest.skip(NOT_RUN[tool, case])
    code, output = runs[tool, case].result()
    if "Skipped: " in output:
        pytest.skip(re.findall("Skipped: (.*)", output)[-1])
    if case == "faults":
        assert code == FOUND, output
    else:
        assert (code, f"done: {case}" in output) == (0, True), output[-4000:]
