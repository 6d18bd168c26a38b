# SPDX-License-Identifier: Apache-2.0
"""The softmax of sparse attention against float64: in torch, and the kernel."""

import math

import pytest
import torch

from sparse_indexer.ops import sparse_softmax as kernel
from sparse_indexer.torch_ops import sparse_softmax as plain

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
SLOTS = 5000
# Where a warp, a CTA and slabs of a CTA begin and end, and what is not a multiple of 4.
WIDTHS = [
    1,
    3,
    4,
    8,
    37,
    128,
    508,
    512,
    640,
    641,
    644,
    2048,
    2176,
    2560,
    2564,
    8192,
    32_768,
    50_001,
]


def call(
    logits: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    sink: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    options = {"num_slots": SLOTS, "scale": scale, "sink": sink, "out": out}
    if logits.device.type == "cuda":
        kernel.sparse_softmax(logits, positions, **options)
    else:
        plain.sparse_softmax(logits.clone(), positions, **options)


def make(
    rows: int, heads: int, k: int, device: str, unused: float = 0.3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, NaN and infinities in unused entries; positions; sinks."""
    generator = torch.Generator().manual_seed(k)
    logits = torch.randn(rows, heads, k, generator=generator) * 30
    positions = (torch.rand(rows, k, generator=generator) * SLOTS).int()
    none = torch.rand(rows, k, generator=generator) < unused
    hostile = torch.tensor([-1, SLOTS, 2**31 - 1, -(2**31)], dtype=torch.int32)
    positions = torch.where(none, hostile[torch.arange(k) % 4], positions)
    wrong = torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.arange(k) % 3]
    logits = torch.where(none[:, None], wrong, logits)
    sink = torch.randn(heads, generator=generator) * 3
    return logits.to(device), positions.to(device), sink.to(device)


def used_entries(positions: torch.Tensor) -> torch.Tensor:
    return ((positions >= 0) & (positions < SLOTS))[:, None].cpu()


def assert_near(
    out: torch.Tensor,
    logits: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
) -> None:
    """Within the roundings of the formula.

    A float32 rounding of y = scale * logit and of y - top moves an exponential by as much as it
    moves them: |y| and |y - top| units. An exponential is within 2 ulp, 4 units, a sum within one
    for each of its terms, `inverse` and the product within one each; all count once for the entry
    and once for the total. At last one rounding to the output.
    """
    used = used_entries(positions)
    y = torch.where(used, logits.cpu().double(), 0) * scale
    y = torch.where(used, y, -torch.inf)
    all_y = (
        y if sink is None else torch.cat((y, sink.cpu().double()[:, None].expand(len(y), -1, 1)), 2)
    )
    want = torch.where(used, all_y.softmax(2)[..., : y.shape[2]], 0).nan_to_num(0)
    finite = torch.where(all_y.isfinite(), all_y, 0)
    largest = finite.abs().amax(2, keepdim=True)
    units = 2 * (3 * largest + 4 + 2 + all_y.shape[2])
    last = UNIT[out.dtype] * want + {torch.float16: 2.0**-25}.get(out.dtype, 2.0**-126)
    error = (out.cpu().double() - want).abs()
    bound = units * 2.0**-24 * want + last
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", WIDTHS)
def test_is_the_formula(k: int, device: str) -> None:
    rows, heads = (3, 7) if k < 10_000 else (2, 3)
    logits, positions, sink = make(rows, heads, k, device)
    for dtype in DTYPES:
        for given, scale in ((None, 0.125), (sink, -0.7)):
            whole = torch.full((rows, heads + 1, k + 4), 7.0, dtype=dtype, device=device)
            out = whole[:, 1:, :k]
            call(logits, positions, scale=scale, sink=given, out=out)
            assert_near(out, logits, positions, scale, given)
            assert not out[~used_entries(positions).to(device).expand(out.shape)].any()
            out.fill_(7)
            assert (whole == 7).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [8, 640, 2176, 8192, 37])
def test_values_that_are_not_finite(k: int, device: str) -> None:
    """Row by row: nothing used, all -inf, one +inf, one NaN, one -inf."""
    logits, positions, _ = make(5, 2, k, device, unused=0)
    positions[:, 1] = -1
    logits[:, :, 1] = torch.nan
    positions[0] = -3
    logits[1] = -torch.inf
    logits[2, :, 2], logits[3, :, 3], logits[4, :, 2] = torch.inf, torch.nan, -torch.inf
    used = used_entries(positions).to(device).expand(5, 2, k)
    sinks = {"none": None, "finite": 0.5, "-inf": -torch.inf, "+inf": torch.inf, "nan": torch.nan}
    for dtype in DTYPES:
        for name, value in sinks.items():
            sink = None if value is None else torch.full((2,), value, device=device)
            out = torch.full((5, 2, k), 7.0, dtype=dtype, device=device)
            call(logits, positions, scale=1.0, sink=sink, out=out)
            assert not out[~used].any()
            for row in (2, 3) if name in ("none", "finite", "-inf") else (1, 2, 3, 4):
                assert out[row][used[row]].isnan().all(), (name, row)
            if name == "finite":
                assert not out[1].any()
            elif name in ("none", "-inf"):
                assert out[1][used[1]].isnan().all()
            if name in ("none", "finite", "-inf"):
                assert not out[4, :, 2].any()
                assert out[4].sum().isfinite()
                assert out[4].any()


@pytest.mark.gpu
@pytest.mark.parametrize("k", WIDTHS)
def test_in_place(k: int) -> None:
    """Over the logits: float32 on them, halves each row and head where it begins."""
    logits, positions, sink = make(3, 5, k, "cuda")
    for dtype in DTYPES:
        want = torch.empty(3, 5, k, dtype=dtype, device="cuda")
        call(logits, positions, scale=0.1, sink=sink, out=want)
        memory = logits.clone()
        out = memory.view(dtype)[..., :k]
        call(memory, positions, scale=0.1, sink=sink, out=out)
        assert torch.equal(out, want)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [640, 2176, 2564])
def test_a_row_has_the_same_bits_in_any_call(k: int) -> None:
    logits, positions, sink = make(70, 64, k, "cuda")
    want = torch.empty(70, 64, k, dtype=torch.float32, device="cuda")
    call(logits, positions, scale=0.1, sink=sink, out=want)
    for row in (0, 33, 69):
        some, out = slice(row, row + 1), torch.empty(1, 64, k, device="cuda")
        call(logits[some], positions[some], scale=0.1, sink=sink, out=out)
        assert torch.equal(out[0], want[row])
    heads = torch.empty(70, 3, k, device="cuda")
    call(logits[:, 5:8], positions, scale=0.1, sink=sink[5:8], out=heads)
    assert torch.equal(heads, want[:, 5:8])


@pytest.mark.gpu
def test_many_rows_and_strides() -> None:
    """More than 65,535 rows; row and head strides with gaps, of which some are not aligned."""
    logits, positions, sink = make(70_000, 1, 8, "cuda")
    out = torch.empty(70_000, 1, 8, dtype=torch.float16, device="cuda")
    call(logits, positions, scale=0.1, sink=sink, out=out)
    assert_near(out, logits, positions, 0.1, sink)
    logits, positions, sink = make(4, 6, 640, "cuda")
    want = torch.empty(4, 6, 640, device="cuda")
    call(logits, positions, scale=0.1, sink=sink, out=want)
    by_head = logits.transpose(0, 1).contiguous().transpose(0, 1)
    out = torch.empty(6, 4, 648, device="cuda").transpose(0, 1)[..., :640]
    call(by_head, positions, scale=0.1, sink=sink, out=out)
    assert torch.equal(out, want)
    wide = torch.full((4, 6, 645), torch.nan, device="cuda")
    wide[..., 1:641] = logits
    call(wide[..., 1:641], positions, scale=0.1, sink=sink, out=out)
    assert_near(out, logits, positions, 0.1, sink)


@pytest.mark.gpu
def test_empty_calls_and_mistakes() -> None:
    logits, positions, sink = make(3, 2, 8, "cuda")
    out = torch.full((3, 2, 8), 7.0, device="cuda")
    good = {"num_slots": SLOTS, "scale": 0.1, "sink": sink, "out": out}
    for some in (slice(0), slice(3, 3)):
        given = good | {"out": out[some]}
        kernel.sparse_softmax(logits[some], positions[some], **given)
    kernel.sparse_softmax(logits[..., :0], positions[:, :0], **good | {"out": out[..., :0]})
    assert (out == 7).all()
    kernel.sparse_softmax(logits, positions, **good | {"num_slots": 0})
    assert not out.any()
    mistakes = {
        r"out: expected \[3, 2, 8\] float16 or bfloat16 or float32 .*, got \[3, 2, 7\]": {
            "out": out[..., :7]
        },
        r"sink: expected \[2\] float32 on cuda:0, got \[1\] float32": {"sink": sink[:1]},
        "scale: expected a finite float32, got inf": {"scale": math.inf},
        "scale: expected a number, got None": {"scale": None},
        "num_slots: expected an int of 0 to": {"num_slots": -1},
    }
    for message, wrong in mistakes.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            kernel.sparse_softmax(logits, positions, **good | wrong)
