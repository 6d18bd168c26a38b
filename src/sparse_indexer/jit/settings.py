# SPDX-License-Identifier: Apache-2.0
"""The variables of the environment that take one of a few values."""

from __future__ import annotations

import os

from sparse_indexer.errors import mismatch

VALUES = {
    "SPARSE_INDEXER_COMPILER": ("nvrtc", "nvcc"),
    "SPARSE_INDEXER_JIT": ("auto", "cached", "rebuild"),
    "SPARSE_INDEXER_LINEINFO": ("0", "1"),
    "SPARSE_INDEXER_SYNC": ("0", "1"),
}


def setting(name: str) -> str:
    """What a variable is set to, "" if it is not.

    Raises:
        ValueError: it is none of its values.
    """
    value = os.environ.get(name, "")
    if value not in ("", *VALUES[name]):
        raise mismatch(name, " or ".join(map(repr, VALUES[name])), repr(value))
    return value
