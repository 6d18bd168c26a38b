# SPDX-License-Identifier: Apache-2.0
"""What all tests share: GPU tests are skipped, counted and named where there is no GPU."""

import os
from pathlib import Path

# Read by OpenMP when torch loads; see sparse_indexer/__main__.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are compiled for the CPU, once for all tests."""
    return tmp_path_factory.mktemp("emulated")
