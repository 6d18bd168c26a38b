# SPDX-License-Identifier: Apache-2.0
"""Where compiled files may be kept: a writable root, read-only ones, and a way out.

Where the writable root is not writable, things go to a folder of this user in the temporary
directory, and where that is not to be had, or not this user's alone, nowhere.
"""

from __future__ import annotations

import errno
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

from sparse_indexer.errors import JitError

_log = logging.getLogger("sparse_indexer")

SCHEMA = "v1"
"""The folder of a root that holds everything, and part of every key."""

STAGING = "staging"
_PREFIX = "building-"  # of a builder's folder in it
_STALE = 86400.0  # seconds after which a staging folder belongs to nobody
_ROOM = 16 << 20  # bytes that a compiler takes for one kernel, at most

OTHER_FOLDER = "set SPARSE_INDEXER_CACHE_DIR to a folder that can be written"
"""What to do where nothing can be kept."""


class Workspace(NamedTuple):
    """Where an entry is made."""

    root: Path | None  # None: no root is writable, so the entry will not be kept
    staging: Path  # a folder of our own, on the file system of the root
    fault: str  # why it is not the first root, with what to do


def roots() -> tuple[Path, list[Path]]:
    """(the writable root, the read-only ones) that `SPARSE_INDEXER_CACHE_DIR` or XDG name."""
    first, *rest = os.environ.get("SPARSE_INDEXER_CACHE_DIR", "").split(os.pathsep)
    if not first:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        first = os.path.join(base, "sparse_indexer")
    return absolute(first), [absolute(root) for root in rest if root]


def read_only_note(root: Path) -> str:
    """What is said of a read-only root: a mistyped one has nothing for us."""
    if not os.path.isdir(root):
        return "read-only, but there is no such folder"
    return "read-only" if os.path.isdir(root / SCHEMA) else f"read-only, but has no {SCHEMA} in it"


def all_roots() -> list[Path]:
    """Where to look, in this order; in the temporary root if the first cannot be written."""
    writable, read_only = roots()
    fallback = fallback_root()
    return [writable, *read_only, *([fallback] if fallback else [])]


def fallback_root() -> Path | None:
    """The temporary root, if it is there and the first root cannot be written."""
    writable = roots()[0]
    there = next(folder for folder in (writable, *writable.parents) if os.path.lexists(folder))
    good = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    good = good and shutil.disk_usage(there).free > _ROOM
    return None if good else temporary_root(make=False)


@contextmanager
def workspace() -> Iterator[Workspace]:
    """A staging folder in the first root that takes one; gone afterwards.

    Raises:
        JitError: there is none, and not even a temporary directory.
    """
    root: Path | None
    root, fault = roots()[0], ""
    try:
        staging = make_staging(root)
    except OSError as error:
        fault = f"the cache folder {root} cannot be written ({error.strerror})"
        try:
            root = _private_root(make=True)
            staging = make_staging(root)
            fault += f", using {root} instead; {OTHER_FOLDER}"
        except OSError as second:
            root, why = None, f"{second.filename or root} ({second.strerror})"
            fault += f", nor can {why}: every process compiles anew; {OTHER_FOLDER}"
            try:
                staging = Path(tempfile.mkdtemp(prefix="sparse_indexer-"))
            except OSError:
                raise JitError(fault) from error
        _warn(fault)
    try:
        yield Workspace(root, staging, fault)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def temporary_root(*, make: bool) -> Path | None:
    """This user's root in the temporary directory; `None` if it is absent or not theirs alone."""
    try:
        return _private_root(make=make)
    except OSError:
        return None


def _private_root(*, make: bool) -> Path:
    root = Path(tempfile.gettempdir()) / f"sparse_indexer-{os.getuid()}"
    if make:
        root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    fault = ""
    if not stat.S_ISDIR(status.st_mode):
        fault = "a link" if stat.S_ISLNK(status.st_mode) else "no folder"
    elif status.st_uid != os.getuid():
        fault = f"user {status.st_uid} owns it"
    elif status.st_mode & 0o077:
        fault = f"mode {stat.S_IMODE(status.st_mode):o} lets others in"
    if fault:
        raise PermissionError(errno.EPERM, f"refused: {fault}", str(root))
    return root


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


def make_staging(root: Path) -> Path:
    """A new folder to make an entry in.

    Raises:
        OSError: the root cannot be written, or is full.
    """
    parent = root / SCHEMA / STAGING
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    staging = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        with tempfile.TemporaryFile(dir=staging) as file:
            os.posix_fallocate(file.fileno(), 0, _ROOM)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # not every file system can tell
            shutil.rmtree(staging, ignore_errors=True)
            raise
    return staging


def absolute(root: str) -> Path:
    """A folder as people write it."""
    path = os.path.expanduser(root)
    if path.startswith("~"):  # this user has no home
        return Path(os.devnull, path)
    return Path(os.path.abspath(path))


@cache
def _warn(fault: str) -> None:
    _log.warning("%s", fault)


def sweep(parent: Path) -> None:
    """Remove what killed builders left."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if time.time() - folder.stat().st_mtime > _STALE:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
