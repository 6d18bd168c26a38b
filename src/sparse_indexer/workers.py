# SPDX-License-Identifier: Apache-2.0
"""Processes that work side by side, and never outlive the one that started them.

Imports nothing that takes time, so that a worker can be ended from its first moments on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import Connection
from types import ModuleType
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def each_done(
    work: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Generator[Result, None, None]:
    """`work` of each item, as they are done, in `jobs` processes, or here if that is one.

    It is imported there, from a module: the program itself is not, so it needs no guard.

    To close it, or to end this process in any way, ends the workers and what they have started.

    Raises:
        concurrent.futures.process.BrokenProcessPool: a worker was killed.
    """
    if jobs <= 1:
        yield from map(work, items)
        return
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)  # nothing is sent: its end is the message
    pool = ProcessPoolExecutor(jobs, context, _start, (theirs,))
    # Workers inherit what is blocked: an interrupt, which a terminal sends to all, is for this one.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    program = sys.modules["__main__"]
    try:
        sys.modules["__main__"] = ModuleType("__main__")  # each worker would run it again
        tasks = [pool.submit(work, item) for item in items]
        sys.modules["__main__"] = program
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for task in as_completed(tasks):
            yield task.result()
    finally:
        sys.modules["__main__"] = program
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        ours.close()
        pool.shutdown()


def _start(parent: Connection) -> None:
    os.setsid()  # a group of its own, with the compilers that it starts
    signal.signal(signal.SIGTERM, lambda *_: _end())  # the pool's, when another worker was killed
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    parent.poll(None)
    _end()


def _end() -> None:
    os.killpg(0, signal.SIGKILL)
