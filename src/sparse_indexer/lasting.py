# SPDX-License-Identifier: Apache-2.0
"""What a publish leaves behind: memory of its own, and an event for other streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


class LastingMemory:
    """A private `MemPool`, so that scratch leaves no fragments between what outlives its call.

    On a CPU, and in a capture, which has a pool of its own, tensors are made as always.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.MemPool() if device.type == "cuda" else None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """What is allocated within comes from the pool."""
        if self._pool is None or torch.cuda.is_current_stream_capturing():
            yield
            return
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield


class Ready:
    """Work queued so far on the current stream of a device; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device)
            if not torch.cuda.is_current_stream_capturing():  # else only a replay does the work
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record(self._stream)

    def wait(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the current stream read what the work wrote."""
        if self._stream is None or self._event is None:
            return
        stream = torch.cuda.current_stream(self._stream.device)
        if stream == self._stream:
            return
        if torch.cuda.is_current_stream_capturing():  # which began when the device was idle
            return
        stream.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(stream)
