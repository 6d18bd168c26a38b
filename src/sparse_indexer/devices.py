# SPDX-License-Identifier: Apache-2.0
"""A device as tensors name it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from sparse_indexer.errors import describe, mismatch


def resolve_device(device: torch.device | str) -> torch.device:
    """The device with its index, `"cuda"` meaning the current one; the CPU without.

    Raises:
        ValueError: no device, or one that torch cannot use.
    """
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise mismatch("device", "a torch device", describe(device)) from error
    if where.type == "cpu":
        if where.index:
            raise mismatch("device", "the one CPU, 'cpu'", str(where))
        return torch.device("cpu")
    if where.type != "cuda":
        try:
            torch.empty(0, device=where)
        except (AssertionError, ImportError, RuntimeError) as error:  # as kinds of device say no
            raise mismatch("device", "a device that torch can use", str(where)) from error
        return where
    count = torch.cuda.device_count()
    if not count:
        raise mismatch("device", "an NVIDIA GPU that torch can use, or 'cpu'", str(where))
    index = torch.cuda.current_device() if where.index is None else where.index
    if index >= count:
        raise mismatch("device", f"cuda:0 to cuda:{count - 1}", str(where))
    return torch.device("cuda", index)


_AS_IT_IS = contextlib.nullcontext()


def current(device: torch.device) -> AbstractContextManager[None]:
    """A block in which a GPU is the current one; nothing is done if it is that, or for a CPU."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _AS_IT_IS
    return torch.cuda.device(device)


def is_captured(device: torch.device) -> bool:
    """Is the current stream of a GPU, whichever is the current one, being captured?"""
    with current(device):
        return torch.cuda.is_current_stream_capturing()


def forbids_loading(device: torch.device) -> bool:
    """Is there a capture, on the current stream of a GPU or of the current one, that it would end?

    What is refused while a stream is captured is refused for all GPUs of the process.
    """
    return torch.cuda.is_current_stream_capturing() or is_captured(device)


def no_autocast(device: torch.device) -> torch.autocast:
    """A block in which matmuls multiply what they are given, whatever `torch.autocast` is set."""
    return torch.autocast(device.type, enabled=False)
