# SPDX-License-Identifier: Apache-2.0
"""What `cache --clear` removes: what has the shape of the cache's own files, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sparse_indexer.errors import JitError
from sparse_indexer.jit.cache import FILES, META
from sparse_indexer.jit.places import SCHEMA, STAGING, fallback_root, roots, sweep

_KEY = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}")
_OF_A_BUILD = re.compile(r"\w+-\w+-[0-9a-f]{12}\.(lock|log)")  # as artifacts names them


class Cleared(NamedTuple):
    """A root that had something, and what stayed there as it is not of the cache."""

    root: Path
    left: list[Path]


def clear() -> list[Cleared]:
    """Remove every entry, lock and log from the writable root, or the one in its place.

    A root is a folder that its user names, so what has not their shape stays: it may be anything.
    What is being made stays as well, in staging folders that builders may still use.

    Raises:
        JitError: something cannot be removed.
    """
    found = (roots()[0], fallback_root())
    return [Cleared(root, _clear(root)) for root in found if root and (root / SCHEMA).is_dir()]


def _clear(root: Path) -> list[Path]:
    folder, left = root / SCHEMA, []
    try:
        for path in folder.iterdir():
            if not _is_folder(path):
                left.append(path)
            elif path.name == STAGING:
                sweep(path)
            elif path.name in ("locks", "logs"):
                left += _remove(path, lambda file: bool(_OF_A_BUILD.fullmatch(file.name)))
            else:
                left += _clear_folder(path, _clear_kernel)
    except OSError as error:
        raise JitError(f"cannot clear {root}: {error.strerror}, {error.filename}") from error
    for path in (folder / STAGING, folder):
        with suppress(OSError):  # in use
            path.rmdir()
    return sorted(left)


def _clear_folder(folder: Path, clear_in: Callable[[Path], list[Path]]) -> list[Path]:
    """Clear what is in it, and remove it if that was all; what else there is."""
    held, left = list(folder.iterdir()), []
    for path in held:
        left += clear_in(path)
    if not held:
        return [folder]
    with suppress(OSError):  # something is left, or was made by now
        folder.rmdir()
    return left


def _clear_kernel(path: Path) -> list[Path]:
    return _clear_folder(path, _clear_entry) if _is_folder(path) else [path]


def _clear_entry(path: Path) -> list[Path]:
    if not _KEY.fullmatch(path.name):
        return [path]
    if _is_folder(path):
        return _remove(path, lambda file: file.name in (META, *FILES))
    path.unlink()  # where an entry should be, and `publish` would replace it
    return []


def _remove(folder: Path, is_own: Callable[[Path], bool]) -> list[Path]:
    """Remove our files of a folder, and it if that is all; what else there is."""
    left = []
    for path in folder.iterdir():
        if is_own(path) and not _is_folder(path):
            path.unlink(missing_ok=True)
        else:
            left.append(path)
    with suppress(OSError):
        folder.rmdir()
    return left


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
