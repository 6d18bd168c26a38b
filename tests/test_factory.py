# SPDX-License-Identifier: Apache-2.0
"""Which backend runs where, what is said of the others, and what an import brings along."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import sparse_indexer
from sparse_indexer import (
    BackendUnavailable,
    factory,
    make_candidate_indexer,
    plan_prefill,
    row_ops,
)
from sparse_indexer.backends.mask import MaskIndexer
from sparse_indexer.backends.sm100 import Sm100Indexer
from sparse_indexer.factory import BACKENDS, why_not
from sparse_indexer.inputs import IndexQ, PrefillIndexerInputs, flat_index_k
from sparse_indexer.testing.deep_gemm import DeepGemmEmulator

# For each compute capability, the backends for it, the best one first.
FITTING = {
    (7, 0): ["sm70", "mask"],
    (7, 5): ["sm70", "mask"],
    (8, 0): ["sm80", "mask"],
    (8, 6): ["sm80", "mask"],
    (8, 9): ["sm80", "mask"],
    (9, 0): ["sm90", "mask"],
    (10, 0): ["sm100", "sm80", "mask"],
    (10, 3): ["sm100", "sm80", "mask"],
    (12, 0): ["sm80", "mask"],
    (12, 1): ["sm80", "mask"],
    (6, 1): ["mask"],
    (7, 2): ["mask"],
    (11, 0): ["mask"],
}
WORDS = {"sm70": "7.0, 7.5", "sm80": "8.x, 10.x, 12.x", "sm90": "9.0", "sm100": "10.x"}
NAMES = "'auto' or 'sm100' or 'sm90' or 'sm80' or 'sm70' or 'mask'"
CPU = torch.device("cpu")


def refused(message: str, kind: type[Exception] = ValueError) -> AbstractContextManager[Any]:
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


class Fake(MaskIndexer):
    """Stands for a backend whose kernels this machine cannot run."""

    name = "fake"


class Machine:
    """The GPUs that torch seems to see."""

    capabilities: list[tuple[int, int]]
    code: list[str]  # what torch was built for
    current = 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    machine.capabilities, machine.code = [], ["compute_50"]

    def capability(device: torch.device | int | None = None) -> tuple[int, int]:
        index = device.index if isinstance(device, torch.device) else device
        return machine.capabilities[machine.current if index is None else index]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(machine.capabilities))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(machine.capabilities))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: machine.current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: machine.code)
    return machine


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> None:
    """All backends are in this release."""
    for name, spec in BACKENDS.items():
        if name != "mask":
            monkeypatch.setitem(BACKENDS, name, spec._replace(make=Fake))


@pytest.fixture
def fresh_log() -> Iterator[None]:
    for log in (factory._log_choice, factory._log_failure):
        log.cache_clear()
    yield
    for log in (factory._log_choice, factory._log_failure):
        log.cache_clear()


def test_the_support_matrix_is_this() -> None:
    assert list(BACKENDS) == ["sm100", "sm90", "sm80", "sm70", "mask"]
    assert {name: BACKENDS[name].capabilities for name in WORDS} == WORDS
    assert BACKENDS["mask"].make is MaskIndexer
    released = [name for name, spec in BACKENDS.items() if spec.make is not None]
    assert released == ["sm100", "sm90", "sm70", "mask"]


@pytest.mark.parametrize("backend", ["auto", "mask"])
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_cpu_gets_the_mask_backend(device: Any, backend: str) -> None:
    indexer = make_candidate_indexer(device, backend=backend)
    assert type(indexer) is MaskIndexer
    assert (indexer.name, indexer.device) == ("mask", CPU)
    assert (indexer.topk, indexer.topk_blocks, indexer.memory_budget) == (512, 2048, 256 << 20)


def test_an_indexed_cpu_takes_what_lies_on_the_cpu() -> None:
    """torch puts a tensor of "cpu:0" on "cpu"."""
    indexer = make_candidate_indexer("cpu:0", topk=2)
    plan = plan_prefill([2], [1], device="cpu:0")
    queries = IndexQ(torch.ones(1, 1, 128, dtype=torch.float16, device="cpu:0"))
    keys = flat_index_k(torch.eye(3, 128) * torch.tensor([[1.0], [3.0], [2.0]]), "fp16")
    inputs = PrefillIndexerInputs(plan, queries, torch.ones(1, 1), keys)
    out = torch.full((1, 2), 7, dtype=torch.int32)
    indexer.topk_prefill(inputs, out)
    assert out.tolist() == [[1, 2]]


@pytest.mark.parametrize("capability", FITTING)
@pytest.mark.parametrize("name", WORDS)
def test_each_backend_is_for_its_capabilities(
    machine: Machine, released: None, name: str, capability: tuple[int, int]
) -> None:
    machine.capabilities = [capability]
    major, minor = capability
    unfit = f"is for compute capability {WORDS[name]}, cuda:0 has {major}.{minor}: "
    unfit += "use backend='auto'"
    expected = None if name in FITTING[capability] else unfit
    assert why_not(name, torch.device("cuda", 0)) == expected
    assert why_not("mask", torch.device("cuda", 0)) is None
    if expected is None:
        assert type(make_candidate_indexer("cuda", backend=name)) is Fake
    else:
        with refused(f"{name}: {expected}", BackendUnavailable):
            make_candidate_indexer("cuda", backend=name)


@pytest.mark.parametrize(("capability", "names"), FITTING.items())
def test_auto_takes_the_first_that_can_run(
    machine: Machine,
    released: None,
    fresh_log: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    names: list[str],
) -> None:
    """Each one gone, the next."""
    machine.capabilities = [capability]
    caplog.set_level(logging.INFO, "sparse_indexer")
    for name in names:
        indexer = make_candidate_indexer("cuda")
        assert type(indexer) is (MaskIndexer if name == "mask" else Fake)
        assert caplog.messages[-1] == f"backend {name} on cuda:0"
        assert indexer.device == torch.device("cuda", 0)
        monkeypatch.setitem(BACKENDS, name, BACKENDS[name]._replace(make=None))
    assert len(caplog.messages) == len(names)


@pytest.mark.parametrize("name", WORDS)
def test_what_is_not_in_the_release_is_said_to_be_so(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whatever the device: no other one would help."""
    monkeypatch.setitem(BACKENDS, name, BACKENDS[name]._replace(make=None))
    machine.capabilities = [next(c for c, names in FITTING.items() if name in names), (6, 1)]
    for device in ("cuda:0", "cuda:1", "cpu", "meta"):
        with refused(
            f"{name}: is not in this release: use backend='mask'", BackendUnavailable
        ) as raised:
            make_candidate_indexer(device, backend=name)
        assert isinstance(raised.value, RuntimeError)


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_gpu_backend_needs_a_gpu(released: None, name: str, device: str) -> None:
    message = f"{name}: needs an NVIDIA GPU, the device is {device}: use backend='mask'"
    if (name, device) == ("sm100", "cpu"):
        message += ", or Sm100Indexer with deep_gemm=sparse_indexer.testing.DeepGemmEmulator()"
    with refused(message, BackendUnavailable):
        make_candidate_indexer(device, backend=name)


def test_each_gpu_is_asked_for_itself(
    machine: Machine, released: None, fresh_log: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The tensors' device counts, and "cuda" is the current one."""
    machine.capabilities = [(7, 0), (9, 0), (12, 0)]
    machine.current = 2
    caplog.set_level(logging.INFO, "sparse_indexer")
    for device, index, name in (
        ("cuda", 2, "sm80"),
        ("cuda:0", 0, "sm70"),
        (torch.device("cuda", 1), 1, "sm90"),
    ):
        assert make_candidate_indexer(device).device == torch.device("cuda", index)
        assert caplog.messages[-1] == f"backend {name} on cuda:{index}"
    with refused(
        "sm90: is for compute capability 9.0, cuda:2 has 12.0: use backend='auto'",
        BackendUnavailable,
    ):
        make_candidate_indexer("cuda", backend="sm90")


def test_auto_logs_its_choice_once_a_device(
    machine: Machine, fresh_log: None, caplog: pytest.LogCaptureFixture
) -> None:
    machine.capabilities = [(6, 1), (6, 1)]
    caplog.set_level(logging.INFO, "sparse_indexer")
    make_candidate_indexer("cpu", backend="mask")
    assert not caplog.records
    for _ in range(3):
        for device in ("cpu", "cuda:0", "cuda:1", "cuda"):
            make_candidate_indexer(device)
    assert [(r.name, r.levelname, r.message) for r in caplog.records] == [
        ("sparse_indexer", "INFO", f"backend mask on {device}")
        for device in ("cpu", "cuda:0", "cuda:1")
    ]


def test_auto_passes_over_a_backend_whose_kernels_cannot_be_built(
    machine: Machine,
    fresh_log: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a warning, once; who asks for it by name gets the error."""

    def make(device: torch.device, **options: int) -> MaskIndexer:
        raise BackendUnavailable("sm90: there is no compiler")

    machine.capabilities = [(9, 0)]
    monkeypatch.setitem(BACKENDS, "sm90", BACKENDS["sm90"]._replace(make=make))
    caplog.set_level(logging.INFO, "sparse_indexer")
    for _ in range(2):
        assert type(make_candidate_indexer("cuda")) is MaskIndexer
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("WARNING", "backend sm90: there is no compiler"),
        ("INFO", "backend mask on cuda:0"),
    ]
    with refused("sm90: there is no compiler", BackendUnavailable):
        make_candidate_indexer("cuda", backend="sm90")


NO_TORCH = {  # capability: (a torch without code for it, what to do)
    (7, 0): (
        ["sm_75", "sm_80", "sm_90", "compute_120"],
        "pip install 'torch>=2.8,<2.11', or take one built for CUDA 12.6",
    ),
    (6, 1): (["sm_70", "sm_75"], "take one built for CUDA 12.6"),
    (7, 5): (["sm_80", "sm_90"], "pip install -U torch"),
    (9, 0): (["sm_80", "sm_100"], "pip install -U torch"),
    (10, 3): (["sm_90a", "sm_100a", "compute_90a"], "pip install -U torch"),
    (12, 1): (["sm_90", "compute_100f"], "pip install -U torch"),
}


@pytest.mark.parametrize("backend", ["auto", "mask", "sm70"])
@pytest.mark.parametrize("capability", NO_TORCH)
def test_a_torch_without_code_for_the_gpu_runs_nothing(
    machine: Machine, capability: tuple[int, int], backend: str
) -> None:
    """Not even `mask`, which `auto` would fall back to."""
    machine.capabilities = [capability]
    machine.code, fix = NO_TORCH[capability]
    where = f"cuda:0, of compute capability {capability[0]}.{capability[1]}"
    message = f"torch {torch.__version__} has no code for {where}, only {', '.join(machine.code)}"
    with refused(f"{message}: {fix}", BackendUnavailable):
        make_candidate_indexer("cuda", backend=backend)


@pytest.mark.parametrize(
    ("capability", "code"),
    [
        ((7, 0), "sm_70"),
        ((7, 5), "sm_70"),
        ((7, 0), "compute_60"),
        ((8, 9), "sm_86"),
        ((9, 0), "sm_90a"),
        ((9, 0), "compute_90a"),
        ((10, 3), "sm_100f"),
        ((12, 1), "sm_120"),
        ((12, 1), "compute_90"),
        ((9, 0), "gfx942"),  # which says nothing of NVIDIA's
    ],
)
def test_a_torch_with_code_for_the_gpu_runs(
    machine: Machine, capability: tuple[int, int], code: str
) -> None:
    machine.capabilities, machine.code = [capability], [code]
    assert factory.why_not_torch(torch.device("cuda", 0)) is None
    assert make_candidate_indexer("cuda", backend="mask").name == "mask"


def test_the_kernels_of_a_backend_are_those_it_builds(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `doctor` looks for, so that it need not be made."""
    built: list[str] = []

    def build(kernels: Any, *_: object) -> None:
        built.extend(kernel.name for kernel in kernels)

    for module in ("backends.kernel_indexer", "row_ops"):
        monkeypatch.setattr(f"sparse_indexer.{module}.build_kernels", build)
    monkeypatch.setitem(sys.modules, "deep_gemm", DeepGemmEmulator())
    for name, capability in {"sm70": (7, 0), "sm90": (9, 0), "sm100": (10, 0)}.items():
        machine.capabilities = [capability]
        built.clear()
        make_candidate_indexer("cuda", backend=name)
        assert built == [kernel.name for kernel in BACKENDS[name].kernels()] != []
    assert not BACKENDS["mask"].kernels()


def test_blackwell_takes_deep_gemm_where_it_is(
    machine: Machine,
    fresh_log: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else, with a warning that says what to install, what `auto` takes next."""
    machine.capabilities = [(10, 3)]
    caplog.set_level(logging.INFO, "sparse_indexer")
    monkeypatch.setattr(row_ops, "build_kernels", lambda *_: None)
    monkeypatch.setitem(sys.modules, "deep_gemm", DeepGemmEmulator())
    for backend in ("auto", "sm100"):
        indexer = make_candidate_indexer("cuda", topk=16, topk_blocks=24, backend=backend)
        assert type(indexer) is Sm100Indexer
        assert (indexer.name, indexer.device.index) == ("sm100", 0)
        assert (indexer.topk, indexer.topk_blocks, indexer.memory_budget) == (16, 24, 256 << 20)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert type(make_candidate_indexer("cuda")) is MaskIndexer
    chosen, warning, other = caplog.messages
    assert (chosen, other) == ("backend sm100 on cuda:0", "backend mask on cuda:0")
    assert warning.startswith("backend sm100: no DeepGEMM (ModuleNotFoundError: ")
    assert warning.endswith(": pip install 'sgl-deep-gemm>=0.2.0,<0.3'")
    assert [r.levelname for r in caplog.records] == ["INFO", "WARNING", "INFO"]
    with pytest.raises(BackendUnavailable, match=r"^sm100: no DeepGEMM \(Module"):
        make_candidate_indexer("cuda", backend="sm100")


def test_what_fails_to_be_made_is_not_logged(
    fresh_log: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sparse_indexer")
    with refused("topk: expected an int of 0 to 1048576, got -1"):
        make_candidate_indexer("cpu", topk=-1)
    assert not caplog.records


UNKNOWN_BACKENDS = {
    "sm60": ("sm60", "'sm60'"),
    "capital letters": ("Mask", "'Mask'"),
    "none": (None, "None"),
    "list": (["mask"], "a list"),
}


@pytest.mark.parametrize(("backend", "got"), UNKNOWN_BACKENDS.values(), ids=UNKNOWN_BACKENDS.keys())
def test_an_unknown_backend_is_refused(backend: Any, got: str) -> None:
    with refused(f"backend: expected {NAMES}, got {got}"):
        make_candidate_indexer("cpu", backend=backend)


UNKNOWN_DEVICES = {
    "name": ("gpu", "'gpu'"),
    "empty": ("", "''"),
    "none": (None, "None"),
    "float": (0.5, "0.5"),
    "negative index": ("cuda:-1", "'cuda:-1'"),
    "list": (["cpu"], "a list"),
}


@pytest.mark.parametrize(("device", "got"), UNKNOWN_DEVICES.values(), ids=UNKNOWN_DEVICES.keys())
def test_an_unknown_device_is_refused(device: Any, got: str) -> None:
    with refused(f"device: expected a torch device, got {got}"):
        make_candidate_indexer(device)


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("xpu", AssertionError),
        ("hpu:1", ModuleNotFoundError),
        ("vulkan", NotImplementedError),
        ("mps", RuntimeError),
    ],
)
def test_what_torch_cannot_use_is_refused(
    device: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(*_: object, device: torch.device) -> None:
        raise kind(f"{device} is not to be had")

    monkeypatch.setattr(torch, "empty", empty)
    with refused(f"device: expected a device that torch can use, got {device}"):
        make_candidate_indexer(device)


def test_there_is_one_cpu() -> None:
    with refused("device: expected the one CPU, 'cpu', got cpu:7"):
        make_candidate_indexer("cpu:7")


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
@pytest.mark.parametrize("backend", ["auto", "mask", "sm90"])
def test_a_gpu_that_is_not_there_is_refused(machine: Machine, device: str, backend: str) -> None:
    with refused(f"device: expected an NVIDIA GPU that torch can use, or 'cpu', got {device}"):
        make_candidate_indexer(device, backend=backend)


def test_an_index_beyond_the_gpus_is_refused(machine: Machine) -> None:
    machine.capabilities = [(8, 0), (8, 0)]
    with refused("device: expected cuda:0 to cuda:1, got cuda:2"):
        make_candidate_indexer("cuda:2")


OPTIONS = {  # the least of each, and what it may be
    "topk": (0, "0 to 1048576"),
    "topk_blocks": (1, "1 to 1048576"),
    "memory_budget": (1, "at least 1"),
}
NO_INTS = {"True": True, "1.0": 1.0, "None": None, "'8'": "8"}


@pytest.mark.parametrize("option", OPTIONS)
def test_the_least_of_an_option_is_taken(option: str) -> None:
    least, bounds = OPTIONS[option]
    for value in (least, 100):
        assert getattr(make_candidate_indexer("cpu", **{option: value}), option) == value
    for value in (least - 1, 2**40) if "to" in bounds else (least - 1,):
        with refused(f"{option}: expected an int of {bounds}, got {value}"):
            make_candidate_indexer("cpu", **{option: value})


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("got", "value"), NO_INTS.items())
def test_an_option_is_an_int(option: str, got: str, value: Any) -> None:
    with refused(f"{option}: expected an int, got {got}"):
        make_candidate_indexer("cpu", **{option: value})


# What would slow an import down, or need a GPU: loaded by those who use it.
LAZY = ("cupy", "tvm_ffi", "triton", "deep_gemm", "matplotlib", "typer", "rich", "transformers")
IMPORT = f"""
import sys
import sparse_indexer
assert "sparse_indexer.inputs" not in sys.modules and "torch" not in sys.modules
import msgspec, numpy, torch  # what these load is their own affair
before = set(sys.modules)
for name in sparse_indexer.__all__:
    getattr(sparse_indexer, name)
assert sparse_indexer.make_candidate_indexer("cpu").name == "mask"
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print("sparse_indexer" in loaded, sorted(loaded & set({LAZY!r})), torch.cuda.is_initialized())
"""


def test_an_import_loads_no_optional_package() -> None:
    where = str(Path(sparse_indexer.__file__).parents[1])
    path = os.pathsep.join(filter(None, (where, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "True [] False\n"), done.stderr


@pytest.mark.parametrize("name", sparse_indexer.__all__)
def test_a_public_name_is_listed_and_has_one_home(name: str) -> None:
    value = getattr(sparse_indexer, name)
    assert value.__name__ == name
    assert value is getattr(sys.modules[value.__module__], name)
    assert name in dir(sparse_indexer)


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"^module 'sparse_indexer' has no attribute 'topk'$"):
        sparse_indexer.topk  # noqa: B018
