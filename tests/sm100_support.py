# SPDX-License-Identifier: Apache-2.0
"""The sm100 backend on a CPU, its DeepGEMM emulated, and what that was called with."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple
from weakref import ref

import torch

from sparse_indexer import Candidates, PrefillIndexerInputs
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.backends.sm100 import Sm100Indexer
from sparse_indexer.protocol import CandidateIndexer
from sparse_indexer.testing import (
    dictated,
    make_inputs,
    random_keys,
    random_queries,
    with_queries,
)
from sparse_indexer.testing.deep_gemm import DeepGemmEmulator, OlderDeepGemmEmulator

EMULATORS = {"0.2.5": DeepGemmEmulator, "older": OlderDeepGemmEmulator}
POISON = 7

# Requests without rows, rows that see nothing, below and above 8 * 24 blocks, ends within blocks
# and pages, an odd number of rows beside an even one.
LENS = [[], [700, 701, 702, 191, 192], [0, 0], [193, 65, 64, 63], [1], [], [0, 640, 200]]


def sm100(version: str, **options: Any) -> Sm100Indexer:
    options = {"topk": 16, "topk_blocks": 24, **options}
    return Sm100Indexer("cpu", deep_gemm=EMULATORS[version](), **options)


def mask(**options: Any) -> MaskIndexer:
    return MaskIndexer("cpu", **{"topk": 16, "topk_blocks": 24, **options})


def exact_layers(
    lens: Sequence[Sequence[int]] = LENS,
    *,
    heads: int = 32,
    request_of_row: Sequence[int] | None = None,
    request_starts: Sequence[int] | None = None,
    page_size: int = 64,
) -> tuple[PrefillIndexerInputs, PrefillIndexerInputs]:
    """A source and a consumer whose logits are integers below 256: exact in bfloat16, many ties."""
    rows = [n for request in lens for n in request]
    width = max(rows)
    generator = torch.Generator().manual_seed(5)
    values = torch.randint(0, 256, (len(rows), width), generator=generator)
    queries, weights, keys = dictated(values.tolist(), "fp4", shift=0, heads=heads)
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
    return source, with_queries(source, flipped, weights.flip(0))


def random_layers(
    lens: Sequence[Sequence[int]], *, heads: int = 32
) -> tuple[PrefillIndexerInputs, PrefillIndexerInputs]:
    rows = [n for request in lens for n in request]
    keys = [random_keys(max(request, default=0), "fp4", seed=i) for i, request in enumerate(lens)]
    queries, weights = random_queries(len(rows), heads, "fp4", seed=90)
    counts = [len(request) for request in lens]
    source = make_inputs(queries, weights, keys, [n - 1 for n in rows], counts)
    return source, with_queries(source, *random_queries(len(rows), heads, "fp4", seed=91))


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
    own, selected, full = (torch.full(shape, POISON, dtype=torch.int32) for _ in range(3))
    candidates = indexer.publish_prefill(source, own)
    indexer.select_prefill(candidates, consumer, selected)
    indexer.topk_prefill(consumer, full)
    return Results(candidates, candidates.blocks, own, selected, full)


def same(a: Results, b: Results) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a[1:], b[1:], strict=True))


class Spy:
    """Stands before an emulator: what was called, and how many bytes were `held` at most."""

    def __init__(self, version: str) -> None:
        emulator = EMULATORS[version]()
        self.calls: list[tuple[str, Any]] = []  # (function, its result's rows or arguments)
        self.most = 0
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
        return self._schedule(*arguments)

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
