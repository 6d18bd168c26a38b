# SPDX-License-Identifier: Apache-2.0
"""What a publish leaves behind: memory of its own, and an event for other streams."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch

from sparse_indexer.devices import current, is_captured
from sparse_indexer.plan import PrefillPlan
from sparse_indexer.protocol import Candidates


class LastingMemory:
    """A private `MemPool`, so that scratch leaves no fragments between what outlives its call.

    A device has one, for the life of the process: a `MemPool` that dies, perhaps by the garbage
    collector, while anything allocates to a pool or is captured on its device takes the process
    with it. On a CPU, and in a capture, which has a pool of its own, tensors are made as always.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self) -> AbstractContextManager[None]:
        """What is allocated within comes from the pool."""
        if self._device.type != "cuda" or is_captured(self._device):
            return contextlib.nullcontext()
        return _allocating(self._device)


@contextlib.contextmanager
def _allocating(device: torch.device) -> Iterator[None]:
    with _ONE_THREAD, torch.cuda.use_mem_pool(_pool_of(device), device):
        yield


_ONE_THREAD = threading.RLock()  # a pool takes no two at a time


@functools.cache
def _pool_of(device: torch.device) -> torch.cuda.MemPool:
    with current(device):
        return torch.cuda.MemPool()


class Ready:
    """Work queued so far on the current stream of a device; nothing on a CPU.

    Args:
        tensors: all that other streams will read, the plan's, too: nobody else may hold a tail's.
    """

    def __init__(self, device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        self._device = device
        self._handle = 0  # of the stream
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda" and not is_captured(device):  # else only a replay does the work
            stream = torch.cuda.current_stream(device)
            self._handle = stream.cuda_stream
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def wait(self) -> None:
        """Let the current stream read what the work wrote."""
        if self._event is None:
            return
        # Twice as fast as a `Stream` to compare, and the same stream as a rule.
        if torch._C._cuda_getCurrentRawStream(self._device.index) == self._handle:
            return
        if is_captured(self._device):  # which began when the device was idle
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for tensor in self.tensors:
            tensor.record_stream(stream)


class RowCandidates(Candidates):
    """Blocks, row by row."""

    def __init__(
        self, plan: PrefillPlan, table: torch.Tensor, others: Iterable[torch.Tensor] = ()
    ) -> None:
        """`table` is `[rows, n]` int32, contiguous: ascending block ids, then INT32_MAX.

        `others` are read with it.
        """
        super().__init__(table, plan)
        self.ready = Ready(plan.device, (table, *plan.tensors, *others))

    @property
    def blocks(self) -> torch.Tensor:
        """See `Candidates.blocks`; the current stream may read them, the plan, and the others."""
        self.ready.wait()
        return self._blocks
