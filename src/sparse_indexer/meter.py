# SPDX-License-Identifier: Apache-2.0
"""What a piece of work takes: seconds and peak memory, on a GPU or in this process."""

from __future__ import annotations

import contextlib
import ctypes
import time
from pathlib import Path

import torch


class Meter:
    """Seconds and peak memory since it was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _trim()
            _resets_peak()
        self._held = self._peak()
        self._start = time.perf_counter()

    def stop(self) -> tuple[float, int]:
        """(seconds, bytes as `memory_rule` says)."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._start, self._peak() - self._held

    def _peak(self) -> int:
        """Bytes; just after a reset, what is held."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _peak_resident()


def memory_rule(device: torch.device) -> str:
    """What the bytes of a `Meter` are, in words."""
    if device.type == "cuda":
        return "peak of what torch holds on the GPU, above the step's start"
    if _resets_peak():
        return "the process's peak resident memory, above the step's start"
    return "growth of the process's peak resident memory"


def _trim() -> None:
    """Hand freed memory back to the system (glibc), so that using it again counts."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _resets_peak() -> bool:
    """Reset the process's peak resident memory to what it holds now, if the kernel lets it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_resident() -> int:
    """Bytes of the process's peak resident memory since its start or last reset."""
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if "VmHWM" in fields:
            return int(fields["VmHWM"].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
