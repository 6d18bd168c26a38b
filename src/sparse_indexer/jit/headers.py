# SPDX-License-Identifier: Apache-2.0
"""Where CUDA's headers are, for a compiler that does not bring its own."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

HOMES = ("CUDA_HOME", "CUDA_PATH")
"""The variables that name a toolkit."""


def cuda_headers(major: int) -> tuple[Path, ...]:
    """The folders of cuda_fp16.h and of libcu++ of this CUDA major, as far as they are there.

    Looked for in the wheels, where cuda.pathfinder says, below CUDA_HOME and in /usr/local.
    """
    wheels = ("cuda_runtime", "cuda_cccl") if major == 12 else (f"cu{major}",)
    folders = [folder / "include" for folder in wheel_folders(*wheels)]
    folders += _pathfinder_headers()
    folders += [Path(os.environ[name]) / "include" for name in HOMES if os.environ.get(name)]
    folders += [Path(f"/usr/local/cuda-{major}/include"), Path("/usr/local/cuda/include")]
    runtime = (f for f in folders if (cuda_version(f) or (0,))[0] == major)
    cccl = (d for f in folders for d in (f, f / "cccl") if (d / "cuda/std/cstdint").is_file())
    found = (next(runtime, None), next(cccl, None))
    return tuple(dict.fromkeys(folder for folder in found if folder))


def cuda_version(include: Path) -> tuple[int, int] | None:
    """The CUDA version of a folder of headers; `None` if it is none."""
    try:
        with (include / "cuda_runtime_api.h").open(errors="replace") as file:
            text = file.read(64 << 10)  # it is near the top
    except OSError:
        return None
    found = re.search(r"#define CUDART_VERSION\s+(\d+)", text)
    return divmod(int(found[1]) // 10, 100) if found else None


def version_files(folders: Iterable[Path]) -> Iterator[Path]:
    """The headers that differ between versions for sure."""
    for folder in folders:
        for name in ("cuda_runtime_api.h", "cuda_fp16.hpp", "cuda/std/__cccl/version.h"):
            if (folder / name).is_file():
                yield folder / name


def wheel_folders(*names: str) -> Iterator[Path]:
    """The folders of these names that NVIDIA's wheels have made."""
    for entry in dict.fromkeys(sys.path):
        for name in names:
            folder = Path(entry) / "nvidia" / name
            if folder.is_dir():
                yield folder


def _pathfinder_headers() -> list[Path]:
    try:
        from cuda import pathfinder

        found = map(pathfinder.find_nvidia_header_directory, ("cudart", "cccl"))
        return [Path(folder) for folder in found if folder]
    except (ImportError, AttributeError, RuntimeError):
        return []
