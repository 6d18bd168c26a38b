# SPDX-License-Identifier: Apache-2.0
"""Which machine code a GPU takes: exact targets, no PTX."""

from __future__ import annotations

import re

from sparse_indexer.errors import mismatch


def target_of(capability: tuple[int, int], compiler: tuple[int, int]) -> str:
    """The target for a GPU of this compute capability: `sm_80`, `sm_90a`, `sm_120f`.

    From 9.0 on it is the one with the instructions of that architecture alone. `compiler` is the
    CUDA version of the compiler: family targets (`f`) came with 12.9.
    """
    major, minor = capability
    if major < 9:
        return f"sm_{major}{minor}"
    if capability == (12, 0):
        return "sm_120f" if compiler >= (12, 9) else "sm_120a"
    return f"sm_{major}{minor}a"


def parse_arch(text: str, compiler: tuple[int, int]) -> tuple[tuple[int, int], str]:
    """(capability, target) of `9.0` or `9.0a`; a suffix is taken as it is.

    Raises:
        ValueError: it is neither.
    """
    found = re.fullmatch(r"(\d+)\.(\d)([af]?)", text.strip())
    if not found:
        raise mismatch("arch", "compute capabilities like 8.0,9.0a,12.0f", repr(text))
    capability = int(found[1]), int(found[2])
    if not found[3]:
        return capability, target_of(capability, compiler)
    return capability, f"sm_{found[1]}{found[2]}{found[3]}"
