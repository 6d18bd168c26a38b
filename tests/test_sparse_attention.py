# SPDX-License-Identifier: Apache-2.0
"""Sparse attention and its gather against the float64 reference."""

import itertools
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from budgets import named_budget
from gpu_support import no_synchronization

from sparse_indexer import (
    BackendUnavailable,
    JitError,
    KVPool,
    attention,
    quantize_fp8,
    sparse_attention,
)
from sparse_indexer.ops import kv_gather as kernel
from sparse_indexer.testing import sparse_attention_reference
from sparse_indexer.torch_ops.kv_gather import kv_gather
from sparse_indexer.torch_ops.sparse_softmax import sparse_softmax

Pool = torch.Tensor | KVPool

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SLOTS = 300


class Case(NamedTuple):
    rows: int = 5
    heads: int = 9
    k: int = 37
    dim: int = 192  # of the fp8 pool: 128 and 64
    value_dim: int = 128
    slots: int = SLOTS
    unused: float = 0.4  # of the entries, anywhere in a row


CASES = {
    "some": Case(),
    "one of everything": Case(rows=1, heads=1, k=1),
    "all of a large row": Case(rows=2, heads=64, k=640, dim=576, value_dim=512, unused=0),
    "a large row": Case(rows=3, heads=64, k=640, dim=576, value_dim=512),
    "one head": Case(heads=1, k=640, unused=0.9),
    "one slot": Case(heads=64, k=1, unused=0.5),
    "all values": Case(value_dim=192),
    "one value": Case(value_dim=1),
    "no RoPE": Case(dim=256, value_dim=256),
    "many rows": Case(rows=60, k=8),
}


def uniform(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_pool(fmt: torch.dtype | str, slots: int, dim: int, seed: int = 0) -> Pool:
    """Rows of sizes a thousandfold apart would be all softmax; these are threefold apart."""
    rows = normal(slots, dim, seed=seed) * (0.5 + uniform(slots, 1, seed=seed + 1))
    if isinstance(fmt, torch.dtype):
        return rows.to(fmt)
    fp8_dim = dim // 128 * 128
    values, scales = quantize_fp8(rows[:, :fp8_dim].unflatten(1, (-1, 128)))
    return KVPool(values.flatten(1), scales, rows[:, fp8_dim:].bfloat16())


def make_positions(case: Case, seed: int = 2) -> torch.Tensor:
    positions = (uniform(case.rows, case.k, seed=seed) * case.slots).to(torch.int32)
    negative = (uniform(case.rows, case.k, seed=seed + 1) * -(2**31)).to(torch.int32) - 1
    unused = uniform(case.rows, case.k, seed=seed + 2) < case.unused
    return torch.where(unused, torch.where(positions % 2 == 0, negative, -1), positions)


def poison(pool: Pool, positions: torch.Tensor) -> None:
    """NaN and infinities in every slot that no row names."""
    unnamed = torch.ones(SLOTS, dtype=torch.bool, device=positions.device)
    unnamed[positions[positions >= 0].long()] = False
    assert unnamed.any()
    if isinstance(pool, torch.Tensor):
        pool[unnamed] = torch.nan
        pool[unnamed & (torch.arange(SLOTS, device=pool.device) % 2 == 0)] = torch.inf
        return
    pool.values.view(torch.uint8)[unnamed] = 0x7F
    pool.scales[unnamed] = torch.inf
    pool.rope[unnamed] = torch.nan


def to(pool: Pool, device: str) -> Pool:
    if isinstance(pool, torch.Tensor):
        return pool.to(device)
    return KVPool(*(part.to(device) for part in (pool.values, pool.scales, pool.rope)))


UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}  # a rounding


def assert_near(out: torch.Tensor, want: torch.Tensor, summands: int) -> None:
    """Within one rounding to out's dtype, and a random walk of float32's, one a summand."""
    walk = 2.0**-23 * summands**0.5 * want.abs().amax()
    bound = UNIT[out.dtype] * want.abs() + walk + 2.0**-25
    error = (out.cpu().double() - want).abs()
    assert (error <= bound).all(), (error / bound).max()


def assert_near_in_halves(
    out: torch.Tensor,
    q: torch.Tensor,
    pool: Pool,
    positions: torch.Tensor,
    operands: torch.dtype,
    **options: Any,
) -> None:
    """Within what it takes to round KV rows, queries and probabilities to `operands`.

    Each rounding moves what it rounds by at most `unit` of it, independently of the others. To
    first order the output moves by p[j] (kv[j] - out) for each unit that a logit moves, by kv[j]
    for each of p[j], by p[j] for each of kv[j]; a logit moves by scale * q[d] * kv[j, d] for a unit
    of q[d] or of kv[j, d]. The bound is six times the root of the sum of squares.
    """
    sink, scale = options.get("sink"), options["scale"]
    want = sparse_attention_reference(q, pool, positions, **options)
    unit, smallest = UNIT[operands], 2.0**-25 if operands == torch.float16 else 0.0
    of_q = unit if q.dtype != operands else 0.0
    of_kv = 0.0 if isinstance(pool, torch.Tensor) and pool.dtype == operands else unit
    float32 = 2.0**-23 * (q.shape[2] + positions.shape[1]) ** 0.5
    for row, slots in enumerate(positions.tolist()):
        kv = rows_of(pool, [slot for slot in slots if slot >= 0])
        if not len(kv):
            assert not out[row].any()
            continue
        queries = q[row].cpu().double()
        logits = queries @ kv.t() * scale
        if sink is not None:
            logits = torch.cat((logits, sink.cpu().double()[:, None]), 1)
        p = logits.softmax(1)[:, : len(kv)]
        moves = scale**2 * (queries**2 @ (kv**2).t()) * (of_q**2 + of_kv**2 + float32**2)
        values, middle = kv[:, : want.shape[2]], want[row]
        # sum over j of p^2 moves (kv - out)^2, the square written out
        weights = p**2 * moves
        squares = weights @ values**2 - 2 * middle * (weights @ values)
        squares += middle**2 * weights.sum(1, keepdim=True)
        squares += (p**2 * (unit**2 + of_kv**2 + float32**2) + smallest**2) @ values**2
        squares += smallest**2 * (p**2).sum(1, keepdim=True)
        bound = 6 * squares.clamp(min=0).sqrt() + UNIT[out.dtype] * middle.abs() + 2.0**-25
        error = (out[row].cpu().double() - middle).abs()
        assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", [*DTYPES, "fp8"], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_the_reference(case: Case, fmt: torch.dtype | str, device: str) -> None:
    pool = to(make_pool(fmt, case.slots, case.dim), device)
    positions = make_positions(case).to(device)
    for dtype, sink in itertools.product(DTYPES, (None, normal(case.heads, seed=5) * 2)):
        q = normal(case.rows, case.heads, case.dim, seed=6).to(device, dtype)
        sink = None if sink is None else sink.to(device)
        options = {"sink": sink, "scale": case.dim**-0.5, "value_dim": case.value_dim}
        out = sparse_attention(q, pool, positions, **options)
        assert out.dtype == dtype
        assert out.shape == (case.rows, case.heads, case.value_dim)
        operands = multiplied(q, pool)
        if operands == torch.float32:
            want = sparse_attention_reference(q, pool, positions, **options)
            assert_near(out, want, case.dim + case.k)
        else:
            assert_near_in_halves(out, q, pool, positions, operands, **options)


def multiplied(q: torch.Tensor, pool: Pool) -> torch.dtype:
    """What the docstring says is multiplied; on a GPU by the kernels, which must be there."""
    gather = kv_gather if q.device.type == "cpu" else kernel.kv_gather
    assert attention._route(q, pool).gather is gather
    half = isinstance(pool, KVPool) or pool.dtype != torch.float32
    if q.device.type == "cpu" or not half or q.dtype == torch.float32:
        return torch.float32
    old = torch.cuda.get_device_capability(q.device) < (8, 0)
    return torch.float16 if old else q.dtype


def as_kernels(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Routes calls on the CPU as on a GPU of this capability, with torch's ops as kernels."""

    def softmax(logits: torch.Tensor, positions: torch.Tensor, **options: Any) -> None:
        out = options.pop("out")
        sparse_softmax(logits := logits.clone(), positions, **options, out=logits)
        out.copy_(logits)

    def route(q: torch.Tensor, pool: Pool) -> object:
        operands = attention._operands(q, pool, capability)
        return attention._Route(kv_gather, softmax, operands, gather_bytes=0, logit_bytes=4)

    monkeypatch.setattr(attention, "_route", route)
    monkeypatch.setattr(attention, "_bmm", lambda a, b: torch.bmm(a.float(), b.float()))


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (9, 0)])
@pytest.mark.parametrize("fmt", [*DTYPES, "fp8"], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_roundings_of_halves(
    case: Case,
    fmt: torch.dtype | str,
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the route that a GPU takes, whatever computes its steps."""
    as_kernels(monkeypatch, capability)
    pool, positions = make_pool(fmt, case.slots, case.dim), make_positions(case)
    for dtype in (torch.float16, torch.bfloat16):
        q = normal(case.rows, case.heads, case.dim, seed=6).to(dtype)
        sink = normal(case.heads, seed=5) * 2
        options = {"sink": sink, "scale": case.dim**-0.5, "value_dim": case.value_dim}
        out = sparse_attention(q, pool, positions, **options)
        assert out.dtype == dtype
        if fmt == torch.float32:
            want = sparse_attention_reference(q, pool, positions, **options)
            assert_near(out, want, case.dim + case.k)
            continue
        operands = torch.float16 if capability < (8, 0) else dtype
        assert_near_in_halves(out, q, pool, positions, operands, **options)
        monkeypatch.setattr(attention, "_route", ROUTE)
        exact = sparse_attention(q, pool, positions, **options)
        as_kernels(monkeypatch, capability)
        assert case.k == 1 or not torch.equal(out, exact)  # or nothing was rounded


ROUTE = attention._route


def test_without_a_compiler_it_is_plain_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Decided and said once a device; but a graph capture decides nothing."""
    device, capturing, tried = torch.device("cuda", 0), True, []

    def build(kernels: object, where: torch.device, name: str) -> None:
        tried.append(where)
        raise BackendUnavailable(f"{name}: no compiler")

    def refuse(kernel: object, where: torch.device) -> None:
        raise JitError("call warmup")

    monkeypatch.setattr(attention, "forbids_loading", lambda where: capturing)
    monkeypatch.setattr(attention, "build_kernels", build)
    monkeypatch.setattr(attention, "load", refuse)
    attention._has_kernels.cache_clear()
    try:
        with pytest.raises(JitError, match="call warmup"):
            attention._has_kernels(device)
        assert not tried
        capturing = False
        with caplog.at_level(logging.WARNING, "sparse_indexer"):
            assert not attention._has_kernels(device)
            capturing = True
            assert not attention._has_kernels(device)
        assert tried == [device]
        assert caplog.messages == ["in plain torch: sparse_attention: no compiler"]
    finally:
        attention._has_kernels.cache_clear()


def test_the_reference_is_the_formula() -> None:
    q, pool = normal(2, 3, 192, seed=1), make_pool("fp8", 10, 192)
    positions = torch.tensor([[-1, 4, -9, 4, 7], [-1] * 5], dtype=torch.int32)
    sink = torch.tensor([0.5, -torch.inf, 3.0])
    out = sparse_attention_reference(q, pool, positions, sink=sink, scale=0.1, value_dim=150)
    values = pool.values[[4, 4, 7]].double() * pool.scales[[4, 4, 7]].double()
    kv = torch.cat((values, pool.rope[[4, 4, 7]].double()), 1)
    for head in range(3):
        e = [(0.1 * sum(q[0, head].double() * row)).exp() for row in kv]
        total = sum(e) + sink[head].double().exp()
        want = sum(weight / total * row[:150] for weight, row in zip(e, kv, strict=True))
        torch.testing.assert_close(out[0, head], want, rtol=1e-13, atol=1e-14)
    assert not out[1].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", [*DTYPES, "fp8"], ids=str)
def test_nothing_of_an_unused_slot_is_seen(fmt: torch.dtype | str, device: str) -> None:
    case = Case(k=20)
    positions, q = make_positions(case), normal(5, 9, 192, seed=6).to(device)
    positions[positions == 0] = 1  # what a slot that is not used may be read as
    positions[3] = -1
    pool, poisoned = (to(make_pool(fmt, SLOTS, 192), device) for _ in range(2))
    positions = positions.to(device)
    poison(poisoned, positions)
    for sink in (None, normal(9, seed=1).to(device)):
        out = sparse_attention(q, poisoned, positions, sink=sink, scale=0.07)
        assert out.isfinite().all()
        assert torch.equal(out, sparse_attention(q, pool, positions, sink=sink, scale=0.07))
        assert not out[3].any()
        assert out[[0, 1, 2, 4]].abs().amax(2).gt(0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_nan_of_a_slot_stays_in_the_rows_that_name_it(device: str) -> None:
    case = Case(unused=0)
    positions = make_positions(case).to(device)
    positions[positions == 7] = 8
    positions[2, 11] = 7
    pool = make_pool(torch.float16, SLOTS, 192).to(device)
    q = normal(5, 9, 192, seed=6).to(device)
    want = sparse_attention(q, pool, positions, scale=0.07)
    pool[7, 3] = torch.nan
    out = sparse_attention(q, pool, positions, scale=0.07)
    assert out[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(out[others], want[others])


def test_logits_of_minus_infinity_give_what_the_formula_gives() -> None:
    pool = torch.ones(4, 16)
    pool[:, 15] = -torch.inf  # past value_dim: the values are finite
    positions = torch.tensor([[0, -1, 1]], dtype=torch.int32)
    q = torch.ones(1, 2, 16)
    options = {"scale": 1.0, "value_dim": 15}
    assert sparse_attention(q, pool, positions, **options).isnan().all()
    out = sparse_attention(q, pool, positions, sink=torch.tensor([0.0, -300.0]), **options)
    assert not out.any()
    sink = torch.full((2,), -torch.inf)
    assert sparse_attention(q, pool, positions, sink=sink, **options).isnan().all()
    none = torch.full_like(positions, -1)
    for given in (None, sink, torch.zeros(2)):
        assert not sparse_attention(q, pool, none, sink=given, **options).any()


def test_large_logits_do_not_overflow() -> None:
    pool = torch.tensor([[1000.0, 1.0], [1001.0, 2.0], [-1000.0, 3.0]])
    positions = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    q = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    sink = torch.tensor([999.0, 1001.0])
    for options in ({"scale": 1.0}, {"scale": 1, "sink": sink}):
        out = sparse_attention(q, pool, positions, **options)
        assert_near(out, sparse_attention_reference(q, pool, positions, **options), 2 + 3)


def tiles(case: Case, *rows: int) -> Iterator[int]:
    """Budgets that allow so many rows a tile."""
    for n in rows:
        route = attention._route(Q, POOL)
        yield n * attention._row_bytes(route, case.heads, case.dim, case.k, case.value_dim)


@pytest.mark.parametrize("fmt", [torch.float32, "fp8"], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=17),
        Case(rows=17, heads=64, k=3, value_dim=7),
        Case(rows=17, heads=3, k=7),
        Case(rows=17, heads=1, k=9),
    ],
    ids=lambda case: f"{case.heads} heads, {case.k} slots",
)
def test_a_row_has_the_same_bits_in_every_tile(case: Case, fmt: torch.dtype | str) -> None:
    plain = fmt != "fp8"
    case = case._replace(dim=77, value_dim=min(case.value_dim, 52)) if plain else case
    pool, positions = make_pool(fmt, SLOTS, case.dim), make_positions(case)
    memory = torch.zeros(17 * case.heads * case.dim + 3)
    q = memory[3:].view(17, case.heads, case.dim).copy_(normal(17, case.heads, case.dim, seed=6))
    options = {"scale": case.dim**-0.5, "value_dim": case.value_dim}
    want = sparse_attention(q, pool, positions, **options)
    least = next(tiles(case, 1))
    for budget in (*tiles(case, 1, 2, 3, 16, 17), 2 * least - 1, 1 << 40):
        out = sparse_attention(q, pool, positions, memory_budget=budget, **options)
        assert torch.equal(out, want)
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    for row in (0, 9, 16):
        for queries in (q, by_head):
            some = slice(row, row + 1)
            out = sparse_attention(queries[some], pool, positions[some], **options)
            assert torch.equal(out, want[some])


# In a process of its own, the libraries' own buffers warmed up by a small call first.
MEASURE = """
import hashlib, json, sys
import torch
from sparse_indexer import sparse_attention
from sparse_indexer.meter import Meter

budget = int(sys.argv[1])
torch.manual_seed(0)
pool = torch.randn(4096, 576).half()
q, positions = torch.randn(48, 16, 576).half(), torch.randint(-1, 4096, (48, 640)).int()
options = {"scale": 0.07, "value_dim": 512}
sparse_attention(q[:1], pool, positions[:1], **options)
meter = Meter(torch.device("cpu"))
out = sparse_attention(q, pool, positions, memory_budget=budget, **options)
peak = meter.stop()[1]
digest = hashlib.sha256(out.numpy().tobytes()).hexdigest()
print(json.dumps({"peak": peak, "result": out.nbytes, "digest": digest}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_within_the_budget() -> None:
    small, large = 16 << 20, 192 << 20
    taken = []
    for budget in (small, large):
        command = [sys.executable, "-c", MEASURE, str(budget)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        taken.append(json.loads(result.stdout))
        assert taken[-1]["peak"] <= budget + taken[-1]["result"]
    assert taken[1]["peak"] > small + taken[1]["result"]  # or the budget would limit nothing
    assert taken[0]["digest"] == taken[1]["digest"]


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [torch.bfloat16, "fp8"], ids=str)
def test_memory_stays_within_the_budget_on_a_gpu_and_nothing_waits(
    fmt: torch.dtype | str,
) -> None:
    case = Case(rows=200, heads=64, k=640, dim=576, value_dim=512)
    pool = to(make_pool(fmt, SLOTS, 576), "cuda")
    positions = make_positions(case).cuda()
    q, sink = normal(200, 64, 576, seed=6).half().cuda(), torch.zeros(64, device="cuda")
    options = {"sink": sink, "scale": 0.07, "value_dim": 512}
    sparse_attention(q[:1], pool, positions[:1], **options)  # loads kernels and cuBLAS
    for budget in (16 << 20, 256 << 20):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        with no_synchronization():
            out = sparse_attention(q, pool, positions, memory_budget=budget, **options)
        assert torch.cuda.max_memory_allocated() - held <= budget + out.nbytes
        assert_near_in_halves(out, q, pool, positions, multiplied(q, pool), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_replays_with_other_positions(dtype: torch.dtype) -> None:
    case = Case(rows=20, k=640, dim=576, value_dim=512)
    pool = to(make_pool("fp8", SLOTS, 576), "cuda")
    q, positions = normal(20, 9, 576, seed=6).to("cuda", dtype), make_positions(case).cuda()
    options = {"scale": 576**-0.5, "value_dim": 512}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sparse_attention(q, pool, positions, **options)  # loads kernels and cuBLAS
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparse_attention(q, pool, positions, **options)
    for seed in (12, 13):
        positions.copy_(make_positions(case, seed))
        graph.replay()
        operands = multiplied(q, pool)
        if operands == torch.float32:
            want = sparse_attention_reference(q, pool, positions, **options)
            assert_near(out, want, 576 + 640)
        else:
            assert_near_in_halves(out, q, pool, positions, operands, **options)


@pytest.mark.gpu
def test_slots_beyond_the_pool_are_unused_on_a_gpu() -> None:
    case = Case()
    pool, q = make_pool("fp8", SLOTS, 192), normal(5, 9, 192, seed=6)
    positions = make_positions(case)
    want = sparse_attention(q, pool, positions, scale=0.07)
    positions = torch.where((positions < 0) & (positions % 2 == 0), SLOTS, positions)
    positions = torch.where(positions < -1, 2**31 - 1, positions)
    out = sparse_attention(q.cuda(), to(pool, "cuda"), positions.cuda(), scale=0.07)
    torch.testing.assert_close(out.cpu(), want, rtol=1e-5, atol=1e-5)


def test_takes_strided_views_and_empty_calls() -> None:
    case = Case()
    q, positions = normal(5, 9, 192, seed=6), make_positions(case)
    pool = make_pool(torch.float32, SLOTS, 192)
    want = sparse_attention(q, pool, positions, scale=0.07)
    wide = torch.full((SLOTS, 2, 200), torch.nan)
    wide[:, 1, :192] = pool
    padded = torch.zeros(5, 50, dtype=torch.int32)
    padded[:, :37] = positions
    halves = torch.stack((q, q), 2)[:, :, 1]
    out = sparse_attention(halves, wide[:, 1, :192], padded[:, :37], scale=0.07)
    assert torch.equal(out, want)
    assert sparse_attention(q[:0], pool, positions[:0], scale=1).shape == (0, 9, 192)
    for none, unused in ((pool, positions[:, :0]), (pool[:0], positions.clamp(max=-1))):
        out = sparse_attention(q, none, unused, sink=torch.zeros(9), scale=1)
        assert out.shape == (5, 9, 192)
        assert not out.any()


def test_no_gradient_is_recorded() -> None:
    q = normal(5, 9, 192, seed=6).requires_grad_()
    pool = make_pool(torch.float32, SLOTS, 192).requires_grad_()
    sink = torch.zeros(9).requires_grad_()
    out = sparse_attention(q, pool, make_positions(Case()), sink=sink, scale=0.07)
    assert not out.requires_grad
    scales, rope = POOL.scales.clone().requires_grad_(), POOL.rope.clone().requires_grad_()
    pool = KVPool(POOL.values, scales, rope)
    out = sparse_attention(q, pool, make_positions(Case()), scale=0.07)
    assert not out.requires_grad
    assert not pool.read(torch.tensor([3])).requires_grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", [*DTYPES, "fp8"], ids=str)
def test_gather_writes_rows_and_zeros(
    fmt: torch.dtype | str, dtype: torch.dtype, device: str
) -> None:
    case = Case(k=20)
    pool, positions = to(make_pool(fmt, SLOTS, 192), device), make_positions(case).to(device)
    poison(pool, positions)
    for slots in (positions, torch.full_like(positions, -1)):
        out = torch.full((5, 22, 200), torch.nan, dtype=dtype, device=device)
        kv_gather(pool, slots, out=out[:, 1:21, :192])
        assert out[:, [0, 21]].isnan().all()
        assert out[..., 192:].isnan().all()
        for row in range(5):
            for j, slot in enumerate(slots[row].tolist()):
                want = torch.zeros(192, dtype=dtype)
                if slot >= 0:
                    want = one_row(pool, slot).to(dtype)
                assert torch.equal(out[row, j + 1, :192].cpu(), want)


def one_row(pool: Pool, slot: int) -> torch.Tensor:
    """Float32, on the CPU."""
    if isinstance(pool, torch.Tensor):
        return pool[slot].cpu().float()
    scales = pool.scales[slot].cpu().repeat_interleave(128)
    return torch.cat((pool.values[slot].cpu().float() * scales, pool.rope[slot].cpu().float()))


def rows_of(pool: Pool, slots: list[int]) -> torch.Tensor:
    """`[n, dim]` float64, on the CPU."""
    at = torch.tensor(slots, dtype=torch.int64)
    if isinstance(pool, torch.Tensor):
        return pool[at.to(pool.device)].cpu().double()
    values, scales, rope = (
        part[at.to(part.device)].cpu().double() for part in (pool.values, pool.scales, pool.rope)
    )
    return torch.cat((values * scales.repeat_interleave(128, 1), rope), 1)


def test_gather_saturates_nothing() -> None:
    pool = torch.tensor([[70000.0, -1e-9, 3.0, torch.nan]])
    out = torch.empty(1, 1, 4, dtype=torch.float16)
    kv_gather(pool, torch.zeros(1, 1, dtype=torch.int32), out=out)
    want = torch.tensor([[[torch.inf, -0.0, 3.0, torch.nan]]], dtype=torch.float16)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


def test_a_pool_of_656_byte_rows_is_read_where_it_lies() -> None:
    memory = torch.zeros(6, 700, dtype=torch.uint8)
    rows = memory[:, 4:660]
    made = make_pool("fp8", 6, 576)
    rows[:, :512] = made.values.view(torch.uint8)
    rows[:, 512:528] = made.scales.view(torch.uint8)
    rows[:, 528:] = made.rope.view(torch.uint8)
    pool = KVPool.from_rows(rows)
    assert pool.dim == 576
    slots = torch.tensor([5, 0, 5])
    assert torch.equal(pool.read(slots), made.read(slots))
    assert torch.equal(pool.read(slots)[1], one_row(made, 0))
    half = pool.read(slots, torch.float16)
    assert half.dtype == torch.float16
    assert torch.equal(half, made.read(slots).half())
    memory[5].zero_()
    assert not pool.read(slots)[[0, 2]].any()
    bare = KVPool.from_rows(torch.zeros(3, 132, dtype=torch.uint8), rope_dim=0)
    assert bare.read(torch.tensor([2])).shape == (1, 128)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_changes_no_bit(dtype: torch.dtype, device: str) -> None:
    for pool in (POOL, PLAIN, PLAIN.float()):
        arguments = (Q.to(device, dtype), to(pool, device), POSITIONS.to(device))
        want = sparse_attention(*arguments, scale=0.1)
        with torch.autocast(device, torch.bfloat16):
            assert torch.equal(sparse_attention(*arguments, scale=0.1), want)


POOL = make_pool("fp8", SLOTS, 192)
PLAIN = make_pool(torch.float16, SLOTS, 192)
Q = normal(5, 9, 192, seed=6)
POSITIONS = make_positions(Case())

BAD_CALLS = {
    r"q: expected \[rows, heads, dim\] float16 or bfloat16 or float32, got None": {"q": None},
    r"q: .*, got \[5, 9, 192\] float64": {"q": Q.double()},
    r"q: .*, got \[9, 192\] float32": {"q": Q[0]},
    "q: expected a contiguous last dimension": {"q": normal(5, 192, 9, seed=1).mT},
    "q: expected at least 1 head and 1 element, got": {"q": Q[:, :0], "sink": None},
    "kv_pool: expected a tensor or a KVPool, got None": {"kv_pool": None},
    r"kv_pool: expected \[slots, 192\] .*, got \[300, 190\] float16": {"kv_pool": PLAIN[:, :190]},
    r"kv_pool: expected \[slots, 192\] .*, got .* float8": {"kv_pool": POOL.values},
    r"kv_pool: .* on cpu, got \[300, 192\] float16 on meta": {"kv_pool": PLAIN.to("meta")},
    "kv_pool: expected tensors on cpu, got": {"kv_pool": to(POOL, "meta")},
    r"kv_pool: expected rows of 191 elements, got 128 \+ 64": {"q": Q[..., :191]},
    r"positions: expected \[5, k\] int32 on cpu, got \[5, 37\] int64": {
        "positions": POSITIONS.long()
    },
    r"positions: expected \[5, k\] int32 on cpu, got \[4, 37\] int32": {"positions": POSITIONS[:4]},
    "positions: expected slots below 300, got 300": {
        "positions": torch.full((5, 3), 300, dtype=torch.int32)
    },
    r"sink: expected \[9\] float32 on cpu, got \[8\] float32": {"sink": torch.zeros(8)},
    r"sink: expected \[9\] float32 on cpu, got \[9\] float16": {"sink": torch.zeros(9).half()},
    "scale: expected a finite float32, got nan": {"scale": float("nan")},
    "scale: expected a finite float32, got True": {"scale": True},
    "scale: expected a finite float32, got 'a'": {"scale": "a"},
    r"scale: expected a finite float32, got 1e\+39": {"scale": 1e39},
    "scale: expected a finite float32, got -1000": {"scale": -(10**400)},
    "value_dim: expected an int of 1 to 192, got 193": {"value_dim": 193},
    "value_dim: expected an int of 1 to 192, got 0": {"value_dim": 0},
    "value_dim: expected an int, got 1.5": {"value_dim": 1.5},
    "memory_budget: expected an int, got None": {"memory_budget": None},
    r"memory_budget: expected at least \d+ bytes, got 1000": {"memory_budget": 1000},
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_calls_say_argument_expected_got(message: str) -> None:
    good = {"q": Q, "kv_pool": POOL, "positions": POSITIONS, "sink": torch.zeros(9), "scale": 0.07}
    sparse_attention(**good)
    with pytest.raises(ValueError, match=f"^{message}"):
        sparse_attention(**{**good, **BAD_CALLS[message]})


def test_numbers_of_numpy() -> None:
    want = sparse_attention(Q, POOL, POSITIONS, scale=0.5, value_dim=7)
    for scale, value_dim in ((np.float32(0.5), np.uint8(7)), (np.float64(0.5), np.int32(7))):
        assert torch.equal(
            sparse_attention(Q, POOL, POSITIONS, scale=scale, value_dim=value_dim), want
        )


def test_the_least_budget_is_the_one_that_is_named() -> None:
    least = next(tiles(Case(value_dim=192), 1))
    call = partial(sparse_attention, Q, POOL, POSITIONS, scale=1.0)
    call(memory_budget=least)
    assert named_budget(partial(call, memory_budget=least - 1), least - 1) == least


def test_what_has_no_values_is_refused() -> None:
    rows = [t.to("meta") for t in (Q, torch.zeros(300, 192), POSITIONS)]
    with pytest.raises(ValueError, match=r"^q: expected a tensor that has values, got .* on meta$"):
        sparse_attention(*rows, scale=1.0)


BYTES = torch.zeros(4, 660, dtype=torch.uint8)
BAD_POOLS: dict[str, Callable[[], object]] = {
    r"kv_pool values: expected \[slots, fp8_dim\] float8_e4m3fn, got \[300, 128\] uint8": (
        lambda: KVPool(POOL.values.view(torch.uint8), POOL.scales, POOL.rope)
    ),
    "kv_pool values: expected a positive multiple of 128 columns, got": (
        lambda: KVPool(POOL.values[:, :120], POOL.scales, POOL.rope)
    ),
    r"kv_pool scales: expected \[300, 1\] float32 on cpu, got \[300, 2\] float32": (
        lambda: KVPool(POOL.values, POOL.scales.expand(-1, 2).contiguous(), POOL.rope)
    ),
    r"kv_pool rope: expected \[300, rope_dim\] bfloat16 on cpu, got \[299, 64\] bfloat16": (
        lambda: KVPool(POOL.values, POOL.scales, POOL.rope[1:])
    ),
    r"kv_pool rope: .* on cpu, got .* on meta": (
        lambda: KVPool(POOL.values, POOL.scales, POOL.rope.to("meta"))
    ),
    r"rows: expected 132 n \+ 128 columns, n >= 1, got \[4, 660\] uint8": (
        lambda: KVPool.from_rows(BYTES)
    ),
    r"rows: expected 132 n \+ 128 columns, n >= 1, got \[4, 128\] uint8": (
        lambda: KVPool.from_rows(BYTES[:, :128])
    ),
    r"rows: expected an address, .* multiples of 4, got \d*[02468], 2 and 660": (
        lambda: KVPool.from_rows(BYTES[:, 2:658])
    ),
    r"rows: expected an address, .* multiples of 4, got \d*[13579], 0 and 656": (
        lambda: KVPool.from_rows(
            torch.frombuffer(bytearray(1 + 2 * 656), dtype=torch.uint8, offset=1).view(2, 656)
        )
    ),
    r"rows: expected an address, .* multiples of 4, got \d*[02468], 0 and 658": (
        lambda: KVPool.from_rows(torch.zeros(2, 658, dtype=torch.uint8)[:, :656])
    ),
    r"rows: expected \[slots, bytes\] uint8, got \[4, 660\] int8": (
        lambda: KVPool.from_rows(BYTES.view(torch.int8))
    ),
    "rope_dim: expected an int of at least 0, got -1": (
        lambda: KVPool.from_rows(BYTES, rope_dim=-1)
    ),
    "dtype: expected torch.float16 or torch.bfloat16 or torch.float32, got torch.float64": (
        lambda: POOL.read(torch.zeros(1, dtype=torch.int64), torch.float64)
    ),
    r"out: expected \[rows, k, dim\] float16 or bfloat16 or float32, got \[5, 37, 192\] float64": (
        lambda: kv_gather(POOL, POSITIONS, out=torch.empty(5, 37, 192, dtype=torch.float64))
    ),
    r"positions: expected \[5, 36\] int32 on cpu, got \[5, 37\] int32": (
        lambda: kv_gather(POOL, POSITIONS, out=torch.empty(5, 36, 192))
    ),
    "positions: expected slots below 300, got 301": (
        lambda: kv_gather(POOL, POSITIONS[:1, :1] * 0 + 301, out=torch.empty(1, 1, 192))
    ),
    "kv_pool: expected rows of 190 elements, got 128": (
        lambda: kv_gather(POOL, POSITIONS, out=torch.empty(5, 37, 190))
    ),
}


@pytest.mark.parametrize("message", BAD_POOLS)
def test_bad_pools_say_argument_expected_got(message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        BAD_POOLS[message]()
