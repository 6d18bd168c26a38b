# SPDX-License-Identifier: Apache-2.0
"""The emulated DeepGEMM against the oracle, and all that it refuses."""

import inspect
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from deep_gemm_calls import (
    LENS,
    Emulator,
    SparseCall,
    dense_call,
    head_terms,
    layer,
    pair_ids,
    rounded_weights,
    sparse_call,
)

from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.formats import KeyFormat
from sparse_indexer.testing import (
    dictated,
    make_inputs,
    oracle_logits,
    palette_keys,
    palette_queries,
)
from sparse_indexer.testing.deep_gemm import DeepGemmEmulator, OlderDeepGemmEmulator
from sparse_indexer.testing.deep_gemm.arithmetic import head_sums, round_bf16
from sparse_indexer.testing.deep_gemm.blocks import metadata_bytes

GENERATIONS = pytest.mark.parametrize("make", [DeepGemmEmulator, OlderDeepGemmEmulator])
BF16_MAX = torch.finfo(torch.bfloat16).max


def refused(message: str) -> Any:
    return pytest.raises(ValueError, match=f"^{re.escape(message)}")


def assert_poisoned(values: torch.Tensor) -> None:
    """NaN and the largest number, by turns, as what is not written."""
    assert values.numel()
    assert (values.isnan() | (values == torch.finfo(values.dtype).max)).all()


def bound(inputs: Any) -> torch.Tensor:
    """Of a logit's error: a head's ReLU is rounded, and each sum of its chain after it."""
    roundings = 1 + inputs.num_heads // 4 + 2
    return roundings * 2.0**-8 * head_terms(inputs)


def bf16(x: Fraction) -> Fraction:
    """Nearest, ties to even, of what is neither tiny nor huge."""
    if x == 0:
        return x
    unit = Fraction(2) ** (math.frexp(float(abs(x)))[1] - 8)
    return round(x / unit) * unit


def test_bf16_is_rounded_once() -> None:
    half = 2.0**-8  # of the gap above 1
    nudge = 2.0**-40
    cases = {
        1 + half: 1.0,
        1 + half + nudge: 1 + 2 * half,
        1 + half - nudge: 1.0,
        1 + 3 * half: 1 + 4 * half,
        1 + 3 * half - nudge: 1 + 2 * half,
        -1 - half - nudge: -1 - 2 * half,
        BF16_MAX: BF16_MAX,
        BF16_MAX * (1 + 2.0**-10): BF16_MAX,
        BF16_MAX * (1 + 2.0**-8): math.inf,
        1e300: math.inf,
        -1e300: -math.inf,
        math.inf: math.inf,
        2.0**-133: 2.0**-133,
        1e-60: 0.0,
    }
    got = round_bf16(torch.tensor(list(cases), dtype=torch.float64))
    assert got.dtype == torch.bfloat16
    assert got.tolist() == list(cases.values())
    # What the float64 sum lost decides a tie, in either direction and with either sign.
    tie = torch.tensor([1 + half, 1 + half, -1 - half, 1 + 3 * half], dtype=torch.float64)
    rest = torch.tensor([1e-30, -1e-30, -1e-30, -1e-30], dtype=torch.float64)
    assert round_bf16(tie, rest).tolist() == [1 + 2 * half, 1.0, -1 - 2 * half, 1 + 2 * half]
    assert round_bf16(torch.tensor([math.nan], dtype=torch.float64)).isnan().all()


def test_heads_are_summed_in_four_chains_of_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    dots = torch.randn(2, 12, 50, generator=generator) * 7
    weights = torch.randn(2, 12, generator=generator).to(torch.bfloat16)
    got = head_sums(dots, weights)
    plain = (dots.relu().double() * weights.double()[..., None]).sum(1).to(torch.bfloat16)
    assert (got != plain).float().mean() > 0.2  # so the order matters
    for row in range(2):
        w = [Fraction(value) for value in weights[row].tolist()]
        for n in range(50):
            terms = [bf16(Fraction(max(0.0, x))) for x in dots[row, :, n].tolist()]
            chains = [Fraction(0)] * 4
            for head, term in enumerate(terms):
                chains[head % 4] = bf16(term * w[head] + chains[head % 4])
            even, odd = bf16(chains[0] + chains[2]), bf16(chains[1] + chains[3])
            assert float(got[row, n]) == float(bf16(even + odd))


def test_special_dot_products() -> None:
    """NaN stays; -inf is 0 with bf16 weights, NaN with fp32 ones, which add its magnitude."""
    dots = torch.tensor([math.nan, -math.inf, math.inf, -1.0, 3e38]).expand(1, 4, 5)
    weights = torch.tensor([[1.0, 0.5, 0.0, 0.0]])
    got = head_sums(dots, weights.to(torch.bfloat16))[0].tolist()
    assert math.isnan(got[0])
    assert got[1] == 0
    assert math.isnan(got[2])
    assert got[3] == 0
    got = head_sums(dots, weights)[0].tolist()
    assert math.isnan(got[0])
    assert math.isnan(got[1])
    assert math.isnan(got[2])
    assert got[3] == 0
    assert math.isnan(got[4])  # 3e38 + 3e38 is inf, times a weight of 0


@GENERATIONS
def test_sparse_logits_are_near_those_of_mask(make: Callable[[], Emulator]) -> None:
    inputs = rounded_weights(layer())
    call = sparse_call(inputs)
    got = call.run(make())
    assert got.shape == (6, 96)
    assert got.dtype == torch.bfloat16
    assert got.stride() == (512, 1)
    want = MaskIndexer("cpu").dense_logits(inputs)
    allowed = bound(inputs)
    blocks = call.metadata["sparse_kv_block_indices"]
    compared = 0
    for row, length in enumerate(inputs.plan.compressed_lens.tolist()):
        columns = 0
        for slot, block in enumerate(blocks[row, : -(-length // 8)].tolist()):
            seen = min(8, length - 8 * block)
            here = got[row, 8 * slot : 8 * slot + seen].double()
            positions = slice(8 * block, 8 * block + seen)
            error = (here - want[row, positions].double()).abs()
            assert (error <= allowed[row, positions]).all()
            columns = 8 * slot + seen
            compared += seen
        assert_poisoned(got[row, columns:])
    assert compared == 70 + 71 + 9 + 90 + 8 + 1
    assert blocks[3].tolist() == [0, 2, 4, 6, 8, *range(10, 17)]  # 12 of 17


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_dictated_sparse_logits_are_exact(page_size: int) -> None:
    """Logits of 8 bits, where no sum rounds, equal the oracle's."""
    integers = [[(37 * n + 11 * row) % 256 for n in range(90)] for row in range(4)]
    queries, weights, keys = dictated(integers, "fp4")
    inputs = make_inputs(queries, weights, [keys], [89, 88, 80, 3], [4], page_size=page_size)
    got = sparse_call(inputs).run(DeepGemmEmulator())
    for row, logits in enumerate(oracle_logits(inputs)):
        assert got[row, : len(logits)].tolist() == logits
        assert_poisoned(got[row, len(logits) :])


def test_a_row_does_not_depend_on_its_pair() -> None:
    inputs = layer()
    call = sparse_call(inputs)
    alone = torch.arange(6, dtype=torch.int32)
    assert call.metadata["indices"].tolist() == [0, 0, 2, 3, 3, 5]
    paired = call.run(DeepGemmEmulator()).view(torch.int16)
    assert torch.equal(
        paired, call.changed(indices=alone).run(DeepGemmEmulator()).view(torch.int16)
    )


def test_sparse_mxfp8() -> None:
    """e4m3 with group scales: 132 bytes a position."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(n, 128, generator=generator).to(torch.float8_e4m3fn) for n in (64, 32)]
    codes = [torch.randint(124, 131, (n, 4), generator=generator).to(torch.uint8) for n in (64, 32)]
    keys, queries = (
        v.double() * (c.double() - 127).exp2().repeat_interleave(32, 1)
        for v, c in zip(values, codes, strict=True)
    )
    pages = torch.full((3, 33 * 256), 255, dtype=torch.uint8)
    pages[2, : 64 * 128] = values[0].view(torch.uint8).flatten()
    pages[2, 64 * 128 :] = codes[0].flatten()
    cache = pages.as_strided((3, 64, 1, 132), (33 * 256, 132, 132, 1))
    weights = torch.randn(1, 32, generator=generator).to(torch.bfloat16)
    deep_gemm = DeepGemmEmulator()
    metadata = deep_gemm.get_paged_sparse_mqa_logits_metadata(
        torch.tensor([60], dtype=torch.int32),
        torch.tensor([[2, -1]], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
        64,
        torch.tensor([[0, 1, 2, 3]], dtype=torch.int32),
        torch.float8_e4m3fn,
        16,
    )
    q = (values[1][None, None], codes[1].view(torch.int32).view(1, 1, 32))
    got = deep_gemm.fp8_fp4_paged_sparse_mqa_logits(q, cache, weights, metadata, 4, 16)
    dots = (queries @ keys.t()).float()
    want = head_sums(dots[None], weights)
    assert torch.equal(got[:, :60], want[:, :60])
    assert_poisoned(got[:, 60:])


def flat_layer(form: KeyFormat, heads: int = 32) -> Any:
    keys = [palette_keys(max(n, default=0), form, seed=i) for i, n in enumerate(LENS)]
    lens = [n for request in LENS for n in request]
    queries, weights = palette_queries(len(lens), heads, form, seed=3)
    counts = [len(n) for n in LENS]
    return make_inputs(queries, weights, keys, [n - 1 for n in lens], counts, layout="flat")


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("form", ["fp4", "fp8"])
def test_older_dense_logits_are_the_oracles(form: KeyFormat, heads: int) -> None:
    """fp32 sums of a palette are exact."""
    inputs = flat_layer(form, heads)
    call = dense_call(inputs)
    want = oracle_logits(inputs)
    relative = OlderDeepGemmEmulator().fp8_fp4_mqa_logits(**call, max_seqlen_k=140)
    absolute = OlderDeepGemmEmulator().fp8_fp4_mqa_logits(**call)
    clean = OlderDeepGemmEmulator().fp8_fp4_mqa_logits(**call, clean_logits=True)
    assert relative.shape == (6, 140)
    assert relative.stride() == (256, 1)
    assert absolute.shape == clean.shape == (6, 202)
    assert absolute.stride() == (512, 1)
    for row, logits in enumerate(want):
        start, end = int(call["cu_seq_len_k_start"][row]), int(call["cu_seq_len_k_end"][row])
        assert relative[row, : len(logits)].tolist() == logits
        assert absolute[row, start:end].tolist() == clean[row, start:end].tolist() == logits
        assert_poisoned(relative[row, len(logits) :])
        outside = torch.ones(202, dtype=torch.bool)
        outside[start:end] = False
        assert_poisoned(absolute[row, outside])
        assert (clean[row, outside] == -math.inf).all()
    rounded = OlderDeepGemmEmulator().fp8_fp4_mqa_logits(**call, logits_dtype=torch.bfloat16)
    row = absolute[0, :70]
    assert torch.equal(rounded[0, :70], row.to(torch.bfloat16))


@pytest.mark.parametrize("heads", [4, 32, 64])
def test_dense_logits_are_near_those_of_mask(heads: int) -> None:
    inputs = rounded_weights(layer(heads=heads, layout="flat"))
    call = dense_call(inputs)
    rows_apart = torch.zeros(6, 64, dtype=torch.bfloat16)[:, :heads]  # 8 bytes would be too few
    call["weights"] = rows_apart.copy_(call["weights"])
    deep_gemm = DeepGemmEmulator()
    bounds = (call["cu_seq_len_k_start"], call["cu_seq_len_k_end"])
    meta = deep_gemm.get_mqa_logits_metadata(*bounds, len(call["kv"][0]), heads)
    assert meta.dtype == torch.int32
    got = deep_gemm.fp8_fp4_mqa_logits(**call, max_seqlen_k=130, schedule_meta=meta)
    assert got.dtype == torch.bfloat16
    assert got.shape == (6, 130)
    assert got.stride() == (512, 1)
    want, allowed = MaskIndexer("cpu").dense_logits(inputs), bound(inputs)
    for row, length in enumerate(inputs.plan.compressed_lens.tolist()):
        error = (got[row, :length].double() - want[row, :length].double()).abs()
        assert (error <= allowed[row, :length]).all()
        if length < 130:
            assert_poisoned(got[row, length:])
    older = OlderDeepGemmEmulator().fp8_fp4_mqa_logits(
        **call, max_seqlen_k=130, logits_dtype=torch.bfloat16
    )
    assert torch.equal(got.view(torch.int16), older.view(torch.int16))


def test_dense_on_hopper() -> None:
    inputs = flat_layer("fp8")
    call = dense_call(inputs)
    got = DeepGemmEmulator(arch_major=9).fp8_fp4_mqa_logits(**call, max_seqlen_k=130)
    assert got.dtype == torch.float32
    for row, logits in enumerate(oracle_logits(inputs)):
        assert got[row, : len(logits)].tolist() == logits


def test_sizes_of_the_metadata() -> None:
    """26 splits of 656 bytes a row, and 16 bytes a schedule entry."""
    assert metadata_bytes(16384, 2048, 8, torch.int8, 148) == 16 + 16384 * 26 * 656 + 16 * 426092
    call = sparse_call(layer())
    made = DeepGemmEmulator(num_sms=148).get_paged_sparse_mqa_logits_metadata(**call.metadata)
    assert made.dtype == torch.uint8
    assert made.shape == (16 + 6 * 656 + 148 * 16,)


def moved(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values, `elements` behind an aligned address."""
    room = torch.zeros(tensor.numel() + elements, dtype=tensor.dtype)
    return room[elements:].view(tensor.shape).copy_(tensor)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps after each row."""
    room = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 8)
    room[..., : tensor.shape[-1]] = tensor
    return room[..., : tensor.shape[-1]]


def with_entry(tensor: torch.Tensor, place: tuple[int, ...], value: int) -> torch.Tensor:
    out = tensor.clone()
    out[place] = value
    return out


Change = tuple[str, Callable[[Any], Any], str]

METADATA_RULES: list[Change] = [
    ("context_lens", lambda x: x.long(), "context_lens: expected [6] int32 on cpu, got [6] int64"),
    ("context_lens", lambda x: x[:5], "context_lens: expected [6] int32 on cpu, got [5] int32"),
    ("context_lens", lambda x: strided(x[:, None])[:, 0], "context_lens: expected a contiguous"),
    ("context_lens", lambda x: x - 10, "context_lens: expected lengths of at least 0, got -9"),
    ("block_table", lambda x: x[:5], "block_table: expected [6, pages] int32 on cpu, got [5, "),
    ("block_table", lambda x: x.t().contiguous().t(), "block_table: expected a contiguous last"),
    ("block_table", lambda x: x[:1].expand(6, -1), "block_table: expected stride(0) beyond the"),
    ("block_table", lambda x: x[:, :2], "block_table: expected columns beyond the logical page 2"),
    ("block_table", lambda x: x[:, :0], "block_table: expected at least 1 page"),
    ("block_table", lambda x: with_entry(x, (0, 0), -1), "block_table[1, 0]: expected page -1"),
    ("block_table", lambda x: with_entry(x, (2, 0), -1), "block_table[2, 0]: expected a page of"),
    ("block_table", lambda x: with_entry(x, (2, 0), 99), "block_table: expected pages of 0 to "),
    ("indices", lambda x: x.long(), "indices: expected [6] int32 on cpu, got [6] int64"),
    ("indices", lambda x: x[:5], "indices: expected [6] int32 on cpu, got [5] int32"),
    (
        "indices",
        lambda x: strided(x[:, None])[:, 0],
        "indices: expected a contiguous last dimension",
    ),
    ("indices", lambda x: with_entry(x, (2,), 0), "indices[2]: expected at most 2 rows of one id"),
    ("indices", lambda x: with_entry(x, (5,), 2), "indices[5]: expected equal ids in rows that"),
    ("indices", lambda x: with_entry(x, (3,), 2), "block_table[3, "),
    ("page_kv", lambda x: 60, "page_kv: expected a multiple of 8, got 60"),
    ("page_kv", lambda x: 128, "metadata: expected rows, blocks, sparse_block_kv, page_kv"),
    ("sparse_kv_block_indices", lambda x: x.long(), "sparse_kv_block_indices: expected [rows, "),
    ("sparse_kv_block_indices", lambda x: x[:0], "rows of sparse_kv_block_indices: expected an "),
    ("sparse_kv_block_indices", strided, "sparse_kv_block_indices: expected a contiguous tensor"),
    ("sparse_kv_block_indices", lambda x: moved(x, 1), "sparse_kv_block_indices: expected an add"),
    (
        "sparse_kv_block_indices",
        lambda x: x[:, :10].contiguous(),
        "columns of sparse_kv_block_indices: expected a multiple of 4, got 10",
    ),
    (
        "sparse_kv_block_indices",
        lambda x: torch.nn.functional.pad(x, (0, 4096)),
        "columns of sparse_kv_block_indices: expected an int of 1 to 4096, got 4108",
    ),
    (
        "sparse_kv_block_indices",
        lambda x: with_entry(x, (0, 3), 2),
        "sparse_kv_block_indices[0, 3]: expected more than the block before it, got 2",
    ),
    (
        "sparse_kv_block_indices",
        lambda x: with_entry(x, (0, 8), 9),
        "sparse_kv_block_indices[0, 8]: expected 0 to 8, got 9",
    ),
    (
        "sparse_kv_block_indices",
        lambda x: with_entry(x, (5, 0), -1),
        "sparse_kv_block_indices[5, 0]: expected 0 to 0, got -1",
    ),
    ("qk_dtype", lambda x: torch.uint8, "qk_dtype: expected torch.int8 or torch.float8_e4m3fn"),
    ("qk_dtype", lambda x: torch.float8_e4m3fn, "metadata: expected rows, blocks, sparse_block"),
    ("sparse_block_kv", lambda x: 32, "sparse_block_kv: expected 8 or 16, got 32"),
]

LOGITS_RULES: list[Change] = [
    ("q", lambda q: q[0], "q: expected (values, scales): packed e2m1 needs its scales, got no"),
    ("q", lambda q: (q[0].view(torch.uint8), q[1]), "q: expected [rows, 1, heads, 128] float8"),
    ("q", lambda q: (q[0][:, 0], q[1]), "q: expected [rows, 1, heads, 64] int8, got [6, 32, 64]"),
    ("q", lambda q: (strided(q[0]), q[1]), "q: expected a contiguous tensor, got strides"),
    ("q", lambda q: (moved(q[0], 8), q[1]), "q: expected an address that is a multiple of 16"),
    ("q", lambda q: (q[0][:0], q[1][:0]), "q: expected at least 1 row, got [0, 1, 32, 64] int8"),
    ("q", lambda q: (q[0], q[1][:, 0]), "q scales: expected [6, 1, 32] int32 on cpu, got [6, 32]"),
    ("q", lambda q: (q[0], q[1].float()), "q scales: expected [6, 1, 32] int32 on cpu, got [6, 1"),
    ("q", lambda q: (q[0], strided(q[1])), "q scales: expected a contiguous tensor"),
    ("q", lambda q: (q[0], moved(q[1], 2)), "q scales: expected an address that is a multiple"),
    ("q", lambda q: (q[0][:5], q[1][:5]), "weights: expected [5, 32] bfloat16 on cpu"),
    ("weights", lambda w: w.float(), "weights: expected [6, 32] bfloat16 on cpu, got [6, 32] flo"),
    ("weights", lambda w: w[:, :31], "weights: expected [6, 32] bfloat16 on cpu, got [6, 31] bf"),
    ("weights", lambda w: w.t().contiguous().t(), "weights: expected a contiguous last dimension"),
    ("weights", lambda w: moved(w, 4), "weights: expected an address that is a multiple of 16"),
    (
        "weights",
        lambda w: torch.nn.functional.pad(w, (0, 4))[:, :32],
        "weights: expected a row stride that is a multiple of 16 bytes, got 72 bytes",
    ),
    ("kv_cache", lambda c: c[:, :, 0], "kv_cache: expected [pages, page_kv, 1, 68] uint8 on cpu"),
    ("kv_cache", lambda c: c.view(torch.int8), "kv_cache: expected [pages, page_kv, 1, 68] uint8"),
    ("kv_cache", lambda c: c[:0], "kv_cache: expected at least 1 page, got [0, 64, 1, 68] uint8"),
    ("kv_cache", lambda c: c[:, :60], "kv_cache: expected pages of a multiple of sparse_block_kv"),
    ("kv_cache", lambda c: strided(c), "kv_cache: expected a position stride of 68 bytes, got 76"),
    ("kv_cache", lambda c: c[:2], "block_table: expected pages of 0 to 1, got "),
    (
        "num_max_sparse_blocks",
        lambda n: 10,
        "num_max_sparse_blocks: expected a multiple of 4, got 10",
    ),
    ("num_max_sparse_blocks", lambda n: 4100, "num_max_sparse_blocks: expected an int of 1 to 4"),
    ("num_max_sparse_blocks", lambda n: 16, "metadata: expected rows, blocks, sparse_block_kv"),
    ("sparse_block_kv", lambda n: 4, "sparse_block_kv: expected 8 or 16, got 4"),
]


@GENERATIONS
@pytest.mark.parametrize(("argument", "change", "message"), METADATA_RULES + LOGITS_RULES)
def test_sparse_preconditions(
    make: Callable[[], Emulator], argument: str, change: Callable[[Any], Any], message: str
) -> None:
    call = sparse_call(layer())
    call.run(make())
    given = {**call.metadata, **call.logits}[argument]
    with refused(message):
        call.changed(**{argument: change(given)}).run(make())


def pages_apart(call: SparseCall, stride: int, offset: int = 0) -> SparseCall:
    cache = call.logits["kv_cache"]
    room = torch.zeros(len(cache) * stride + offset, dtype=torch.uint8)
    for page in range(len(cache)):
        start = page * stride + offset
        room[start : start + 64 * 68] = cache[page].as_strided((64 * 68,), (1,))
    moved_cache = room.as_strided(cache.shape, (stride, 68, 68, 1), offset)
    return call.changed(kv_cache=moved_cache)


def test_pages_lie_at_multiples() -> None:
    call = sparse_call(layer())
    want = call.run(DeepGemmEmulator()).view(torch.int16)
    contiguous = pages_apart(call, 64 * 68)  # 34 * 128, and not a multiple of 512
    assert torch.equal(contiguous.run(DeepGemmEmulator()).view(torch.int16), want)
    with refused("kv_cache: expected a page stride that is a multiple of 512 bytes, in an int32, "):
        contiguous.run(OlderDeepGemmEmulator())
    padded = pages_apart(call, 9 * 512)
    assert torch.equal(padded.run(OlderDeepGemmEmulator()).view(torch.int16), want)
    with refused("kv_cache: expected a page stride that is a multiple of 128 bytes, in an int32, "):
        pages_apart(call, 64 * 68 + 64).run(DeepGemmEmulator())
    with refused("kv_cache: expected an address that is a multiple of 16"):
        pages_apart(call, 64 * 68, 8).run(DeepGemmEmulator())


@pytest.mark.parametrize(("heads", "older", "current"), [(16, 0, 1), (32, 1, 1), (36, 0, 0)])
def test_heads_of_sparse_logits(heads: int, older: int, current: int) -> None:
    call = sparse_call(layer(heads=heads))
    if heads == 36:  # a stride that TMA takes
        call = call.changed(weights=torch.zeros(6, 40, dtype=torch.bfloat16)[:, :36])
    for emulator, takes in ((OlderDeepGemmEmulator(), older), (DeepGemmEmulator(), current)):
        if takes:
            call.run(emulator)
            continue
        with refused("q: expected ") as error:
            call.run(emulator)
        assert str(error.value).endswith(f" heads, got {heads}")


def test_metadata_is_of_its_call() -> None:
    call, deep_gemm = sparse_call(layer()), DeepGemmEmulator()
    metadata = deep_gemm.get_paged_sparse_mqa_logits_metadata(**call.metadata)
    run = deep_gemm.fp8_fp4_paged_sparse_mqa_logits
    run(metadata=metadata, **call.logits)
    with refused("metadata: expected [bytes] uint8 on cpu, got"):
        run(metadata=metadata.view(torch.int32), **call.logits)
    with refused("metadata: expected what get_paged_sparse_mqa_logits_metadata returned"):
        run(metadata=torch.zeros(4096, dtype=torch.uint8), **call.logits)
    deep_gemm.set_num_sms(132)
    assert deep_gemm.get_num_sms() == 132
    with refused("metadata: expected rows, blocks, sparse_block_kv, page_kv, num_sms and q dtype"):
        run(metadata=metadata, **call.logits)


DENSE_RULES: list[Change] = [
    ("q", lambda q: q[0], "q: expected (values, scales): packed e2m1 needs its scales, got no sca"),
    ("q", lambda q: (q[0][:, None], q[1]), "q: expected [rows, heads, 64] int8, got [6, 1, 32, 6"),
    ("q", lambda q: (q[0], q[1].long()), "q scales: expected [6, 32] int32 on cpu, got [6, 32] i"),
    ("q", lambda q: (strided(q[0]), q[1]), "q: expected a contiguous tensor"),
    ("kv", lambda kv: kv[0], "kv: expected (values, scales), got "),
    ("kv", lambda kv: (kv[0].view(torch.uint8), kv[1]), "kv: expected [positions, 64] int8 on cp"),
    ("kv", lambda kv: (strided(kv[0]), kv[1]), "kv: expected a contiguous tensor"),
    ("kv", lambda kv: (kv[0], kv[1].float()), "kv scales: expected [202] int32 on cpu, got [202]"),
    ("kv", lambda kv: (kv[0], moved(kv[1], 1)), "kv scales: expected an address that is a multip"),
    ("kv", lambda kv: (kv[0][:0], kv[1][:0]), "kv: expected at least 1 position, got [0, 64] int"),
    ("kv", lambda kv: (kv[0][:100], kv[1][:100]), "cu_seq_len_k_start: expected 0 to 100, got 0"),
    ("weights", lambda w: w[:, :20], "weights: expected [6, 32] bfloat16 on cpu, got [6, 20] bfl"),
    ("weights", lambda w: w.half(), "weights: expected [6, 32] bfloat16"),
    ("cu_seq_len_k_start", lambda x: x.long(), "cu_seq_len_k_start: expected [6] int32 on cpu"),
    ("cu_seq_len_k_start", lambda x: x - 1, "cu_seq_len_k_start: expected 0 to "),
    ("cu_seq_len_k_end", lambda x: x[:5], "cu_seq_len_k_end: expected [6] int32 on cpu, got [5]"),
    ("cu_seq_len_k_end", lambda x: x + 50, "cu_seq_len_k_end: expected 0 to "),
    ("cu_seq_len_k_end", lambda x: with_entry(x, (4,), 3), "cu_seq_len_k_end[4]: expected at lea"),
    ("cu_seq_len_k_end", lambda x: strided(x[:, None])[:, 0], "cu_seq_len_k_end: expected a cont"),
    ("max_seqlen_k", lambda x: 0, "max_seqlen_k: expected an int of at least 1, got 0"),
    ("max_seqlen_k", lambda x: 129, "max_seqlen_k: expected at least the longest span 130, got 1"),
    ("schedule_meta", lambda x: x.long(), "schedule_meta: expected [words] int32, got "),
    ("schedule_meta", lambda x: x + 1, "schedule_meta: expected get_mqa_logits_metadata of these"),
    ("schedule_meta", lambda x: moved(x, 1), "schedule_meta: expected an address that is a multi"),
]


@pytest.mark.parametrize(("argument", "change", "message"), DENSE_RULES)
def test_dense_preconditions(argument: str, change: Callable[[Any], Any], message: str) -> None:
    deep_gemm = DeepGemmEmulator()
    call = dense_call(layer(layout="flat"))
    call["weights"] = call["weights"].to(torch.bfloat16)
    bounds = (call["cu_seq_len_k_start"], call["cu_seq_len_k_end"])
    meta = deep_gemm.get_mqa_logits_metadata(*bounds, len(call["kv"][0]), 32)
    call |= {"max_seqlen_k": 130, "schedule_meta": meta}
    deep_gemm.fp8_fp4_mqa_logits(**call)
    with refused(message):
        deep_gemm.fp8_fp4_mqa_logits(**{**call, argument: change(call[argument])})


def test_what_only_one_generation_takes() -> None:
    fp4, fp8 = dense_call(layer(layout="flat")), dense_call(flat_layer("fp8"))
    brain = {"weights": fp4["weights"].to(torch.bfloat16)}
    current, older = DeepGemmEmulator(), OlderDeepGemmEmulator()
    with refused("weights: expected [6, 32] bfloat16 on cpu, got [6, 32] float32 on cpu"):
        current.fp8_fp4_mqa_logits(**fp4, max_seqlen_k=130)
    with refused("q: expected (values, scales), got no scales"):
        current.fp8_fp4_mqa_logits(**{**fp8, **brain}, max_seqlen_k=130)
    with refused("logits_dtype: expected torch.bfloat16 with bfloat16 weights, got torch.float32"):
        older.fp8_fp4_mqa_logits(**{**fp4, **brain})
    with refused("logits_dtype: expected torch.float32 or torch.bfloat16, got "):
        older.fp8_fp4_mqa_logits(**fp4, logits_dtype=torch.float16)
    with refused("clean_logits: expected False with max_seqlen_k, got True"):
        older.fp8_fp4_mqa_logits(**fp4, max_seqlen_k=130, clean_logits=True)
    assert "clean_logits" not in inspect.signature(current.fp8_fp4_mqa_logits).parameters
    assert (current.__version__, older.__version__) == ("0.2.5", "0.2.4rc0")


@GENERATIONS
def test_other_devices(make: Callable[..., Emulator]) -> None:
    call = sparse_call(layer())
    metadata = make().get_paged_sparse_mqa_logits_metadata(**call.metadata)
    hopper = make(arch_major=9)
    message = "device: expected compute capability 10.x, got 9.x"
    with refused(message):
        hopper.get_paged_sparse_mqa_logits_metadata(**call.metadata)
    with refused(message):
        hopper.fp8_fp4_paged_sparse_mqa_logits(metadata=metadata, **call.logits)
    dense = dense_call(layer(layout="flat"))
    bounds = (dense["cu_seq_len_k_start"], dense["cu_seq_len_k_end"])
    with refused(message):
        hopper.get_mqa_logits_metadata(*bounds, 202, 32)
    with refused("q: expected no scales on compute capability 9.x, got (values, scales)"):
        hopper.fp8_fp4_mqa_logits(**dense, max_seqlen_k=130)
    with refused("device: expected compute capability 9.x or 10.x, got 12.x"):
        make(arch_major=12).fp8_fp4_mqa_logits(**dense, max_seqlen_k=130)
    meta = make().get_mqa_logits_metadata(*bounds, 202, 32)
    eight = dense_call(flat_layer("fp8"))
    with refused(message):
        hopper.fp8_fp4_mqa_logits(**eight, max_seqlen_k=130, schedule_meta=meta)
    q = eight["q"][:, :20].contiguous()
    with refused("q: expected 32 or 64 heads on compute capability 9.x, got 20"):
        hopper.fp8_fp4_mqa_logits(**{**eight, "q": q}, max_seqlen_k=130)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_sms": 1}, "num_sms: expected an int of 3 to 256, got 1"),
        ({"longest_run": 0}, "longest_run: expected an int of at least 1, got 0"),
        ({"arch_major": 0}, "arch_major: expected an int of at least 1, got 0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, int], message: str) -> None:
    with refused(message):
        DeepGemmEmulator(**options)


SCHEDULE_RULES: list[tuple[dict[str, Any], str]] = [
    ({"num_kv_tokens": 0}, "num_kv_tokens: expected an int of at least 1, got 0"),
    ({"num_kv_tokens": 100}, "cu_seq_len_k_end: expected 0 to 100, got"),
    ({"num_heads": 30}, "num_heads: expected a multiple of 4, got 30"),
    ({"num_heads": 132}, "num_heads: expected an int of 4 to 128, got 132"),
    (
        {"cu_seq_len_k_start": torch.zeros(0, dtype=torch.int32)},
        "rows of cu_seq_len_k_start: expected an int of at least 1, got 0",
    ),
    (
        {"cu_seq_len_k_start": torch.zeros(60000, dtype=torch.int32), "num_heads": 64},
        "cu_seq_len_k_start: expected at most 58112 rows, got 60000",
    ),
]


@pytest.mark.parametrize(("changes", "message"), SCHEDULE_RULES)
def test_schedule_preconditions(changes: dict[str, Any], message: str) -> None:
    bound_ = torch.tensor([3, 200], dtype=torch.int32)
    call: dict[str, Any] = {
        "cu_seq_len_k_start": torch.zeros(2, dtype=torch.int32),
        "cu_seq_len_k_end": bound_,
        "num_kv_tokens": 210,
        "num_heads": 32,
    }
    DeepGemmEmulator().get_mqa_logits_metadata(**call)
    with refused(message):
        DeepGemmEmulator().get_mqa_logits_metadata(**{**call, **changes})


def test_longer_runs_on_request() -> None:
    """The real function takes them; rows 0 and 1, 2 and 3 are then the pairs."""
    inputs = layer([[70, 71, 9, 64], [33]])
    call = sparse_call(inputs)
    want = call.run(DeepGemmEmulator()).view(torch.int16)
    assert pair_ids(inputs).tolist() == [0, 0, 2, 2, 4]
    run = call.changed(indices=torch.tensor([5, 5, 5, 5, 1], dtype=torch.int32))
    assert torch.equal(run.run(DeepGemmEmulator(longest_run=4)).view(torch.int16), want)
    with refused("indices[3]: expected at most 3 rows of one id, got 4 rows of 5"):
        run.run(DeepGemmEmulator(longest_run=3))
