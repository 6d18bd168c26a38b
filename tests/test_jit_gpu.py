# SPDX-License-Identifier: Apache-2.0
"""The test kernel on a GPU: streams, graphs, contexts, shared memory, errors, cost of a call."""

import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_support import no_synchronization
from jit_support import needs_nvcc, run_python, scale_kernel, use_empty_cache

from sparse_indexer.errors import JitError
from sparse_indexer.jit import load, warmup

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def monkey() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory, monkey: pytest.MonkeyPatch) -> Any:
    use_empty_cache(tmp_path_factory.mktemp("gpu"), monkey)
    return load(scale_kernel(), DEVICE)


def tensors(
    rows: int = 300, columns: int = 1000, device: torch.device = DEVICE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, factor and a poisoned out."""
    generator = torch.Generator(device).manual_seed(rows)
    x = torch.randn(rows, columns, device=device, generator=generator)
    factor = torch.randn(rows, device=device, generator=generator)
    return x, factor, torch.full_like(x, torch.nan)


def expected(x: torch.Tensor, factor: torch.Tensor, power: int = 1) -> torch.Tensor:
    scaled = x * factor[:, None]
    return scaled if power == 1 else scaled * scaled


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("pdl", [False, True])
def test_values(entries: Any, power: int, pdl: bool) -> None:
    x, factor, out = tensors()
    for _ in range(3):  # with pdl each launch may overlap the one before
        entries.scale(x, factor, power, pdl, out)
    assert torch.equal(out, expected(x, factor, power))


def test_strides(entries: Any) -> None:
    x, factor, _ = tensors()
    wide = torch.full((300, 1100), 7.0, device=DEVICE)
    entries.scale(x[:, 10:900], factor, 1, False, wide[:, 50:940])
    assert torch.equal(wide[:, 50:940], expected(x, factor)[:, 10:900])
    assert (wide[:, :50] == 7).all()
    assert (wide[:, 940:] == 7).all()


@pytest.mark.parametrize(("rows", "columns"), [(0, 1000), (300, 0), (0, 0)])
def test_nothing_to_do(entries: Any, rows: int, columns: int) -> None:
    x, factor, out = tensors(rows, columns)
    entries.scale(x, factor, 1, False, out)
    torch.cuda.synchronize()


def test_many_rows(entries: Any) -> None:
    """More than 65,535 CTAs along x."""
    x, factor, out = tensors(70_000, 3)
    entries.scale(x, factor, 1, False, out)
    assert torch.equal(out, expected(x, factor))


def test_all_of_the_shared_memory(entries: Any) -> None:
    room = torch.cuda.get_device_properties(DEVICE).shared_memory_per_block_optin
    x, factor, out = tensors(3, room // 4)
    entries.scale(x, factor, 2, False, out)
    assert torch.equal(out, expected(x, factor, 2))


def test_launch_that_fails_is_named_and_leaves_nothing_behind(entries: Any) -> None:
    x, factor, out = tensors(3, 100_000)
    with pytest.raises(
        RuntimeError,
        match=r"scale, variant scale_1, on cuda:0: cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE "
        r"\(.*\); grid \[3, 1, 1\], block \[128, 1, 1\], 400000 bytes of shared memory",
    ):
        entries.scale(x, factor, 1, False, out)
    test_values(entries, 1, False)


def test_side_stream(entries: Any) -> None:
    """The launch waits for what is ahead of it in torch's current stream, and for nothing else."""
    x, factor, out = tensors()
    late, stream = torch.zeros_like(x), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        entries.scale(late, factor, 1, False, out)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(out, expected(x, factor))


def test_no_synchronization(entries: Any) -> None:
    x, factor, out = tensors()
    with no_synchronization():
        entries.scale(x, factor, 1, False, out)


def test_graph(entries: Any) -> None:
    x, factor, out = tensors()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        entries.scale(x, factor, 1, True, out)
        entries.scale(out, factor, 2, True, out)
    for seed in range(3):
        x.copy_(tensors(300 + seed)[0][:300])
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected(expected(x, factor), factor, 2))


def test_capture_on_a_miss(entries: Any) -> None:
    """Refused before anything is built; a kernel that `warmup` loaded is captured."""
    x, factor, out = tensors()
    graph, late, ready = torch.cuda.CUDAGraph(), scale_kernel(), scale_kernel()
    warmup(DEVICE, [ready])
    with torch.cuda.graph(graph):
        with pytest.raises(JitError, match=r"call sparse_indexer.jit.warmup\('cuda:0'\) before"):
            load(late, DEVICE)
        load(ready, DEVICE).scale(x, factor, 1, False, out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected(x, factor))


def test_messages(entries: Any) -> None:
    x, factor, out = tensors(37, 64)
    cases = [
        (
            (x, factor[:36], out),
            r"factor: expected \[37\] float32 on cuda:0, got \[36\] float32 on",
        ),
        (
            (x, factor, out[:36]),
            r"out: expected \[37, 64\] float32 on cuda:0, got \[36, 64\] float32",
        ),
        (
            (x.half(), factor, out),
            r"x: expected \[rows, columns\] float32 on cuda, got \[37, 64\] fl",
        ),
        (
            (x, factor.cpu(), out),
            r"factor: expected \[37\] float32 on cuda:0, got \[37\] float32 on cpu",
        ),
        (
            (x.t().contiguous().t(), factor, out),
            r"x: expected a contiguous last dimension, got str",
        ),
    ]
    for (a, b, c), message in cases:
        with pytest.raises(ValueError, match=f"^{message}"):
            entries.scale(a, b, 1, False, c)
    assert out.isnan().all()


@pytest.mark.two_gpus
def test_another_device(entries: Any) -> None:
    """Tensors decide: the current device is neither asked nor changed."""
    kernel, other = scale_kernel(), torch.device("cuda", 1)
    x, factor, out = tensors(device=other)
    torch.cuda.set_device(0)
    load(kernel, other).scale(x, factor, 1, False, out)
    assert torch.cuda.current_device() == 0
    assert torch.equal(out, expected(x, factor))
    ours = tensors()
    with torch.cuda.device(1):
        load(kernel, DEVICE).scale(*ours[:2], 1, False, ours[2])
        assert torch.cuda.current_device() == 1
    assert torch.equal(ours[2], expected(*ours[:2]))
    with pytest.raises(
        ValueError, match=r"^factor: expected \[300\] float32 on cuda:0, got .*cuda:1"
    ):
        load(kernel, DEVICE).scale(ours[0], factor, 1, False, ours[2])


def test_many_threads(entries: Any) -> None:
    """Each with its stream, the first launch of each in a context that it has not seen before."""
    inputs = [tensors(100 + i) for i in range(8)]
    torch.cuda.synchronize()

    def work(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                entries.scale(x, factor, 1, False, out)

    threads = [threading.Thread(target=work, args=i) for i in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for x, factor, out in inputs:
        assert torch.equal(out, expected(x, factor))


def test_first_thing_that_a_process_does(entries: Any) -> None:
    """Before torch has made a context."""
    code = """
    from sparse_indexer.jit import warmup
    warmup("cuda:0", [kernel])
    x = torch.ones(2, 3, device="cuda")
    out = torch.zeros_like(x)
    load(kernel, x.device).scale(x, torch.tensor([2.0, 3.0], device="cuda"), 2, False, out)
    print(out.tolist())
    """
    assert run_python(code).strip() == "[[4.0, 4.0, 4.0], [9.0, 9.0, 9.0]]"


@needs_nvcc
def test_other_compiler(entries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_INDEXER_COMPILER", "nvcc")
    x, factor, out = tensors()
    load(scale_kernel(), DEVICE).scale(x, factor, 2, True, out)
    assert torch.equal(out, expected(x, factor, 2))


def test_a_call_costs_less_than_one_of_torch(entries: Any) -> None:
    """A look-up, the checks and a launch against `torch.mul(x, 2, out=y)`, seen from the host."""
    kernel = scale_kernel()
    x, factor, out = tensors(8, 32)
    load(kernel, DEVICE)

    def ours() -> None:
        load(kernel, x.device).scale(x, factor, 1, False, out)

    def torch_s() -> None:
        torch.mul(x, 2, out=out)

    def microseconds(call: Any) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        return (time.perf_counter() - start) / 200 * 1e6

    times = [(microseconds(ours), microseconds(torch_s)) for _ in range(25)]
    mine, other = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"a call with its launch: {mine:.2f} us, torch.mul: {other:.2f} us")
    assert mine < other
