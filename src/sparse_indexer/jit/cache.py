# SPDX-License-Identifier: Apache-2.0
"""Compiled files on disk: found by what they were made from, shared by processes, never half there.

    <root>/v1/<target>/<kernel>/<source>-<compiler>/{kernel.cubin | host.so, meta.json}

`source` and `compiler` are hashes of contents; meta.json holds size and sha256 of the file beside
it, and an entry that does not match its meta is no entry. Reading takes no lock. An entry is
written in a staging folder and renamed to its name, so a builder may be killed at any point.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import msgspec

from sparse_indexer.jit.places import (
    SCHEMA,
    STAGING,
    Workspace,
    all_roots,
    roots,
    temporary_root,
)
from sparse_indexer.jit.resources import Resources

_log = logging.getLogger("sparse_indexer")

META = "meta.json"
FILES = ("kernel.cubin", "host.so")


class Entry(NamedTuple):
    """The name of a compiled file."""

    target: str  # sm_90a, or the machine of a host module
    kernel: str
    file: str  # kernel.cubin or host.so
    source: str  # hash of what is compiled, and of the flags
    compiler: str | None  # hash of the compiler; None: any will do

    def folder(self, root: Path) -> Path:
        """Where it is below a root."""
        return root / SCHEMA / self.target / self.kernel / f"{self.source}-{self.compiler}"


class Stored(NamedTuple):
    """An entry that was read and checked, or made."""

    data: bytes
    path: Path | None  # None: it is nowhere on disk
    meta: dict[str, Any]
    fresh: bool  # made now, by this process


class _Meta(TypedDict):
    """What the meta of every entry has."""

    size: int
    sha256: str
    built_by: str
    resources: dict[str, Resources]
    warnings: list[str]


def entries(root: Path) -> list[Path]:
    """The compiled files below a root, `.../<target>/<kernel>/<key>/<file>`."""
    found = (root / SCHEMA).glob("*/*/*/*")
    return sorted(p for p in found if p.name in FILES and p.parents[2].name != STAGING)


def find(*wanted: Entry) -> Stored | None:
    """The first of these entries that a root has, read and checked; `None` if none has any."""
    for entry, root in itertools.product(wanted, all_roots()):
        folders = [entry.folder(root)]
        if entry.compiler is None:
            folders = sorted(folders[0].parent.glob(f"{entry.source}-*"))
        for folder in folders:
            stored = read(folder, entry.file)
            if stored:
                return stored
    return None


def read(folder: Path, name: str) -> Stored | None:
    """The file of this folder if it is what its meta says."""
    try:
        meta = json.loads((folder / META).read_bytes())
        msgspec.convert(meta, _Meta)
        data = (folder / name).read_bytes()
        if len(data) == meta["size"] > 0 and hashlib.sha256(data).hexdigest() == meta["sha256"]:
            return Stored(data, folder / name, meta, False)
    except (OSError, ValueError):
        pass
    return None


def publish(
    place: Workspace, entry: Entry, data: bytes, meta: dict[str, Any], *, replace: bool
) -> Stored:
    """Keep `data` as the entry; where that fails it is still returned, with a warning.

    If another process was faster, its entry stays, unless it is broken or `replace` is set.
    """
    digest = hashlib.sha256(data).hexdigest()
    meta = {**entry._asdict(), "size": len(data), "sha256": digest, **meta}
    if place.root is None:
        return Stored(data, None, meta, True)
    folder, ready = entry.folder(place.root), place.staging / "entry"
    try:
        ready.mkdir()
        _write(ready / entry.file, data)
        _write(ready / META, json.dumps(meta, indent=1).encode())
        _sync(ready)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            ready.rename(folder)
        except OSError:
            existing = read(folder, entry.file)
            if existing and not replace:
                return Stored(data, existing.path, meta, True)
            folder.rename(place.staging / "old")
            ready.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        _log.warning("cannot keep %s for %s: %s", entry.kernel, entry.target, error)
        return Stored(data, None, meta, True)
    return Stored(data, folder / entry.file, meta, True)


def clear() -> list[Path]:
    """Remove everything from the writable root and the temporary one; the roots that had any."""
    found = (roots()[0], temporary_root(make=False))
    folders = [root / SCHEMA for root in found if root and (root / SCHEMA).exists()]
    for folder in folders:
        shutil.rmtree(folder)
    return [folder.parent for folder in folders]


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # not every file system syncs folders
        pass
    finally:
        os.close(descriptor)
