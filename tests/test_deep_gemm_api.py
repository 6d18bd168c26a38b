# SPDX-License-Identifier: Apache-2.0
"""The wheels of sgl-deep-gemm, read and not imported: do they take what we pass and emulate?"""

import ast
import inspect
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version

from sparse_indexer.testing.deep_gemm import DeepGemmEmulator, OlderDeepGemmEmulator
from sparse_indexer.testing.deep_gemm.checks import CURRENT, MAX_SPARSE_BLOCKS, OLDER

SOURCES = Path(__file__).resolve().parents[1] / "src" / "sparse_indexer"

# The first and the last of each generation that are not previews, and whatever comes next.
REQUIREMENTS = ["==0.2.0", "==0.2.3.post2", "==0.2.5", ">=0.2.5,<0.3"]
EMULATED = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_sparse_mqa_logits",
    "get_mqa_logits_metadata",
    "get_paged_sparse_mqa_logits_metadata",
]
# What the Python function takes as one argument, and what the operator takes for it.
OPERATOR_ARGUMENTS = {
    "q": ["q", "q_sf"],
    "kv": ["kv_data", "kv_sf"],
    "kv_cache": ["fused_kv_cache"],
}
OPERATORS_SINCE = Version("0.2.3")  # before it the extension has functions without argument names


class Wheel(NamedTuple):
    """What one wheel says of itself."""

    version: Version
    functions: dict[str, inspect.Signature]  # of deep_gemm/__init__.py
    operators: dict[str, list[str]]  # argument names, from the schemas in the extension
    extension: bytes
    sparse_kernel: str  # a header
    sparse_layout: str  # a header

    @property
    def emulator(self) -> DeepGemmEmulator | OlderDeepGemmEmulator:
        older = self.version <= Version(OLDER.version)
        return OlderDeepGemmEmulator() if older else DeepGemmEmulator()


def signature(function: ast.FunctionDef) -> inspect.Signature:
    arguments = function.args
    assert not [*arguments.posonlyargs, *arguments.kwonlyargs], function.name
    assert arguments.vararg is arguments.kwarg is None, function.name
    names = [argument.arg for argument in arguments.args]
    defaults = [inspect.Parameter.empty] * (len(names) - len(arguments.defaults))
    values = {"torch.float": torch.float}
    for default in arguments.defaults:
        text = ast.unparse(default)
        defaults.append(values[text] if text in values else ast.literal_eval(default))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [inspect.Parameter(n, kind, default=d) for n, d in zip(names, defaults, strict=True)]
    )


def read_wheel(path: Path) -> Wheel:
    with zipfile.ZipFile(path) as archive:
        tree = ast.parse(archive.read("deep_gemm/__init__.py"))
        extension = archive.read("deep_gemm/_C.so")
        include = "deep_gemm/include/deep_gemm/"
        kernel = archive.read(include + "impls/sm100_sparse_mqa_logits.cuh").decode()
        layout = archive.read(include + "layout/sparse_mqa_logits.cuh").decode()
    defined = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in EMULATED]
    schemas = re.findall(rb"\0(\w+)\(([^()\0]*)\) -> Tensor(?=\0)", extension)
    operators = {
        name.decode(): [argument.split()[-1].decode() for argument in arguments.split(b", ")]
        for name, arguments in schemas
        if name.decode() in EMULATED
    }
    version = Version(path.name.split("-")[1])
    functions = {function.name: signature(function) for function in defined}
    return Wheel(version, functions, operators, extension, kernel, layout)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    """By requirement; skipped where pip reaches no index."""

    def download(requirement: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp("wheels")
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        target = ["--platform", "manylinux2014_x86_64", "--python-version", "3.12"]
        patience = ["--retries", "1", "--timeout", "10", "--disable-pip-version-check"]
        name = f"sgl-deep-gemm{requirement}"
        result = subprocess.run(
            [*pip, *target, *patience, "--dest", str(folder), name], capture_output=True, text=True
        )
        return folder, result.stdout + result.stderr if result.returncode else ""

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(download, REQUIREMENTS))
    read = {}
    for requirement, (folder, errors) in zip(REQUIREMENTS, results, strict=True):
        if errors and ("from versions: none" in errors or "Connection" in errors):
            pytest.skip("needs a package index that has sgl-deep-gemm")
        assert not errors, errors
        (path,) = folder.glob("*.whl")
        read[requirement] = read_wheel(path)
    return read


def each_wheel(function: Any) -> Any:
    return pytest.mark.parametrize("requirement", REQUIREMENTS)(function)


@each_wheel
def test_emulated_signatures_are_those_of_the_wheel(
    wheels: dict[str, Wheel], requirement: str
) -> None:
    """Names, order and defaults."""
    wheel = wheels[requirement]
    assert sorted(wheel.functions) == EMULATED
    for name, real in wheel.functions.items():
        emulated = inspect.signature(getattr(wheel.emulator, name))
        plain = [
            p.replace(annotation=inspect.Parameter.empty) for p in emulated.parameters.values()
        ]
        assert plain == list(real.parameters.values()), name


@each_wheel
def test_operators_take_what_the_functions_do(wheels: dict[str, Wheel], requirement: str) -> None:
    """The Python functions are thin: the compiled ones have the same arguments, pairs apart."""
    wheel = wheels[requirement]
    if wheel.version < OPERATORS_SINCE:
        assert all(f"__tvm_ffi_{name}\0".encode() in wheel.extension for name in EMULATED)
        return
    assert sorted(wheel.operators) == EMULATED
    for name, operator in wheel.operators.items():
        arguments = wheel.functions[name].parameters
        want = [part for a in arguments for part in OPERATOR_ARGUMENTS.get(a, [a])]
        assert operator == want, name


class Call(NamedTuple):
    """A call of one of the functions in our sources."""

    place: str
    name: str
    positional: int
    keywords: list[str]
    optional: list[str]  # keys of a dictionary that is unpacked, for some versions only


def our_calls() -> Iterator[Call]:
    for path in sorted(SOURCES.rglob("*.py")):
        if path.parent.name == "deep_gemm":
            continue
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            dictionaries = {
                target.id: [key.value for key in made.keys if isinstance(key, ast.Constant)]
                for assigned in ast.walk(function)
                if isinstance(assigned, ast.Assign)
                for target in assigned.targets
                if isinstance(target, ast.Name)
                for made in ast.walk(assigned.value)
                if isinstance(made, ast.Dict) and made.keys
            }
            for call in ast.walk(function):
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                    continue
                if call.func.attr not in EMULATED:
                    continue
                optional = []
                for keyword in call.keywords:
                    if keyword.arg is None:
                        assert isinstance(keyword.value, ast.Name)
                        optional += dictionaries[keyword.value.id]
                keywords = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
                assert not any(isinstance(a, ast.Starred) for a in call.args)
                place = f"{path.name}:{call.lineno}"
                yield Call(place, call.func.attr, len(call.args), keywords, optional)


def misfit(call: Call, real: inspect.Signature) -> str | None:
    """Why a function does not take a call, if it does not."""
    given = [*call.keywords, *(name for name in call.optional if name in real.parameters)]
    try:
        real.bind(*[None] * call.positional, **dict.fromkeys(given))
    except TypeError as error:
        return f"{call.place}: {call.name}{real}: {error}"
    return None


@each_wheel
def test_the_wheel_takes_what_we_pass(wheels: dict[str, Wheel], requirement: str) -> None:
    calls = list(our_calls())
    assert {"fp8_fp4_mqa_logits", "fp8_fp4_paged_sparse_mqa_logits"} <= {c.name for c in calls}
    for call in calls:
        assert misfit(call, wheels[requirement].functions[call.name]) is None


def test_a_renamed_argument_does_not_fit(wheels: dict[str, Wheel]) -> None:
    (call,) = (call for call in our_calls() if call.name == "fp8_fp4_mqa_logits")
    for wheel in wheels.values():
        parameters = list(wheel.functions[call.name].parameters.values())
        names = [parameter.name for parameter in parameters]
        place = names.index("max_seqlen_k")
        parameters[place] = parameters[place].replace(name="max_seq_len_k")
        problem = misfit(call, inspect.Signature(parameters))
        assert problem is not None
        assert problem.startswith("deep_gemm_api.py:")


def test_optional_arguments_are_somewhere(wheels: dict[str, Wheel]) -> None:
    for call in our_calls():
        for name in call.optional:
            taken = [w for w in wheels.values() if name in w.functions[call.name].parameters]
            assert taken, f"{call.place}: no version of {call.name} takes {name}"


def number(pattern: str, text: str | bytes) -> int:
    """The only number that the pattern finds."""
    text = text if isinstance(text, str) else text.decode("latin-1")
    (found,) = set(re.findall(pattern, text))
    return int(found)


@each_wheel
def test_rules_are_those_of_the_wheel(wheels: dict[str, Wheel], requirement: str) -> None:
    """The numbers that the emulator refuses by, as the wheel's kernels and checks have them."""
    wheel = wheels[requirement]
    generation = wheel.emulator.generation
    stride = generation.page_stride
    assert number(r"fused_kv_cache\.stride\(0\) % (\d+) == 0", wheel.extension) == stride
    assert number(r"kv_page_stride_bytes % (\d+) == 0", wheel.sparse_kernel) == stride
    heads = number(r"kNum(?:Max)?Heads = (\d+)", wheel.sparse_layout)
    assert max(generation.sparse_heads) == heads
    assert ("kNumMaxHeads" in wheel.sparse_layout) == (len(generation.sparse_heads) > 1)
    assert number(r"kHeadDim = (\d+)", wheel.sparse_layout) == 128
    assert number(r"kBlockQ = (\d+)", wheel.sparse_layout) == wheel.emulator.longest_run
    blocks = number(r"num_max_sparse_blocks <= (\d+)", wheel.extension)
    assert blocks == MAX_SPARSE_BLOCKS
    assert number(r"num_max_sparse_blocks % (\d+) == 0", wheel.extension) == 4
    only_mx = b"is_mx_sf == (arch_major == 10" in wheel.extension
    assert only_mx == generation.mx_only


@each_wheel
def test_heads_are_summed_in_bf16(wheels: dict[str, Wheel], requirement: str) -> None:
    """Products of two heads at once, in two pairs of chains, by bf16 instructions."""
    kernel = wheels[requirement].sparse_kernel
    assert re.search(r"sum_0 = __hfma2\(ptx::cvt_relu_bf16x2_f32\(", kernel)
    assert re.search(r"sum_1 = __hfma2\(ptx::cvt_relu_bf16x2_f32\(", kernel)
    assert re.search(r"__hadd2_rn\(sum_0, sum_1\)", kernel)
    assert number(r"head_offset \+= (\d+)", kernel) == 4


def test_both_generations_are_read(wheels: dict[str, Wheel]) -> None:
    assert len({wheel.version for wheel in wheels.values()}) >= 3
    kinds = {wheel.emulator.generation for wheel in wheels.values()}
    assert kinds == {CURRENT, OLDER}
    assert "0.2.5" in {str(wheel.version) for wheel in wheels.values()}
