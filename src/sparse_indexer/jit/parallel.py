# SPDX-License-Identifier: Apache-2.0
"""How many compilers may run at once."""

from __future__ import annotations

import os
from pathlib import Path

_BYTES_A_COMPILER = 2 << 30  # the most that g++ or NVRTC took for one kernel, rounded up


def max_jobs() -> int:
    """As many as there are cores for this process, and memory for."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, _available_memory() // _BYTES_A_COMPILER))


def _available_memory() -> int:
    """Bytes that are free on this machine and in this container."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) << 10
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / f"memory.{n}").read_text() for n in ("max", "current"))
        free = min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no cgroup 2, or no limit
        pass
    return free
