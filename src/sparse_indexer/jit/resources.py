# SPDX-License-Identifier: Apache-2.0
"""What a kernel takes of a GPU, as ptxas told the compiler's log."""

from __future__ import annotations

import re
from typing import NamedTuple

FLAG = "--ptxas-options=-v"
"""Makes NVRTC and nvcc alike log it; changes nothing of the machine code."""


class Resources(NamedTuple):
    """Of one variant for one target."""

    registers: int  # a thread
    spill_bytes: int  # of the stores and loads in the code
    shared_bytes: int  # static, a CTA


def parse_resources(log: str) -> dict[str, Resources]:
    """By symbol, from a compiler's output; a symbol without complete figures is left out."""
    found: dict[str, Resources] = {}
    symbol, spills = "", 0
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            symbol, spills = match[1], 0
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = int(match[1]) + int(match[2])
        elif symbol and (match := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            found[symbol] = Resources(int(match[1]), spills, int(shared[1]) if shared else 0)
    return found


def parse_warnings(log: str) -> list[str]:
    """The lines of a compiler's output that warn, less the one that every old target gets."""
    lines = [line.strip() for line in log.splitlines() if re.search(r"\bwarning\b", line)]
    return [line for line in lines if "are deprecated and may be removed" not in line]
