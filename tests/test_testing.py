# SPDX-License-Identifier: Apache-2.0
"""The conformance kit itself: it reports a faulty backend, its data is what it says it is."""

from collections.abc import Iterator
from itertools import combinations, product

import pytest
import torch

from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.backends.sm100 import Sm100Indexer
from sparse_indexer.formats import FORMATS, INT32_MAX
from sparse_indexer.inputs import (
    IndexKPool,
    IndexQ,
    PrefillIndexerInputs,
    PrefillPlan,
    flat_index_k,
)
from sparse_indexer.planning import plan_prefill
from sparse_indexer.protocol import Candidates
from sparse_indexer.testing import (
    CASES,
    CaseConfig,
    DeepGemmEmulator,
    block_overlap,
    block_union,
    check,
    check_backend,
    equal_problem,
    hostile_pool,
    index_q,
    logits_problem,
    near_floor_problem,
    oracle_logits,
    oracle_publish,
    oracle_select,
    overlapping_queries,
    palette_keys,
    palette_queries,
    random_keys,
    with_queries,
)
from sparse_indexer.testing.data import make_inputs
from sparse_indexer.testing.turns import turns
from sparse_indexer.torch_ops.topk import ordered


class Faulty(MaskIndexer):
    name = "faulty"

    def __init__(self) -> None:
        super().__init__("cpu", topk=8, topk_blocks=12)


class SeesOneTooFar(Faulty):
    def _tiles(self, inputs):
        for tile in super()._tiles(inputs):
            limit = torch.tensor(tile.context, dtype=torch.int32)
            yield tile._replace(lens=torch.minimum(tile.lens + 1, limit))


class ForgetsTheNewestBlock(Faulty):
    def publish_prefill(self, inputs, out_positions=None):
        made = super().publish_prefill(inputs, out_positions)
        lens = inputs.plan.compressed_lens.tolist()
        rows = [row[:n] for row, n in zip(self.dense_logits(inputs).tolist(), lens, strict=True)]
        blocks = made.blocks.clone()
        for i, row in enumerate(rows):
            keys = [max(row[s : s + 8]) for s in range(0, len(row), 8)]
            best = sorted(range(len(keys)), key=lambda b: (-keys[b], b))[: self.topk_blocks]
            blocks[i, : len(best)] = torch.tensor(sorted(best))
        return Candidates(blocks, made.plan)


class BreaksTiesUpwards(Faulty):
    def topk_prefill(self, inputs, out_positions):
        super().topk_prefill(inputs, out_positions)
        lens = inputs.plan.compressed_lens.tolist()
        starts = inputs.plan.request_starts
        for i, row in enumerate(self.dense_logits(inputs).nan_to_num(nan=-torch.inf).tolist()):
            best = sorted(sorted(range(lens[i]), key=lambda n: (-row[n], -n))[: self.topk])
            shift = 0 if starts is None else int(starts[inputs.plan.request_of_row[i]])
            out_positions[i, : len(best)] = torch.tensor(best, dtype=torch.int32) + shift


class RanksNaNHighest(Faulty):
    def _ordered_logits(self, inputs, tile):
        for start, values in self._logits(inputs, tile):
            nan = values.isnan()
            ((_, order),) = [(s, o) for s, o in super()._ordered_logits(inputs, tile) if s == start]
            yield start, order.masked_fill(nan, 2**31 - 2)


class RanksNegativeZeroLower(Faulty):
    def _ordered_logits(self, inputs, tile):
        for start, values in self._logits(inputs, tile):
            yield start, ordered(values) - ((values == 0) & values.signbit()).to(torch.int32)


class RanksNaNLowest(Faulty):
    def _ordered_logits(self, inputs, tile):
        for start, values in self._logits(inputs, tile):
            yield start, ordered(values) - values.isnan().to(torch.int32)


class IgnoresLowBits(Faulty):
    """Of the keys that order the logits."""

    bits = 6

    def _ordered_logits(self, inputs, tile):
        for start, order in super()._ordered_logits(inputs, tile):
            yield start, order >> self.bits << self.bits


class RefusesATailOfATail(Faulty):
    def prefill_tail(self, candidates, tail_lens):
        if isinstance(candidates, Tail):
            raise ValueError("candidates: expected what was published, got a tail")
        made = super().prefill_tail(candidates, tail_lens)
        return Tail(made.blocks, made.plan)


class Tail(Candidates):
    pass


class TakesATailOfATailFromTheFirst(Faulty):
    def prefill_tail(self, candidates, tail_lens):
        made = super().prefill_tail(candidates, tail_lens)
        first = getattr(candidates, "first", candidates)
        blocks = first.blocks[first.plan.tail_rows(tail_lens)]
        tail = Candidates(blocks[: made.num_rows].clone(), made.plan)
        tail.first = Candidates(first.blocks.flip(0), first.plan)
        return tail


class WritesPastItsRow(Faulty):
    def select_prefill(self, candidates, inputs, out_positions):
        super().select_prefill(candidates, inputs, out_positions)
        size = (*out_positions.shape[:1], out_positions.shape[1] + 1)
        out_positions.as_strided(size, out_positions.stride())[:, -1] = -1


class LeavesThePadding(Faulty):
    def topk_prefill(self, inputs, out_positions):
        before = out_positions.clone()
        super().topk_prefill(inputs, out_positions)
        out_positions.copy_(torch.where(out_positions == -1, before, out_positions))


class SortsByLogit(Faulty):
    def select_prefill(self, candidates, inputs, out_positions):
        super().select_prefill(candidates, inputs, out_positions)
        used = (out_positions >= 0).sum(1).tolist()
        for row, n in enumerate(used):
            out_positions[row, :n] = out_positions[row, :n].flip(0)


class KeepsTheFirstRows(Faulty):
    def prefill_tail(self, candidates, tail_lens):
        made = super().prefill_tail(candidates, tail_lens)
        return Candidates(candidates.blocks[: made.num_rows], made.plan)


class AddsTheStartTwice(Faulty):
    def _write(self, inputs, tile, best, out):
        super()._write(inputs, tile, best, out)
        starts = inputs.plan.request_starts
        if starts is not None:
            rows = out[tile.rows]
            out[tile.rows] = torch.where(rows >= 0, rows + starts[tile.request], rows)


class UsesOneRequestsKeys(Faulty):
    def _tiles(self, inputs):
        longest = max(
            range(len(inputs.plan.context_lens)), key=inputs.plan.context_lens.__getitem__
        )
        for tile in super()._tiles(inputs):
            yield tile._replace(request=longest)


class MistakesTheLayout(Faulty):
    def _logits(self, inputs, tile):
        pool = inputs.index_k
        if isinstance(pool, IndexKPool) and pool.format in ("fp8", "fp4"):
            other = "planar" if pool.layout == "interleaved" else "interleaved"
            pool = IndexKPool(pool.pages, pool.page_size, pool.format, other)
            inputs = PrefillIndexerInputs(inputs.plan, inputs.index_q, inputs.head_weights, pool)
        yield from super()._logits(inputs, tile)


class RoundsLogitsToHalf(Faulty):
    def _logits(self, inputs, tile):
        for start, values in super()._logits(inputs, tile):
            yield start, values.half().float()


class ChangesFromRunToRun(Faulty):
    runs = 0

    def publish_prefill(self, inputs, out_positions=None):
        made = super().publish_prefill(inputs, out_positions)
        self.runs += 1
        blocks = made.blocks.clone()
        if self.runs % 3 == 2 and len(blocks):
            used = int((blocks[0] != INT32_MAX).sum())
            blocks[0, : max(0, used - 1)] = torch.arange(max(0, used - 1))
        return Candidates(blocks, made.plan)


class LetsRowsDisturbEachOther(Faulty):
    def _tiles(self, inputs):
        for tile in super()._tiles(inputs):
            yield tile._replace(lens=tile.lens.amax().expand_as(tile.lens))


class ReusesItsBlocks(Faulty):
    buffer = None

    def publish_prefill(self, inputs, out_positions=None):
        made = super().publish_prefill(inputs, out_positions)
        if self.buffer is None or self.buffer.shape != made.blocks.shape:
            self.buffer = torch.empty_like(made.blocks)
        return Candidates(self.buffer.copy_(made.blocks), made.plan)


class KnowsOnePageSize(Faulty):
    def _logits(self, inputs, tile):
        if isinstance(inputs.index_k, IndexKPool) and inputs.index_k.page_size != 64:
            raise RuntimeError("page size 64 only")
        yield from super()._logits(inputs, tile)


class RefusesEmptyBatches(Faulty):
    def topk_prefill(self, inputs, out_positions):
        int(inputs.plan.compressed_lens.max())  # fails on an empty tensor
        super().topk_prefill(inputs, out_positions)


class TakesFloat32WeightsOnly(Faulty):
    def publish_prefill(self, inputs, out_positions=None):
        assert inputs.head_weights.dtype == torch.float32
        return super().publish_prefill(inputs, out_positions)


class ScoresTheSourcesKeys(Faulty):
    keys = None

    def publish_prefill(self, inputs, out_positions=None):
        self.keys = inputs.index_k
        return super().publish_prefill(inputs, out_positions)

    def select_prefill(self, candidates, inputs, out_positions):
        own = PrefillIndexerInputs(candidates.plan, inputs.index_q, inputs.head_weights, self.keys)
        super().select_prefill(candidates, own, out_positions)


class Raises(Faulty):
    def topk_prefill(self, inputs, out_positions):
        raise RuntimeError("out of resources")


FAULTS = {
    ReusesItsBlocks: "edges",
    KnowsOnePageSize: "nans",
    RefusesEmptyBatches: "no_rows",
    TakesFloat32WeightsOnly: "bf16_weights",
    ScoresTheSourcesKeys: "own_keys",
    Raises: "edges",
    SeesOneTooFar: "future",
    ForgetsTheNewestBlock: "old_newest",
    BreaksTiesUpwards: "equal_logits",
    RanksNaNHighest: "nans",
    RanksNegativeZeroLower: "signed_zeros",
    RanksNaNLowest: "nan_and_minus_infinity",
    IgnoresLowBits: "close_logits",
    RefusesATailOfATail: "edges",
    TakesATailOfATailFromTheFirst: "edges",
    WritesPastItsRow: "edges",
    LeavesThePadding: "edges",
    SortsByLogit: "edges",
    KeepsTheFirstRows: "future",
    AddsTheStartTwice: "interleaved",
    UsesOneRequestsKeys: "ragged",
    MistakesTheLayout: "edges",
    RoundsLogitsToHalf: "close_logits",
    ChangesFromRunToRun: "two_values",
    LetsRowsDisturbEachOther: "edges",
}


ORDER_FAULTS = (RanksNegativeZeroLower, RanksNaNLowest, IgnoresLowBits)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_reported_by_case_and_check(fault: type[Faulty]) -> None:
    report = check_backend(fault(), formats=["fp8"])
    assert FAULTS[fault] in {failure.case.split("[")[0] for failure in report.failures}
    assert report.backend == "faulty"
    with pytest.raises(AssertionError, match=f"{len(report.failures)} of {report.checks} checks"):
        report.raise_if_failed()
    assert all(failure.problem for failure in report.failures)


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(check, "CASES", {name: CASES[name] for name in names})


@pytest.mark.parametrize("fault", ORDER_FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("sizes", [(8, 12), (1, 1), (64, 70), (100, 3), (512, 2048)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_wrong_order_is_reported_by_every_selection(
    fmt: str, sizes: tuple[int, int], fault: type[Faulty], monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, FAULTS[fault])
    topk, topk_blocks = sizes
    indexer = fault()
    indexer.topk, indexer.topk_blocks = sizes
    report = check_backend(indexer, formats=[fmt], heads=[12])
    want = {"topk: positions = oracle's"}
    if topk_blocks > 1:  # not the newest alone
        want.add("publish: blocks = oracle's")
    if topk_blocks > 1 and topk < 8 * topk_blocks:  # not all of them
        want.add("select: positions among its candidates = oracle's")
    assert {failure.check for failure in report.failures} >= want


@pytest.mark.parametrize("sizes", [(1, 1), (8, 12), (7, 11), (100, 3), (512, 2048)])
@pytest.mark.parametrize("bits", range(1, 13))
def test_any_ignored_bits_are_reported(
    bits: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "close_logits")
    indexer = IgnoresLowBits()
    indexer.bits = bits
    indexer.topk, indexer.topk_blocks = sizes
    found = {failure.check for failure in check_backend(indexer, formats=["fp8"]).failures}
    assert "topk: positions = oracle's" in found
    assert "publish: blocks = oracle's" in found or sizes[1] == 1


@pytest.mark.parametrize("cases", [12, 18, 20, 24])
@pytest.mark.parametrize("formats", [list(FORMATS)[:n] for n in (1, 2, 3, 4)], ids=len)
def test_cases_meet_all_layouts_heads_and_page_sizes(formats: list[str], cases: int) -> None:
    layouts, heads, sizes = ("planar", "interleaved", "flat"), (32, 64), (64, 8, 256)
    names = [str(i) for i in range(cases)]
    runs = list(turns(names, formats, layouts, heads, sizes))
    assert runs == list(turns(names, formats, layouts, heads, sizes))
    assert [run[:2] for run in runs] == [(name, form) for form in formats for name in names]
    runs = [(*run[:4], None if run[2] == "flat" else run[4]) for run in runs]
    pairs = {pair for run in runs for pair in combinations(run[1:], 2)}
    paged = layouts[:2]
    for left, right in (
        (formats, layouts),
        (formats, heads),
        (formats, sizes),
        (layouts, heads),
        (paged, sizes),
        (heads, sizes),
    ):
        assert pairs >= set(product(left, right))
    for name in names:
        met = [{run[i] for run in runs if run[0] == name} for i in (2, 3, 4)]
        assert len(met[0]) == min(len(formats), 3)
        assert len(met[1]) == min(len(formats), 2)
        # Of three runs with three layouts one has no pages.
        assert len(met[2] - {None}) >= min(len(formats) - ("flat" in met[0]), 3)


def test_the_kit_runs_what_its_turns_say() -> None:
    class Recorder(Faulty):
        def publish_prefill(self, inputs, out_positions=None):
            keys = inputs.index_k
            paged = isinstance(keys, IndexKPool)
            seen.add((keys.format, keys.layout, keys.page_size) if paged else (keys.format, "flat"))
            seen.add((keys.format, inputs.num_heads))
            raise RuntimeError("seen")

    seen = set()
    check_backend(Recorder(), formats=["fp8"], heads=[6, 7], page_sizes=[8, 24])
    paged = set(product(["fp8"], ["planar", "interleaved"], [8, 24]))
    assert seen == paged | {("fp8", "flat"), ("fp8", 6), ("fp8", 7)}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"tolerance": float("nan")}, "tolerance: expected a finite number of at least 0, got nan"),
        ({"tolerance": float("inf")}, "tolerance: expected a finite number of at least 0, got inf"),
        ({"tolerance": -1e-6}, "tolerance: expected a finite number of at least 0, got -1e-06"),
        ({"tolerance": None}, "tolerance: expected a number, got None"),
        ({"tolerance": True}, "tolerance: expected a number, got True"),
        (
            {"indexer": None},
            "indexer: expected a CandidateIndexer, with name, device, .*, got None",
        ),
        ({"indexer": MaskIndexer}, "indexer: expected a CandidateIndexer, with device, .*, got "),
        ({"own_logits": 3}, "own_logits: expected a function or None, got 3"),
        ({"heads": 32}, "heads: expected a sequence, got 32"),
        ({"heads": None}, "heads: expected a sequence, got None"),
        ({"heads": [32, 0]}, r"heads\[1\]: expected an int of at least 1, got 0"),
        ({"heads": [32.0]}, r"heads\[0\]: expected an int, got 32.0"),
        ({"page_sizes": 64}, "page_sizes: expected a sequence, got 64"),
        ({"page_sizes": [12]}, r"page_sizes\[0\]: expected a multiple of 8, got 12"),
        ({"formats": "fp8"}, "formats: expected a sequence, got 'fp8'"),
        ({"formats": ["fp9"]}, r"formats\[0\]: expected 'fp4' or .* or 'bf16', got 'fp9'"),
        ({"layouts": "flat"}, "layouts: expected a sequence, got 'flat'"),
        ({"layouts": ["round"]}, r"layouts\[0\]: expected 'planar' or .*, got 'round'"),
    ],
)
def test_bad_arguments_say_argument_expected_got(bad: dict, message: str) -> None:
    arguments = {"indexer": Faulty()} | bad
    with pytest.raises(ValueError, match=f"^{message}"):
        check_backend(arguments.pop("indexer"), **arguments)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("topk", "8", "indexer.topk: expected an int, got '8'"),
        ("topk", -3, "indexer.topk: expected an int of at least 0, got -3"),
        ("topk_blocks", 0, "indexer.topk_blocks: expected an int of at least 1, got 0"),
        ("name", 5, "indexer.name: expected a str, got 5"),
        ("device", "nonsense", "indexer.device: expected a torch device, got 'nonsense'"),
        ("device", None, "indexer.device: expected a torch device, got None"),
        ("device", "meta", "indexer.device: expected a device that has values, got meta"),
    ],
)
def test_what_an_indexer_says_of_itself_is_checked(
    attribute: str, value: object, message: str
) -> None:
    indexer = Faulty()
    setattr(indexer, attribute, value)
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_backend(indexer)


@pytest.mark.parametrize("name", ["formats", "layouts", "heads", "page_sizes"])
def test_checking_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected at least one, got none"):
        check_backend(MaskIndexer("cpu", topk=8, topk_blocks=12), **{name: ()})


def test_a_backend_off_by_more_than_its_tolerance_is_reported() -> None:
    class Noisy(Faulty):
        def _logits(self, inputs, tile) -> Iterator[tuple[int, torch.Tensor]]:
            for start, values in super()._logits(inputs, tile):
                yield start, values * (1 + 1e-3 * torch.sin(torch.arange(values.shape[1]) * 99.0))

    noisy = Noisy()
    exact = ["edges", "close_logits"]
    report = check_backend(noisy, formats=["fp8"], tolerance=2e-3, own_logits=noisy.dense_logits)
    cases = {failure.case.split("[")[0] for failure in report.failures}
    assert cases >= set(exact)  # no tolerance where logits are exact
    assert not cases & {"normal", "overlapping"}  # and enough where they are not
    report = check_backend(noisy, formats=["fp8"], tolerance=2e-3, exact_cases=False)
    report.raise_if_failed()
    report = check_backend(noisy, formats=["fp8"], tolerance=1e-4, own_logits=noisy.dense_logits)
    assert {"normal", "overlapping"} <= {failure.case.split("[")[0] for failure in report.failures}


class RoundsWeights(Faulty):
    """Selects by the rules, from logits a little off."""

    def publish_prefill(self, inputs, out_positions=None):
        return super().publish_prefill(self.rounded(inputs), out_positions)

    def select_prefill(self, candidates, inputs, out_positions):
        super().select_prefill(candidates, self.rounded(inputs), out_positions)

    def topk_prefill(self, inputs, out_positions):
        super().topk_prefill(self.rounded(inputs), out_positions)

    def rounded(self, inputs):
        return with_queries(inputs, inputs.index_q, inputs.head_weights.bfloat16())


class SwapsAnOwnPosition(RoundsWeights):
    """For the worst of its candidates that it left out, where it left some out."""

    def publish_prefill(self, inputs, out_positions=None):
        made = super().publish_prefill(inputs, out_positions)
        if out_positions is not None:
            logits = self.dense_logits(inputs)
            for row, blocks in enumerate(made.blocks.tolist()):
                seen = range(int(inputs.plan.compressed_lens[row]))
                among = {8 * b + i for b in blocks if b != INT32_MAX for i in range(8)} & {*seen}
                own = [n for n in out_positions[row].tolist() if n >= 0]
                rest = sorted(among - {*own}, key=lambda n: float(logits[row, n]))
                if own and rest and inputs.plan.request_starts is None:
                    swapped = sorted([*own[1:], rest[0]])
                    out_positions[row, : len(own)] = torch.tensor(swapped, dtype=torch.int32)
        return made


@pytest.mark.parametrize("sizes", [(8, 12), (8, 4), (64, 16), (16, 8), (20, 4)])
def test_own_positions_are_those_of_its_own_blocks(sizes: tuple[int, int]) -> None:
    """Which within the tolerance may be others than the oracle's, however many topk are."""
    for backend, right in ((RoundsWeights, True), (SwapsAnOwnPosition, False)):
        indexer = backend()
        indexer.topk, indexer.topk_blocks = sizes
        report = check_backend(indexer, formats=["bf16"], tolerance=2**-6, exact_cases=False)
        check = "publish: own positions among its candidates within the tolerance of the oracle's"
        assert (check in {failure.check for failure in report.failures}) is not right
        assert not (right and report.failures), str(report)


@pytest.mark.parametrize("sizes", [(8, 4), (16, 8)])
def test_a_backend_that_rounds_may_publish_fewer_blocks_than_topk(sizes: tuple[int, int]) -> None:
    topk, topk_blocks = sizes
    options = {"topk": topk, "topk_blocks": topk_blocks, "deep_gemm": DeepGemmEmulator()}
    check_backend(
        Sm100Indexer("cpu", **options),
        formats=["fp4"],
        layouts=["planar"],
        page_sizes=[64],
        tolerance=2**-6,
        exact_cases=False,
    ).raise_if_failed()


@pytest.mark.parametrize("sizes", [(0, 1), (7, 1), (228, 4), (300, 4), (2000, 1)])
def test_cases_are_of_any_size(sizes: tuple[int, int]) -> None:
    """Also where a row selects more than it publishes, and by far."""
    topk, topk_blocks = sizes
    report = check_backend(MaskIndexer("cpu", topk=topk, topk_blocks=topk_blocks), formats=["fp8"])
    report.raise_if_failed()
    assert report.selecting_rows >= 20
    source = CASES["two_values"](CaseConfig(topk=topk, topk_blocks=topk_blocks)).source
    assert source.dense_scores()[0].unique().numel() == 2


@pytest.mark.parametrize("overlap", [0.55, 0.75, 0.86, 0.93])
@pytest.mark.parametrize(("positions", "topk_blocks"), [(8192, 64), (40_000, 600)])
def test_neighboring_rows_share_as_many_blocks_as_asked(
    overlap: float, positions: int, topk_blocks: int
) -> None:
    keys = random_keys(positions, "fp8", seed=5)
    queries, weights = overlapping_queries(
        96, 4, keys, overlap=overlap, topk_blocks=topk_blocks, seed=7
    )
    plan = plan_prefill([positions - 1] * 96, [96])
    inputs = PrefillIndexerInputs(plan, queries, weights, keys)
    indexer = MaskIndexer("cpu", topk=0, topk_blocks=topk_blocks, accumulate=torch.float32)
    blocks = indexer.publish_prefill(inputs).blocks
    assert block_overlap(blocks) == pytest.approx(overlap, abs=0.03)
    # Rows come back to the blocks of earlier rows, as on text: see overlapping_queries.
    assert block_union(blocks, 8) < 1 + 0.65 * 7 * (1 - overlap)
    assert block_union(blocks, 4) < block_union(blocks, 8)


def test_an_overlap_out_of_reach_is_refused() -> None:
    keys = random_keys(4096, "fp8", seed=5)
    with pytest.raises(ValueError, match=r"overlap: expected 0\.\d+ to 0\.9\d+, got 0.01"):
        overlapping_queries(8, 4, keys, overlap=0.01, topk_blocks=64)
    with pytest.raises(
        ValueError, match="topk_blocks: expected fewer than the 512 blocks, got 512"
    ):
        overlapping_queries(8, 4, keys, overlap=0.5, topk_blocks=512)


def test_block_overlap_and_union_of_given_blocks() -> None:
    blocks = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 9], [7, 8, 9, INT32_MAX]], dtype=torch.int32)
    # Windows of 2: union 5 of 8, union 6 of 7; of 3: union 7 of 11.
    assert block_union(blocks, 2) == pytest.approx((2 * 5 / 8 + 2 * 6 / 7) / 2)
    assert block_union(blocks, 3) == pytest.approx(3 * 7 / 11)
    assert block_overlap(blocks[:2]) == pytest.approx(0.75)


def test_hostile_pool_is_hostile() -> None:
    keys = [palette_keys(n, "fp8", seed=n) for n in (100, 0, 9)]
    pool, table = hostile_pool(keys, "planar", page_size=16, seed=3)
    assert pool.pages.stride(0) > pool.pages.shape[1]
    assert table.shape == (3, 9)
    own = table[0, :7].tolist() + table[2, :1].tolist()
    assert len(set(own)) == 8
    assert 0 not in own
    assert own != sorted(own)
    unused = {*table[0, 7:].tolist(), *table[1].tolist(), *table[2, 1:].tolist()}
    assert unused == {-1, INT32_MAX, pool.num_pages}
    untouched = [page for page in range(pool.num_pages) if page not in own]
    assert (pool.pages[untouched] == 0xFF).all()


def test_the_oracle_applies_the_rules_by_hand() -> None:
    nan, inf = float("nan"), float("inf")
    row = [nan, -0.0, 0.0, -inf, 5.0, inf, -1.0, 0.0, 9.0]
    assert oracle_select([row], 3) == [[4, 5, 8]]
    assert oracle_select([row], 5) == [[1, 2, 4, 5, 8]]
    assert oracle_select([row], 9) == [list(range(9))]
    assert oracle_select([[nan, -inf, nan]], 2) == [[0, 1]]
    assert oracle_select([[]], 2) == [[]]
    assert oracle_select([row], 2, [[1]]) == [[8]]
    ones = [1.0] * 8
    assert oracle_publish([ones * 3 + [0.0]], 2) == [[0, 3]]
    assert oracle_publish([ones + [inf] * 8 + [-inf]], 2) == [[1, 2]]
    assert oracle_publish([[]], 2) == [[]]


def test_the_oracle_computes_the_formula_by_hand() -> None:
    # Head sum first, then the maximum: 4 * 1 + 0 = 4 and 2.5 + 2.5 = 5; a negative weight counts.
    queries = torch.zeros(2, 2, 128)
    queries[:, 0, 0] = queries[:, 1, 1] = 1.0
    keys = torch.zeros(3, 128)
    keys[0, :2] = torch.tensor([4.0, 0.0])
    keys[1, :2] = torch.tensor([2.5, 2.5])
    keys[2, :2] = torch.tensor([-3.0, 1.0])
    weights = torch.tensor([[1.0, 1.0], [1.0, -2.0]])
    inputs = make_inputs(
        index_q(queries, "bf16"), weights, [flat_index_k(keys, "bf16")], [2, 2], [2]
    )
    want = [[4.0, 5.0, 1.0], [4.0, -2.5, -2.0]]
    assert oracle_logits(inputs) == want
    assert inputs.dense_scores().tolist() == want


def test_comparators_say_what_is_wrong() -> None:
    a = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    assert equal_problem(a, a.clone()) is None
    assert "row 1: missing [6], instead [7]" in equal_problem(
        torch.tensor([[1, 2, 3], [4, 5, 7]], dtype=torch.int32), a
    )
    assert "row 0 in order: column 0 expected 1, got 2" in equal_problem(a[:, [1, 0, 2]], a)
    assert "shape: expected [2, 3], got [1, 3]" in equal_problem(a[:1], a)

    logits = torch.tensor([[5.0, 4.0, 3.9, 1.0]])
    bound = torch.tensor([0.2])
    first, near = torch.tensor([[0, 1]]), torch.tensor([[0, 2]])
    far = torch.tensor([[0, 3]])
    assert near_floor_problem(near, first, logits, bound) is None
    assert "3 does not belong" in near_floor_problem(far, first, logits, bound)
    assert "0 is missing" in near_floor_problem(torch.tensor([[1, 2]]), first, logits, bound)

    assert logits_problem(logits + 1e-4, logits, [4], 1e-4) is None
    assert "row 0, position 0: expected 5.0" in logits_problem(logits + 1e-3, logits, [4], 1e-4)
    assert logits_problem(logits + 1e-3, logits, [0], 1e-4) is None


def test_palettes_are_exact_in_any_order_of_summation() -> None:
    for fmt in ("fp8", "fp4", "fp16", "bf16"):
        queries, weights = palette_queries(5, 64, fmt, seed=1)
        inputs = make_inputs(queries, weights, [palette_keys(300, fmt, seed=2)], [299] * 5, [5])
        exact = inputs.dense_scores()
        single = MaskIndexer("cpu", accumulate=torch.float32).dense_logits(inputs)
        assert torch.equal(exact, single)
        assert exact.unique().numel() > 200
        assert isinstance(inputs.plan, PrefillPlan)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"normal", "overlapping"}))
@pytest.mark.parametrize("fmt", FORMATS)
def test_exact_cases_are_exact_in_any_order_of_heads(fmt: str, name: str) -> None:
    case = CASES[name](CaseConfig(topk=8, topk_blocks=12, format=fmt))
    assert case.exact
    single = MaskIndexer("cpu", accumulate=torch.float32)
    for inputs in (case.source, case.consumer):
        exact = inputs.dense_scores()
        q, heads = inputs.index_q, inputs.num_heads
        for seed in range(2):
            order = torch.randperm(heads, generator=torch.Generator().manual_seed(seed))
            scales = None if q.scales is None else q.scales[:, order]
            turned = IndexQ(q.values[:, order], scales)
            got = single.dense_logits(with_queries(inputs, turned, inputs.head_weights[:, order]))
            torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True)
