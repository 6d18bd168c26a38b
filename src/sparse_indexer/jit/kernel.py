# SPDX-License-Identifier: Apache-2.0
"""What a kernel is, before it is compiled."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import sparse_indexer
from sparse_indexer.errors import describe, mismatch

if TYPE_CHECKING:
    import torch
    import tvm_ffi

_PACKAGE = Path(sparse_indexer.__file__).parent
# In the package of an installed wheel, beside src/ in a checkout.
SOURCES = next(
    (
        folder
        for folder in (_PACKAGE / "jit_csrc", _PACKAGE.parents[1] / "jit_csrc")
        if folder.is_dir()
    ),
    _PACKAGE / "jit_csrc",
)
"""The folder jit_csrc: what every kernel may include."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """`kernels/<name>.cuh`, compiled once for each variant, and its host entry `host/<name>.cc`.

    All variants of a kernel are in one cubin. Compared by identity: an op has one, at module level.
    """

    name: str
    variants: Mapping[str, str]  # symbol of the launch -> its Config in C++, `Topk<512>`
    capabilities: tuple[int, int] = (70, 121)  # 10 * major + minor: first and last it is for
    root: Path = SOURCES  # holds kernels/ and host/; jit_csrc can be included, too
    loaded: dict[torch.device, tvm_ffi.Module] = field(
        default_factory=dict, init=False, repr=False
    )  # filled by `load`, and only there

    def __post_init__(self) -> None:
        if not isinstance(self.variants, Mapping):
            raise mismatch("variants", "a mapping of symbols to Configs", describe(self.variants))
        names = [("name", self.name), *(("variants", symbol) for symbol in self.variants)]
        for argument, word in names:
            if not isinstance(word, str) or not re.fullmatch(r"[A-Za-z_]\w*", word, re.ASCII):
                raise mismatch(argument, "a C identifier", describe(word))
        if not self.variants:
            raise mismatch("variants", f"at least one of {self.name}", "none")
        for config in self.variants.values():
            if not isinstance(config, str):
                raise mismatch("variants", "Configs in C++, as str", describe(config))
        match self.capabilities:
            case (int(first), int(last)) if 70 <= first <= last:
                pass
            case other:
                expected = "(first, last), each 10 * major + minor of 7.0 or later"
                raise mismatch("capabilities", expected, repr(other))
        if not isinstance(self.root, Path):
            raise mismatch("root", "a pathlib.Path", describe(self.root))

    def is_for(self, capability: tuple[int, int]) -> bool:
        """Whether it is meant for GPUs of this (major, minor)."""
        first, last = self.capabilities
        return first <= 10 * capability[0] + capability[1] <= last

    @property
    def unit(self) -> str:
        """The text to compile."""
        lines = [f'#include "kernels/{self.name}.cuh"', '#include "sparse_indexer/entry.cuh"']
        lines += [f"SPARSE_INDEXER_ENTRY({symbol}, {c})" for symbol, c in self.variants.items()]
        return "\n".join(lines) + "\n"

    @property
    def host_source(self) -> Path:
        """The C++ file of the host entry."""
        return self.root / "host" / f"{self.name}.cc"

    @property
    def include_dirs(self) -> list[Path]:
        """What `#include` finds besides a compiler's own headers."""
        own = [] if self.root == SOURCES else [self.root, self.root / "include"]
        return [*own, SOURCES, SOURCES / "include"]


def expect_kernels(kernels: object) -> list[Kernel]:
    """`kernels` as a list if they are; `ValueError` if not."""
    if isinstance(kernels, str) or not isinstance(kernels, Iterable):
        raise mismatch("kernels", "a list of Kernel", describe(kernels))
    listed = list(kernels)
    for kernel in listed:
        if not isinstance(kernel, Kernel):
            raise mismatch("kernels", "a list of Kernel", f"one with {describe(kernel)}")
    return listed


@cache
def all_kernels() -> dict[str, Kernel]:
    """The library's kernels by name: every `Kernel` at the level of a module of `ops`."""
    try:
        package = importlib.import_module("sparse_indexer.ops")
    except ModuleNotFoundError:
        return {}
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    found = [v for module in modules for v in vars(module).values() if isinstance(v, Kernel)]
    return {kernel.name: kernel for kernel in found}
