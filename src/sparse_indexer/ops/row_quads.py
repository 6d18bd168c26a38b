# SPDX-License-Identifier: Apache-2.0
"""Rows by request, four at a time: those that a kernel scores together."""

from __future__ import annotations

import struct

import torch

from sparse_indexer.errors import blame_argument, mismatch
from sparse_indexer.jit import Kernel, load

KERNEL = Kernel("row_quads", {"row_quads": "sparse_indexer::RowQuads"})


def row_quads(
    request_of_row: torch.Tensor,
    lens: torch.Tensor,
    *,
    requests: list,  # type: ignore[type-arg]
    out_rows: torch.Tensor,
    out_slots: torch.Tensor,
    out_slot_lens: torch.Tensor,
    out_lens: torch.Tensor,
    out_first: torch.Tensor,
    out_request_lens: torch.Tensor,
    out_request_first: torch.Tensor,
) -> None:
    """Each request's rows, in row order, by four.

    Args:
        request_of_row: `[rows]` int32.
        lens: `[rows]` int32: positions a row sees.
        requests: of each request four ints: its first quad, its quads (rows beyond them are left
            out), its first packed block, and the positions that its packed keys hold.
        out_rows: `[quads, 4]` int32: the row of each slot; past a request's rows -1.
        out_slots: `[rows]` int32: the slot of each row.
        out_slot_lens: `[quads, 4]` int32: positions the slot's row sees, at most those held.
        out_lens: `[quads]` int32: the most of a quad's.
        out_first: `[quads]` int32: first packed block of the quad's request.
        out_request_lens: `[requests]` int32: most positions a row of the request sees.
        out_request_first: `[requests]` int32: its first packed block.
    """
    try:
        packed = bytearray()
        for i, request in enumerate(requests):
            try:
                packed += struct.pack("4i", *request)
            except (struct.error, TypeError):
                raise mismatch(f"requests[{i}]", "four 32-bit ints", repr(request)) from None
        load(KERNEL, lens.device).row_quads(
            request_of_row,
            lens,
            bytes(packed),
            out_rows,
            out_slots,
            out_slot_lens,
            out_lens,
            out_first,
            out_request_lens,
            out_request_first,
        )
    except Exception as error:
        blame_argument(error, row_quads, locals())
        raise
