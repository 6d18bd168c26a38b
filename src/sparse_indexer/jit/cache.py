# SPDX-License-Identifier: Apache-2.0
"""Compiled files on disk: found by what they were made from, shared by processes, never half there.

    <root>/v1/<target>/<kernel>/<source>-<compiler>/{kernel.cubin | kernel.ptx | host.so, meta.json}

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import msgspec

from sparse_indexer.jit.places import OTHER_FOLDER, SCHEMA, STAGING, Workspace
from sparse_indexer.jit.resources import Resources

_log = logging.getLogger("sparse_indexer")

META = "meta.json"
FILES = ("kernel.cubin", "kernel.ptx", "host.so")


class Entry(NamedTuple):
    """The name of a compiled file."""

    target: str  # sm_90a, or the machine of a host module
    kernel: str
    file: str  # one of FILES
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
    fault: str = ""  # why it is nowhere


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


def files(wanted: list[Entry], roots: list[Path]) -> Iterator[Path]:
    """Where the files of these entries would be, the first of them first."""
    for entry, root in itertools.product(wanted, roots):
        folder = entry.folder(root)
        any_s = sorted(folder.parent.glob(f"{entry.source}-*")) if entry.compiler is None else None
        yield from (found / entry.file for found in any_s or [folder])


def find(wanted: list[Entry], roots: list[Path]) -> Stored | None:
    """The first of these entries that a root has, read and checked; `None` if none has any."""
    found = (read(file.parent, file.name) for file in files(wanted, roots))
    return next(filter(None, found), None)


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
        return Stored(data, None, meta, True, place.fault)
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
            folder.parent.mkdir(parents=True, exist_ok=True)  # `clear` may have taken it
            if folder.exists():
                folder.rename(place.staging / "old")
            ready.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        fault = f"{place.root} ({error.strerror}); {OTHER_FOLDER}"
        _log.warning("cannot keep %s for %s in %s", entry.kernel, entry.target, fault)
        return Stored(data, None, meta, True, fault)
    return Stored(data, folder / entry.file, meta, True)


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
