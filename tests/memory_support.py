# SPDX-License-Identifier: Apache-2.0
"""How much memory the tensors of a call take at once, on a CPU."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """`peak` bytes of tensors alive at once; emulated kernels allocate nothing.

    Of a temporary within an op of torch nothing is known.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        """Tensors of the same memory as `known` ones do not count."""
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {at: held for at, held in self._live.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result
