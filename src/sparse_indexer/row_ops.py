# SPDX-License-Identifier: Apache-2.0
"""The ops that read rows of logits: kernels on a GPU, plain torch on a CPU."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from sparse_indexer.backends.kernels import build_kernels
from sparse_indexer.ops import block_keys as block_keys_kernel
from sparse_indexer.ops import topk as topk_kernel
from sparse_indexer.torch_ops import as_kernels


class _BlockKeys(Protocol):
    def __call__(
        self, logits: torch.Tensor, lens: torch.Tensor, *, out: torch.Tensor, skip_blocks: int = -1
    ) -> None: ...


class _Topk(Protocol):
    def __call__(
        self,
        keys: torch.Tensor,
        lens: torch.Tensor,
        *,
        out: torch.Tensor,
        rows: torch.Tensor | None = None,
        per_column: int = 1,
        force_last: bool = False,
        unused: int = -1,
        blocks: torch.Tensor | None = None,
        request_of_row: torch.Tensor | None = None,
        request_starts: torch.Tensor | None = None,
    ) -> None: ...


KERNELS = (block_keys_kernel.KERNEL, topk_kernel.KERNEL)


class RowOps(NamedTuple):
    """See `ops.block_keys` and `ops.topk`."""

    block_keys: _BlockKeys
    topk: _Topk


def row_ops(device: torch.device, backend: str) -> RowOps:
    """The ops of a device; kernels are built and loaded here, so that calls need no compiler.

    Raises:
        BackendUnavailable: a kernel can be neither built nor loaded; names the backend.
    """
    if device.type != "cuda":
        return RowOps(as_kernels.block_keys, as_kernels.topk)
    build_kernels(KERNELS, device, backend)
    return RowOps(block_keys_kernel.block_keys, topk_kernel.topk)
