# SPDX-License-Identifier: Apache-2.0
"""What is done at a time: requests whose keys are held together, tiles of one size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from sparse_indexer.errors import mismatch


class RequestGroup(NamedTuple):
    """Requests `begin` to `stop - 1`."""

    begin: int
    stop: int
    size: int  # of their keys
    longest: int  # the largest of them


def request_groups(
    rows: Sequence[int],
    sizes: Sequence[int],
    *,
    unit_bytes: int,
    least: Callable[[int, int], int],
    budget: int,
    padded: bool = False,
) -> Iterator[RequestGroup]:
    """As many requests at a time as half the budget holds the keys of, but at least one.

    Args:
        rows: of each request; groups without any are left out.
        sizes: of each request's keys, in units of `unit_bytes`.
        least: bytes that a group takes, by the size of its keys and its longest request's.
        padded: each request of a group takes as much as its longest.

    Raises:
        ValueError: the budget is below what one of the requests takes.
    """
    one = max((least(size, size) for size in set(sizes)), default=0)
    if any(rows) and one > budget:
        raise mismatch("memory_budget", f"at least {one} bytes", f"{budget}")
    begin = 0
    while begin < len(rows):
        stop, size, longest = begin, 0, 0
        while stop < len(rows):
            larger = max(longest, sizes[stop])
            together = (stop + 1 - begin) * larger if padded else size + sizes[stop]
            full = together * unit_bytes > budget // 2 or least(together, larger) > budget
            if stop > begin and full:
                break
            stop, size, longest = stop + 1, together, larger
        if any(rows[begin:stop]):
            yield RequestGroup(begin, stop, size, longest)
        begin = stop


def even_tiles(start: int, stop: int, *, unit: int, most: int) -> list[slice]:
    """As few tiles as there may be, of one size, a multiple of `unit` and at most `most` units."""
    units = -(-(stop - start) // unit)
    step = -(-units // -(-units // most)) * unit
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]
