# SPDX-License-Identifier: Apache-2.0
"""The NVIDIA driver, for what is said about it in errors and by `doctor`."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver supports; `None` if there is no driver."""
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("libcuda.so.1")
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10
