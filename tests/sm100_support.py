# SPDX-License-Identifier: Apache-2.0
"""The sm100 backend, its DeepGEMM emulated, what that was called with, and what is expected."""

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch

from sparse_indexer import Candidates, PrefillIndexerInputs
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.backends.sm100 import Sm100Indexer
from sparse_indexer.dense_tiles import dense_tiles
from sparse_indexer.protocol import CandidateIndexer
from sparse_indexer.testing import (
    block_values,
    dictated,
    make_inputs,
    near_floor_problem,
    random_keys,
    random_queries,
    with_queries,
)
from sparse_indexer.testing.check import Report, check_backend
from sparse_indexer.testing.deep_gemm import DeepGemmEmulator, OlderDeepGemmEmulator

COPIES = pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda of: pickle.loads(pickle.dumps(of))], ids=["copy", "pickle"]
)
EMULATORS = {"0.2.5": DeepGemmEmulator, "older": OlderDeepGemmEmulator}
POISON = 7

# Requests without rows, rows that see nothing, below and above 8 * 24 blocks, ends within blocks
# and pages, an odd number of rows beside an even one.
LENS = [[], [700, 701, 702, 191, 192], [0, 0], [193, 65, 64, 63], [1], [], [0, 640, 200]]


def sm100(version: str, device: str = "cpu", **options: Any) -> Sm100Indexer:
    options = {"topk": 16, "topk_blocks": 24, "deep_gemm": EMULATORS[version](), **options}
    return Sm100Indexer(device, **options)


def mask(device: str = "cpu", **options: Any) -> MaskIndexer:
    return MaskIndexer(device, **{"topk": 16, "topk_blocks": 24, **options})


class Layers(NamedTuple):
    """A source, and a consumer with other queries over the same keys."""

    source: PrefillIndexerInputs
    consumer: PrefillIndexerInputs


def exact_layers(
    lens: Sequence[Sequence[int]] = LENS,
    *,
    heads: int = 32,
    request_of_row: Sequence[int] | None = None,
    request_starts: Sequence[int] | None = None,
    page_size: int = 64,
    seed: int = 5,
    device: str = "cpu",
) -> Layers:
    """Logits are integers below 256: exact in bfloat16, many ties. At most 32 rows."""
    rows = [n for request in lens for n in request]
    width = max(rows)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (len(rows), width), generator=generator)
    queries, weights, keys = dictated(values.tolist(), "fp4", shift=0, heads=heads, device=device)
    if request_of_row is not None:
        left = [list(request) for request in lens]
        rows = [left[request].pop(0) for request in request_of_row]
    source = make_inputs(
        queries,
        weights,
        [keys for _ in lens],
        [n - 1 for n in rows],
        [len(request) for request in lens],
        page_size=page_size,
        request_of_row=request_of_row,
        request_starts=request_starts,
    )
    flipped = type(queries)(queries.values.flip(0), queries.scales.flip(0))
    return Layers(source, with_queries(source, flipped, weights.flip(0)))


def random_layers(lens: Sequence[Sequence[int]], *, heads: int = 32, device: str = "cpu") -> Layers:
    rows = [n for request in lens for n in request]
    keys = [
        random_keys(max(request, default=0), "fp4", seed=i, device=device)
        for i, request in enumerate(lens)
    ]
    first, second = (
        random_queries(len(rows), heads, "fp4", seed=seed, device=device) for seed in (90, 91)
    )
    counts = [len(request) for request in lens]
    source = make_inputs(*first, keys, [n - 1 for n in rows], counts)
    return Layers(source, with_queries(source, *second))


class Results(NamedTuple):
    candidates: Candidates
    blocks: torch.Tensor
    own: torch.Tensor
    selected: torch.Tensor
    full: torch.Tensor


def run(
    indexer: CandidateIndexer, source: PrefillIndexerInputs, consumer: PrefillIndexerInputs
) -> Results:
    shape = (source.plan.num_rows, indexer.topk)
    own, selected, full = (
        torch.full(shape, POISON, dtype=torch.int32, device=indexer.device) for _ in range(3)
    )
    candidates = indexer.publish_prefill(source, own)
    indexer.select_prefill(candidates, consumer, selected)
    indexer.topk_prefill(consumer, full)
    return Results(candidates, candidates.blocks, own, selected, full)


def same(a: Results, b: Results) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a[1:], b[1:], strict=True))


def expect_agreement(
    indexer: Sm100Indexer, oracle: MaskIndexer, source: PrefillIndexerInputs, consumer: Any
) -> tuple[Results, Results]:
    """On 95 % of positions and blocks; what differs is within 2^-5 of the floor of a selection."""
    got, want = run(indexer, source, consumer), run(oracle, source, consumer)
    selected = torch.full_like(want.selected, POISON)
    oracle.select_prefill(got.candidates, consumer, selected)
    logits = {layer: oracle.dense_logits(layer) for layer in (source, consumer)}
    newest = (source.plan.compressed_lens.long() - 1) // 8
    keys = block_values(logits[source])
    keys[torch.arange(len(keys), device=keys.device), newest] = torch.inf
    pairs = {
        "blocks": (got.blocks, want.blocks, keys),
        "own": (got.own, want.own, logits[source]),
        "selected": (got.selected, selected, logits[consumer]),
        "full": (got.full, want.full, logits[consumer]),
    }
    for name, tensors in pairs.items():
        have, need, values = (tensor.cpu() for tensor in tensors)
        rows = zip(have.tolist(), need.tolist(), strict=True)
        assert sum(len(set(a) & set(b)) for a, b in rows) >= 0.95 * need.numel(), name
        floor = values.gather(1, need.long()).amin(1).abs()
        assert near_floor_problem(have, need, values, floor * 2**-5) is None, name
    return got, want


def check_within_tolerance(indexer: Sm100Indexer, heads: int, page_sizes: Sequence[int]) -> Report:
    """The conformance kit, in the formats and pages that consumers read, logits rounded."""
    alike = indexer._deep_gemm.rounds_alike(heads)
    return check_backend(
        indexer,
        formats=["fp4"],
        layouts=["planar"],
        heads=[heads],
        page_sizes=page_sizes,
        tolerance=2**-6,
        exact_cases=False,
        own_logits=(lambda inputs: _own_logits(indexer, inputs)) if alike else None,
    )


def _own_logits(indexer: Sm100Indexer, inputs: PrefillIndexerInputs) -> torch.Tensor:
    shape = (inputs.plan.num_rows, max(inputs.plan.context_lens, default=0))
    out = torch.full(shape, torch.nan, device=indexer.device)
    api = indexer._deep_gemm
    for tile in dense_tiles(api, inputs, needed_beyond=0, budget=indexer.memory_budget):
        every = torch.arange(len(out), device=indexer.device)
        rows = tile.of(every) if tile.rows is None else tile.rows.long()
        columns = min(tile.width, shape[1])
        out[rows, :columns] = tile.logits()[:, :columns].float()
    return out


class Spy:
    """Stands before an emulator: what was called, and how many bytes were `held` at most."""

    def __init__(self, version: str) -> None:
        emulator = EMULATORS[version]()
        self.calls: list[tuple[str, Any]] = []  # (function, its result's rows or arguments)
        self.most = 0
        self.schedules: list[ref[torch.Tensor]] = []
        self.most_schedules = 0  # that were alive at once
        self._alive: dict[int, ref[torch.Tensor]] = {}
        for name in ("fp8_fp4_mqa_logits", "fp8_fp4_paged_sparse_mqa_logits"):
            setattr(self, name, self._keeping(name, getattr(emulator, name)))
        self._schedule = emulator.get_paged_sparse_mqa_logits_metadata

    def of(self, name: str) -> list[Any]:
        return [seen for called, seen in self.calls if called == name]

    def held(self) -> int:
        """Bytes of the queries, gathered keys and logits that are alive."""
        tensors = {key: held() for key, held in self._alive.items()}
        self._alive = {key: ref(t) for key, t in tensors.items() if t is not None}
        return sum(len(t) * t.stride(0) * t.itemsize for t in tensors.values() if t is not None)

    def get_paged_sparse_mqa_logits_metadata(self, *arguments: Any) -> torch.Tensor:
        self.calls.append(("schedule", arguments))
        metadata = self._schedule(*arguments)
        self.schedules.append(ref(metadata))
        alive = sum(held() is not None for held in self.schedules)
        self.most_schedules = max(self.most_schedules, alive)
        return metadata

    def _keeping(self, name: str, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(call)  # its signature, too
        def kept(*arguments: Any, **options: Any) -> torch.Tensor:
            logits = call(*arguments, **options)
            keys = arguments[1] if name == "fp8_fp4_mqa_logits" else ()
            for tensor in (logits, *arguments[0], *keys):
                self._alive.setdefault(id(tensor), ref(tensor))
            self.most = max(self.most, self.held())
            self.calls.append((name, len(logits)))
            return logits

        return kept
