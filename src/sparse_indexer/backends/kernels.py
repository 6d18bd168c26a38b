# SPDX-License-Identifier: Apache-2.0
"""A backend's kernels, before its first call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_indexer.errors import BackendUnavailable, JitError
from sparse_indexer.jit import Kernel, warmup


def build_kernels(kernels: Sequence[Kernel], device: torch.device, backend: str) -> None:
    """Build and load what is not loaded yet, so that calls need no compiler.

    Raises:
        BackendUnavailable: one can be neither built nor loaded; names the backend.
    """
    if any(device not in kernel.loaded for kernel in kernels):
        try:
            warmup(device, kernels)
        except JitError as error:
            raise BackendUnavailable(f"{backend}: {error}") from error
