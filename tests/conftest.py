# SPDX-License-Identifier: Apache-2.0
"""What all tests share: GPU tests are skipped, counted and named where there are too few GPUs."""

import os
from pathlib import Path

# Read by OpenMP when torch loads; see sparse_indexer/__main__.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

if "ONE_GPU_AS_TWO" in os.environ:  # see test_one_gpu_as_two.py
    torch.cuda.device_count = lambda: 2  # which asks NVML else


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if "gpu" in item.keywords and not gpus:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif "two_gpus" in item.keywords and gpus < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are compiled for the CPU, once for all tests."""
    return tmp_path_factory.mktemp("emulated")
