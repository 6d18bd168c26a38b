# SPDX-License-Identifier: Apache-2.0
"""Which backend runs where: the only place that asks which GPU this is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch

from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.deep_gemm_api import EMULATED
from sparse_indexer.devices import resolve_device
from sparse_indexer.errors import BackendUnavailable, describe, mismatch
from sparse_indexer.jit.hints import VOLTA_TORCH
from sparse_indexer.jit.kernel import Kernel
from sparse_indexer.jit.targets import takes
from sparse_indexer.protocol import CandidateIndexer

_log = logging.getLogger("sparse_indexer")


class BackendSpec(NamedTuple):
    """One row of the support matrix."""

    capabilities: str  # compute capabilities it is for, in words
    runs_on: Callable[[tuple[int, int]], bool]  # (major, minor) -> is it for this GPU
    make: Callable[..., CandidateIndexer] | None  # None: not in this release
    kernels: Callable[[], Sequence[Kernel]] = tuple  # what it builds when it is made


def _sm90(device: torch.device, **options: int) -> CandidateIndexer:
    from sparse_indexer.backends.sm90 import Sm90Indexer  # not before there is a GPU for it

    return Sm90Indexer(device, **options)


def _sm100(device: torch.device, **options: int) -> CandidateIndexer:
    from sparse_indexer.backends.sm100 import Sm100Indexer

    return Sm100Indexer(device, **options)


def _sm70(
    device: torch.device, *, topk: int, topk_blocks: int, memory_budget: int
) -> CandidateIndexer:
    from sparse_indexer.backends.sm70 import Sm70Indexer  # likewise

    return Sm70Indexer(device, topk=topk, topk_blocks=topk_blocks, memory_budget=memory_budget)


def _sm90_kernels() -> Sequence[Kernel]:
    from sparse_indexer.backends.sm90 import Sm90Indexer

    return Sm90Indexer.own_kernels()


def _sm100_kernels() -> Sequence[Kernel]:
    from sparse_indexer.row_ops import KERNELS

    return KERNELS


def _sm70_kernels() -> Sequence[Kernel]:
    from sparse_indexer.backends.gemm_indexer import GemmIndexer
    from sparse_indexer.backends.sm70 import FusedIndexer

    return [*FusedIndexer.own_kernels(), *GemmIndexer.own_kernels()]


BACKENDS: dict[str, BackendSpec] = {
    "sm100": BackendSpec("10.x", lambda cc: cc[0] == 10, _sm100, _sm100_kernels),
    "sm90": BackendSpec("9.0", lambda cc: cc[0] == 9, _sm90, _sm90_kernels),
    "sm80": BackendSpec("8.x, 10.x, 12.x", lambda cc: cc[0] in (8, 10, 12), None),
    "sm70": BackendSpec("7.0, 7.5", lambda cc: cc in ((7, 0), (7, 5)), _sm70, _sm70_kernels),
    "mask": BackendSpec("any, CPU too", lambda cc: True, MaskIndexer),
}
"""By name, in the order in which `auto` tries them."""


def make_candidate_indexer(
    device: torch.device | str,
    *,
    topk: int = 512,
    topk_blocks: int = 2048,
    memory_budget: int = 256 << 20,
    backend: str = "auto",
) -> CandidateIndexer:
    """Make the indexer for the tensors of one device.

    Args:
        device: the device of the tensors, `"cuda"` meaning the current one.
        topk: positions a row selects.
        topk_blocks: blocks of 8 positions a row publishes.
        memory_budget: bytes of scratch, at most.
        backend: a name of the support matrix, or `"auto"`: the fastest one that can run there.
            What `auto` chose is logged once per device, at level INFO of `sparse_indexer`, and at
            WARNING a backend for this GPU that cannot be made: its kernels cannot be built, or
            `sm100` has no DeepGEMM. It does not know the keys: `sm100` refuses fp8 ones when they
            are published (before DeepGEMM 0.2.5: selected from); `backend="mask"` takes them.

    Raises:
        ValueError: an unknown backend or device, or an option out of the backend's range.
        BackendUnavailable: the named backend cannot run there, or this torch can run nothing
            there; the message says why and what to do.
    """
    if backend not in ("auto", *BACKENDS):
        raise mismatch("backend", " or ".join(map(repr, ("auto", *BACKENDS))), describe(backend))
    where = resolve_device(device)
    lacking = why_not_torch(where)
    if lacking:
        raise BackendUnavailable(lacking)
    options = {"topk": topk, "topk_blocks": topk_blocks, "memory_budget": memory_budget}
    for name in BACKENDS if backend == "auto" else (backend,):
        reason = why_not(name, where)
        make = BACKENDS[name].make
        if reason is None and make is not None:
            try:
                indexer = make(where, **options)
            except BackendUnavailable as error:
                if backend != "auto":
                    raise
                _log_failure(str(error))
                continue
            if backend == "auto":
                _log_choice(name, str(where))
            return indexer
        if backend != "auto":
            if make is not None and (name, where.type) == ("sm100", "cpu"):
                reason = f"{reason}, or {EMULATED}"
            raise BackendUnavailable(f"{name}: {reason}")
    raise AssertionError("mask runs everywhere")


def why_not(name: str, device: torch.device) -> str | None:
    """Why backend `name` cannot run on `device`, with the fix; `None` if it can."""
    spec = BACKENDS[name]
    if name == "mask":
        return None
    if spec.make is None:
        return "is not in this release: use backend='mask'"
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, the device is {device}: use backend='mask'"
    capability = torch.cuda.get_device_capability(device)
    if not spec.runs_on(capability):
        have = f"{device} has {capability[0]}.{capability[1]}"
        return f"is for compute capability {spec.capabilities}, {have}: use backend='auto'"
    return None


def why_not_torch(device: torch.device) -> str | None:
    """Why this build of torch can run nothing on a GPU, with the fix; `None` if it can."""
    if device.type != "cuda":
        return None
    code = [name for name in torch.cuda.get_arch_list() if name.startswith(("sm_", "compute_"))]
    capability = torch.cuda.get_device_capability(device)
    if not code or takes(capability, code):  # without code of CUDA's it is not for us to say
        return None
    have = f"{device}, of compute capability {capability[0]}.{capability[1]}"
    fix = "pip install -U torch"
    if capability < (7, 5):
        fix = "take one built for CUDA 12.6"
        if capability >= (7, 0):
            fix = f"pip install {VOLTA_TORCH}, or {fix}"
    return f"torch {torch.__version__} has no code for {have}, only {', '.join(code)}: {fix}"


@cache
def _log_failure(reason: str) -> None:
    _log.warning("backend %s", reason)


@cache
def _log_choice(name: str, device: str) -> None:
    _log.info("backend %s on %s", name, device)
