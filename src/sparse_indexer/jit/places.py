# SPDX-License-Identifier: Apache-2.0
"""Where compiled files may be kept: a writable root, read-only ones, and a way out.

Where the writable root is not writable, things go to a folder of this user in the temporary
directory, and where that is not to be had, or not this user's alone, nowhere.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

_log = logging.getLogger("sparse_indexer")

SCHEMA = "v1"
"""The folder of a root that holds everything, and part of every key."""

STAGING = "staging"
_STALE = 86400.0  # seconds after which a staging folder belongs to nobody


class Workspace(NamedTuple):
    """Where an entry is made."""

    root: Path | None  # None: no root is writable, so the entry will not be kept
    staging: Path  # a folder of our own, on the file system of the root


def roots() -> tuple[Path, list[Path]]:
    """(the writable root, the read-only ones) that `SPARSE_INDEXER_CACHE_DIR` or XDG name."""
    first, *rest = os.environ.get("SPARSE_INDEXER_CACHE_DIR", "").split(os.pathsep)
    if not first:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        first = os.path.join(base, "sparse_indexer")
    return _absolute(first), [_absolute(root) for root in rest if root]


def usable_root() -> Path | None:
    """The root that new entries go to; `None` if none is writable."""
    with workspace() as place:
        return place.root


def read_only_note(root: Path) -> str:
    """What is said of a read-only root: a mistyped one has nothing for us."""
    if not os.path.isdir(root):
        return "read-only, but there is no such folder"
    return "read-only" if os.path.isdir(root / SCHEMA) else f"read-only, but has no {SCHEMA} in it"


def all_roots() -> list[Path]:
    """Where to look, in this order."""
    writable, read_only = roots()
    fallback = None if os.access(writable, os.W_OK) else temporary_root(make=False)
    return [writable, *read_only, *([fallback] if fallback else [])]


@contextmanager
def workspace() -> Iterator[Workspace]:
    """A staging folder in the first root that takes one; gone afterwards."""
    root: Path | None = roots()[0]
    staging = make_staging(root)
    if staging is None:
        _warn_unwritable(str(root))
        root = temporary_root(make=True)
        staging = make_staging(root)
    if staging is None:
        with tempfile.TemporaryDirectory(prefix="sparse_indexer-") as folder:
            yield Workspace(None, Path(folder))
        return
    try:
        yield Workspace(root, staging)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def temporary_root(*, make: bool) -> Path | None:
    """This user's root in the temporary directory; `None` if it is absent or somebody else's."""
    root = Path(tempfile.gettempdir()) / f"sparse_indexer-{os.getuid()}"
    try:
        if make:
            root.mkdir(mode=0o700, exist_ok=True)
        status = root.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return root if private and status.st_uid == os.getuid() else None


@contextmanager
def variable(name: str, value: str | None) -> Iterator[None]:
    """Set a variable of the environment until the end of the block; `None` sets nothing."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def make_staging(root: Path | None) -> Path | None:
    """A new folder to make an entry in; `None` where the root cannot be written."""
    if root is None:
        return None
    parent = root / SCHEMA / STAGING
    try:
        parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=parent))
    except OSError:
        return None
    _sweep(parent)
    return staging


def _absolute(root: str) -> Path:
    path = os.path.expanduser(root)
    if path.startswith("~"):  # this user has no home
        return Path(os.devnull, path)
    return Path(os.path.abspath(path))


@cache
def _warn_unwritable(root: str) -> None:
    where = temporary_root(make=True) or "nothing: every process compiles anew"
    _log.warning(
        "the cache folder %s is not writable (SPARSE_INDEXER_CACHE_DIR), using %s", root, where
    )


def _sweep(parent: Path) -> None:
    """Remove what killed builders left."""
    for folder in parent.iterdir():
        try:
            if time.time() - folder.stat().st_mtime > _STALE:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
