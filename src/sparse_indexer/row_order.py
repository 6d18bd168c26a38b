# SPDX-License-Identifier: Apache-2.0
"""A plan's rows by request, and which of them are scored in pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_indexer.plan import PrefillPlan


class RowOrder(NamedTuple):
    """Rows request after request, ascending within each; all tensors are `[rows]`.

    `rows`, `lens`, `requests` and `pairs` are in that order, `places` is in the plan's.
    """

    rows: torch.Tensor  # int32: the plan's row
    lens: torch.Tensor  # int32: positions it sees
    requests: torch.Tensor  # int32: its request
    pairs: torch.Tensor  # int32: an id that at most two rows share, neighbors of one request
    places: torch.Tensor  # int64: where in the order each of the plan's rows is


def row_order(plan: PrefillPlan) -> RowOrder:
    """Order a plan's rows; reads nothing back from the device."""
    rows = plan.rows_by_request()
    requests = plan.request_of_row[rows]
    index = torch.arange(len(rows), device=plan.device)
    first = torch.searchsorted(requests, requests)  # of its request
    pairs = first + (index - first) // 2
    places = torch.empty_like(rows).scatter_(0, rows, index)
    lens = plan.compressed_lens[rows]
    return RowOrder(rows.to(torch.int32), lens, requests, pairs.to(torch.int32), places)
