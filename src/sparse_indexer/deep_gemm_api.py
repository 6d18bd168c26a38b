# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM (package sgl-deep-gemm) as the `sm100` backend calls it, both generations of its API.

                          0.2.0 to 0.2.4            0.2.5
dense logits              fp4, fp8; float32         fp4; bfloat16, as are the weights
candidate logits          fp4; bfloat16; 32 heads   the same
pages of candidates       a stride of n * 512       of n * 128 bytes
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from sparse_indexer.errors import BackendUnavailable, describe, mismatch
from sparse_indexer.formats import FORMATS, HEAD_DIM, INT32_MAX
from sparse_indexer.index_k import BLOCK_SIZE, FlatIndexK, IndexKPool
from sparse_indexer.inputs import IndexQ, PrefillIndexerInputs

MAX_HEADS = 64
MAX_BLOCKS = 4096  # candidates of a row
MAX_ROWS = 1 << 20  # whose candidates are scored at once
CANDIDATE_HEADS = 32  # that are scored at once

_PACKAGE = "'sgl-deep-gemm>=0.2.0,<0.3'"
INSTALL = f"pip install {_PACKAGE}"
OTHER_TORCH = f"pip install -U torch {_PACKAGE}, as a release is built for one torch"
EMULATED = "Sm100Indexer with deep_gemm=sparse_indexer.testing.DeepGemmEmulator()"
_ANY = 'backend="mask" takes any'
_FP4_BYTES = FORMATS["fp4"].payload_bytes + FORMATS["fp4"].scale_bytes
_FUNCTIONS = (
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_sparse_mqa_logits",
    "get_paged_sparse_mqa_logits_metadata",
)


class Pages(NamedTuple):
    """The shape of a pool, which schedules are for."""

    page_size: int
    num_pages: int


class Queries(NamedTuple):
    """A layer's queries, and what of them is made once: weights of 32 or 64 heads, the rest 0."""

    values: torch.Tensor  # [rows, heads, 64] (fp4) or [rows, heads, 128] (fp8) int8
    scales: torch.Tensor | None  # [rows, heads] int32 (fp4)
    weights: torch.Tensor  # [rows, 32 or 64] as kernels read them, an fp8 scale in them

    def of(self, rows: slice | torch.Tensor | None) -> Queries:
        """Those of `rows`, a slice or `[n]` int32, or of all, with as many heads as weights.

        Kernels read them; values are float8_e4m3fn if fp8. Not copied where they need not be.
        """
        values, scales, weights = self
        if rows is not None:
            values, weights = _some(values, rows), _some(weights, rows)
            scales = None if scales is None else _some(scales, rows)
        rest = weights.shape[1] - values.shape[1]
        if rest:
            values = torch.nn.functional.pad(values, (0, 0, 0, rest))
            scales = None if scales is None else torch.nn.functional.pad(scales, (0, rest))
        values = aligned(values)
        if scales is None:
            return Queries(values.view(torch.float8_e4m3fn), None, weights)
        return Queries(values, aligned(scales), weights)


def _some(tensor: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    return tensor[rows] if isinstance(rows, slice) else torch.index_select(tensor, 0, rows)


def query_bytes(heads: int) -> int:
    """What a row of `Queries` takes: of fp8; of fp4 and once more for 32 of its heads at a time."""
    return heads * (HEAD_DIM + 2 * 4 + 4 + 2)


def padded_heads(heads: int) -> int:
    """The heads of `Queries`."""
    return CANDIDATE_HEADS if heads <= CANDIDATE_HEADS else MAX_HEADS


def queries_of(inputs: PrefillIndexerInputs, dtype: torch.dtype) -> Queries:
    """A layer's queries, with weights of `dtype`, bfloat16 or float32."""
    index_q: IndexQ = inputs.index_q
    scales, weights = index_q.scales, inputs.head_weights
    if scales is not None and index_q.values.dtype != torch.uint8:
        weights, scales = weights * scales, None
    rest = padded_heads(inputs.num_heads) - inputs.num_heads
    if rest:
        weights = torch.nn.functional.pad(weights, (0, rest))
    weights = weights.bfloat16() if dtype == torch.bfloat16 else weights.float()  # `to` is slower
    return Queries(index_q.values.view(torch.int8), scales, aligned(weights))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, at a multiple of 16 bytes, as kernels read it; as a rule it is that already."""
    tensor = tensor.contiguous()
    if 1 in tensor.shape:  # whose stride may be anything, and is checked
        tensor = tensor.flatten().view(tensor.shape)
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def schedule_bytes(rows: int, n: int) -> int:
    """What `DeepGemm.schedule` of n blocks a row takes, at most."""
    return 672 * rows * -(-n // 80) + 16 * 257  # 80 blocks a split; 16 for each of 256 SMs


def _again(module: Any) -> DeepGemm:
    """Of a module by its name, or of an emulator."""
    return DeepGemm(importlib.import_module(module) if isinstance(module, str) else module)


class DeepGemm:
    """One installed version, or an emulator of it: it runs on the current device.

    Args:
        module: `deep_gemm` or what has its functions; `None`: the package is imported.

    Raises:
        ValueError: `deep_gemm` is neither a module nor an object with its functions.
        BackendUnavailable: it is missing, cannot be imported, or is too old.
    """

    def __init__(self, module: Any = None) -> None:
        is_one = isinstance(module, ModuleType) or any(hasattr(module, f) for f in _FUNCTIONS)
        if isinstance(module, type) or not (module is None or is_one):
            want = "the module deep_gemm, an emulator (made, not its class) or None"
            raise mismatch("deep_gemm", want, describe(module))
        if module is None:
            try:
                module = importlib.import_module("deep_gemm")
            except Exception as error:  # of another torch, without a CUDA home, ...
                why = " ".join(f"{type(error).__name__}: {error}".split())
                fix = INSTALL if isinstance(error, ModuleNotFoundError) else OTHER_TORCH
                if isinstance(error, AssertionError):
                    fix = "set CUDA_HOME to a toolkit, which its import looks for"
                raise BackendUnavailable(f"sm100: no DeepGEMM ({why}): {fix}") from error
        self._module = module
        self.version = str(getattr(module, "__version__", "of unknown version"))
        missing = [name for name in _FUNCTIONS if not callable(getattr(module, name, None))]
        if missing:
            has = f"DeepGEMM {self.version} has no {missing[0]}"
            raise BackendUnavailable(f"sm100: {has}: {INSTALL}")
        try:
            parameters = inspect.signature(module.fp8_fp4_mqa_logits).parameters
        except (TypeError, ValueError) as error:
            has = f"DeepGEMM {self.version} does not say what fp8_fp4_mqa_logits takes"
            raise BackendUnavailable(f"sm100: {has}: {INSTALL}") from error
        self._chooses_dtype = "logits_dtype" in parameters
        self.logits_dtype = torch.float32 if self._chooses_dtype else torch.bfloat16
        self.page_alignment = 512 if self._chooses_dtype else 128
        self._pools: WeakKeyDictionary[IndexKPool, tuple[torch.Tensor, Pages]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """What a copy needs: it looks at pools anew."""
        is_module = isinstance(self._module, ModuleType)
        return _again, (self._module.__name__ if is_module else self._module,)

    @property
    def num_sms(self) -> int:
        """SMs that are scheduled for now; a schedule for others traps."""
        get = getattr(self._module, "get_num_sms", None)
        return 0 if get is None else int(get())

    @property
    def reads(self) -> str:
        """What this version scores, in words."""
        keys = "fp4 and fp8 keys" if self._chooses_dtype else "fp4 keys"
        dtype = str(self.logits_dtype).removeprefix("torch.")
        pages = f"candidates in fp4 pages with a stride of n * {self.page_alignment} bytes"
        return f"dense logits of {keys} in {dtype}, {pages}"

    def expect_dense(self, inputs: PrefillIndexerInputs) -> None:
        """`ValueError` unless `dense_logits` takes such keys and queries."""
        form, values = inputs.index_k.format, inputs.index_q.values
        if form not in ("fp4", "fp8"):
            raise mismatch("index_k", f"fp4 or fp8 keys ({_ANY})", f"{form}")
        if form == "fp8" and not self._chooses_dtype:
            others = f"DeepGEMM {self.version} reads no others, 0.2.0 to 0.2.4 read fp8"
            raise mismatch("index_k", f"fp4 keys ({others}, {_ANY})", form)
        dtype = FORMATS[form].values_dtype
        if values.dtype != dtype:
            name = str(dtype).removeprefix("torch.")
            raise mismatch("index_q values", f"{name}, as the keys are {form} ({_ANY})", values)
        if inputs.num_heads > MAX_HEADS:
            most = f"at most {MAX_HEADS} heads ({_ANY})"
            raise mismatch("index_q values", most, f"{inputs.num_heads}")

    def expect_pool(self, inputs: PrefillIndexerInputs) -> tuple[torch.Tensor, Pages]:
        """The pool's keys as `candidate_logits` reads them where they lie; `ValueError` if not.

        A pool is looked at once.
        """
        pool = inputs.index_k
        known = self._pools.get(pool) if isinstance(pool, IndexKPool) else None
        if known is None:
            self.check_pool(pool)
            assert isinstance(pool, IndexKPool)
            size, pages = pool.page_size, pool.num_pages
            stride = pool.pages.stride(0) if pages > 1 else 512 * size  # of one page: of none
            keys = pool.pages.as_strided(
                (pages, size, 1, _FP4_BYTES), (stride, _FP4_BYTES, _FP4_BYTES, 1)
            )
            known = self._pools[pool] = keys, Pages(size, pages)
        if not known[1].num_pages and max(inputs.plan.context_lens, default=0):
            raise mismatch("index_k pages", "at least 1 page", "none")
        return known

    def check_pool(self, pool: IndexKPool | FlatIndexK) -> None:
        """`ValueError` unless `candidate_logits` reads such pages where they lie."""
        if not isinstance(pool, IndexKPool) or pool.format != "fp4":
            keys = {IndexKPool: "a pool of", FlatIndexK: "flat"}.get(type(pool))
            got = describe(pool) if keys is None else f"{keys} {pool.format} keys"
            want = f"a pool of fp4 keys, to select among candidates ({_ANY})"
            raise mismatch("index_k", want, got)
        if pool.layout != "planar":
            want = f"'planar', as DeepGEMM reads pages ({_ANY})"
            raise mismatch("index_k layout", want, repr(pool.layout))
        if pool.num_pages > 1:
            unit, stride = self.page_alignment, pool.pages.stride(0)
            if stride % unit:
                fits = -(-pool.page_size * _FP4_BYTES // unit) * unit
                rule = f"a multiple of {unit} bytes for DeepGEMM {self.version}"
                want = f"{rule}, {fits} for {pool.page_size} positions"
                raise mismatch("index_k page stride", want, f"{stride}")
            if stride > INT32_MAX:
                raise mismatch("index_k page stride", f"at most {INT32_MAX} bytes", f"{stride}")
        if pool.pages.data_ptr() % 16:
            raise mismatch("index_k pages", "at a multiple of 16 bytes", "another address")

    def rounds_alike(self, heads: int) -> bool:
        """Is a dense logit of fp4 keys the candidate's logit, bit for bit?"""
        return not self._chooses_dtype and heads <= CANDIDATE_HEADS

    def logits_bytes(self, width: int) -> int:
        """What a row of `dense_logits` takes; rows are made a multiple of 8."""
        return -(-width // 512) * 512 * self.logits_dtype.itemsize

    def dense_logits(
        self,
        queries: Queries,
        keys: tuple[torch.Tensor, torch.Tensor],
        *,
        starts: torch.Tensor,
        ends: torch.Tensor,
        width: int,
    ) -> torch.Tensor:
        """Logits of the keys `starts[i]` to `ends[i] - 1`.

        Args:
            keys: `[n, 64]` int8 and `[n]` int32 (fp4), or `[n, 128]` float8_e4m3fn and float32.
            queries: with weights of `logits_dtype`.
            starts, ends: `[rows]` int32, apart by at most `width`.

        Returns:
            `[rows, width]` of `logits_dtype`, rows apart by a multiple of 512 elements; whatever
            is there past a row's keys.
        """
        older = {"logits_dtype": self.logits_dtype} if self._chooses_dtype else {}
        logits: torch.Tensor = self._module.fp8_fp4_mqa_logits(
            (queries.values, queries.scales),
            keys,
            queries.weights,
            starts,
            ends,
            max_seqlen_k=width,
            **older,
        )
        return logits

    def schedule(
        self,
        blocks: torch.Tensor,
        *,
        lens: torch.Tensor,
        pairs: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
    ) -> torch.Tensor:
        """How candidates are scored, for `candidate_logits`.

        Args:
            blocks: `[rows, n]` int32, contiguous, n a multiple of 4: ascending block ids.
            lens: `[rows]` int32: `ceil(lens / 8)` blocks of a row are read, at most n.
            pairs: `[rows]` int32: neighbors of equal id, at most two, are scored together.
            page_table: `[rows, pages]` int32, contiguous: that of a pair's first row is read.
        """
        metadata: torch.Tensor = self._module.get_paged_sparse_mqa_logits_metadata(
            lens, page_table, pairs, page_size, blocks, torch.int8, BLOCK_SIZE
        )
        return metadata

    def candidate_logits(
        self, queries: Queries, keys: torch.Tensor, metadata: torch.Tensor, n: int
    ) -> torch.Tensor:
        """Logits of each row's scheduled blocks, `[rows, n * 8]` bfloat16.

        Sums of more than 32 heads are added up in bfloat16.

        Args:
            queries: with weights of bfloat16.
            keys: of `expect_pool`.
        """
        assert queries.scales is not None
        parts = [(queries.values, queries.scales, queries.weights)]
        if queries.weights.shape[1] > CANDIDATE_HEADS:
            rows, heads = queries.weights.shape
            shape = (rows, heads // CANDIDATE_HEADS, CANDIDATE_HEADS)
            values = queries.values.view(*shape, -1).transpose(0, 1).contiguous()
            scales = queries.scales.view(shape).transpose(0, 1).contiguous()
            weights = queries.weights.chunk(shape[1], 1)
            parts = list(zip(values, scales, weights, strict=True))
        total: torch.Tensor | None = None
        for stored, codes, of_heads in parts:
            q = (stored.unsqueeze(1), codes.unsqueeze(1))
            logits: torch.Tensor = self._module.fp8_fp4_paged_sparse_mqa_logits(
                q, keys, of_heads, metadata, n, BLOCK_SIZE
            )
            total = logits if total is None else total.add_(logits)
        assert total is not None
        return total
