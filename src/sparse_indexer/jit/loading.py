# SPDX-License-Identifier: Apache-2.0
"""A kernel in memory: built if needed, loaded on a device, called with torch tensors."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sparse_indexer.devices import forbids_loading, resolve_device
from sparse_indexer.errors import JitError, describe, mismatch
from sparse_indexer.jit.artifacts import device_artifact, host_artifact
from sparse_indexer.jit.cache import Stored
from sparse_indexer.jit.driver import driver_version
from sparse_indexer.jit.hints import NEWER_CPP_LIBRARY
from sparse_indexer.jit.kernel import Kernel, all_kernels, expect_kernels
from sparse_indexer.jit.parallel import max_jobs
from sparse_indexer.jit.places import workspace
from sparse_indexer.jit.settings import setting

if TYPE_CHECKING:
    import tvm_ffi

_loading = threading.Lock()
_HOST = torch.device("cpu")


def load(kernel: Kernel, device: torch.device) -> tvm_ffi.Module:
    """The host entries of `kernel`, ready for tensors of `device`, which has its index.

    The first call for a device builds and loads, any other is one look-up without a lock. The
    entries take torch tensors and numbers, launch on torch's current stream of the tensors' device,
    and leave the current device alone. For the CPU they are there to refuse its tensors by name.

    Raises:
        ValueError: an argument is none of these, or torch cannot use the device.
        JitError: it cannot be built or loaded, or a CUDA graph is being captured; see `warmup`.
    """
    good = isinstance(kernel, Kernel) and isinstance(device, torch.device)
    return (kernel.loaded.get(device) if good else None) or _load(kernel, device)


def warmup(device: torch.device | str, kernels: Sequence[Kernel] | None = None) -> None:
    """Build and load `kernels`, or all that are for this GPU, so that no later call has to.

    Call it before a CUDA graph is captured, and where a first call must not take seconds.

    Raises:
        ValueError: `device` is no GPU that torch can use, or `kernels` no kernels.
        JitError: one cannot be built or loaded.
    """
    if not torch.cuda.device_count():
        raise mismatch("device", "an NVIDIA GPU that torch can use", str(device))
    where = resolve_device(device)
    if where.type != "cuda":
        raise mismatch("device", "a CUDA device", str(where))
    if kernels is None:
        capability = torch.cuda.get_device_capability(where)
        kernels = [kernel for kernel in all_kernels().values() if kernel.is_for(capability)]
    kernels = expect_kernels(kernels)
    wanted = [(kernel, _capability(kernel, where)) for kernel in kernels]
    with ThreadPoolExecutor(max_jobs()) as pool:
        tasks = [pool.submit(host_artifact, kernel) for kernel in kernels]
        tasks += [pool.submit(device_artifact, *kernel_for) for kernel_for in wanted]
        try:
            for task in tasks:
                task.result()
        except BaseException:  # Ctrl-C, or a failure that the other kernels would only delay
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for kernel in kernels:
        load(kernel, where)


def _load(kernel: Kernel, device: torch.device) -> tvm_ffi.Module:
    if not isinstance(kernel, Kernel):
        raise mismatch("kernel", "a Kernel", describe(kernel))
    device = resolve_device(device)
    if device.type not in ("cuda", "cpu"):
        raise mismatch("device", "a CUDA device or the CPU", str(device))
    setting("SPARSE_INDEXER_SYNC")  # which the module reads
    _refuse_capture(kernel, device)
    with _loading:
        if device in kernel.loaded:
            return kernel.loaded[device]
        with ThreadPoolExecutor(1) as pool:
            host = None if _HOST in kernel.loaded else pool.submit(host_artifact, kernel)
            cubin = None
            if device.type == "cuda":
                cubin = device_artifact(kernel, _capability(kernel, device))
            if host:
                kernel.loaded[_HOST] = _open(kernel, host.result())
        module = kernel.loaded[_HOST]
        if cubin:
            try:
                module.load(kernel.name, device.index, cubin.data, list(kernel.variants))
            except RuntimeError as error:
                raise JitError(f"cannot load {error}{_driver_hint(cubin)}") from error
        kernel.loaded[device] = module
        return module


def _capability(kernel: Kernel, device: torch.device) -> tuple[int, int]:
    capability = torch.cuda.get_device_capability(device)
    if not kernel.is_for(capability):
        first, last = (f"{number // 10}.{number % 10}" for number in kernel.capabilities)
        wanted = first if first == last else f"{first} to {last}"
        have = f"{device} has {capability[0]}.{capability[1]}"
        raise JitError(f"{kernel.name} is for compute capability {wanted}, {have}")
    return capability


def _refuse_capture(kernel: Kernel, device: torch.device) -> None:
    if device.type == "cuda" and forbids_loading(device):
        raise JitError(
            f"{kernel.name} is not loaded on {device}, and a CUDA graph is being captured\n"
            f"  hint: call sparse_indexer.jit.warmup({str(device)!r}) before the capture"
        )


def _driver_hint(cubin: Stored) -> str:
    driver, built_by = driver_version(), str(cubin.meta.get("built_by", ""))
    made = re.search(r"(\d+)\.(\d+)$", built_by)
    if driver is None or made is None or driver >= (int(made[1]), int(made[2])):
        return ""
    have = f"{driver[0]}.{driver[1]}"
    package = "nvidia-cuda-nvrtc-cu12" if driver[0] == 12 else "nvidia-cuda-nvrtc"
    return (
        f"\n  hint: this driver is for CUDA up to {have}, and {built_by} compiled the kernel: "
        f"update the driver, or take its compiler, pip install '{package}=={have}.*'"
    )


def _open(kernel: Kernel, stored: Stored) -> tvm_ffi.Module:
    """The module of a shared library, which exports `load` and something to call."""
    module = _open_library(kernel, stored)
    exported = set(re.findall(rb"\0__tvm_ffi_(\w+)", stored.data))
    if not exported > {b"load"}:
        macro = f"EXPORT({kernel.name})" if b"load" in exported else "MODULE()"
        raise JitError(
            f"cannot load the host entry of {kernel.name}: it exports nothing to call or to load\n"
            f"  hint: add SPARSE_INDEXER_{macro}; at the end of {kernel.host_source}"
        )
    return module


def _open_library(kernel: Kernel, stored: Stored) -> tvm_ffi.Module:
    """From its place in the cache or from a copy."""
    import tvm_ffi

    if stored.path:
        try:
            return tvm_ffi.load_module(stored.path)
        except (RuntimeError, OSError):  # replaced by now, or on a file system mounted noexec
            pass
    with workspace() as place:
        path = Path(place.staging, f"{kernel.name}.so")
        path.write_bytes(stored.data)
        try:
            return tvm_ffi.load_module(path)
        except (RuntimeError, OSError) as error:
            hint = f"\n  hint: {NEWER_CPP_LIBRARY}" if "GLIBCXX" in str(error) else ""
            title = f"cannot load the host entry of {kernel.name}"
            raise JitError(f"{title}: {error}{hint}") from error
