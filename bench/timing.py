# SPDX-License-Identifier: Apache-2.0
"""Timing on a GPU: interleaved medians over several input sets, and what to say of the machine."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[int], object]  # takes the number of the input set


def environment() -> str:
    """One line: GPU, driver's CUDA, torch."""
    gpu = torch.cuda.get_device_properties(0)
    return (
        f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} SMs, "
        f"torch {torch.__version__}"
    )


def medians(calls: Sequence[Call], *, sets: int = 1, repeats: int = 30) -> list[float]:
    """Median microseconds of each call on the device; the calls take turns, so do the input sets.

    Their order is another one each time, since a call that follows one that used much other memory
    takes longer. A buffer larger than any L2 is written before each measurement, which is recorded
    with events.
    """
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for call in calls:
        for i in range(sets):
            call(i)
    torch.cuda.synchronize()
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    order, shuffled = list(zip(calls, events, strict=True)), random.Random(0)
    for repeat in range(repeats):
        shuffled.shuffle(order)
        for call, pairs in order:
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call(repeat % sets)
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize()
    return [statistics.median(a.elapsed_time(b) * 1e3 for a, b in pairs) for pairs in events]


def host_medians(calls: Sequence[Call], *, repeats: int = 2000) -> list[float]:
    """Median microseconds that each call keeps the host busy, launch included."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call(0)
    for repeat in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call(0)
            taken.append((time.perf_counter() - start) * 1e6)
        if repeat % 100 == 99:
            torch.cuda.synchronize()
    return [statistics.median(taken) for taken in times]


def copy_rate() -> float:
    """GB/s of a large device-to-device copy, bytes read and written."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    (us,) = medians([lambda i: target.copy_(source)])
    return 2 * source.nbytes / us * 1e-3
