# SPDX-License-Identifier: Apache-2.0
"""What a compiler is, told from its files: no process, no paths, no times.

Of a file count its size and its first and last 64 KiB, where an ELF has its build id and its
section table. All of that is content: a copy elsewhere has the same fingerprint, and nothing needs
to be remembered between processes.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

_SAMPLE = 64 << 10


def digest(*parts: str) -> str:
    """One hash of several texts, in hex; lists that only join alike differ."""
    text = "\0".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def fingerprint(path: Path) -> str:
    """Of a file; of one that cannot be read, nothing but that."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            head = file.read(_SAMPLE)
            file.seek(max(0, size - _SAMPLE))
            return hashlib.sha256(b"%d\n" % size + head + file.read(_SAMPLE)).hexdigest()
    except OSError:
        return "unreadable"


def programs(word: str) -> tuple[str, ...]:
    """The fingerprints of all programs of this name, in the order of the PATH.

    All, because the first may be a wrapper that calls the next, as ccache does.
    """
    if os.sep in word:
        places = [Path(word)]
    else:
        places = [Path(f) / word for f in os.environ.get("PATH", os.defpath).split(os.pathsep)]
    found = (p.resolve() for p in places if os.access(p, os.X_OK) and p.is_file())
    return tuple(map(fingerprint, dict.fromkeys(found)))


def behind_script(path: Path) -> Path:
    """The program of the same name that a script calls, where its text says so; else `path`."""
    with path.open("rb") as file:
        text = file.read(_SAMPLE)
    if text.startswith(b"#!"):
        pattern = rf"/[\w./+-]+/{re.escape(path.name)}\b"
        for found in re.findall(pattern, text.decode(errors="replace")):
            if Path(found).is_file() and Path(found).resolve() != path:
                return Path(found).resolve()
    return path
