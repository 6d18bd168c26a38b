# SPDX-License-Identifier: Apache-2.0
"""What the sm100 backend reads, and what it refuses: keys, pages, queries, DeepGEMM itself."""

import copy
import importlib
import inspect
import pickle
import re
import sys
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sm100_support import (
    COPIES,
    EMULATORS,
    POISON,
    exact_layers,
    mask,
    random_layers,
    run,
    same,
    sm100,
)

from sparse_indexer import (
    BackendUnavailable,
    FlatIndexK,
    IndexKPool,
    IndexQ,
    PrefillIndexerInputs,
    testing,
)
from sparse_indexer.backends.sm100 import Sm100Indexer
from sparse_indexer.deep_gemm_api import EMULATED, DeepGemm
from sparse_indexer.formats import KeyFormat
from sparse_indexer.testing import make_inputs, palette_keys, palette_queries, with_queries
from sparse_indexer.testing.data import Layout

VERSIONS = list(EMULATORS)
FUNCTIONS = (
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_sparse_mqa_logits",
    "get_paged_sparse_mqa_logits_metadata",
)
LENS = [[700, 701, 20], [], [650]]


ANY = r"\(.*backend=.mask. takes any\)"


def layer(
    form: KeyFormat = "fp4", layout: Layout = "planar", heads: int = 32, page_size: int = 64
) -> PrefillIndexerInputs:
    rows = [n for request in LENS for n in request]
    keys = [palette_keys(max(lens, default=0), form, seed=i) for i, lens in enumerate(LENS)]
    queries, weights = palette_queries(len(rows), heads, form, seed=9)
    counts = [len(lens) for lens in LENS]
    positions = [n - 1 for n in rows]
    return make_inputs(
        queries, weights, keys, positions, counts, layout=layout, page_size=page_size
    )


def empty(inputs: PrefillIndexerInputs) -> torch.Tensor:
    return torch.full((inputs.plan.num_rows, 16), POISON, dtype=torch.int32)


def with_pages(inputs: PrefillIndexerInputs, stride: int, offset: int = 0) -> PrefillIndexerInputs:
    """The same pages, so many bytes apart, the first one so many beyond a multiple of 16."""
    pool = inputs.index_k
    assert isinstance(pool, IndexKPool)
    storage = torch.full((len(pool.pages) * stride + 16,), 0xFF, dtype=torch.uint8)
    offset += -storage.data_ptr() % 16
    pages = storage.as_strided(pool.pages.shape, (stride, 1), offset)
    pages.copy_(pool.pages)
    moved = msgspec.structs.replace(pool, pages=pages)
    return PrefillIndexerInputs(inputs.plan, inputs.index_q, inputs.head_weights, moved)


@pytest.mark.parametrize(
    ("version", "page_size", "stride", "fits"),
    [
        ("0.2.5", 64, 4352, None),
        ("0.2.5", 64, 4608, None),
        ("0.2.5", 64, 4352 + 64, 4352),
        ("0.2.5", 8, 544, 640),
        ("0.2.5", 8, 640, None),
        ("older", 64, 4608, None),
        ("older", 64, 4352, 4608),
        ("older", 128, 8704, None),
        ("older", 128, 8704 + 128, 8704),
    ],
)
def test_page_strides_that_do_not_fit_are_refused_by_name(
    version: str, page_size: int, stride: int, fits: int | None
) -> None:
    source, consumer = exact_layers(LENS, page_size=page_size)
    want = run(mask(), source, consumer)
    both = with_pages(source, stride), with_pages(consumer, stride)
    indexer = sm100(version)
    if fits is None:
        assert same(run(indexer, *both), want)
        return
    number = EMULATORS[version].generation.version
    unit = EMULATORS[version].generation.page_stride
    message = (
        rf"^index_k page stride: expected a multiple of {unit} bytes for DeepGEMM {number}, "
        rf"{fits} for {page_size} positions, got {stride}$"
    )
    refuses(indexer, both, message)
    out = empty(consumer)
    indexer.topk_prefill(both[1], out)
    assert torch.equal(out, want.full)


def refuses(
    indexer: Sm100Indexer, both: tuple[PrefillIndexerInputs, PrefillIndexerInputs], message: str
) -> None:
    """Where a cache is made, where it would be published, and where candidates are read."""
    source, consumer = both
    with pytest.raises(ValueError, match=message):
        indexer.check_pool(source.index_k)
    with pytest.raises(ValueError, match=message):
        indexer.publish_prefill(source)
    with pytest.raises(ValueError, match=message):
        indexer.select_prefill(mask().publish_prefill(source), consumer, empty(consumer))


def test_pages_at_another_address_are_refused() -> None:
    source, _ = exact_layers(LENS)
    moved = with_pages(source, 4608, offset=8)
    message = r"^index_k pages: expected at a multiple of 16 bytes, got another address$"
    refuses(sm100("0.2.5"), (moved, moved), message)


def test_a_pool_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of other pages is another pool; nobody else keeps its pages alive."""
    source, consumer = exact_layers(LENS)
    fits, looked_at, check = with_pages(source, 4608), [], DeepGemm.check_pool

    def checking(api: DeepGemm, pool: IndexKPool) -> None:
        looked_at.append(pool.pages.data_ptr())
        check(api, pool)

    monkeypatch.setattr(DeepGemm, "check_pool", checking)
    indexer, want = sm100("0.2.5"), run(mask(), source, consumer)
    layers = [
        PrefillIndexerInputs(x.plan, x.index_q, x.head_weights, fits.index_k)
        for x in (source, consumer)
    ]
    assert same(run(indexer, *layers), want)
    assert looked_at == [fits.index_k.pages.data_ptr()]
    with pytest.raises(ValueError, match=r"^index_k pages: expected at a multiple of 16 bytes"):
        indexer.publish_prefill(with_pages(source, 4608, offset=8))
    pages = weakref.ref(fits.index_k.pages)
    del fits, layers
    assert pages() is None
    assert not indexer._deep_gemm._pools


@pytest.mark.parametrize("version", VERSIONS)
def test_a_pool_is_checked_where_it_is_made(version: str) -> None:
    indexer = sm100(version)
    indexer.check_pool(IndexKPool.empty(3, 128, "fp4"))
    fits = sm100("0.2.5").check_pool
    fits(IndexKPool.empty(3, 64, "fp4"))
    indexer.check_pool(IndexKPool.empty(3, 64, "fp4", page_stride=4608))
    with pytest.raises(ValueError, match=r"^index_k: expected a pool of fp4 keys, .* got None$"):
        indexer.check_pool(None)
    for form, layout, message in (
        ("fp8", "planar", r"^index_k: expected a pool of fp4 keys, .*, got a pool of fp8 keys$"),
        ("fp4", "interleaved", r"^index_k layout: expected 'planar', .* got 'interleaved'$"),
    ):
        with pytest.raises(ValueError, match=message):
            indexer.check_pool(IndexKPool.empty(3, 128, form, layout))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_pool_of_one_page_has_no_stride(version: str) -> None:
    source, consumer = exact_layers([[60, 59, 64]])
    pool = source.index_k
    assert isinstance(pool, IndexKPool)
    page = int(source.plan.page_table[0, 0])
    alone = msgspec.structs.replace(pool, pages=pool.pages[page].clone()[None])
    assert alone.pages.stride(0) % 512
    table = torch.zeros_like(source.plan.page_table)
    plan = msgspec.structs.replace(source.plan, page_table=table)
    both = [
        PrefillIndexerInputs(plan, i.index_q, i.head_weights, alone) for i in (source, consumer)
    ]
    assert same(run(sm100(version), *both), run(mask(), *both))


@pytest.mark.parametrize("form", ["fp4", "fp8"])
@pytest.mark.parametrize("layout", ["planar", "interleaved", "flat"])
def test_dense_logits_of_any_keys_that_the_version_reads(layout: Layout, form: KeyFormat) -> None:
    """float32 logits, before 0.2.5: equal to the last bit; 24 of 88 blocks are published."""
    inputs = layer(form, layout, page_size=8)
    indexer, oracle = sm100("older"), mask()
    out, want = empty(inputs), empty(inputs)
    indexer.topk_prefill(inputs, out)
    oracle.topk_prefill(inputs, want)
    assert torch.equal(out, want)
    published = oracle.publish_prefill(inputs, want)
    got = {"fp8": f"{'flat' if layout == 'flat' else 'a pool of'} fp8 keys", "fp4": "flat fp4 keys"}
    message = rf"^index_k: expected a pool of fp4 keys, .* {ANY}, got {got[form]}$"
    if (form, layout) == ("fp4", "interleaved"):
        message = rf"^index_k layout: expected 'planar', as .* {ANY}, got 'interleaved'$"
    if (form, layout) == ("fp4", "planar"):
        message = "^index_k page stride: expected a multiple of 512 bytes"
    if form == "fp4" and layout != "flat":
        refuses(indexer, (inputs, inputs), message)
        return
    candidates = indexer.publish_prefill(inputs, out)  # its own, out of the dense logits
    assert torch.equal(candidates.blocks, published.blocks)
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match=message):
        indexer.select_prefill(candidates, inputs, out)


@pytest.mark.parametrize("form", ["fp8", "fp16", "bf16"])
def test_keys_that_the_version_does_not_read_are_refused(form: KeyFormat) -> None:
    inputs = layer(form)
    message = {
        "fp8": rf"^index_k: expected fp4 keys (?=\(DeepGEMM 0.2.5 reads no o){ANY}, got fp8$"
    }.get(form, f"^index_k: expected fp4 or fp8 keys {ANY}, got {form}$")
    with pytest.raises(ValueError, match=message):
        sm100("0.2.5").publish_prefill(inputs)
    with pytest.raises(ValueError, match=message):
        sm100("0.2.5").topk_prefill(inputs, empty(inputs))


def test_queries_are_of_the_format_of_the_keys() -> None:
    inputs = layer("fp4")
    other = with_queries(inputs, *palette_queries(4, 32, "fp8", seed=1))
    message = r"^index_q values: expected uint8, as the keys are fp4 \(.*\), got \[4, 32, 128\]"
    with pytest.raises(ValueError, match=message):
        sm100("0.2.5").publish_prefill(other)
    inputs = layer("fp8")
    other = with_queries(inputs, *palette_queries(4, 32, "fp4", seed=1))
    message = r"^index_q values: expected float8_e4m3fn, as the keys are fp8 .*, got \[4, 32, 64\]"
    with pytest.raises(ValueError, match=message):
        sm100("older").publish_prefill(other)


def test_more_heads_than_are_scored_are_refused() -> None:
    inputs = layer(heads=65)
    with pytest.raises(ValueError, match=rf"^index_q values: .* 64 heads {ANY}, got 65$"):
        sm100("0.2.5").publish_prefill(inputs)


@pytest.mark.parametrize("topk_blocks", [1, 30, 4098])
def test_widths_that_have_no_kernel_are_refused(topk_blocks: int) -> None:
    with pytest.raises(ValueError, match=r"^topk_blocks: expected (a multiple of 4|an int of 1)"):
        sm100("0.2.5", topk_blocks=topk_blocks)
    source, consumer = random_layers(LENS)
    if topk_blocks != 4098:
        candidates = mask(topk_blocks=topk_blocks).publish_prefill(source)
        message = "^candidates.blocks: expected a multiple of 4 of at most 4096 columns, got"
        with pytest.raises(ValueError, match=message):
            sm100("0.2.5").select_prefill(candidates, consumer, empty(consumer))
        with pytest.raises(ValueError, match=message):
            sm100("0.2.5").prefill_tail(candidates, [1, 0, 1])


def test_its_device_and_inputs_are_checked() -> None:
    with pytest.raises(ValueError, match=r"^device: expected a CUDA device, got meta$"):
        Sm100Indexer("meta", deep_gemm=EMULATORS["0.2.5"]())
    source, _ = random_layers(LENS)
    indexer = sm100("0.2.5")
    with pytest.raises(ValueError, match=r"^inputs: expected PrefillIndexerInputs, got None$"):
        indexer.publish_prefill(None)
    with pytest.raises(ValueError, match=r"^out_positions: expected \[4, 16\] int32 on cpu"):
        indexer.topk_prefill(source, torch.empty(4, 15, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^candidates: expected Candidates, got None$"):
        indexer.prefill_tail(None, [1])


INSTALL = r"pip install 'sgl-deep-gemm>=0\.2\.0,<0\.3'$"


def test_a_missing_package_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)  # as if it were not installed
    message = rf"^sm100: no DeepGEMM \(ModuleNotFoundError: .*deep_gemm.*\): {INSTALL}"
    with pytest.raises(BackendUnavailable, match=message):
        DeepGemm()


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (OSError("_C.so: undefined\nsymbol: c10"), r"pip install -U torch 'sgl.*, as a release is"),
        (AssertionError(), "set CUDA_HOME to a toolkit, which its import looks for$"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named_with_the_fix(
    error: Exception, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", fails)
    why = " ".join(str(error).split())
    message = rf"^sm100: no DeepGEMM \({type(error).__name__}: ?{why}\): {fix}"
    with pytest.raises(BackendUnavailable, match=message):
        DeepGemm()


def test_a_package_without_candidates_is_too_old() -> None:
    old = SimpleNamespace(__version__="0.1.5", fp8_fp4_mqa_logits=lambda q: q)
    message = rf"^sm100: DeepGEMM 0.1.5 has no fp8_fp4_paged_sparse_mqa_logits: {INSTALL}"
    with pytest.raises(BackendUnavailable, match=message):
        Sm100Indexer("cpu", deep_gemm=old)


@pytest.mark.parametrize(
    ("given", "got"), [(testing.DeepGemmEmulator, "a type"), (3, "3"), ("deep_gemm", "'deep_gemm'")]
)
def test_what_is_no_package_is_refused(given: object, got: str) -> None:
    message = rf"^deep_gemm: expected the module deep_gemm, an emulator .*, got {got}$"
    with pytest.raises(ValueError, match=message):
        Sm100Indexer("cpu", deep_gemm=given)


def test_a_package_that_cannot_be_inspected_is_refused() -> None:
    opaque = SimpleNamespace(**dict.fromkeys(FUNCTIONS, min), __version__="0.2.9")
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(opaque.fp8_fp4_mqa_logits)
    message = rf"^sm100: DeepGEMM 0.2.9 does not say what fp8_fp4_mqa_logits takes: {INSTALL}"
    with pytest.raises(BackendUnavailable, match=message):
        DeepGemm(opaque)


def test_the_package_is_imported_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = EMULATORS["0.2.5"]()
    monkeypatch.setitem(sys.modules, "deep_gemm", emulator)
    assert DeepGemm().version == "0.2.5"


def test_on_a_cpu_the_emulator_is_named() -> None:
    with pytest.raises(BackendUnavailable, match=f"^sm100: needs a GPU, .* {re.escape(EMULATED)}$"):
        Sm100Indexer("cpu")
    assert EMULATED.endswith("=sparse_indexer.testing.DeepGemmEmulator()")
    assert Sm100Indexer("cpu", deep_gemm=testing.DeepGemmEmulator()).topk_blocks == 2048
    assert testing.OlderDeepGemmEmulator is EMULATORS["older"]
    assert {"DeepGemmEmulator", "OlderDeepGemmEmulator"} <= {*dir(testing)}
    with pytest.raises(AttributeError, match="no attribute 'Emulator'"):
        _ = testing.Emulator


def test_the_generations_are_told_apart() -> None:
    older, current = DeepGemm(EMULATORS["older"]()), DeepGemm(EMULATORS["0.2.5"]())
    assert (older.logits_dtype, older.page_alignment) == (torch.float32, 512)
    assert (current.logits_dtype, current.page_alignment) == (torch.bfloat16, 128)


def test_flat_keys_may_begin_anywhere() -> None:
    """Flat keys are read where they lie: neither they nor any request's begin is aligned."""
    inputs = layer("fp4", "flat")
    assert isinstance(inputs.index_k, FlatIndexK)
    assert any(start % 8 for start in inputs.plan.key_starts.tolist())
    keys = inputs.index_k
    scales = torch.cat((keys.scales[:1], keys.scales))[1:]
    assert scales.data_ptr() % 16
    moved = msgspec.structs.replace(keys, scales=scales)
    inputs = PrefillIndexerInputs(inputs.plan, inputs.index_q, inputs.head_weights, moved)
    got, want = empty(inputs), empty(inputs)
    sm100("older").topk_prefill(inputs, got)
    mask().topk_prefill(inputs, want)
    assert torch.equal(got, want)


@pytest.mark.parametrize("version", VERSIONS)
def test_flat_keys_of_rows_that_see_nothing_are_nowhere(version: str) -> None:
    """Their request may begin past the keys, where the plan is not looked at, as on a GPU."""
    keys = [palette_keys(n, "fp4", seed=i) for i, n in enumerate((700, 0, 300))]
    queries = palette_queries(5, 32, "fp4", seed=9)
    positions = [699, 698, -1, -1, 299]
    inputs = make_inputs(*queries, keys, positions, [2, 2, 1], layout="flat")
    want = empty(inputs)
    indexer = sm100(version)
    indexer.topk_prefill(inputs, want)
    blocks = indexer.publish_prefill(inputs).blocks
    inputs.plan.key_starts[1] = 1 << 20
    got = empty(inputs)
    indexer.topk_prefill(inputs, got)
    assert torch.equal(got, want)
    assert torch.equal(indexer.publish_prefill(inputs).blocks, blocks)


def test_pages_that_do_not_exist_hold_nan() -> None:
    """As in `mask`, where the values of the plan are not looked at, as on a GPU."""
    inputs = layer()
    inputs.plan.page_table[0, 1] = -1
    inputs.plan.page_table[2, 3] = 1 << 20
    got, want = empty(inputs), empty(inputs)
    sm100("older").topk_prefill(inputs, got)
    mask().topk_prefill(inputs, want)
    assert torch.equal(got, want)
    assert not ((got[3] >= 192) & (got[3] < 256)).any()


@pytest.mark.parametrize("version", VERSIONS)
def test_query_scales_may_lie_anywhere(version: str) -> None:
    both = exact_layers([[700 - i for i in range(16)]])
    moved = []
    for inputs in both:
        wide = torch.cat((inputs.index_q.scales[:, :1], inputs.index_q.scales), 1)
        queries = IndexQ(inputs.index_q.values, wide[:, 1:])
        moved.append(with_queries(inputs, queries, inputs.head_weights))
    assert same(run(sm100(version), *moved), run(sm100(version), *both))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("page", [-1, 1 << 20])
def test_a_page_that_is_not_there_holds_nothing_for_a_source(
    version: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody looks, as on a GPU: its positions are the last choice, as NaN."""
    monkeypatch.setattr(PrefillIndexerInputs, "check", lambda inputs: None)
    inputs = layer()
    table = inputs.plan.page_table.clone()
    table[0, 3] = page
    plan = msgspec.structs.replace(inputs.plan, page_table=table)
    inputs = msgspec.structs.replace(inputs, plan=plan)
    got, want = empty(inputs), empty(inputs)
    sm100(version).topk_prefill(inputs, got)
    mask().topk_prefill(inputs, want)
    assert torch.equal(got, want)
    assert not ((got[:2] >= 192) & (got[:2] < 256)).any()
    published = (indexer.publish_prefill(inputs).blocks for indexer in (sm100(version), mask()))
    assert torch.equal(*published)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_stride_of_a_lone_row_does_not_matter(version: str) -> None:
    """As of weights that are a part of a layer's one projection."""
    source, consumer = exact_layers([[700]])
    want = run(sm100(version), source, consumer)
    parts = []
    for inputs in (source, consumer):
        q, wide = inputs.index_q, torch.zeros(1, 33)
        wide[:, :32] = inputs.head_weights
        values, scales = torch.zeros(1, 33, 64, dtype=torch.uint8), torch.zeros(1, 33).int()
        values[:, :32], scales[:, :32] = q.values, q.scales
        queries = IndexQ(values[:, :32], scales[:, :32])
        parts.append(PrefillIndexerInputs(inputs.plan, queries, wide[:, :32], inputs.index_k))
    assert parts[0].head_weights.stride(0) == 33
    assert same(run(sm100(version), *parts), want)


@COPIES
@pytest.mark.parametrize("version", VERSIONS)
def test_a_copy_reads_the_pool_of_now(version: str, copied: Callable[[Any], Any]) -> None:
    source, consumer = exact_layers([[700 - i for i in range(16)]])
    indexer = sm100(version)
    before = run(indexer, source, consumer)
    other = copied(indexer)
    pool = source.index_k
    pool.pages.copy_(pool.pages.flip(0))
    want = run(indexer, source, consumer)
    assert not same(want, before)
    assert same(run(other, source, consumer), want)


def test_a_copy_of_an_indexer_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator, module = EMULATORS["0.2.5"](), ModuleType("deep_gemm")
    for name in FUNCTIONS:
        setattr(module, name, getattr(emulator, name))
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    for indexer in (Sm100Indexer("cpu", deep_gemm=module), sm100("0.2.5", deep_gemm=module)):
        other = pickle.loads(pickle.dumps(copy.deepcopy(indexer)))
        assert other._deep_gemm._module is module
        assert (other.topk, other.memory_budget) == (indexer.topk, indexer.memory_budget)
