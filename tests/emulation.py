# SPDX-License-Identifier: Apache-2.0
"""Kernels on a CPU, in a process of their own: `emulate` before anything else loads a libcuda."""

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jit_support import CSRC, pretend_cuda

from sparse_indexer.backends.gemm_indexer import GemmIndexer
from sparse_indexer.backends.sm70 import FusedIndexer, Sm70Indexer
from sparse_indexer.jit import Kernel
from sparse_indexer.jit.artifacts import host_artifact
from sparse_indexer.jit.kernel import SOURCES
from sparse_indexer.lasting import LastingMemory

_CPU = torch.device("cpu")


def emulate(kernels: Sequence[Kernel], capability: int, folder: Path) -> None:
    """Let the ops of `kernels` take tensors of the CPU, and run there as on such a GPU.

    Args:
        capability: 10 * major + minor.
        folder: where the same kernels may have been compiled before.
    """
    import tvm_ffi

    table = _table(kernels)
    folder = folder / hashlib.sha256(f"{capability} {table}".encode()).hexdigest()[:12]
    library = folder / "libcuda.so.1"
    if not library.exists():
        _compile(table, capability, library)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    for kernel in kernels:
        stored = host_artifact(kernel)
        assert stored.path is not None
        module = tvm_ffi.load_module(stored.path)
        module.load(kernel.name, 0, b"", list(kernel.variants))
        kernel.loaded[_CPU] = _Entries(module)  # type: ignore[assignment]


def _compile(table: str, capability: int, library: Path) -> None:
    folder = library.parent
    for source in (*SOURCES.joinpath("kernels").iterdir(), *SOURCES.joinpath("include").rglob("*")):
        if source.suffix in (".h", ".cuh"):
            path = folder / source.relative_to(SOURCES)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_plain(source.read_text()))
    (folder / "emulated_kernels.h").write_text(table)
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-w", "-ffp-contract=off"]
    command += [f"-I{folder}", f"-I{folder / 'include'}", f"-I{CSRC}", "-Wl,-soname,libcuda.so.1"]
    command += [f"-DEMULATED_CAPABILITY={capability}", f"-D__CUDA_ARCH__={capability}0"]
    subprocess.run([*command, "-o", library, CSRC / "emulated_cuda.cc"], check=True)


def on_cpu(kind: type[Any], **attributes: object) -> Any:
    """An indexer that otherwise expects a GPU, with these attributes."""
    indexer = object.__new__(kind)
    indexer.device, indexer._lasting = _CPU, LastingMemory(_CPU)
    vars(indexer).update(attributes)
    return indexer


def sm70_on_cpu(route: str = "auto", **options: int) -> Any:
    """An `Sm70Indexer`, for emulated kernels."""
    routes = {
        "_fused": None if route == "gemm" else on_cpu(FusedIndexer, **options),
        "_gemm": None if route == "fused" else on_cpu(GemmIndexer, **options),
    }
    return on_cpu(Sm70Indexer, route=route, **routes, **options)


class _Entries:
    """A host module whose entries take tensors of the CPU."""

    def __init__(self, module: object) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., object]:
        entry = getattr(self._module, name)

        def call(*arguments: object) -> object:
            tensors = (pretend_cuda(a) if isinstance(a, torch.Tensor) else a for a in arguments)
            return entry(*tensors)

        return call


def _table(kernels: Sequence[Kernel]) -> str:
    lines = [f'#include "kernels/{kernel.name}.cuh"' for kernel in kernels]
    lines += ["struct EmulatedKernel { const char* name; unsigned threads; void (*run)(void*); };"]
    rows = []
    for kernel in kernels:
        for symbol, config in kernel.variants.items():
            lines.append(
                f"inline void {symbol}(void* p) {{ using C = {config}; C::run(*(C::Params*)p); }}"
            )
            rows.append(f'{{"{symbol}", ({config}::kThreads), {symbol}}},')
    return "\n".join([*lines, "inline const EmulatedKernel kEmulatedKernels[] = {", *rows, "};\n"])


def _plain(text: str) -> str:
    """Dynamic shared memory as a pointer, each `asm` as a call with its operands, outputs first."""
    dynamic = r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];"
    text = re.sub(dynamic, r"auto* \2 = static_cast<\1*>(emulated::dynamic_shared);", text)
    # The one asm that is a macro's: its operands are in other macros.
    mma = r'asm volatile\("\{\\n\.reg \.pred p;\\n\.reg \.b64 .*?"r"\(accumulate\)\);'
    call = "emulated::wgmma<int(Element::ELEMENT), N>(d, a, StrideA, b, StrideB, accumulate);"
    text = re.sub(mma, call, text, flags=re.DOTALL)
    parts = []
    while found := re.search(r"\basm(?: volatile)?\s*\(", text):
        end = _closing(text, found.end())
        template, *operands = re.split(r":(?=\s*\"|\s*$)", text[found.end() : end])
        template = re.sub(r"\\n|\.reg[^;]*;", " ", template)
        opcode = re.search(r"[a-z][\w.]*|$", template)
        assert opcode
        arguments = []
        for section in operands[:2]:
            while operand := re.match(r"[\s,]*\"[^\"]*\"\(", section):
                stop = _closing(section, operand.end())
                arguments.append(section[operand.end() : stop])
                section = section[stop + 1 :]
        name = f"ptx_{re.sub(r'[^a-z0-9]', '_', opcode[0])}"
        parts += [text[: found.start()], f"{name}({', '.join(arguments)})"]
        text = text[end + 1 :]
    return "".join([*parts, text])


def _closing(text: str, start: int) -> int:
    """Where the parenthesis closes that was opened just before `start`."""
    depth = 1
    for match in re.finditer(r"\"(?:[^\"\\]|\\.)*\"|[()]", text[start:]):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if not depth:
            return start + match.start()
    raise AssertionError(text[start : start + 80])
