# SPDX-License-Identifier: Apache-2.0
"""What a layer hands to an indexer, checked in the caller's words.

Everything an input can be made of is importable from here.
"""

from __future__ import annotations

import functools

import msgspec
import torch

from sparse_indexer.errors import expect_tensor, mismatch
from sparse_indexer.formats import HEAD_DIM, INT32_MAX
from sparse_indexer.index_k import BLOCK_SIZE, FlatIndexK, IndexKPool, flat_index_k
from sparse_indexer.page_table import expand_index_page_table, pool_slots
from sparse_indexer.plan import PrefillPlan
from sparse_indexer.planning import plan_prefill

__all__ = [
    "BLOCK_SIZE",
    "HEAD_DIM",
    "FlatIndexK",
    "IndexKPool",
    "IndexQ",
    "PrefillIndexerInputs",
    "PrefillPlan",
    "expand_index_page_table",
    "expect_out_positions",
    "flat_index_k",
    "plan_prefill",
    "pool_slots",
]


class IndexQ(msgspec.Struct, frozen=True, eq=False):
    """Index queries of `[rows, heads]`, 128 dims each.

    values                             scales
    [rows, heads, 128] float8_e4m3fn   [rows, heads] float32; None: folded into the weights
    [rows, heads, 64] uint8, e2m1,     [rows, heads] int32: four ue8m0 codes, one per 32 dims
      low nibble = even element
    [rows, heads, 128] float16         None
    [rows, heads, 128] bfloat16        None

    An fp8 scale multiplies the head's weight, so it acts outside the ReLU. Queries are meant for
    keys of their own format; `mask` takes any pairing, other backends may refuse one by name.

    Raises:
        ValueError: a wrong shape, dtype, device, or scales that do not belong to the values.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        packed = isinstance(self.values, torch.Tensor) and self.values.dtype == torch.uint8
        shape = ("rows", "heads", HEAD_DIM // 2 if packed else HEAD_DIM)
        plain = (torch.float8_e4m3fn, torch.float16, torch.bfloat16)
        values = expect_tensor("index_q values", self.values, shape, (*plain, torch.uint8))
        if not values.shape[1]:
            raise mismatch("index_q values", "at least 1 head", values)
        if values.dtype in (torch.float16, torch.bfloat16):
            if self.scales is not None:
                raise mismatch("index_q scales", f"None with {values.dtype}", self.scales)
        elif packed or self.scales is not None:
            dtype = torch.int32 if packed else torch.float32
            shape_ = tuple(values.shape[:2])
            expect_tensor("index_q scales", self.scales, shape_, (dtype,), values.device)


class PrefillIndexerInputs(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One layer's inputs: `logit[r, n] = k_scale[n] * sum_h w[r, h] * relu(q[r, h] . k[n])`.

    Attributes:
        plan: which positions each row sees, and where their keys are.
        index_q: the queries of all rows.
        head_weights: `[rows, heads]` float32 or bfloat16.
        index_k: the keys.

    Raises:
        ValueError: a wrong shape, dtype or device; paged keys with a plan for flat ones or the
            reverse; a page table too narrow for the plan's contexts. On a CPU also a wrong value:
            a used page outside the pool or a flat column beyond the keys (see `check`).
    """

    plan: PrefillPlan
    index_q: IndexQ
    head_weights: torch.Tensor
    index_k: IndexKPool | FlatIndexK

    def __post_init__(self) -> None:
        plan = self.plan
        if not isinstance(plan, PrefillPlan):
            raise mismatch("plan", "a PrefillPlan", plan)
        if not isinstance(self.index_q, IndexQ):
            raise mismatch("index_q", "an IndexQ", self.index_q)
        values = self.index_q.values
        shape = (plan.num_rows, *values.shape[1:])
        expect_tensor("index_q values", values, shape, (values.dtype,), plan.device)
        dtypes = (torch.float32, torch.bfloat16)
        expect_tensor("head_weights", self.head_weights, shape[:2], dtypes, plan.device)
        longest = max(plan.context_lens, default=0)
        if isinstance(self.index_k, IndexKPool):
            if plan.page_table is None:
                raise mismatch("index_k", "FlatIndexK, as the plan has key_starts", self.index_k)
            pages, size = self.index_k.pages, self.index_k.page_size
            if plan.page_table.shape[1] * size < longest:
                columns = -(-longest // size)
                want = f"at least {columns} columns ({longest} positions, {size} a page)"
                raise mismatch("page_table", want, plan.page_table)
        elif isinstance(self.index_k, FlatIndexK):
            if plan.key_starts is None:
                raise mismatch("index_k", "IndexKPool, as the plan has a page table", self.index_k)
            pages = self.index_k.values
        else:
            raise mismatch("index_k", "an IndexKPool or FlatIndexK", self.index_k)
        if pages.device != plan.device:
            raise mismatch("index_k", f"tensors on {plan.device}", pages)
        if plan.device.type == "cpu":
            self.check()

    @property
    def num_heads(self) -> int:
        """Index heads."""
        return self.index_q.values.shape[1]

    def check(self) -> None:
        """Check the values, too: the plan's, and where its keys are. Synchronizes with the device.

        Raises:
            ValueError: as `PrefillPlan.check`; a page that some row uses is not a page of the
                pool; a flat column that some row uses is beyond the keys.
        """
        plan = self.plan
        plan.check()
        seen = torch.zeros(plan.num_requests, dtype=torch.int64, device=plan.device)
        lens = plan.compressed_lens.long()
        seen.scatter_reduce_(0, plan.request_of_row.long(), lens, "amax")
        if isinstance(self.index_k, IndexKPool) and plan.page_table is not None:
            columns = torch.arange(plan.page_table.shape[1], device=plan.device)
            used = columns * self.index_k.page_size < seen[:, None]
            outside = (plan.page_table < 0) | (plan.page_table >= self.index_k.num_pages)
            for request, column in (used & outside).nonzero()[:1].tolist():
                page = int(plan.page_table[request, column])
                # What does not fit was cut to these when the plan was made.
                got = {INT32_MAX: f"{INT32_MAX} or more", -1: "-1 or less"}.get(page, f"{page}")
                want = f"a page of 0 to {self.index_k.num_pages - 1}"
                raise mismatch(f"page_table[{request}, {column}]", want, got)
        elif isinstance(self.index_k, FlatIndexK) and plan.key_starts is not None:
            held = len(self.index_k.values)
            outside = (plan.key_starts < 0) | (plan.key_starts + seen > held)
            for (request,) in (outside & (seen > 0)).nonzero()[:1].tolist():
                got = f"{int(plan.key_starts[request])} with {int(seen[request])} positions seen"
                want = f"a start within the {held} columns of the flat keys"
                raise mismatch(f"key_starts[{request}]", want, got)

    def dense_scores(self) -> torch.Tensor:
        """The whole matrix of logits, for code that really wants it; no backend calls this.

        Memoized: made once, kept as long as these inputs.

        Returns:
            `[rows, max(context_lens)]` float32, columns request-relative, -inf where a row sees
            nothing. Accumulated in float64 on a CPU, float32 on a GPU.
        """
        return self._dense_scores

    @functools.cached_property  # not a field: a copy with other queries must not have it
    def _dense_scores(self) -> torch.Tensor:
        from sparse_indexer.backends.mask import MaskIndexer

        return MaskIndexer(self.plan.device).dense_logits(self)


def expect_out_positions(
    out_positions: torch.Tensor | None, num_rows: int, topk: int, device: torch.device
) -> torch.Tensor:
    """`out_positions` if it is `[num_rows, topk]` int32 on `device`; `ValueError` if not."""
    out = expect_tensor("out_positions", out_positions, (num_rows, topk), (torch.int32,), device)
    if num_rows > 1 and out.stride(0) < topk:
        raise mismatch("out_positions", "rows of their own memory", f"strides {list(out.stride())}")
    return out
