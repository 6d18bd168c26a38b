# SPDX-License-Identifier: Apache-2.0
"""From what an engine has to a `PrefillPlan`, with one host-to-device copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sparse_indexer.devices import resolve_device
from sparse_indexer.errors import describe, expect_int, expect_tensor, mismatch
from sparse_indexer.formats import INT32_MAX
from sparse_indexer.plan import HostInts, PrefillPlan

_Array = npt.NDArray[np.int64]
_INTS = (torch.int32, torch.int64)


def plan_prefill(
    positions: HostInts,
    rows_per_request: HostInts,
    *,
    compress_ratio: int = 1,
    device: torch.device | str | None = None,
    page_table: torch.Tensor | None = None,
    row_page_table: torch.Tensor | None = None,
    key_starts: HostInts | None = None,
    request_of_row: HostInts | None = None,
    context_lens: HostInts | None = None,
    request_starts: HostInts | None = None,
) -> PrefillPlan:
    """Make a plan from what an engine has, with one host-to-device copy.

    Args:
        positions: `[rows]` token position of each row in its request, from 0; -1 for a padding
            row, which sees nothing. On the host, or on the GPU; then give `context_lens`, too.
        rows_per_request: `[requests]` host: rows of each request.
        compress_ratio: tokens a compressed position stands for; a row sees
            `(token position + 1) // compress_ratio` positions.
        device: of the plan; default: that of a page table, else of `positions`, else the CPU.
        page_table: `[requests, max_pages]` int32 or int64, on `device` or the host: pages of each
            request in the index-K pool.
        row_page_table: `[rows, max_pages]`: the same, row by row, all rows of a request alike.
        key_starts: `[requests]` host: with flat keys, the first column of each request; default:
            requests packed one after the other by `context_lens`.
        request_of_row: `[rows]` host: the request of each row; default: consecutive rows.
        context_lens: `[requests]` host: compressed positions of each request's keys; default: the
            most that any of its rows sees.
        request_starts: `[requests]` host: added to a request's selected positions.

    Raises:
        ValueError: a wrong shape, dtype, device, length or value; more than one of `page_table`,
            `row_page_table`, `key_starts`; no `context_lens` with `positions` on a GPU.
    """
    ratio = expect_int("compress_ratio", compress_ratio, 1, INT32_MAX)
    given = [t for t in (page_table, row_page_table, key_starts) if t is not None]
    if len(given) > 1:
        one = "at most one of the three"
        raise mismatch("page_table, row_page_table, key_starts", one, f"{len(given)} of them")
    where = _plan_device(device, page_table, row_page_table, positions)
    counts = _host_ints("rows_per_request", rows_per_request)
    rows = int(counts.sum())
    on_device = isinstance(positions, torch.Tensor) and positions.device.type != "cpu"
    if on_device:
        expect_tensor("positions", positions, (rows,), _INTS, where)
        requests = _row_requests(request_of_row, counts)
        staged: dict[str, _Array] = {"request_of_row": requests}
    else:
        # The last position sees one more than its number.
        tokens = _host_ints("positions", positions, low=-1, high=INT32_MAX - (ratio == 1))
        if len(tokens) != rows:
            raise mismatch("positions", f"{rows} values, one a row", f"{len(tokens)}")
        requests = _row_requests(request_of_row, counts)
        staged = {"request_of_row": requests}
        staged["compressed_lens"] = (tokens + 1) // ratio
    contexts = _contexts(context_lens, len(counts), requests, staged.get("compressed_lens"))
    for name, starts in (("key_starts", key_starts), ("request_starts", request_starts)):
        if starts is not None:
            staged[name] = _host_ints(name, starts)
    if page_table is None and row_page_table is None and key_starts is None:
        starts = np.cumsum(contexts) - contexts
        if len(starts) and starts[-1] > INT32_MAX:
            want = f"at most {INT32_MAX} before the last request, as they are packed"
            raise mismatch("context_lens", want, f"{starts[-1]}")
        staged["key_starts"] = starts
    shifted = staged.get("request_starts")
    if shifted is not None and len(shifted) == len(contexts):
        for i in np.flatnonzero(shifted + contexts - 1 > INT32_MAX)[:1].tolist():
            want = f"at most {INT32_MAX + 1 - contexts[i]}, for {contexts[i]} positions"
            raise mismatch(f"request_starts[{i}]", want, f"{shifted[i]}")
    table, name = page_table, "page_table"
    if row_page_table is not None:
        table, name = row_page_table, "row_page_table"
        staged["first_row"] = _first_rows(requests, len(counts), staged.get("compressed_lens"))
    if table is not None:
        shape = (len(counts) if name == "page_table" else len(requests), "max_pages")
        expect_tensor(name, table, shape, _INTS)
        if table.device != where:
            if table.device.type != "cpu":
                raise mismatch(name, f"a table on {where} or the host", table)
            staged["table"] = table.flatten().numpy().clip(-1, INT32_MAX)

    copied = _copy_to_device(staged, where)
    if table is not None:
        table = copied["table"].view(table.shape) if "table" in copied else table
        if "first_row" in copied and len(requests):
            table = table[copied["first_row"].long()]
        elif "first_row" in copied:
            table = table.new_zeros(len(counts), table.shape[1])
        table = table.clamp(-1, INT32_MAX).to(torch.int32)
    if on_device:
        copied["compressed_lens"] = ((torch.as_tensor(positions) + 1) // ratio).to(torch.int32)
    return PrefillPlan(
        compressed_lens=copied["compressed_lens"],
        request_of_row=copied["request_of_row"],
        rows_per_request=counts.tolist(),
        context_lens=contexts.tolist(),
        page_table=table,
        key_starts=copied.get("key_starts"),
        request_starts=copied.get("request_starts"),
    )


def _plan_device(device: torch.device | str | None, *candidates: HostInts | None) -> torch.device:
    """The explicit device (an index filled in), else that of the first tensor, else the CPU."""
    if device is None:
        tensors = [t for t in candidates if isinstance(t, torch.Tensor)]
        return tensors[0].device if tensors else torch.device("cpu")
    return resolve_device(device)


def _host_ints(argument: str, values: HostInts, low: int = 0, high: int = INT32_MAX) -> _Array:
    """1-D host integers of [low, high] as an int64 array."""
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise mismatch(argument, "integers on the host", values)
    try:
        array = np.asarray(values)
    except (TypeError, RuntimeError, ValueError) as error:
        raise mismatch(argument, "a 1-D sequence of integers", values) from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        got = f"shape {list(array.shape)} {array.dtype}" if array.ndim else describe(values)
        raise mismatch(argument, "a 1-D sequence of integers", got)
    outside = np.flatnonzero((array < low) | (array > high))
    if outside.size:
        first = int(outside[0])
        raise mismatch(f"{argument}[{first}]", f"{low} to {high}", str(array[first]))
    return array.astype(np.int64)


def _row_requests(request_of_row: HostInts | None, counts: _Array) -> _Array:
    """The request of each row, counted against rows_per_request."""
    if request_of_row is None:
        return np.repeat(np.arange(len(counts)), counts)
    requests = _host_ints("request_of_row", request_of_row)
    outside = np.flatnonzero(requests >= len(counts))
    if outside.size:
        first = int(outside[0])
        want = f"0 to {len(counts) - 1}"
        raise mismatch(f"request_of_row[{first}]", want, str(requests[first]))
    found = np.bincount(requests, minlength=len(counts))
    if not np.array_equal(found, counts):
        first = int(np.flatnonzero(found != counts)[0])
        want = f"{counts[first]} rows of request {first}, as in rows_per_request"
        raise mismatch("request_of_row", want, f"{found[first]}")
    return requests


def _contexts(
    context_lens: HostInts | None, count: int, requests: _Array, lens: _Array | None
) -> _Array:
    """context_lens, defaulted and checked by what the rows see if that is known on the host."""
    seen = np.zeros(count, np.int64)
    if lens is not None:
        np.maximum.at(seen, requests, lens)
    if context_lens is None:
        if lens is None:
            raise mismatch("context_lens", "a list, as positions are on a GPU", "None")
        return seen
    contexts = _host_ints("context_lens", context_lens)
    if len(contexts) != count:
        raise mismatch("context_lens", f"{count} values, one a request", f"{len(contexts)}")
    if (contexts < seen).any():
        first = int(np.flatnonzero(contexts < seen)[0])
        want = f"at least {seen[first]}, what its rows see"
        raise mismatch(f"context_lens[{first}]", want, f"{contexts[first]}")
    return contexts


def _first_rows(requests: _Array, count: int, lens: _Array | None) -> _Array:
    """The first row of each request that sees something: a padding row's pages may be anything.

    Where there is none the first row, or 0: nobody reads its pages.
    """
    first = np.zeros(count, np.int64)
    rows = np.arange(len(requests))[::-1]
    first[requests[rows]] = rows
    if lens is not None:
        rows = rows[lens[rows] > 0]
        first[requests[rows]] = rows
    return first


def _copy_to_device(arrays: dict[str, _Array], device: torch.device) -> dict[str, torch.Tensor]:
    """All arrays as int32 on `device`: one buffer, one copy, each array at a multiple of 16 bytes.

    The staging buffer is this call's own, so the caller may change its arrays at once; torch keeps
    it until the copy has run.
    """
    offsets, size = [], 0
    for array in arrays.values():
        offsets.append(size)
        size += -(-array.size // 4) * 4
    staging = torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    view = staging.numpy()
    for offset, array in zip(offsets, arrays.values(), strict=True):
        view[offset : offset + array.size] = array
    buffer = staging.to(device, non_blocking=True)
    return {
        name: buffer[offset : offset + array.size]
        for offset, (name, array) in zip(offsets, arrays.items(), strict=True)
    }
