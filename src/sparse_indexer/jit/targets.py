# SPDX-License-Identifier: Apache-2.0
"""Which machine code a GPU takes: exact targets. PTX is made only of targets that are named."""

from __future__ import annotations

import re

from sparse_indexer.errors import mismatch

_NUMBERS = (70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
_KNOWN = tuple(f"{number // 10}.{number % 10}" for number in _NUMBERS)


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


def targets_of(capability: tuple[int, int], compiler: tuple[int, int]) -> list[str]:
    """All targets that such a GPU takes, `target_of` first."""
    number = f"{capability[0]}{capability[1]}"
    own = [f"sm_{number}{suffix}" for suffix in "af"] if capability >= (9, 0) else []
    return list(dict.fromkeys([target_of(capability, compiler), *own]))


def is_ptx(target: str) -> bool:
    """Whether what is made for it is PTX, for the driver of that GPU or a newer one to compile."""
    return target.startswith("compute_")


def parse_arch(text: str, compiler: tuple[int, int]) -> tuple[tuple[int, int], str]:
    """(capability, target) of `9.0` or `9.0a`; a suffix is taken as it is. `compute_75` is PTX.

    Raises:
        ValueError: it is none of these, or there is no such target.
    """
    ptx = re.fullmatch(r"compute_(\d+)(\d)", text.strip(), re.ASCII)
    if ptx and f"{ptx[1]}.{ptx[2]}" in _KNOWN:
        return (int(ptx[1]), int(ptx[2])), text.strip()
    found = re.fullmatch(r"((\d+)\.(\d))([af]?)", text.strip(), re.ASCII)
    capability = (int(found[2]), int(found[3])) if found else (0, 0)
    first = {"": (0, 0), "a": (9, 0), "f": (10, 0)}
    if not found or found[1] not in _KNOWN or capability < first[found[4]]:
        expected = f"compute capabilities like 8.0,9.0a,12.0f, of {', '.join(_KNOWN)}"
        raise mismatch("arch", f"{expected}, `a` from 9.0 on, `f` from 10.0 on", repr(text))
    if not found[4]:
        return capability, target_of(capability, compiler)
    return capability, f"sm_{found[2]}{found[3]}{found[4]}"
