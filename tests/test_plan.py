# SPDX-License-Identifier: Apache-2.0
"""The prefill plan: what each row sees, which request it is of, and where that one's keys are."""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparse_indexer import (
    IndexKPool,
    IndexQ,
    PrefillIndexerInputs,
    PrefillPlan,
    expand_index_page_table,
    flat_index_k,
    make_candidate_indexer,
    plan_prefill,
    pool_slots,
)

INT32_MAX = 2**31 - 1

HOST_INTS: dict[str, Callable[[Sequence[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "numpy int32": lambda x: np.array(x, dtype=np.int32),
    "numpy int64": lambda x: np.array(x, dtype=np.int64),
    "strided numpy": lambda x: np.array([[i, 99] for i in x], dtype=np.int64).reshape(-1, 2)[:, 0],
    "torch int32": lambda x: torch.tensor(x, dtype=torch.int32),
    "torch int64": lambda x: torch.tensor(x, dtype=torch.int64),
    "strided torch": lambda x: torch.tensor(x, dtype=torch.int64).repeat_interleave(2)[::2],
}
EVERY_KIND = pytest.mark.parametrize("kind", HOST_INTS.values(), ids=HOST_INTS.keys())
TENSORS = ("compressed_lens", "request_of_row", "page_table", "key_starts", "request_starts")


def refused(message: str) -> AbstractContextManager[Any]:
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


def contents(plan: PrefillPlan) -> dict[str, Any]:
    """The plan as plain values; every tensor must be int32."""
    tensors = {name: getattr(plan, name) for name in TENSORS}
    assert all(t is None or t.dtype == torch.int32 for t in tensors.values())
    plain = {name: None if t is None else t.tolist() for name, t in tensors.items()}
    return plain | {"rows_per_request": plan.rows_per_request, "context_lens": plan.context_lens}


# Ratio, token positions, compressed positions seen.
FORMULA = {
    "1": (1, [-1, 0, 1, 7, 2**31 - 2], [0, 1, 2, 8, 2**31 - 1]),
    "4": (4, [-1, 0, 2, 3, 4, 6, 7, 8, 2**31 - 1], [0, 0, 0, 1, 1, 1, 2, 2, 2**29]),
    "128": (128, [-1, 0, 126, 127, 128, 254, 255, 256], [0, 0, 0, 1, 1, 1, 2, 2]),
}


@pytest.mark.parametrize(("ratio", "positions", "lens"), FORMULA.values(), ids=FORMULA.keys())
@EVERY_KIND
def test_a_row_sees_the_complete_compressed_positions(
    kind: Callable, ratio: int, positions: list[int], lens: list[int]
) -> None:
    plan = plan_prefill(kind(positions), kind([len(positions)]), compress_ratio=ratio)
    assert contents(plan) == {
        "compressed_lens": lens,
        "request_of_row": [0] * len(lens),
        "page_table": None,
        "key_starts": [0],
        "request_starts": None,
        "rows_per_request": [len(lens)],
        "context_lens": [max(lens)],
    }
    assert (plan.num_rows, plan.num_requests) == (len(lens), 1)
    assert plan.device == torch.device("cpu")


@given(position=st.integers(-1, 5000), ratio=st.integers(1, 300))
@settings(deadline=None)
def test_a_compressed_position_is_seen_once_its_last_token_is(position: int, ratio: int) -> None:
    plan = plan_prefill([position], [1], compress_ratio=ratio)
    complete = [n for n in range(5002) if (n + 1) * ratio - 1 <= position]
    assert plan.compressed_lens.tolist() == [len(complete)]


@EVERY_KIND
def test_all_host_arguments_take_all_kinds(kind: Callable) -> None:
    plan = plan_prefill(
        kind([9, 4, -1, 5]),
        kind([1, 0, 3]),
        request_of_row=kind([2, 0, 2, 2]),
        context_lens=kind([5, 7, 11]),
        key_starts=kind([70, 0, 3]),
        request_starts=kind([1000, 2000, 3000]),
    )
    assert contents(plan) == {
        "compressed_lens": [10, 5, 0, 6],
        "request_of_row": [2, 0, 2, 2],
        "page_table": None,
        "key_starts": [70, 0, 3],
        "request_starts": [1000, 2000, 3000],
        "rows_per_request": [1, 0, 3],
        "context_lens": [5, 7, 11],
    }


# positions, rows_per_request, options; compressed_lens, request_of_row, context_lens, key_starts
CHUNKS: dict[str, tuple[list[int], list[int], dict[str, Any], tuple[list[int], ...]]] = {
    "packed behind prefixes of 10 and 3": (
        [10, 11, 12, 13, 3, 4, 5, 6, 7, 8],
        [4, 6],
        {},
        ([11, 12, 13, 14, 4, 5, 6, 7, 8, 9], [0] * 4 + [1] * 6, [14, 9], [0, 14]),
    ),
    "contexts of 13 and 21": ([12, 20], [1, 1], {}, ([13, 21], [0, 1], [13, 21], [0, 13])),
    "requests without rows": (
        [4, 5, 6, 7, 8],
        [0, 5, 0, 0],
        {},
        ([5, 6, 7, 8, 9], [1] * 5, [0, 9, 0, 0], [0, 0, 9, 9]),
    ),
    "no rows": ([], [0, 0], {}, ([], [], [0, 0], [0, 0])),
    "no rows but keys": ([], [0, 0], {"context_lens": [6, 2]}, ([], [], [6, 2], [0, 6])),
    "one dummy request": ([], [0], {}, ([], [], [0], [0])),
    "no requests": ([], [], {}, ([], [], [], [])),
    "rows without keys": ([-1, -1, -1], [3], {}, ([0, 0, 0], [0, 0, 0], [0], [0])),
    "padding between rows": (
        [3, -1, 4, -1, 9],
        [4, 1],
        {},
        ([4, 0, 5, 0, 10], [0, 0, 0, 0, 1], [5, 10], [0, 5]),
    ),
    "interleaved rows": (
        [8, 2, 9, 3, 10],
        [3, 2],
        {"request_of_row": [0, 1, 0, 1, 0]},
        ([9, 3, 10, 4, 11], [0, 1, 0, 1, 0], [11, 4], [0, 11]),
    ),
    "descending positions": ([9, 5, 7], [3], {}, ([10, 6, 8], [0, 0, 0], [10], [0])),
    "contexts longer than seen": (
        [3, 0],
        [1, 1],
        {"context_lens": [64, 1]},
        ([4, 1], [0, 1], [64, 1], [0, 64]),
    ),
    "tokens four to a position": (
        [2, 3, 14, 15],
        [2, 2],
        {"compress_ratio": 4},
        ([0, 1, 3, 4], [0, 0, 1, 1], [1, 4], [0, 1]),
    ),
}


@pytest.mark.parametrize(
    ("positions", "rows", "options", "right"), CHUNKS.values(), ids=CHUNKS.keys()
)
def test_flat_chunks(positions: list, rows: list, options: dict, right: tuple) -> None:
    lens, requests, contexts, starts = right
    assert contents(plan_prefill(positions, rows, **options)) == {
        "compressed_lens": lens,
        "request_of_row": requests,
        "page_table": None,
        "key_starts": starts,
        "request_starts": None,
        "rows_per_request": rows,
        "context_lens": contexts,
    }


@pytest.mark.parametrize(
    ("positions", "rows", "options", "right"), CHUNKS.values(), ids=CHUNKS.keys()
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_table_by_request_and_by_row_are_one(
    positions: list, rows: list, options: dict, right: tuple, dtype: torch.dtype
) -> None:
    """A request without rows has no row in the second, and nobody reads its pages."""
    lens, requests, contexts, _ = right
    table = 10 + torch.arange(3 * len(rows), dtype=dtype).view(len(rows), 3)
    by_request = plan_prefill(positions, rows, page_table=table, **options)
    by_row = plan_prefill(positions, rows, row_page_table=table[requests], **options)
    for plan in (by_request, by_row):
        assert plan.compressed_lens.tolist() == lens
        assert plan.context_lens == contexts
        assert plan.key_starts is None
        assert plan.page_table is not None
        assert plan.page_table.dtype == torch.int32
        assert plan.page_table.shape == (len(rows), 3)
        used = sorted(set(requests))
        assert torch.equal(plan.page_table[used].to(dtype), table[used])


class HostToDevice(TorchDispatchMode):
    """Records what goes from the CPU to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.sources: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        host = [t for t in given if t.device.type == "cpu"]
        if host and any(t.device.type != "cpu" for t in made):
            self.operations.append(func.name())
            self.sources += host
        return out


def staged(copies: HostToDevice, tensor: torch.Tensor) -> list[int]:
    """What was copied to where this part of the device's buffer is."""
    start = tensor.storage_offset()
    return copies.sources[0][start : start + tensor.numel()].tolist()


HOST_TABLE = torch.arange(12).view(3, 4)
COPIED: dict[str, dict[str, Any]] = {
    "flat keys": {},
    "starts": {"key_starts": [0, 4, 9], "request_starts": [10, 20, 30]},
    "everything flat": {
        "request_of_row": np.array([2, 0, 2]),
        "rows_per_request": np.array([1, 0, 2]),
        "context_lens": torch.tensor([9, 9, 9]),
        "key_starts": torch.tensor([5, 6, 7], dtype=torch.int32),
        "request_starts": [1, 2, 3],
        "compress_ratio": 4,
    },
    "table on the host": {"page_table": HOST_TABLE},
    "int32 table on the host": {"page_table": HOST_TABLE.int()},
    "table by row on the host": {"row_page_table": HOST_TABLE, "request_starts": [1, 2, 3]},
    "table on the device": {"page_table": HOST_TABLE.to("meta")},
    "table by row on the device": {"row_page_table": HOST_TABLE.to("meta")},
    "positions on the device": {
        "positions": torch.arange(3, device="meta"),
        "context_lens": [3, 3, 3],
        "page_table": HOST_TABLE.to("meta"),
        "request_starts": [1, 2, 3],
    },
    "positions on the device, table on the host": {
        "positions": torch.arange(3, device="meta"),
        "context_lens": [3, 3, 3],
        "page_table": HOST_TABLE,
    },
}


@pytest.mark.parametrize("options", COPIED.values(), ids=COPIED.keys())
def test_one_copy_goes_to_the_device(options: dict[str, Any]) -> None:
    """The meta device stands for it: what would read a value back cannot."""
    arguments = {"positions": [8, 3, 5], "rows_per_request": [1, 1, 1], **options}
    with HostToDevice() as copies:
        plan = plan_prefill(device="meta", **arguments)
    assert copies.operations == ["aten::_to_copy"]
    right = {n: options[n] for n in ("key_starts", "request_starts") if n in options}
    right["request_of_row"] = options.get("request_of_row", [0, 1, 2])
    if "positions" not in options:
        ratio = options.get("compress_ratio", 1)
        right["compressed_lens"] = [(n + 1) // ratio for n in (8, 3, 5)]
    for name, values in right.items():
        tensor = getattr(plan, name)
        assert tensor.storage_offset() * 4 % 16 == 0
        assert staged(copies, tensor) == [int(value) for value in values]
    for name in TENSORS:
        tensor = getattr(plan, name)
        assert tensor is None or (tensor.is_meta and tensor.dtype == torch.int32)


HOSTILE = [[2**40, 7, -1], [3, -(2**40), 2**31], [INT32_MAX, -7, 0]]
TAMED = [[INT32_MAX, 7, -1], [3, -1, INT32_MAX], [INT32_MAX, -1, 0]]


@pytest.mark.parametrize("option", ["page_table", "row_page_table"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_unused_slots_hold_anything(option: str, device: str) -> None:
    """What no int32 holds becomes a page of no pool, not one that wrapped around."""
    table = torch.tensor(HOSTILE)
    with HostToDevice() as copies:
        plan = plan_prefill([1, 2, 3], [1, 1, 1], device=device, **{option: table})
    assert plan.page_table is not None
    assert plan.page_table.dtype == torch.int32
    if device == "cpu":
        assert plan.page_table.tolist() == TAMED
    else:
        tables = copies.sources[0].unfold(0, 9, 4).view(-1, 3, 3).tolist()
        assert TAMED in tables


def overwrite(value: Any) -> None:
    if isinstance(value, list):
        value[:] = [7] * len(value)
    else:
        value[...] = 7


MUTABLE = [kind for name, kind in HOST_INTS.items() if name != "tuple"]


@pytest.mark.parametrize("kind", MUTABLE, ids=[name for name in HOST_INTS if name != "tuple"])
@pytest.mark.parametrize("table", [None, "page_table", "row_page_table"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_caller_may_change_its_arrays_at_once(
    kind: Callable, table: str | None, dtype: torch.dtype, device: str
) -> None:
    arguments = {
        "positions": kind([8, 3, 5]),
        "rows_per_request": kind([1, 2]),
        "request_of_row": kind([1, 0, 1]),
        "context_lens": kind([4, 9]),
        "request_starts": kind([100, 200]),
    }
    if table is None:
        arguments["key_starts"] = kind([0, 30])
    else:
        rows = 2 if table == "page_table" else 3
        arguments[table] = torch.arange(3 * rows, dtype=dtype).view(rows, 3)
    with HostToDevice() as copies:
        plan = plan_prefill(device=device, **arguments)
    values = contents(plan) if device == "cpu" else [s.tolist() for s in copies.sources]
    for value in arguments.values():
        overwrite(value)
    assert (contents(plan) if device == "cpu" else [s.tolist() for s in copies.sources]) == values
    assert plan.rows_per_request == [1, 2]
    assert plan.context_lens == [4, 9]


def test_the_device_is_that_of_the_table_or_of_the_positions() -> None:
    on_meta = torch.arange(2, device="meta")
    table = torch.zeros(1, 4, dtype=torch.int32)
    for options, device in (
        ({}, "cpu"),
        ({"page_table": table}, "cpu"),
        ({"page_table": table.to("meta")}, "meta"),
        ({"row_page_table": table.repeat(2, 1).to("meta")}, "meta"),
        ({"positions": torch.arange(2), "page_table": table.to("meta")}, "meta"),
        ({"device": "meta", "page_table": table}, "meta"),
        ({"device": torch.device("meta")}, "meta"),
        ({"positions": on_meta, "context_lens": [2]}, "meta"),
        ({"positions": on_meta, "context_lens": [2], "page_table": table.to("meta")}, "meta"),
        (
            {"positions": on_meta, "context_lens": [2], "page_table": table, "device": "meta"},
            "meta",
        ),
    ):
        plan = plan_prefill(**{"positions": [0, 1], "rows_per_request": [2], **options})
        assert plan.device == torch.device(device)
        assert plan.compressed_lens.device == plan.request_of_row.device == plan.device


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_plan_on_the_gpu_equals_that_on_the_cpu(where: str) -> None:
    """With the positions on the host, and on the GPU."""
    for positions, rows, options, (_, requests, contexts, _) in CHUNKS.values():
        options = {**options, "context_lens": contexts, "request_starts": list(range(len(rows)))}
        table = torch.arange(3 * len(rows)).view(len(rows), 3)
        for keys in ({"page_table": table}, {"row_page_table": table[requests]}, {}):
            given = torch.tensor(positions, dtype=torch.int64, device=where)
            plan = plan_prefill(given, rows, device="cuda", **options, **keys)
            assert plan.device == torch.device("cuda", torch.cuda.current_device())
            plan.check()
            assert contents(plan) == contents(plan_prefill(positions, rows, **options, **keys))


NEEDLES = (11, 17, 3)  # in contexts of 13, 21 and 9 positions: blocks end inside each
ROWS = ((0, 12), (1, 20), (2, 8), (1, 18), (1, -1), (2, 7), (0, 11))  # request, token position


@pytest.mark.parametrize("keys", ["key_starts", "page_table", "row_page_table"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["consecutive", "interleaved"])
@pytest.mark.parametrize("starts", [None, [1000, 0, 70000]], ids=["relative", "shifted"])
def test_each_row_finds_the_needle_of_its_own_request(
    keys: str, interleaved: bool, starts: list[int] | None
) -> None:
    rows = ROWS if interleaved else sorted(ROWS, key=lambda row: row[0])
    requests = [request for request, _ in rows]
    vectors = [torch.zeros(context, 128) for context in (13, 21, 9)]
    for vector, needle in zip(vectors, NEEDLES, strict=True):
        vector[needle] = 1.0
    options: dict[str, Any] = {"request_of_row": requests if interleaved else None}
    held: Any = flat_index_k(torch.cat(vectors), "fp16")
    if keys != "key_starts":
        table = torch.tensor([[90, 41, 2**40, -1], [3, 88, 17, -1], [99, 0, INT32_MAX, 2**31]])
        options[keys] = table if keys == "page_table" else table[requests]
        held = IndexKPool.empty(100, 8, "fp16")
        for vector, pages in zip(vectors, table, strict=True):
            n = torch.arange(len(vector))
            held.write(pages[n // 8] * 8 + n % 8, vector)
    plan = plan_prefill([n for _, n in rows], [2, 3, 2], request_starts=starts, **options)
    queries = IndexQ(torch.ones(len(rows), 1, 128, dtype=torch.float16))
    inputs = PrefillIndexerInputs(plan, queries, torch.ones(len(rows), 1), held)

    indexer = make_candidate_indexer("cpu", topk=1, topk_blocks=4)
    assert indexer.name == "mask"
    out = torch.full((len(rows), 1), 7, dtype=torch.int32)
    candidates = indexer.publish_prefill(inputs, out)
    for i, (request, position) in enumerate(rows):
        shift = 0 if starts is None else starts[request]
        assert out[i].item() == (NEEDLES[request] + shift if position >= 0 else -1)
        blocks = [block for block in candidates.blocks[i].tolist() if block != INT32_MAX]
        assert blocks == list(range(position // 8 + 1))


@st.composite
def mixed_rows(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Rows of each request, the request of each row in any order, tails that they allow."""
    counts = draw(st.lists(st.integers(0, 6), max_size=5))
    requests = draw(st.permutations([i for i, count in enumerate(counts) for _ in range(count)]))
    return counts, requests, [draw(st.integers(0, count)) for count in counts]


@settings(deadline=None)
@given(mixed=mixed_rows())
def test_a_tail_is_the_last_rows_of_each_request(
    mixed: tuple[list[int], list[int], list[int]],
) -> None:
    counts, requests, tails = mixed
    positions = [3 * row + 1 for row in range(len(requests))]
    table = torch.arange(2 * len(counts), dtype=torch.int32).view(len(counts), 2)
    starts = list(range(len(counts)))
    options = {"request_of_row": requests, "page_table": table, "request_starts": starts}
    plan = plan_prefill(positions, counts, **options)
    rows_of = [[r for r, q in enumerate(requests) if q == i] for i in range(len(counts))]
    assert plan.rows_by_request().tolist() == list(chain(*rows_of))

    kept = sorted(chain(*(own[len(own) - n :] for own, n in zip(rows_of, tails, strict=True))))
    rows = plan.tail_rows(tails)
    assert rows.dtype == torch.int64
    assert rows.tolist() == kept
    tail = plan.tail(tails)
    assert contents(tail) == {
        **contents(plan),
        "compressed_lens": [positions[r] + 1 for r in kept],
        "request_of_row": [requests[r] for r in kept],
        "rows_per_request": tails,
    }
    shorter = [n // 2 for n in tails]
    assert contents(tail.tail(shorter)) == contents(plan.tail(shorter))
    assert contents(plan.tail(counts)) == contents(plan)


@pytest.mark.parametrize(
    ("rows", "want", "got"),
    [
        ([0], r"\[n\] int32 or int64 on cpu", "a list"),
        (torch.tensor([0.0]), r"\[n\] int32 or int64 on cpu", r"\[1\] float32 on cpu"),
        (torch.tensor([[0]]), r"\[n\] int32 or int64 on cpu", r"\[1, 1\] int64 on cpu"),
        (torch.tensor([3]), "0 to 2", "3"),
        (torch.tensor([0, -1]), "0 to 2", "-1"),
    ],
)
def test_the_plan_of_some_rows_is_of_its_own(rows: object, want: str, got: str) -> None:
    plan = plan_prefill([3, 4, 5], [1, 2])
    with pytest.raises(ValueError, match=f"^rows: expected {want}, got {got}$"):
        plan.of_rows(rows, [1, 0])
    some = plan.of_rows(torch.tensor([2, 0], dtype=torch.int32), (1, 1))
    assert some.compressed_lens.tolist() == [6, 4]
    assert some.request_of_row.tolist() == [1, 0]


def test_a_tail_shares_the_keys_and_takes_any_sequence() -> None:
    table = torch.zeros(2, 3, dtype=torch.int32)
    paged = plan_prefill([4, 5, 6], [2, 1], page_table=table, request_starts=[5, 6])
    flat = plan_prefill([4, 5, 6], [2, 1])
    for plan in (paged, flat):
        for tails in ([1, 1], (1, 1)):
            tail = plan.tail(tails)
            assert tail.rows_per_request == [1, 1]
            assert tail.compressed_lens.tolist() == [6, 7]
            assert tail.page_table is plan.page_table
            assert tail.key_starts is plan.key_starts
            assert tail.request_starts is plan.request_starts


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


A_LIST = "tail_lens: expected a list of ints on the host"
BAD_TAILS = {
    "too few": ([1], "tail_lens: expected 2 values, one a request, got 1 values"),
    "too many": ([1, 1, 0], "tail_lens: expected 2 values, one a request, got 3 values"),
    "none": ([], "tail_lens: expected 2 values, one a request, got 0 values"),
    "too long": ([2, 2], "tail_lens[1]: expected an int of 0 to 1, got 2"),
    "negative": ([-1, 1], "tail_lens[0]: expected an int of 0 to 2, got -1"),
    "bool": ([True, 1], "tail_lens[0]: expected an int, got True"),
    "float": ([1, 1.0], "tail_lens[1]: expected an int, got 1.0"),
    "floats": (np.array([1.0, 1.0]), "tail_lens[0]: expected an int, got 1.0"),
    "bools": (torch.tensor([True, False]), "tail_lens[0]: expected an int, got True"),
    "2-D": (ints(1, 1)[None], f"{A_LIST}, got [1, 2] int32 on cpu"),
    "2-D array": (np.ones((1, 2), np.int64), f"{A_LIST}, got [1, 2] int64, a numpy array"),
    "not there": (ints(1, 1).to("meta"), f"{A_LIST}, got [2] int32 on meta"),
    "an iterator": (iter([1, 1]), f"{A_LIST}, got a list_iterator"),
}


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, np.int16, list])
def test_tail_lengths_of_any_kind(kind: Any) -> None:
    plan, tails = plan_prefill([4, 5, 6, 7], [3, 1]), [2, 1]
    given = np.array(tails, np.int16) if kind is np.int16 else kind(tails)
    assert plan.tail_rows(given).tolist() == [1, 2, 3]
    tail = plan.tail(given)
    assert tail.rows_per_request == tails
    assert all(type(n) is int for n in tail.rows_per_request)
    assert plan.of_rows(torch.tensor([1, 2, 3]), given).rows_per_request == tails


@pytest.mark.parametrize(("tails", "message"), BAD_TAILS.values(), ids=BAD_TAILS.keys())
@pytest.mark.parametrize("method", ["tail", "tail_rows"])
def test_a_tail_refuses(tails: list, message: str, method: str) -> None:
    plan = plan_prefill([4, 5, 6], [2, 1])
    with refused(message):
        getattr(plan, method)(tails)


GOOD_PLAN: dict[str, Any] = {
    "compressed_lens": ints(4, 5, 0),
    "request_of_row": ints(0, 0, 1),
    "rows_per_request": [2, 1],
    "context_lens": [5, 3],
    "key_starts": ints(0, 5),
    "request_starts": ints(7, 8),
}


@pytest.mark.parametrize("kind", [list, tuple])
def test_host_lengths_are_the_plans_own(kind: Callable[..., Any]) -> None:
    counts, contexts = [np.int64(2), 1], [np.uint8(5), 3]
    plan = PrefillPlan(
        **GOOD_PLAN | {"rows_per_request": kind(counts), "context_lens": kind(contexts)}
    )
    counts[0] = contexts[0] = 0
    assert plan.rows_per_request == [2, 1]
    assert plan.context_lens == [5, 3]
    assert {type(n) for n in (*plan.rows_per_request, *plan.context_lens)} == {int}
    tails = [np.int32(1), 1]
    tail = plan.tail(tails)
    tails[0] = 2
    assert tail.rows_per_request == [1, 1]


def test_a_ratio_of_numpy() -> None:
    plan = plan_prefill([7, 8], [2], compress_ratio=np.int8(4))
    assert plan.compressed_lens.tolist() == [2, 2]


A_TABLE = torch.zeros(2, 4, dtype=torch.int32)
OF_REQUEST = "0 to the context_lens of its request"
BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "request beyond": (
        {"request_of_row": ints(0, 0, 2)},
        "request_of_row[2]: expected 0 to 1, got 2",
    ),
    "request before": (
        {"request_of_row": ints(-1, 0, 1)},
        "request_of_row[0]: expected 0 to 1, got -1",
    ),
    "other counts": (
        {"request_of_row": ints(0, 1, 1)},
        "rows_per_request[0]: expected 1, the count in request_of_row, got 2",
    ),
    "seen beyond the context": (
        {"compressed_lens": ints(5, 6, 3)},
        f"compressed_lens[1]: expected {OF_REQUEST}, got 6",
    ),
    "beyond its own context": (
        {"compressed_lens": ints(5, 5, 4)},
        f"compressed_lens[2]: expected {OF_REQUEST}, got 4",
    ),
    "seen less than nothing": (
        {"compressed_lens": ints(5, 5, -1)},
        f"compressed_lens[2]: expected {OF_REQUEST}, got -1",
    ),
}
BAD_PLANS: dict[str, tuple[dict[str, Any], str]] = {
    **BAD_VALUES,
    "int64 lens": (
        {"compressed_lens": ints(4, 5, 0, dtype=torch.int64)},
        "compressed_lens: expected [rows] int32, got [3] int64 on cpu",
    ),
    "lens in two dimensions": (
        {"compressed_lens": ints(4, 5, 0)[None]},
        "compressed_lens: expected [rows] int32, got [1, 3] int32 on cpu",
    ),
    "strided lens": (
        {"compressed_lens": ints(4, 9, 5, 9, 0, 9)[::2]},
        "compressed_lens: expected a contiguous last dimension, got strides [2]",
    ),
    "lens as a list": (
        {"compressed_lens": [4, 5, 0]},
        "compressed_lens: expected [rows] int32, got a list",
    ),
    "too few requests of rows": (
        {"request_of_row": ints(0, 0)},
        "request_of_row: expected [3] int32 on cpu, got [2] int32 on cpu",
    ),
    "int64 requests of rows": (
        {"request_of_row": ints(0, 0, 1, dtype=torch.int64)},
        "request_of_row: expected [3] int32 on cpu, got [3] int64 on cpu",
    ),
    "requests of rows elsewhere": (
        {"request_of_row": ints(0, 0, 1).to("meta")},
        "request_of_row: expected [3] int32 on cpu, got [3] int32 on meta",
    ),
    "rows as a tensor": (
        {"rows_per_request": ints(2, 1)},
        "rows_per_request: expected a list of ints on the host, got [2] int32 on cpu",
    ),
    "contexts as a range": (
        {"context_lens": range(3, 5)},
        "context_lens: expected a list of ints on the host, got a range",
    ),
    "a negative count": (
        {"rows_per_request": [4, -1]},
        "rows_per_request[1]: expected an int of 0 to 2147483647, got -1",
    ),
    "a bool for a count": (
        {"rows_per_request": [2, True]},
        "rows_per_request[1]: expected an int, got True",
    ),
    "a bool of numpy for a count": (
        {"rows_per_request": [2, np.True_]},
        "rows_per_request[1]: expected an int, got a numpy bool",
    ),
    "a context beyond int32": (
        {"context_lens": [2**31, 3]},
        "context_lens[0]: expected an int of 0 to 2147483647, got 2147483648",
    ),
    "more rows than lens": (
        {"rows_per_request": [2, 2]},
        "rows_per_request: expected a sum of 3 rows, got a sum of 4",
    ),
    "too few contexts": (
        {"context_lens": [5]},
        "context_lens: expected 2 values, one a request, got 1 values",
    ),
    "table and starts": (
        {"page_table": A_TABLE},
        "page_table, key_starts: expected exactly one of the two, got both",
    ),
    "neither table nor starts": (
        {"key_starts": None},
        "page_table, key_starts: expected exactly one of the two, got neither",
    ),
    "a table by row": (
        {"key_starts": None, "page_table": A_TABLE[[0, 0, 1]]},
        "page_table: expected [2, max_pages] int32 on cpu, got [3, 4] int32 on cpu",
    ),
    "an int64 table": (
        {"key_starts": None, "page_table": A_TABLE.long()},
        "page_table: expected [2, max_pages] int32 on cpu, got [2, 4] int64 on cpu",
    ),
    "a transposed table": (
        {"key_starts": None, "page_table": torch.zeros(4, 2, dtype=torch.int32).t()},
        "page_table: expected a contiguous last dimension, got strides [1, 2]",
    ),
    "a table elsewhere": (
        {"key_starts": None, "page_table": A_TABLE.to("meta")},
        "page_table: expected [2, max_pages] int32 on cpu, got [2, 4] int32 on meta",
    ),
    "starts by row": (
        {"key_starts": ints(0, 0, 5)},
        "key_starts: expected [2] int32 on cpu, got [3] int32 on cpu",
    ),
    "int64 request starts": (
        {"request_starts": ints(7, 8, dtype=torch.int64)},
        "request_starts: expected [2] int32 on cpu, got [2] int64 on cpu",
    ),
}


def test_a_plan_of_device_tensors_is_taken_as_it_is() -> None:
    plan = PrefillPlan(**GOOD_PLAN)
    tensors = {n: value for n, value in GOOD_PLAN.items() if isinstance(value, torch.Tensor)}
    assert all(getattr(plan, name) is value for name, value in tensors.items())
    assert plan.page_table is None
    assert (plan.num_rows, plan.num_requests) == (3, 2)
    wide = torch.zeros(2, 9, dtype=torch.int32)[:, 3:7]
    paged = PrefillPlan(**(GOOD_PLAN | {"key_starts": None, "page_table": wide}))
    assert paged.page_table is wide


@pytest.mark.parametrize(("changes", "message"), BAD_PLANS.values(), ids=BAD_PLANS.keys())
def test_a_plan_refuses(changes: dict[str, Any], message: str) -> None:
    with refused(message):
        PrefillPlan(**(GOOD_PLAN | changes))


@pytest.mark.parametrize(("changes", "message"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_values_are_checked_on_request(changes: dict[str, Any], message: str) -> None:
    """As on a GPU, where nothing looks at them before."""
    own = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in GOOD_PLAN.items()}
    plan = PrefillPlan(**own)
    plan.check()
    for name, value in changes.items():
        getattr(plan, name).copy_(value)
    with refused(message):
        plan.check()


@pytest.mark.parametrize("changes", [{}, *(c for c, _ in BAD_VALUES.values())])
def test_no_value_is_read_off_a_device(changes: dict[str, Any]) -> None:
    fields = GOOD_PLAN | changes
    on_meta = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in fields.items()}
    plan = PrefillPlan(**on_meta)
    assert plan.device == torch.device("meta")
    tail = plan.tail([1, 1])
    assert tail.compressed_lens.shape == (2,)


@pytest.mark.parametrize("field", GOOD_PLAN)
def test_a_plan_is_frozen(field: str) -> None:
    plan = PrefillPlan(**GOOD_PLAN)
    with pytest.raises(AttributeError, match="immutable"):
        setattr(plan, field, getattr(plan, field))


GOOD_CALL: dict[str, Any] = {"positions": [4, 9, 2], "rows_per_request": [2, 1]}
TABLE = torch.zeros(2, 4, dtype=torch.int64)
ON_META = torch.zeros(3, dtype=torch.int64, device="meta")
A_SEQUENCE = "a 1-D sequence of integers"
BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "ratio 0": ({"compress_ratio": 0}, "compress_ratio: expected an int of 1 to 2147483647, got 0"),
    "ratio 2^80": (
        {"compress_ratio": 2**80},
        f"compress_ratio: expected an int of 1 to 2147483647, got {2**80}",
    ),
    "ratio True": ({"compress_ratio": True}, "compress_ratio: expected an int, got True"),
    "ratio 2.0": ({"compress_ratio": 2.0}, "compress_ratio: expected an int, got 2.0"),
    "two tables": (
        {"page_table": TABLE, "row_page_table": TABLE},
        "page_table, row_page_table, key_starts: expected at most one of the three, got 2 of them",
    ),
    "table and starts": (
        {"page_table": TABLE, "row_page_table": TABLE, "key_starts": [0, 9]},
        "page_table, row_page_table, key_starts: expected at most one of the three, got 3 of them",
    ),
    "too few positions": ({"positions": [4, 9]}, "positions: expected 3 values, one a row, got 2"),
    "too many positions": (
        {"positions": [4, 9, 2, 5]},
        "positions: expected 3 values, one a row, got 4",
    ),
    "position -2": ({"positions": [4, -2, 2]}, "positions[1]: expected -1 to 2147483646, got -2"),
    "position 2^31": (
        {"positions": [4, 9, 2**31]},
        "positions[2]: expected -1 to 2147483646, got 2147483648",
    ),
    "position 2^31 - 1": (
        {"positions": [4, 9, 2**31 - 1]},
        "positions[2]: expected -1 to 2147483646, got 2147483647",
    ),
    "position 2^31 of pairs": (
        {"positions": [4, 9, 2**31], "compress_ratio": 2},
        "positions[2]: expected -1 to 2147483647, got 2147483648",
    ),
    "position 2^40": (
        {"positions": torch.tensor([4, 2**40, 2])},
        "positions[1]: expected -1 to 2147483646, got 1099511627776",
    ),
    "float positions": (
        {"positions": [4.0, 9.0, 2.0]},
        f"positions: expected {A_SEQUENCE}, got shape [3] float64",
    ),
    "bool positions": (
        {"positions": np.array([True, True, True])},
        f"positions: expected {A_SEQUENCE}, got shape [3] bool",
    ),
    "positions in two dimensions": (
        {"positions": torch.tensor([[4, 9, 2]])},
        f"positions: expected {A_SEQUENCE}, got shape [1, 3] int64",
    ),
    "one position": ({"positions": 4}, f"positions: expected {A_SEQUENCE}, got 4"),
    "no positions": ({"positions": None}, f"positions: expected {A_SEQUENCE}, got None"),
    "negative rows": (
        {"rows_per_request": [4, -1]},
        "rows_per_request[1]: expected 0 to 2147483647, got -1",
    ),
    "rows in two dimensions": (
        {"rows_per_request": [[2, 1]]},
        f"rows_per_request: expected {A_SEQUENCE}, got shape [1, 2] int64",
    ),
    "rows elsewhere": (
        {"rows_per_request": ON_META},
        "rows_per_request: expected integers on the host, got [3] int64 on meta",
    ),
    "requests of fewer rows": (
        {"request_of_row": [0, 0]},
        "request_of_row: expected 1 rows of request 1, as in rows_per_request, got 0",
    ),
    "requests of other rows": (
        {"request_of_row": [0, 1, 1]},
        "request_of_row: expected 2 rows of request 0, as in rows_per_request, got 1",
    ),
    "a negative request": (
        {"request_of_row": [0, -1, 1]},
        "request_of_row[1]: expected 0 to 2147483647, got -1",
    ),
    "too few contexts": (
        {"context_lens": [10]},
        "context_lens: expected 2 values, one a request, got 1",
    ),
    "a context shorter than seen": (
        {"context_lens": [9, 64]},
        "context_lens[0]: expected at least 10, what its rows see, got 9",
    ),
    "a negative context": (
        {"context_lens": [10, -1]},
        "context_lens[1]: expected 0 to 2147483647, got -1",
    ),
    "a negative key start": (
        {"key_starts": [0, -1]},
        "key_starts[1]: expected 0 to 2147483647, got -1",
    ),
    "a key start a row": (
        {"key_starts": [0, 0, 10]},
        "key_starts: expected [2] int32 on cpu, got [3] int32 on cpu",
    ),
    "a key start beyond int32": (
        {"key_starts": [0, 2**31]},
        "key_starts[1]: expected 0 to 2147483647, got 2147483648",
    ),
    "a negative request start": (
        {"request_starts": [-1, 0]},
        "request_starts[0]: expected 0 to 2147483647, got -1",
    ),
    "a request that ends beyond int32": (
        {"request_starts": [2**31 - 11, 2**31 - 2]},
        "request_starts[1]: expected at most 2147483645, for 3 positions, got 2147483646",
    ),
    "packed beyond int32": (
        {"rows_per_request": [1, 1, 1], "context_lens": [2**31 - 1, 10, 3]},
        "context_lens: expected at most 2147483647 before the last request, as they are packed, "
        "got 2147483657",
    ),
    "too few request starts": (
        {"request_starts": [5]},
        "request_starts: expected [2] int32 on cpu, got [1] int32 on cpu",
    ),
    "a table a row": (
        {"page_table": TABLE[[0, 0, 1]]},
        "page_table: expected [2, max_pages] int32 or int64, got [3, 4] int64 on cpu",
    ),
    "a row table a request": (
        {"row_page_table": TABLE},
        "row_page_table: expected [3, max_pages] int32 or int64, got [2, 4] int64 on cpu",
    ),
    "a float table": (
        {"page_table": TABLE.float()},
        "page_table: expected [2, max_pages] int32 or int64, got [2, 4] float32 on cpu",
    ),
    "a table of numpy": (
        {"page_table": TABLE.numpy()},
        "page_table: expected [2, max_pages] int32 or int64, got [2, 4] int64, a numpy array",
    ),
    "a transposed table": (
        {"page_table": torch.zeros(4, 2, dtype=torch.int32).t()},
        "page_table: expected a contiguous last dimension, got strides [1, 2]",
    ),
    "a table on another device": (
        {"page_table": TABLE.to("meta"), "device": "cpu"},
        "page_table: expected a table on cpu or the host, got [2, 4] int64 on meta",
    ),
    "a row table on another device": (
        {"row_page_table": TABLE[[0, 0, 1]].to("meta"), "device": "cpu"},
        "row_page_table: expected a table on cpu or the host, got [3, 4] int64 on meta",
    ),
    "device positions without contexts": (
        {"positions": ON_META},
        "context_lens: expected a list, as positions are on a GPU, got None",
    ),
    "positions on another device": (
        {"positions": ON_META, "context_lens": [9, 9], "device": "cpu"},
        "positions: expected [3] int32 or int64 on cpu, got [3] int64 on meta",
    ),
    "too few device positions": (
        {"positions": ON_META[:2], "context_lens": [9, 9]},
        "positions: expected [3] int32 or int64 on meta, got [2] int64 on meta",
    ),
    "float device positions": (
        {"positions": ON_META.float(), "context_lens": [9, 9]},
        "positions: expected [3] int32 or int64 on meta, got [3] float32 on meta",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_plan_prefill_refuses(changes: dict[str, Any], message: str) -> None:
    with refused(message):
        plan_prefill(**(GOOD_CALL | changes))


NO_INTEGERS = {
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "float that requires a gradient": torch.ones(3, requires_grad=True),
    "ragged": [[4], [9, 2]],
    "text": "492",
    "too large for any integer": [4, 9, 2**70],
    "times": np.array([4, 9, 2], "timedelta64[s]"),
    "a set": {4, 9, 2},
}


@pytest.mark.parametrize("positions", NO_INTEGERS.values(), ids=NO_INTEGERS.keys())
def test_what_is_no_integers_is_refused_by_name(positions: Any) -> None:
    with pytest.raises(ValueError, match=r"^positions: expected a 1-D sequence of integers, got "):
        plan_prefill(positions, [2, 1])


def test_a_position_whose_length_no_int32_holds_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^positions\[1\]: expected .*, got 2147483647$"):
        plan_prefill([4, INT32_MAX, 2], [2, 1])


def test_packed_starts_that_no_int32_holds_are_refused() -> None:
    """They would wrap around to other columns."""
    plan = plan_prefill([], [0, 0], context_lens=[INT32_MAX, 5])
    assert plan.key_starts is not None
    assert plan.key_starts.tolist() == [0, INT32_MAX]
    with pytest.raises(ValueError, match=r"^(context_lens|key_starts)\b.*: expected "):
        plan_prefill([], [0, 0, 0], context_lens=[INT32_MAX, 5, 5])


def test_shifted_positions_that_no_int32_holds_are_refused() -> None:
    """They would come out negative."""
    plan = plan_prefill([4, 9], [1, 1], request_starts=[INT32_MAX - 4, 0])
    assert plan.request_starts is not None
    assert plan.request_starts.tolist() == [INT32_MAX - 4, 0]
    with pytest.raises(ValueError, match=r"^request_starts\b.*: expected "):
        plan_prefill([5, 9], [1, 1], request_starts=[INT32_MAX - 4, 0])


def test_a_wild_request_is_refused_in_few_words() -> None:
    with pytest.raises(ValueError, match=r"^request_of_row\b.*: expected ") as raised:
        plan_prefill([4, 9, 2], [2, 1], request_of_row=[0, 0, 1_000_000])
    assert len(str(raised.value)) < 500


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^device: expected .*, got 'gpu'$"):
        plan_prefill(**GOOD_CALL, device="gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_missing_gpu_is_refused_by_name(device: str) -> None:
    with pytest.raises(ValueError, match=r"^device: expected .*, got '?cuda"):
        plan_prefill(**GOOD_CALL, device=device)


# kv_page_size, index_page_size, compress_ratio, KV pages, index pages
EXPANDED: dict[str, tuple[int, int, int, list[list[int]], list[list[int]]]] = {
    "same pages": (64, 64, 1, [[5, 0, -1], [7, 7, 2]], [[5, 0, -1], [7, 7, 2]]),
    "two a page": (128, 64, 1, [[5, 0, -1]], [[10, 11, 0, 1, -1, -1]]),
    "ten a page": (640, 64, 1, [[3]], [list(range(30, 40))]),
    "four tokens a position": (256, 64, 4, [[9, 1]], [[9, 1]]),
    "four tokens a position, small pages": (256, 8, 4, [[2]], [list(range(16, 24))]),
    "128 tokens a position": (2048, 16, 128, [[6, -1]], [[6, -1]]),
    "the largest id": (64, 64, 1, [[INT32_MAX]], [[INT32_MAX]]),
    "too large an id": (16, 8, 1, [[INT32_MAX, 1]], [[-1, -1, 2, 3]]),
    "the largest index page": (16, 8, 1, [[2**30 - 1, 2**30]], [[2**31 - 2, 2**31 - 1, -1, -1]]),
    "some pages too large": (24, 8, 1, [[715827882]], [[2**31 - 2, 2**31 - 1, -1]]),
    "negative ids": (16, 8, 1, [[-(2**31), -2, -1]], [[-1] * 6]),
    "no pages": (16, 8, 1, [[], []], [[], []]),
}


@pytest.mark.parametrize(
    ("kv_size", "index_size", "ratio", "table", "right"), EXPANDED.values(), ids=EXPANDED.keys()
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_expanded_pages(
    kv_size: int, index_size: int, ratio: int, table: list, right: list, dtype: torch.dtype
) -> None:
    sizes = {"kv_page_size": kv_size, "index_page_size": index_size, "compress_ratio": ratio}
    given = torch.tensor(table, dtype=dtype)
    strided = torch.cat((given, torch.full_like(given, 9)), 1)[:, : given.shape[1]]
    for pages in (given, strided):
        expanded = expand_index_page_table(pages, **sizes)
        assert expanded.dtype == torch.int32
        assert expanded.tolist() == right
    assert given.tolist() == table
    on_meta = expand_index_page_table(given.to("meta"), **sizes)
    assert (on_meta.is_meta, on_meta.shape) == (True, (len(table), len(right[0])))


@pytest.mark.parametrize("m", [1, 2])
def test_wild_int64_pages_become_no_page(m: int) -> None:
    table = torch.tensor([[2**40, 2**31, -(2**40), 3]])
    expanded = expand_index_page_table(table, kv_page_size=8 * m, index_page_size=8)
    assert expanded.tolist() == [[-1] * 3 * m + [3 * m + i for i in range(m)]]


@pytest.mark.parametrize(
    ("kv_size", "index_size", "ratio"), [(64, 64, 1), (128, 16, 1), (640, 64, 1), (256, 8, 4)]
)
def test_a_pool_filled_by_kv_pages_is_read_through_the_expanded_table(
    kv_size: int, index_size: int, ratio: int
) -> None:
    """A KV page's positions are consecutive in the pool, whatever the pool's own page size."""
    held = kv_size // ratio  # positions of a KV page
    kv_table = torch.tensor([[2, 0, -1], [4, 3, 1]])
    lens = [2 * held - 3, 3 * held]
    generator = torch.Generator().manual_seed(6)
    keys = [torch.randn(n, 128, generator=generator) for n in lens]
    pool = IndexKPool.empty(5 * held // index_size, index_size, "bf16")
    for vectors, pages in zip(keys, kv_table, strict=True):
        n = torch.arange(len(vectors))
        pool.write(pages[n // held] * held + n % held, vectors)
    table = expand_index_page_table(
        kv_table, kv_page_size=kv_size, index_page_size=index_size, compress_ratio=ratio
    )
    tokens = [n * ratio - 1 for n in lens]
    paged = plan_prefill(tokens, [1, 1], compress_ratio=ratio, page_table=table)
    flat = plan_prefill(tokens, [1, 1], compress_ratio=ratio)
    assert paged.context_lens == flat.context_lens == lens
    queries = IndexQ(torch.randn(2, 2, 128, generator=generator).bfloat16())
    weights = torch.randn(2, 2, generator=generator)
    through_table = PrefillIndexerInputs(paged, queries, weights, pool).dense_scores()
    flat_keys = flat_index_k(torch.cat(keys), "bf16")
    right = PrefillIndexerInputs(flat, queries, weights, flat_keys).dense_scores()
    assert torch.equal(through_table, right)
    assert len(right.unique()) > max(lens) // 2


GOOD_EXPANSION: dict[str, Any] = {"page_table": TABLE, "kv_page_size": 64, "index_page_size": 16}
BAD_EXPANSIONS: dict[str, tuple[dict[str, Any], str]] = {
    "one dimension": (
        {"page_table": TABLE[0]},
        "page_table: expected [requests, max_pages] int32 or int64, got [4] int64 on cpu",
    ),
    "dtype": (
        {"page_table": TABLE.float()},
        "page_table: expected [requests, max_pages] int32 or int64, got [2, 4] float32 on cpu",
    ),
    "no tensor": (
        {"page_table": [[1]]},
        "page_table: expected [requests, max_pages] int32 or int64, got a list",
    ),
    "index page 0": (
        {"index_page_size": 0},
        "index_page_size: expected an int of 8 to 2147483647, got 0",
    ),
    "index page 4": (
        {"index_page_size": 4},
        "index_page_size: expected an int of 8 to 2147483647, got 4",
    ),
    "index page 12": (
        {"kv_page_size": 24, "index_page_size": 12},
        "index_page_size: expected a multiple of 8, got 12",
    ),
    "kv page 2^80": (
        {"kv_page_size": 2**80},
        f"kv_page_size: expected an int of 1 to 2147483647, got {2**80}",
    ),
    "index page True": ({"index_page_size": True}, "index_page_size: expected an int, got True"),
    "kv page 0": ({"kv_page_size": 0}, "kv_page_size: expected an int of 1 to 2147483647, got 0"),
    "kv page 64.0": ({"kv_page_size": 64.0}, "kv_page_size: expected an int, got 64.0"),
    "kv page of half an index page": (
        {"kv_page_size": 8},
        "kv_page_size: expected a multiple of index_page_size * compress_ratio = 16, got 8",
    ),
    "kv page in tokens": (
        {"compress_ratio": 8},
        "kv_page_size: expected a multiple of index_page_size * compress_ratio = 128, got 64",
    ),
    "ratio 0": ({"compress_ratio": 0}, "compress_ratio: expected an int of 1 to 2147483647, got 0"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_EXPANSIONS.values(), ids=BAD_EXPANSIONS.keys())
def test_expand_index_page_table_refuses(changes: dict[str, Any], message: str) -> None:
    with refused(message):
        expand_index_page_table(**(GOOD_EXPANSION | changes))


def test_a_padding_row_does_not_give_the_pages_of_its_request() -> None:
    table = torch.tensor([[-1, 9], [4, 5], [7, 7], [-1, -1]])
    plan = plan_prefill([-1, 70, -1, -1], [2, 2], row_page_table=table)
    assert plan.page_table is not None
    assert plan.page_table.tolist() == [[4, 5], [7, 7]]


@pytest.mark.parametrize("start", [-3, INT32_MAX - 1])
def test_starts_that_positions_do_not_fit_behind_are_refused(start: int) -> None:
    plan = plan_prefill([4, 9], [1, 1])
    starts = torch.tensor([0, start], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"^request_starts\[1\]: expected 0 to .*, got {start}$"):
        msgspec.structs.replace(plan, request_starts=starts)


def test_a_huge_count_is_refused_before_anything_is_made_of_it() -> None:
    with pytest.raises(
        ValueError, match=f"^positions: expected {INT32_MAX} values, one a row, got 2$"
    ):
        plan_prefill([5, 6], [INT32_MAX])


def paged_plan(**changes: Any) -> PrefillPlan:
    table = ints(5, -1, 2**31 - 1, 9, 7, 3).view(2, 3)
    options: dict[str, Any] = {"page_table": table, "request_of_row": [1, 0, 0]}
    return plan_prefill([0, 2, 1], [2, 1], **options | changes)


def test_pool_slots() -> None:
    """Rows in any order; -1 where a position is unused, or has no page or no slot."""
    positions = ints(0, 7, 8, 23, -1, 0, 7, 8, 16, 24, 5, -(2**31), 2**31 - 1, 1, -1).view(3, 5)
    slots = pool_slots(positions, paged_plan(), 8)
    assert slots.dtype == torch.int32
    assert slots.tolist() == [
        [72, 79, 56, 31, -1],
        [40, 47, -1, -1, -1],
        [45, -1, -1, 41, -1],
    ]
    odd = pool_slots(positions, paged_plan(), np.int8(3))
    assert odd[0].tolist() == [27, 10, 11, -1, -1]
    bare = paged_plan(page_table=torch.zeros(2, 0, dtype=torch.int32))
    assert (pool_slots(positions, bare, 8) == -1).all()


@pytest.mark.parametrize(
    ("positions", "plan", "page_size", "message"),
    [
        (ints(1, 2, 3), paged_plan(), 8, "positions: expected [3, k] int32 on cpu, got [3] int32"),
        (A_TABLE, paged_plan(), 8, "positions: expected [3, k] int32 on cpu, got [2, 4] int32"),
        (A_TABLE[:, :3].t().contiguous(), paged_plan(), 0, "page_size: expected an int of 1 to "),
        (A_TABLE, None, 8, "plan: expected a PrefillPlan, got None"),
        (
            A_TABLE,
            paged_plan(page_table=None),
            8,
            "plan: expected a page table and no request_starts, got no page table",
        ),
        (
            A_TABLE,
            paged_plan(request_starts=[0, 3]),
            8,
            "plan: expected a page table and no request_starts, got request_starts",
        ),
    ],
)
def test_pool_slots_refuses(positions: Any, plan: Any, page_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        pool_slots(positions, plan, page_size)
