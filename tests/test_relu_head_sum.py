# SPDX-License-Identifier: Apache-2.0
"""The relu_head_sum kernel against its definition, and against block_keys of its own logits."""

import pytest
import torch

from sparse_indexer.ops.block_keys import block_keys
from sparse_indexer.ops.relu_head_sum import relu_head_sum

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
# Of a thread's block of 8, a CTA's 1024 positions, and of heads, 8 at a time.
WIDTHS = [1, 7, 8, 9, 64, 1000, 1023, 1024, 1025, 4096, 37_500]
HEADS = [1, 7, 8, 9, 32, 64]


def padded(rows: int, width: int, dtype: torch.dtype, fill: float = torch.nan) -> torch.Tensor:
    """`[rows, width]` with rows at multiples of 16 bytes, `fill` between them."""
    stride = -(-width // 8) * 8 + 8
    return torch.full((rows, stride), fill, dtype=dtype, device=DEVICE)[:, :width]


def whole_numbers(rows: int, heads: int, width: int) -> tuple[torch.Tensor, ...]:
    """Scores, weights and key scales whose logits are exact in float32."""
    generator = torch.Generator(DEVICE).manual_seed(width)
    made = torch.randint(-64, 65, (rows * heads, width), device=DEVICE, generator=generator)
    scores = padded(rows * heads, width, torch.float16)
    scores.copy_(made)
    weights = torch.randint(-32, 33, (rows, heads), device=DEVICE, generator=generator).float() / 16
    scales = 2.0 ** torch.randint(-3, 9, (width,), device=DEVICE, generator=generator)
    return scores, weights, scales


def reference(
    scores: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor:
    """In float64; NaN passes the ReLU."""
    rows, heads = weights.shape
    of_heads = scores.double().view(rows, heads, -1)
    of_heads = torch.where(of_heads < 0, 0.0, of_heads)
    logits = (weights.double()[:, None] @ of_heads)[:, 0]
    return logits if scales is None else logits * scales.double()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("width", WIDTHS)
def test_whole_numbers_are_exact(width: int, heads: int) -> None:
    scores, weights, scales = whole_numbers(5, heads, width)
    for given in (None, scales):
        for fill, extra in ((7.0, 4), (7.0, 5)):  # aligned outputs, and not
            whole = torch.full((5, width + extra - width % 4), fill, device=DEVICE)
            relu_head_sum(scores, weights, key_scales=given, out_logits=whole[:, :width])
            assert torch.equal(whole[:, :width].double(), reference(scores, weights, given))
            assert (whole[:, width:] == fill).all()


def test_random_scores_are_within_the_roundings() -> None:
    """Each of the sum's multiply-adds, and the scale, is rounded once."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    for heads in (32, 64):
        scores = torch.randn(20 * heads, 1024, device=DEVICE, generator=generator).half()
        weights = torch.randn(20, heads, device=DEVICE, generator=generator)
        scales = torch.rand(1024, device=DEVICE, generator=generator)
        out = torch.empty(20, 1024, device=DEVICE)
        relu_head_sum(scores, weights, key_scales=scales, out_logits=out)
        bound = (heads + 1) * 2.0**-24 * reference(scores, weights.abs(), scales)
        error = (out.double() - reference(scores, weights, scales)).abs()
        assert (error <= bound).all(), (error / bound).max()
        assert error.any()


def test_heads_are_added_in_order() -> None:
    """To the bit what float32 multiply-adds give, one head after the other."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    scores = torch.randn(3 * 64, 16, device=DEVICE, generator=generator).half()
    weights = torch.randn(3, 64, device=DEVICE, generator=generator)
    sums = torch.zeros(3, 16, dtype=torch.float64, device=DEVICE)
    for h in range(64):  # a product of 11 and 24 bits is exact in float64, and so is its sum here
        sums += weights[:, h, None].double() * scores[h::64].relu().double()
        sums = sums.float().double()
    out = torch.empty(3, 16, device=DEVICE)
    relu_head_sum(scores, weights, out_logits=out)
    assert torch.equal(out, sums.float())


def test_infinities_and_nan() -> None:
    """-inf and -0 are nothing, NaN of either sign stays."""
    scores = torch.zeros(2 * 9, 8, dtype=torch.float16, device=DEVICE)
    scores[0, :5] = torch.tensor([-torch.inf, torch.inf, torch.nan, -0.0, 65504.0]).half()
    scores[0].view(torch.int16)[5] = -1  # NaN with its sign set
    scores[1, 6] = torch.inf
    weights = torch.ones(2, 9, device=DEVICE)
    weights[0, 1] = -1
    out = torch.empty(2, 8, device=DEVICE)
    relu_head_sum(scores, weights, out_logits=out)
    inf, nan = torch.inf, torch.nan
    want = torch.tensor([[0, inf, nan, 0, 65504.0, nan, -inf, 0], [0.0] * 8], device=DEVICE)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.nan_to_num(0), want.nan_to_num(0))
    weights[1, 0] = torch.inf  # times 0
    relu_head_sum(scores, weights, out_logits=out)
    assert out[1].isnan().all()


@pytest.mark.parametrize("heads", [7, 32, 64])
@pytest.mark.parametrize("width", WIDTHS)
def test_keys_are_those_of_its_logits(width: int, heads: int) -> None:
    edges = {0, 1, 7, 8, 9, 15, 16, 17, width - 9, width - 8, width - 1, width}
    lens = sorted(n for n in edges if 0 <= n <= width)
    scores, weights, scales = whole_numbers(len(lens), heads, width)
    scores[:, ::5] = torch.nan
    scores[:, 8:16] = torch.nan
    for row, length in enumerate(lens):  # would win if it were read
        scores[row * heads : (row + 1) * heads, length:] = torch.inf
    seen = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    logits = padded(len(lens), width, torch.float32)
    relu_head_sum(scores, weights, key_scales=scales, out_logits=logits)
    blocks = -(-width // 8)
    want = torch.empty(len(lens), blocks, device=DEVICE)
    block_keys(logits, seen, out=want)
    whole = torch.full((len(lens), blocks + 3), 7.0, device=DEVICE)
    relu_head_sum(scores, weights, key_scales=scales, lens=seen, out_keys=whole[:, :blocks])
    assert torch.equal(whole[:, :blocks], want)
    assert (whole[:, blocks:] == 7).all()


def test_tiles_of_positions_give_the_keys_of_the_whole() -> None:
    lens = [0, 5, 64, 72, 130, 199, 200]
    scores, weights, scales = whole_numbers(7, 32, 200)
    seen = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    want, got = torch.empty(2, 7, 25, device=DEVICE)
    relu_head_sum(scores, weights, key_scales=scales, lens=seen, out_keys=want)
    for start, stop in ((0, 64), (64, 136), (136, 200)):
        some, blocks = slice(start, stop), slice(start // 8, stop // 8)
        relu_head_sum(
            scores[:, some], weights, key_scales=scales[some], lens=seen, start=start,
            out_keys=got[:, blocks],
        )  # fmt: skip
    assert torch.equal(got, want)
    assert [int(keys.isposinf().sum()) for keys in want] == [0, 1, 1, 1, 1, 1, 1]


def test_logits_of_blocks_that_are_not_seen_are_left_alone() -> None:
    scores, weights, _ = whole_numbers(4, 32, 40)
    lens = torch.tensor([-5, 0, 9, 1000], dtype=torch.int32, device=DEVICE)
    out = torch.full((4, 40), 7.0, device=DEVICE)
    relu_head_sum(scores, weights, lens=lens, out_logits=out)
    want = reference(scores, weights, None).float()
    assert (out[:2] == 7).all()
    assert torch.equal(out[2, :16], want[2, :16])
    assert (out[2, 16:] == 7).all()
    assert torch.equal(out[3], want[3])


def test_tiles_beyond_four_gigabytes_and_many_rows() -> None:
    scores = torch.ones(70_000 * 2, 40_000, dtype=torch.float16, device=DEVICE)
    weights = torch.ones(70_000, 2, device=DEVICE)
    weights[-1] = 3
    lens = torch.full((70_000,), 39_999, dtype=torch.int32, device=DEVICE)
    keys = torch.empty(70_000, 5000, device=DEVICE)
    relu_head_sum(scores, weights, lens=lens, out_keys=keys)
    assert (keys[:-1, :-1] == 2).all()
    assert (keys[-1, :-1] == 6).all()
    assert keys[:, -1].isposinf().all()


def test_empty_calls_and_mistakes() -> None:
    scores, weights, scales = whole_numbers(2, 32, 64)
    lens = torch.tensor([3, 64], dtype=torch.int32, device=DEVICE)
    out, keys = torch.empty(2, 64, device=DEVICE), torch.empty(2, 8, device=DEVICE)
    relu_head_sum(scores[:0], weights[:0], out_logits=out[:0])
    relu_head_sum(scores[:, :0], weights, lens=lens, out_keys=keys[:, :0])
    mistakes = {
        "out_logits, out_keys: expected one of the two, got both": {"out_keys": keys},
        "out_logits, out_keys: expected one of the two, got None": {"out_logits": None},
        r"out_logits: expected \[2, 64\] float32 .*, got \[2, 8\]": {"out_logits": keys},
        r"scores: expected \[64, positions\] float16 .*, got \[63, 64\]": {"scores": scores[:63]},
        "scores: expected rows at multiples of 16 bytes": {
            "scores": torch.empty(64, 65, dtype=torch.float16, device=DEVICE)[:, :64]
        },
        "start: expected a multiple of 8, got 4": {"start": 4},
        r"key_scales: expected \[64\] float32 .*, got \[63\]": {"key_scales": scales[:63]},
    }
    for message, wrong in mistakes.items():
        given = {"scores": scores, "weights": weights, "lens": lens, "out_logits": out} | wrong
        with pytest.raises(ValueError, match=f"^{message}"):
            relu_head_sum(given.pop("scores"), given.pop("weights"), **given)
    with pytest.raises(ValueError, match=r"^lens: expected a tensor with out_keys, got None"):
        relu_head_sum(scores, weights, out_keys=keys)
