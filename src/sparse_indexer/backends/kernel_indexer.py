# SPDX-License-Identifier: Apache-2.0
"""How a backend that runs on this library's kernels alone is made."""

from __future__ import annotations

import torch

from sparse_indexer.backends.kernels import build_kernels
from sparse_indexer.devices import resolve_device
from sparse_indexer.errors import expect_int, mismatch
from sparse_indexer.jit import Kernel
from sparse_indexer.lasting import LastingMemory


class KernelIndexer:
    """Options of an indexer on a GPU, and its kernels, built."""

    name: str

    def __init__(
        self,
        device: torch.device | str,
        *,
        topk: int = 512,
        topk_blocks: int = 2048,
        memory_budget: int = 256 << 20,
    ) -> None:
        self.device = resolve_device(device)
        if self.device.type != "cuda":
            raise mismatch("device", "a CUDA device", str(self.device))
        self.topk = expect_int("topk", topk, 0, 1 << 15)
        self.topk_blocks = expect_int("topk_blocks", topk_blocks, 1, 1 << 15)
        self.memory_budget = expect_int("memory_budget", memory_budget, 1)
        build_kernels(self.own_kernels(), self.device, self.name)
        self._lasting = LastingMemory(self.device)

    @classmethod
    def own_kernels(cls) -> list[Kernel]:
        """What is built and loaded when it is made."""
        raise NotImplementedError
