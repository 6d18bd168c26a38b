# SPDX-License-Identifier: Apache-2.0
"""What a host entry says about tensors that do not fit, on a machine without a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from jit_support import CSRC, needs_gxx, scale_kernel, use_empty_cache

from sparse_indexer.jit import Kernel, load

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def monkey() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory, monkey: pytest.MonkeyPatch) -> None:
    use_empty_cache(tmp_path_factory.mktemp("check"), monkey)


@pytest.fixture(scope="module")
def checks(cached: None) -> Any:
    return load(Kernel("checks", {"unused": "Unused"}, root=CSRC), CPU)


def inputs(rows: int = 37, columns: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.zeros(rows, columns)
    return logits, logits.new_zeros(rows).int(), logits.new_zeros(rows, 2, columns).byte()


@needs_gxx
@pytest.mark.parametrize(("rows", "columns"), [(37, 64), (0, 64), (37, 0), (0, 0), (1, 1)])
def test_sizes_are_bound(checks: Any, rows: int, columns: int) -> None:
    """Zero is a size like any other."""
    assert list(checks.shapes(*inputs(rows, columns))) == [rows, columns]


@needs_gxx
def test_one_of_several_dtypes(checks: Any) -> None:
    logits, lens, pairs = inputs()
    checks.shapes(logits.bfloat16(), lens, pairs)
    with pytest.raises(
        ValueError,
        match=r"^logits: expected \[rows, columns\] float32 or bfloat16, got \[37, 64\] float16 on",
    ):
        checks.shapes(logits.half(), lens, pairs)


@needs_gxx
def test_message_names_sizes_that_are_free_and_numbers_that_are_bound(checks: Any) -> None:
    logits, lens, pairs = inputs()
    cases = [
        (
            (logits[0], lens, pairs),
            r"logits: expected \[rows, columns\] float32 or bfloat16, got \[64\]",
        ),
        ((logits, lens[:36], pairs), r"lens: expected \[37\] int32, got \[36\] int32 on cpu"),
        ((logits, lens.long(), pairs), r"lens: expected \[37\] int32, got \[37\] int64 on cpu"),
        ((logits, lens[None], pairs), r"lens: expected \[37\] int32, got \[1, 37\] int32 on cpu"),
        ((logits, lens, pairs[:, :1]), r"pairs: expected \[37, 2, 64\] uint8, got \[37, 1, 64\]"),
        ((logits, lens, pairs[..., 1:]), r"pairs: expected \[37, 2, 64\] uint8, got \[37, 2, 63\]"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=f"^{message}"):
            checks.shapes(*arguments)


@needs_gxx
def test_last_dim_contiguous(checks: Any) -> None:
    x = torch.zeros(6, 8)
    for good in (x, x[::2], x[:, :3], x[:, :1].expand(6, 1), x[:0].t()[:, ::2], x.t()[:, :1]):
        checks.last_dim_contiguous(good)
    with pytest.raises(ValueError, match=r"^x: expected a contiguous last dimension, got strides"):
        checks.last_dim_contiguous(x.t())
    with pytest.raises(ValueError, match=r"got strides \[8, 2\]"):
        checks.last_dim_contiguous(x[:, ::2])


@needs_gxx
def test_contiguous(checks: Any) -> None:
    x = torch.zeros(6, 8)
    for good in (x, x[2:4], x[:1, 3:5], x[:0, ::2]):
        checks.contiguous(good)
    for bad in (x.t(), x[:, :3], x[::2], x[:, ::2]):
        with pytest.raises(ValueError, match=r"^x: expected a contiguous tensor, got strides"):
            checks.contiguous(bad)


@needs_gxx
def test_aligned(checks: Any) -> None:
    x = torch.zeros(6, 8)
    for good in (
        x,
        x[:, :3],
        x[:, 4:],
        x[:0, 1:],
        x[1]._base[:1, :7] if x[1]._base is not None else x,
    ):
        checks.aligned(good)
    with pytest.raises(
        ValueError,
        match=r"^x: expected an address that is a multiple of 16, got one that is 4 past it",
    ):
        checks.aligned(x[:, 1:5])
    with pytest.raises(
        ValueError, match=r"^x: expected rows at multiples of 16 bytes, got strides \[7, 1\]"
    ):
        checks.aligned(torch.zeros(6, 7))


@needs_gxx
def test_rows_aligned(checks: Any) -> None:
    x = torch.zeros(6, 8)
    for good in (x, x[:, 4:], x[:1, :7], torch.empty(6, 0), x[:, 1:1], x[:0, 1:]):
        assert checks.rows_aligned_16(good)
    for bad in (x[:, 1:], torch.zeros(6, 7)):
        assert not checks.rows_aligned_16(bad)


@needs_gxx
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_are_at_multiples_of_their_size(checks: Any, dtype: torch.dtype) -> None:
    size = dtype.itemsize
    x = torch.frombuffer(bytearray(4 * 8 * size + 1), dtype=dtype, offset=1).view(4, 8)
    with pytest.raises(
        ValueError,
        match=rf"^x: expected an address that is a multiple of {size}, got one that is 1",
    ):
        checks.last_dim_contiguous(x)
    checks.last_dim_contiguous(x[:0])


@needs_gxx
def test_numbers(checks: Any) -> None:
    checks.scalar(1)
    checks.scalar(2048)
    for topk in (0, 2049, -1):
        with pytest.raises(ValueError, match=f"^topk: expected an int of 1 to 2048, got {topk}$"):
            checks.scalar(topk)


@needs_gxx
def test_optional_tensor(checks: Any) -> None:
    assert checks.optional(None) is False
    assert checks.optional(torch.zeros(3, dtype=torch.int32)) is True
    with pytest.raises(ValueError, match=r"^starts: expected \[requests\] int32, got \[3\] int64"):
        checks.optional(torch.zeros(3, dtype=torch.int64))


@needs_gxx
def test_data_of_a_slice(checks: Any) -> None:
    assert checks.first(torch.arange(8.0).view(2, 4)[1, 2:]) == 6.0


@needs_gxx
def test_cpu_tensors_are_refused_by_name(cached: None) -> None:
    x, factor = torch.zeros(3, 4), torch.zeros(3)
    entries = load(scale_kernel(), CPU)
    with pytest.raises(
        ValueError,
        match=r"^x: expected \[rows, columns\] float32 on cuda, got \[3, 4\] float32 on cpu$",
    ):
        entries.scale(x, factor, 1, False, x)


@needs_gxx
def test_launch_before_load_is_refused(cached: None) -> None:
    from jit_support import pretend_cuda

    x, factor = pretend_cuda(torch.zeros(3, 4)), pretend_cuda(torch.zeros(3))
    with pytest.raises(RuntimeError, match="kernels are not loaded on cuda:0"):
        load(scale_kernel(), CPU).scale(x, factor, 1, False, x)


@needs_gxx
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a driver")
def test_no_driver_is_named(cached: None) -> None:
    with pytest.raises(RuntimeError, match=r"cannot load the NVIDIA driver: libcuda.so.1"):
        load(scale_kernel(), CPU).load("scale", 0, b"cubin", ["scale_1"])
