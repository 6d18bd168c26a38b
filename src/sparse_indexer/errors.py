# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, in the caller's words: argument, expected, got."""

from __future__ import annotations

from types import EllipsisType

import torch


class BackendUnavailable(RuntimeError):
    """A backend cannot run here; the message says what is missing and the command that fixes it."""


class JitError(RuntimeError):
    """A kernel could not be built or loaded: the compiler's error, its command and log, the fix."""


def describe(value: object) -> str:
    """How a value is written in a message: tensors by shape, dtype and device."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{list(value.shape)} {dtype} on {value.device}"
    if isinstance(value, (str, int, float, bool, type(None))):
        return repr(value)
    return f"a {type(value).__name__}"


def mismatch(argument: str, expected: str, got: object) -> ValueError:
    """The one form of a caller's mistake: `argument: expected ..., got ...`.

    `got` is described by `describe` unless it is already a `str`.
    """
    return ValueError(f"{argument}: expected {expected}, got {_text(got)}")


def _text(got: object) -> str:
    return got if isinstance(got, str) else describe(got)


Shape = tuple["int | str | EllipsisType", ...]


def expect_tensor(
    argument: str,
    tensor: object,
    shape: Shape,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> torch.Tensor:
    """`tensor` if it has this shape, dtype and device and a contiguous last dimension.

    In `shape` a `str` is a free size, by name, and a leading `...` is any leading dimensions.

    Raises:
        ValueError: it has not.
    """
    names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    sizes = ", ".join("..." if s is ... else str(s) for s in shape)
    expected = f"[{sizes}] {names}" + (f" on {device}" if device is not None else "")
    if (
        not isinstance(tensor, torch.Tensor)
        or not _shape_fits(tuple(tensor.shape), shape)
        or tensor.dtype not in dtypes
        or (device is not None and tensor.device != device)
    ):
        raise mismatch(argument, expected, tensor)
    if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise mismatch(argument, "a contiguous last dimension", f"strides {list(tensor.stride())}")
    return tensor


def _shape_fits(have: tuple[int, ...], want: Shape) -> bool:
    if want and want[0] is ...:
        want = want[1:]
        have = have[max(0, len(have) - len(want)) :]
    return len(have) == len(want) and all(
        isinstance(w, str) or w == h for w, h in zip(want, have, strict=True)
    )


def expect_int(argument: str, value: object, low: int, high: int | None = None) -> int:
    """`value` if it is an `int` of [low, high]; `ValueError` if not."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise mismatch(argument, "an int", describe(value))
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"{low} to {high}"
        raise mismatch(argument, f"an int of {bound}", str(value))
    return value
