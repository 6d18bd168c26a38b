# SPDX-License-Identifier: Apache-2.0
"""The prefill plan: what a forward pass knows about its rows, shared by all layers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from sparse_indexer.aliasing import Place, place
from sparse_indexer.errors import (
    describe,
    expect_indices,
    expect_int,
    expect_tensor,
    mismatch,
)
from sparse_indexer.formats import INT32_MAX

HostInts = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor  # 1-D, on the host

_INT32 = (torch.int32,)


class PrefillPlan(msgspec.Struct, frozen=True, eq=False, kw_only=True, dict=True):
    """Which positions each row of a forward pass may see, and where their keys are.

    Made once a forward by `plan_prefill`, or directly from device tensors an engine already has.
    They are not copied: from a publish on they must not change as long as its candidates are used
    (a graph that has captured all of that may be replayed with other values).

    Attributes:
        compressed_lens: `[rows]` int32: positions the row may see, `(token position + 1) // ratio`.
        request_of_row: `[rows]` int32: the row's request; any mapping.
        rows_per_request: host, `[requests]`: rows of each request; a list or tuple, copied.
        context_lens: host, `[requests]`, likewise: at least the most positions that any row of the
            request sees.
        page_table: `[requests, max_pages]` int32: pages of each request in the index-K pool; slots
            past its last position hold anything. `None`: keys are flat.
        key_starts: `[requests]` int32: first column of each request in flat keys. `None`: keys are
            paged.
        request_starts: `[requests]` int32: added to a request's selected positions. `None`: nothing
            is added, the positions written are request-relative.

    Raises:
        ValueError: a wrong shape, dtype, device or length; on a CPU also a wrong value. On a GPU
            reading the values would synchronize: `check()` does it on request.
    """

    compressed_lens: torch.Tensor
    request_of_row: torch.Tensor
    rows_per_request: Sequence[int]
    context_lens: Sequence[int]
    page_table: torch.Tensor | None = None
    key_starts: torch.Tensor | None = None
    request_starts: torch.Tensor | None = None

    def __post_init__(self) -> None:
        lens = expect_tensor("compressed_lens", self.compressed_lens, ("rows",), _INT32)
        rows, device = len(lens), lens.device
        expect_tensor("request_of_row", self.request_of_row, (rows,), _INT32, device)
        for name in ("rows_per_request", "context_lens"):
            own = _expect_host_ints(name, getattr(self, name))
            msgspec.structs.force_setattr(self, name, own)
        requests = len(self.rows_per_request)
        if sum(self.rows_per_request) != rows:
            got = f"a sum of {sum(self.rows_per_request)}"
            raise mismatch("rows_per_request", f"a sum of {rows} rows", got)
        if len(self.context_lens) != requests:
            got = f"{len(self.context_lens)} values"
            raise mismatch("context_lens", f"{requests} values, one a request", got)
        if (self.page_table is None) == (self.key_starts is None):
            both = "both" if self.page_table is not None else "neither"
            raise mismatch("page_table, key_starts", "exactly one of the two", both)
        if self.page_table is not None:
            shape = (requests, "max_pages")
            expect_tensor("page_table", self.page_table, shape, _INT32, device)
        for name in ("key_starts", "request_starts"):
            if getattr(self, name) is not None:
                expect_tensor(name, getattr(self, name), (requests,), _INT32, device)
        if device.type == "cpu":
            self.check()

    @property
    def num_rows(self) -> int:
        """Rows of the plan."""
        return self.compressed_lens.shape[0]

    @property
    def num_requests(self) -> int:
        """Requests of the plan, those without rows included."""
        return len(self.rows_per_request)

    @property
    def device(self) -> torch.device:
        """Where the plan's tensors are."""
        return self.compressed_lens.device

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of the plan's tensors."""
        return [t for t in msgspec.structs.astuple(self) if isinstance(t, torch.Tensor)]

    @functools.cached_property
    def places(self) -> list[Place]:
        """Where the plan's tensors are."""
        return [place(tensor) for tensor in self.tensors]

    def check(self) -> None:
        """Check the values, too. Synchronizes with the device.

        Raises:
            ValueError: a row's request or length is out of range, or `rows_per_request` does not
                count `request_of_row`.
        """
        if not self.num_rows:
            return
        requests = self.request_of_row.cpu()
        bad = (requests < 0) | (requests >= self.num_requests)
        _refuse_first("request_of_row", bad, requests, f"0 to {self.num_requests - 1}")
        counts = torch.bincount(requests, minlength=self.num_requests).tolist()
        if counts != self.rows_per_request:
            pairs = zip(counts, self.rows_per_request, strict=True)
            first = next(i for i, (found, given) in enumerate(pairs) if found != given)
            want = f"{counts[first]}, the count in request_of_row"
            raise mismatch(f"rows_per_request[{first}]", want, str(self.rows_per_request[first]))
        lens = self.compressed_lens.cpu()
        limit = torch.tensor(self.context_lens, device="cpu")[requests.long()]
        within = "0 to the context_lens of its request"
        _refuse_first("compressed_lens", (lens < 0) | (lens > limit), lens, within)
        if self.request_starts is not None:
            starts = self.request_starts.cpu().long()
            ends = starts + torch.tensor(self.context_lens, device="cpu") - 1
            bad = (starts < 0) | (ends > INT32_MAX)
            _refuse_first("request_starts", bad, starts, "0 to where its positions fit an int32")

    def rows_by_request(self) -> torch.Tensor:
        """`[rows]` int64: row indices, request after request, ascending within each."""
        if sum(map(bool, self.rows_per_request)) == 1:
            return torch.arange(self.num_rows, device=self.device)
        return torch.argsort(self.request_of_row, stable=True)

    def tail_rows(self, tail_lens: HostInts) -> torch.Tensor:
        """`[sum(tail_lens)]` int64, ascending: the last `tail_lens[i]` rows of each request i.

        Raises:
            ValueError: not one length a request, or a length beyond the request's rows.
        """
        tails = _host_list("tail_lens", tail_lens)
        if len(tails) != self.num_requests:
            got = f"{len(tails)} values"
            raise mismatch("tail_lens", f"{self.num_requests} values, one a request", got)
        by_request = self.rows_by_request()
        kept = []
        ends = accumulate(self.rows_per_request)
        for i, (end, rows) in enumerate(zip(ends, self.rows_per_request, strict=True)):
            tail = expect_int(f"tail_lens[{i}]", tails[i], 0, rows)
            if tail:
                kept.append(by_request[end - tail : end])
        if len(kept) > 1:
            return torch.cat(kept).sort().values
        return kept[0] if kept else by_request[:0]

    def tail(self, tail_lens: HostInts) -> PrefillPlan:
        """The plan of `tail_rows(tail_lens)` alone; requests and their keys stay as they are.

        Raises:
            ValueError: as `tail_rows`.
        """
        return self.of_rows(self.tail_rows(tail_lens), tail_lens)

    def of_rows(self, rows: torch.Tensor, rows_per_request: HostInts) -> PrefillPlan:
        """The plan of some rows alone; requests and their keys stay as they are.

        Args:
            rows: `[n]` int32 or int64: the rows, in the order in which they are wanted.
            rows_per_request: host, `[requests]`: how many of each request.

        Raises:
            ValueError: `rows` is no such tensor, on a CPU also: a row beyond the plan's; or as the
                plan itself.
        """
        expect_indices("rows", rows, self.num_rows, self.device)
        return PrefillPlan(
            compressed_lens=torch.index_select(self.compressed_lens, 0, rows),
            request_of_row=torch.index_select(self.request_of_row, 0, rows),
            rows_per_request=_host_list("rows_per_request", rows_per_request),
            context_lens=self.context_lens,
            page_table=self.page_table,
            key_starts=self.key_starts,
            request_starts=self.request_starts,
        )


def _host_list(argument: str, values: HostInts) -> list[int]:
    """The values of a sequence, array or tensor, whatever they are."""
    on_host = not isinstance(values, torch.Tensor) or values.device.type == "cpu"
    if isinstance(values, np.ndarray | torch.Tensor) and on_host and values.ndim == 1:
        return list(values.tolist())
    if not isinstance(values, Sequence):
        raise mismatch(argument, "a list of ints on the host", describe(values))
    return list(values)


def _expect_host_ints(argument: str, value: object) -> list[int]:
    """A list of our own."""
    if not isinstance(value, (list, tuple)):
        raise mismatch(argument, "a list of ints on the host", describe(value))
    return [expect_int(f"{argument}[{i}]", item, 0, INT32_MAX) for i, item in enumerate(value)]


def _refuse_first(argument: str, bad: torch.Tensor, values: torch.Tensor, expected: str) -> None:
    if bad.any():
        row = int(bad.nonzero()[0])
        raise mismatch(f"{argument}[{row}]", expected, str(int(values[row])))
