# SPDX-License-Identifier: Apache-2.0
"""Which machine code a GPU takes: exact targets. PTX is made only of targets that are named.

And which compilers make it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sparse_indexer.errors import mismatch

_Version = tuple[int, int]

# 10 * major + minor of a compute capability: the first CUDA whose compilers know it, of its `a`
# target from 9.0 on, and the first that does not any more.
_NEVER = (1 << 30, 0)
_COMPILERS: dict[int, tuple[_Version, _Version]] = {
    70: ((9, 0), (13, 0)),
    72: ((9, 2), (13, 0)),
    75: ((10, 0), _NEVER),
    80: ((11, 0), _NEVER),
    86: ((11, 1), _NEVER),
    87: ((11, 4), _NEVER),
    88: ((13, 0), _NEVER),
    89: ((11, 8), _NEVER),
    90: ((12, 0), _NEVER),
    100: ((12, 8), _NEVER),
    101: ((12, 8), (13, 0)),
    103: ((12, 9), _NEVER),
    110: ((13, 0), _NEVER),
    120: ((12, 8), _NEVER),
    121: ((12, 9), _NEVER),
}
_KNOWN = tuple(f"{number // 10}.{number % 10}" for number in _COMPILERS)


def compilers_of(capability: _Version) -> tuple[_Version, _Version]:
    """(first, end) of the CUDA versions whose compilers know it: first <= version < end."""
    return _COMPILERS.get(10 * capability[0] + capability[1], ((0, 0), _NEVER))


def is_known(capability: _Version, compiler: _Version) -> bool:
    """Whether the compilers of this CUDA version know it."""
    first, end = compilers_of(capability)
    return first <= compiler < end


def capability_of(target: str) -> _Version:
    """Of `sm_90a` or `compute_75`: 9.0 and 7.5; 0.0 of what is neither."""
    found = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[af]?", target, re.ASCII)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def takes(capability: _Version, code: Iterable[str]) -> bool:
    """Whether a GPU runs any of this code, named as by `torch.cuda.get_arch_list`.

    Machine code runs on its own and later minors of one major, PTX (`compute_75`) on all that is
    later; with `a` either runs on its own capability alone, with `f` on later minors.
    """
    for name in code:
        own = capability_of(name)
        later_minor = own[0] == capability[0] and own <= capability
        if name.endswith("a"):
            runs = own == capability
        elif is_ptx(name) and not name.endswith("f"):
            runs = own <= capability and own != (0, 0)
        else:
            runs = later_minor
        if runs:
            return True
    return False


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
