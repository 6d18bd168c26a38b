# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, in the caller's words: argument, expected, got."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from types import EllipsisType
from typing import get_args, get_type_hints

import msgspec
import numpy as np
import torch


class BackendUnavailable(RuntimeError):
    """A backend cannot run here; the message says what is missing and the command that fixes it."""


class JitError(RuntimeError):
    """A kernel could not be built or loaded: the compiler's error, its command and log, the fix."""


def describe(value: object) -> str:
    """How a value is written in a message: tensors by shape, dtype and device."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return f"a nested tensor on {value.device}"
        kinds = [value.dtype] if value.layout == torch.strided else [value.dtype, value.layout]
        words = " ".join(str(kind).removeprefix("torch.") for kind in kinds)
        return f"{list(value.shape)} {words} on {value.device}"
    if isinstance(value, np.ndarray):
        return f"{list(value.shape)} {value.dtype}, a numpy array"
    if isinstance(value, (str, int, float, bool, type(None))):
        return repr(value)
    name = type(value).__name__
    if type(value).__module__ == "numpy":
        return f"a numpy {name}"
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def one_line(text: str) -> str:
    """A text of unknown origin for a terminal: on one line, `?` for what cannot be printed."""
    return "".join(c if c.isprintable() else "?" for c in re.sub(r"\s+", " ", text))


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
    if (
        not isinstance(tensor, torch.Tensor)
        or not _shape_fits(tensor.shape, shape)
        or tensor.dtype not in dtypes
        or (device is not None and tensor.device != device)
    ):
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        sizes = ", ".join("..." if s is ... else str(s) for s in shape)
        where = f" on {device}" if device is not None else ""
        raise mismatch(argument, f"[{sizes}] {names}{where}", tensor)
    if tensor.ndim and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise mismatch(argument, "a contiguous last dimension", f"strides {list(tensor.stride())}")
    return tensor


def _shape_fits(have: tuple[int, ...], want: Shape) -> bool:
    if have == want:
        return True
    if want and want[0] is ...:
        want = want[1:]
        have = have[max(0, len(have) - len(want)) :]
    return len(have) == len(want) and all(
        isinstance(w, str) or w == h for w, h in zip(want, have, strict=True)
    )


def expect_indices(
    argument: str, indices: object, count: int, device: torch.device
) -> torch.Tensor:
    """`indices` if they are `[n]` int32 or int64 on `device`, and there, on a CPU, below `count`.

    On a GPU reading them would synchronize.

    Raises:
        ValueError: they are not.
    """
    if (
        not isinstance(indices, torch.Tensor)
        or indices.ndim != 1
        or indices.dtype not in (torch.int32, torch.int64)
        or indices.device != device
    ):
        raise mismatch(argument, f"[n] int32 or int64 on {device}", indices)
    if device.type == "cpu" and len(indices):
        low, high = (int(bound) for bound in indices.aminmax())
        if low < 0 or high >= count:
            bounds = f"0 to {count - 1}" if count else "none, as there are none"
            raise mismatch(argument, bounds, str(low if low < 0 else high))
    return indices


def expect_int(argument: str, value: object, low: int, high: int | None = None) -> int:
    """`value` if it is an integer of [low, high], numpy's or not; `ValueError` if not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise mismatch(argument, "an int", describe(value))
    value = int(value)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"{low} to {high}"
        raise mismatch(argument, f"an int of {bound}", str(value))
    return value


_KINDS = {
    torch.Tensor: "dense CUDA tensor",
    int: "64-bit int",
    bool: "Python bool",
    float: "number",
    type(None): "None",
}


def blame_argument(error: Exception, op: Callable[..., None], given: Mapping[str, object]) -> None:
    """After an `error` of `op`, so that a call that works pays nothing: is an argument to blame?

    Annotations are types that `isinstance` takes.

    Raises:
        ValueError: one is not what its annotation says. Or a tensor is not on a GPU, unless `error`
            is a `ValueError`, which says more.
    """
    arguments = list(_arguments(op, given))
    for fits in (_is_of,) if isinstance(error, ValueError) else (_is_of, _is_on_gpu):
        for name, value, hint in arguments:
            if not fits(value, hint):
                kinds = [_KINDS.get(kind, kind.__name__) for kind in get_args(hint) or (hint,)]
                article = "an" if kinds[0][0] in "AEIOU" else "a"
                expected = f"{article} {' or '.join(kinds)}"
                raise mismatch(name, expected, describe(value)) from None


def _arguments(
    op: Callable[..., None], given: Mapping[str, object]
) -> Iterator[tuple[str, object, type]]:
    """(name, value, annotated type) of each argument, and of the tensors in a struct."""
    for name, hint in get_type_hints(op).items():
        if name not in given:  # the result
            continue
        value = given[name]
        yield name, value, hint
        if isinstance(value, msgspec.Struct):
            for field, part in msgspec.structs.asdict(value).items():
                if isinstance(part, torch.Tensor):
                    yield f"{name} {field}", part, torch.Tensor


def _is_of(value: object, hint: type) -> bool:
    import tvm_ffi

    if hint in (int, bool):  # either is taken for the other
        return isinstance(value, Integral) and -(1 << 63) <= int(value) < 1 << 63
    if hint is float:
        return isinstance(value, Real)
    if isinstance(value, torch.Tensor):
        try:
            tvm_ffi.from_dlpack(value.detach())
        except (BufferError, RuntimeError):  # meta, sparse, nested, quantized
            return False
    return isinstance(value, hint)


def _is_on_gpu(value: object, hint: type) -> bool:
    return not isinstance(value, torch.Tensor) or value.device.type == "cuda"
