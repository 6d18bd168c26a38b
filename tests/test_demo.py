# SPDX-License-Identifier: Apache-2.0
"""The demo's numbers, against a dense matrix of logits and plain Python sets."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from test_trace import random_layer, saved

from sparse_indexer import BackendUnavailable, IndexKPool, PrefillIndexerInputs, demo
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.backends.sm100 import Sm100Indexer
from sparse_indexer.demo import DemoResult, run_demo
from sparse_indexer.formats import INT32_MAX
from sparse_indexer.protocol import CandidateIndexer
from sparse_indexer.testing.deep_gemm import DeepGemmEmulator
from sparse_indexer.trace import Trace, TraceLayer, load_trace

ROWS, CONTEXT, TOPK, TOPK_BLOCKS = 256, 8192, 64, 128

# Mean over the rows that see more than topk positions, which is all of them, of
# |selected & exact| / topk. Exact: on a CPU a logit's bits depend on its row and position alone.
RECALL = 13357 / (ROWS * TOPK)
# Mean over adjacent rows of |published by both| / topk_blocks.
OVERLAP = 28690 / ((ROWS - 1) * TOPK_BLOCKS)


@pytest.fixture(scope="module")
def result() -> DemoResult:
    return run_demo(load_trace(), device="cpu")


def dense_logits(trace: Trace, layer: TraceLayer) -> torch.Tensor:
    """`[rows, positions]` float32 of a trace with fp8 queries and keys, -inf where not visible."""
    q, k = layer.index_q, layer.index_k
    assert q.scales is not None
    assert k.scales is not None
    dots = torch.einsum("rhd,nd->rhn", q.values.double(), k.values.double()).relu()
    weights = layer.head_weights.double() * q.scales.double()
    logits = torch.einsum("rh,rhn->rn", weights, dots) * k.scales.double()
    hidden = torch.arange(logits.shape[1]) >= trace.compressed_lens[:, None]
    return logits.masked_fill(hidden, -math.inf).float()


def best(logits: torch.Tensor, count: int) -> torch.Tensor:
    """`[rows, count]`: ascending columns of the largest, lower columns first among equals."""
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return order.sort(dim=1).values.int()


def used(rows: torch.Tensor) -> list[set[int]]:
    return [{i for i in row if i not in (-1, INT32_MAX)} for row in rows.tolist()]


def test_runs_on_the_mask_backend(result: DemoResult) -> None:
    assert result.backend == "mask"
    assert result.device == "cpu"


def test_recall_is_the_measured_one(result: DemoResult) -> None:
    assert result.recall == RECALL
    assert result.deep_rows.tolist() == list(range(ROWS))
    pairs = zip(used(result.positions), used(result.exact_positions), strict=True)
    assert sum(len(a & b) for a, b in pairs) / (ROWS * TOPK) == RECALL


def test_selects_what_a_dense_matrix_says(result: DemoResult) -> None:
    trace = result.trace
    assert trace.consumer is not None
    logits = dense_logits(trace, trace.source)
    keys = logits.view(ROWS, -1, 8).amax(2)
    keys[torch.arange(ROWS), (trace.compressed_lens - 1) // 8] = math.inf
    blocks = best(keys, TOPK_BLOCKS)
    assert torch.equal(result.blocks, blocks)
    assert torch.equal(result.source_positions, best(logits, TOPK))

    logits = dense_logits(trace, trace.consumer)
    assert torch.equal(result.exact_positions, best(logits, TOPK))
    mask = torch.zeros_like(keys, dtype=torch.bool).scatter_(1, blocks.long(), True)
    published = logits.where(mask.repeat_interleave(8, 1), -math.inf)
    assert torch.equal(result.positions, best(published, TOPK))
    assert result.logits is not None
    torch.testing.assert_close(result.logits, logits.gather(1, result.positions.long()))


def test_tail_selects_what_its_rows_do_among_all(result: DemoResult) -> None:
    assert torch.equal(result.tail_positions, result.positions[-32:])
    assert result.tail_rows_equal == 32


def test_overlap_is_the_measured_one(result: DemoResult) -> None:
    blocks = used(result.blocks)
    shared = sum(len(a & b) for a, b in zip(blocks[1:], blocks[:-1], strict=True))
    assert shared / ((ROWS - 1) * TOPK_BLOCKS) == OVERLAP
    assert math.isclose(result.overlap, OVERLAP, rel_tol=1e-12)


def test_steps_count_rows_blocks_and_positions(result: DemoResult) -> None:
    lens = result.trace.compressed_lens.tolist()
    inside = [
        sum(min(8, seen - 8 * block) for block in row)
        for row, seen in zip(used(result.blocks), lens, strict=True)
    ]
    want = {
        "source": (ROWS, TOPK_BLOCKS, inside),
        "consumer": (ROWS, None, [TOPK] * ROWS),
        "tail": (32, None, [TOPK] * 32),
        "full": (ROWS, None, [TOPK] * ROWS),
    }
    assert [step.name for step in result.steps] == list(want)
    for step in result.steps:
        rows, blocks, positions = want[step.name]
        assert (step.rows, step.blocks) == (rows, blocks)
        assert math.isclose(step.positions, sum(positions) / rows, rel_tol=1e-12)
        shares = [p / seen for p, seen in zip(positions, lens[-rows:], strict=True)]
        assert math.isclose(step.share, sum(shares) / rows, rel_tol=1e-12)
        assert step.seconds > 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_is_that_of_a_tile(result: DemoResult) -> None:
    assert result.memory_rule == "the process's peak resident memory, above the step's start"
    for step in result.steps:
        assert 0 < step.peak_bytes < demo.MEMORY_BUDGET


def test_keys_are_in_shuffled_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PrefillIndexerInputs] = []

    class Watched(MaskIndexer):
        def topk_prefill(self, inputs: PrefillIndexerInputs, out_positions: torch.Tensor) -> None:
            seen.append(inputs)
            super().topk_prefill(inputs, out_positions)

    def watched(device: str, *, backend: str, **options: int) -> MaskIndexer:
        return Watched(device, **options)

    monkeypatch.setattr(demo, "make_candidate_indexer", watched)
    run_demo(load_trace(), device="cpu")
    assert len(seen) == 2
    for inputs in seen:
        assert isinstance(inputs.index_k, IndexKPool)
        assert inputs.index_k.page_size == 64
        assert inputs.plan.page_table is not None
        pages = inputs.plan.page_table[0].tolist()
        assert sorted(pages) == list(range(CONTEXT // 64))
        assert sum(b == a + 1 for a, b in itertools.pairwise(pages)) < 8


@pytest.mark.parametrize(("form", "name"), [("fp4", "sm100"), ("fp8", "mask")])
def test_keys_that_the_fastest_backend_does_not_read_are_for_mask(
    form: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But who names a backend gets its error."""
    tensors = random_layer("source", form, 30, 32, 250)
    tensors["positions"] = torch.arange(220, 250, dtype=torch.int32)
    trace = load_trace(saved(tmp_path, tensors))

    def blackwell(device: str, *, backend: str, **options: int) -> CandidateIndexer:
        if backend == "mask":
            return MaskIndexer(device, **options)
        return Sm100Indexer(device, **options, deep_gemm=DeepGemmEmulator())

    monkeypatch.setattr(demo, "make_candidate_indexer", blackwell)
    result = run_demo(trace, topk=16, topk_blocks=24, device="cpu")
    assert result.backend == name
    assert result.tail_rows_equal == 30
    if name == "mask":
        with pytest.raises(ValueError, match=r"^index_k: expected fp4 keys"):
            run_demo(trace, topk=16, topk_blocks=24, device="cpu", backend="sm100")


def test_chunks_change_nothing(result: DemoResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CHUNK_ROWS", 50)
    seen: list[tuple[str, float]] = []
    other = run_demo(
        load_trace(), device="cpu", on_progress=lambda step, share: seen.append((step, share))
    )
    for name in ("blocks", "source_positions", "positions", "tail_positions", "exact_positions"):
        assert torch.equal(getattr(other, name), getattr(result, name))
    names = ["source"] * 6 + ["consumer"] * 6 + ["tail"] + ["full"] * 6
    assert [step for step, _ in seen] == names
    shares = [share for _, share in seen]
    assert shares == sorted(set(shares))
    assert shares[-1] == 1


def test_without_a_consumer_the_source_stands_in(tmp_path: Path) -> None:
    tensors = random_layer("source", "bf16", 130, 3, 203)
    tensors["positions"] = torch.arange(70, 200, dtype=torch.int32)
    result = run_demo(load_trace(saved(tmp_path, tensors)), topk=16, topk_blocks=20, device="cpu")
    assert [step.name for step in result.steps] == ["source", "tail", "full"]
    assert torch.equal(result.positions, result.source_positions)
    assert torch.equal(result.positions, result.exact_positions)
    assert result.recall == 1
    assert result.tail_rows_equal == 32


@pytest.mark.parametrize("fmt", ["fp4", "fp8", "fp16", "bf16"])
def test_few_rows_that_see_little(tmp_path: Path, fmt: str) -> None:
    tensors = random_layer("source", fmt, 5, 3, 17) | random_layer("consumer", fmt, 5, 2, 0)
    tensors["positions"] = torch.tensor([0, 2, 3, 8, 66])
    trace = load_trace(saved(tmp_path, tensors, {"compress_ratio": "4"}))
    result = run_demo(trace, topk=16, topk_blocks=2, device="cpu")
    assert trace.shared_keys
    assert used(result.blocks) == [set(), set(), {0}, {0}, {0, 1}]
    assert used(result.positions) == [set(), set(), {0}, {0, 1}, set(range(16))]
    assert [step.rows for step in result.steps] == [5, 5, 5, 5]
    assert result.tail_rows_equal == 5
    assert math.isnan(result.recall)
    assert result.overlap == (0 + 1 + 1 / 2) / 3
    source = result.steps[0]
    assert source.blocks == 4 / 5
    assert source.positions == (1 + 2 + 16) / 5
    assert source.share == 3 / 5


def test_rows_that_see_nothing(tmp_path: Path) -> None:
    tensors = random_layer("source", "fp16", 1, 1, 1) | {"positions": torch.tensor([0])}
    result = run_demo(load_trace(saved(tmp_path, tensors, {"compress_ratio": "4"})), device="cpu")
    assert result.context == 0
    assert used(result.positions) == [set()]
    assert math.isnan(result.recall)
    assert math.isnan(result.overlap)


def test_wrong_options() -> None:
    trace = load_trace()
    with pytest.raises(ValueError, match=r"^topk: expected an int of 1 to 16384, got 0$"):
        run_demo(trace, topk=0)
    with pytest.raises(ValueError, match=r"^topk_blocks: expected an int of 1 to 16384, got 0$"):
        run_demo(trace, topk_blocks=0, device="cpu")
    with pytest.raises(ValueError, match=r"^device: expected a torch device, got 'gpu'$"):
        run_demo(trace, device="gpu")
    with pytest.raises(ValueError, match=r"^backend: expected 'auto' or .*, got 'fast'$"):
        run_demo(trace, device="cpu", backend="fast")
    with pytest.raises(BackendUnavailable, match=r"^sm70: (is not in this|needs an NVIDIA GPU)"):
        run_demo(trace, device="cpu", backend="sm70")


@pytest.mark.gpu
def test_on_a_gpu(result: DemoResult) -> None:
    other = run_demo(load_trace(), device="cuda")
    assert other.device.startswith("cuda:")
    assert other.memory_rule == "peak of what torch holds on the GPU, above the step's start"
    assert all(step.peak_bytes > 0 for step in other.steps)
    assert other.recall == pytest.approx(result.recall, abs=0.01)
