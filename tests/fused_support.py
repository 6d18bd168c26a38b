# SPDX-License-Identifier: Apache-2.0
"""What the tests of the kernels for Volta and Turing share: their machine code, operands, calls."""

import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sparse_indexer import FlatIndexK, IndexQ, PrefillIndexerInputs
from sparse_indexer.errors import JitError
from sparse_indexer.formats import INT32_MAX, KeyFormat
from sparse_indexer.inputs import BLOCK_SIZE, flat_index_k
from sparse_indexer.jit import Kernel
from sparse_indexer.jit.artifacts import device_artifact, host_artifact
from sparse_indexer.jit.targets import parse_arch
from sparse_indexer.ops import fused_block_keys, fused_candidate_logits, fused_logits
from sparse_indexer.ops.candidate_quads import candidate_quads
from sparse_indexer.ops.index_k import index_k
from sparse_indexer.ops.index_q import index_q
from sparse_indexer.quads import Quads, make_quads
from sparse_indexer.testing import make_inputs

DEVICE = torch.device("cuda:0")
POISON = 7.0
KERNELS = (fused_logits.KERNEL, fused_block_keys.KERNEL, fused_candidate_logits.KERNEL)
CODES = ("own", "compute_75", "compute_70")
"""What runs: the GPU's own machine code, or PTX for Turing or Volta, compiled by the driver."""


@functools.cache
def ptx_module(kernel: Kernel, target: str) -> Any:
    """A host module of its own that has loaded `kernel` as PTX."""
    import tvm_ffi

    capability, _ = parse_arch(target, (12, 9))
    stored = None
    with pytest.MonkeyPatch.context() as patch:
        for mode in ("cached", "auto"):  # of any compiler, else of the one that is here
            patch.setenv("SPARSE_INDEXER_JIT", mode)
            try:
                stored = stored or device_artifact(kernel, capability, target)
            except JitError as error:
                missing = str(error)
    if stored is None:
        pytest.skip(f"python -m sparse_indexer compile --arch {target}: {missing}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, f"{kernel.name}.so")  # a module holds one set of kernels a device
        copy.write_bytes(host_artifact(kernel).data)
        module = tvm_ffi.load_module(copy)
    module.load(kernel.name, DEVICE.index, stored.data + b"\0", list(kernel.variants))
    return module


def use_code(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ops run this code until the test ends."""
    if code != "own":
        for kernel in KERNELS:
            monkeypatch.setitem(kernel.loaded, DEVICE, ptx_module(kernel, code))


def beyond_halves(form: KeyFormat, heads: int) -> tuple[PrefillIndexerInputs, torch.Tensor]:
    """8 rows over 300 positions, and the scores `[8, heads, 300]` of heads, most with weight 0.

    Scores are integers beyond 2^11, exact in float32: rounded to float16 they are others.
    """
    generator = torch.Generator(DEVICE).manual_seed(6)

    def pick(choices: list[int], *shape: int) -> torch.Tensor:
        index = torch.randint(len(choices), shape, device=DEVICE, generator=generator)
        return torch.tensor(choices, device=DEVICE, dtype=torch.float32)[index]

    queries = pick([0, 13, -15, 11, -9, 14], 8, heads, 128)
    keys = pick([0, 1, -1, 13, -15, 14, 9], 300, 128)
    weights = torch.zeros(8, heads, device=DEVICE)
    weights[:, ::10] = pick([1, -2, 1], 8, len(range(0, heads, 10)))
    if form == "fp8":
        codes, ones = torch.float8_e4m3fn, torch.ones(300, device=DEVICE)
        index_q, index_k = IndexQ(queries.to(codes)), FlatIndexK(keys.to(codes), ones, "fp8")
    else:
        index_k = flat_index_k(keys, form)
        index_q = IndexQ(queries.to(index_k.values.dtype))
    inputs = make_inputs(index_q, weights, [index_k], [299] * 8, [8])
    return inputs, queries @ keys.t()


class Packed(NamedTuple):
    """What the ops read, of all rows of a plan."""

    keys: torch.Tensor
    queries: torch.Tensor
    weights: torch.Tensor
    quads: Quads

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        return {
            "keys": self.keys,
            "queries": self.queries,
            "weights": self.weights,
            "quad_first": self.quads.first,
        }


def pack(inputs: PrefillIndexerInputs) -> Packed:
    """e4m3 where queries and keys are fp8 or fp4, else float16. What holds no key is NaN."""
    plan, quads = inputs.plan, make_quads(inputs.plan)
    codes = {torch.uint8, torch.float8_e4m3fn}
    small = inputs.index_q.values.dtype in codes and inputs.index_k.format in ("fp4", "fp8")
    element, width = (torch.uint8, 1152) if small else (torch.float16, 1088)
    heads = 32 if inputs.num_heads <= 32 else 64
    blocks = sum(request.blocks for request in quads.requests)
    keys = torch.full((blocks * width * element.itemsize,), 0xFF, dtype=torch.uint8, device=DEVICE)
    keys = keys.view(element).view(blocks, width)
    where = plan.page_table if plan.page_table is not None else plan.key_starts
    index_k(
        inputs.index_k,
        where,
        lens=quads.request_lens,
        max_len=quads.max_blocks * BLOCK_SIZE,
        out_starts=quads.request_first,
        out_values=keys,
    )
    queries = torch.empty(len(quads.rows), 4 * heads, 128, dtype=element, device=DEVICE)
    weights = torch.empty(len(quads.rows), 4, heads, device=DEVICE)
    index_q(
        inputs.index_q,
        inputs.head_weights.contiguous(),
        rows=quads.rows,
        out_values=queries,
        out_weights=weights,
    )
    return Packed(keys, queries, weights, quads)


def poisoned(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An output within a larger tensor, and that one."""
    storage = torch.full((rows, columns + 5), POISON, device=DEVICE)
    return storage[:, :columns], storage


def by_row(packed: Packed, storage: torch.Tensor) -> torch.Tensor:
    """Rows in the plan's order; slots without a row and what is beyond the output are untouched."""
    assert (storage[:, -5:] == POISON).all()
    unused = packed.quads.rows.view(-1) < 0
    assert (storage[unused] == POISON).all()
    return storage[packed.quads.slots.long(), :-5]


def logits_of(packed: Packed, columns: int, **options: bool) -> torch.Tensor:
    out, storage = poisoned(packed.quads.rows.numel(), columns)
    lens = packed.quads.slot_lens
    fused_logits.fused_logits(**packed.operands, slot_lens=lens, out=out, **options)
    return by_row(packed, storage)


def block_keys_of(packed: Packed, columns: int, **options: bool) -> torch.Tensor:
    out, storage = poisoned(packed.quads.rows.numel(), columns)
    lens = packed.quads.slot_lens
    fused_block_keys.fused_block_keys(**packed.operands, slot_lens=lens, out=out, **options)
    return by_row(packed, storage)


def candidate_logits_of(
    packed: Packed, blocks: torch.Tensor, columns: int, **options: bool
) -> torch.Tensor:
    """`blocks` `[rows, n]` int32, ascending, then INT32_MAX."""
    quads, n = packed.quads, blocks.shape[1]
    count, width = len(quads.rows), max(min(4 * n, quads.max_blocks), 1)
    of_slots = torch.full((count * 4, n), INT32_MAX, dtype=torch.int32, device=DEVICE)
    of_slots[quads.slots.long()] = blocks
    entries = torch.empty(count, width, dtype=torch.int32, device=DEVICE)
    ranks = torch.empty(count, -(-width // 32), 4, dtype=torch.int16, device=DEVICE)
    counts = torch.empty(count, 2, dtype=torch.int32, device=DEVICE)
    candidate_quads(
        of_slots.view(count, 4, n),
        max_blocks=quads.max_blocks,
        out_entries=entries,
        out_ranks=ranks,
        out_counts=counts,
    )
    out, storage = poisoned(count * 4, columns)
    fused_candidate_logits.fused_candidate_logits(
        **packed.operands, entries=entries, ranks=ranks, counts=counts, out=out, **options
    )
    return by_row(packed, storage)
