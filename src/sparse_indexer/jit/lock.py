# SPDX-License-Identifier: Apache-2.0
"""One builder of an entry at a time, as far as the file system helps.

A lock saves work, it is not what keeps the cache sound: every entry is renamed into place whole. So
whatever goes wrong with a lock, the answer is to go on without it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger("sparse_indexer")

WARN_AFTER = 5.0  # seconds
GIVE_UP_AFTER = 600.0  # seconds
_LONGEST_NAP = 0.25  # seconds


@contextmanager
def lock(path: Path, what: str) -> Iterator[None]:
    """Hold the lock of `path` until the end of the block.

    Waits for whoever holds it, and says for whom after `WARN_AFTER`. Goes on without the lock after
    `GIVE_UP_AFTER`, and at once where the file cannot be opened or the file system has no locks.
    The lock ends with its process, so a file that is left behind holds nobody up.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return
    try:
        if _acquire(descriptor, path, what):
            _sign(descriptor)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, what: str) -> bool:
    start, nap, warned = time.monotonic(), 0.01, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError:
            return False
        waited = time.monotonic() - start
        if waited > GIVE_UP_AFTER:
            _log.warning("waited %.0f s for %s, going on without %s", waited, what, path)
            return False
        if waited > WARN_AFTER and not warned:
            _log.warning("waiting for %s, which builds %s (%s)", _holder(descriptor), what, path)
            warned = True
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)


def _sign(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except OSError:
        pass


def _holder(descriptor: int) -> str:
    try:
        return os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
    except OSError:
        return "another process"
