# SPDX-License-Identifier: Apache-2.0
"""The block_keys kernel against its definition in torch."""

import math

import pytest
import torch

from sparse_indexer.ops.block_keys import block_keys

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")


def reference(logits: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    blocks = -(-logits.shape[1] // 8)
    at = torch.arange(8 * blocks, device=logits.device)
    padded = torch.nn.functional.pad(logits.float(), (0, 8 * blocks - logits.shape[1]))
    hidden = (at >= lens[:, None]) | padded.isnan()
    keys = torch.where(hidden, -math.inf, padded).view(len(logits), blocks, 8).amax(2)
    first = 8 * torch.arange(blocks, device=logits.device)
    newest = (first < lens[:, None]) & (first + 8 >= lens[:, None])
    return torch.where(newest, math.inf, keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 16, 64, 8192, 8200, 16_383, 16_392, 50_001])
def test_equals_the_definition(width: int, dtype: torch.dtype) -> None:
    edges = {0, 1, 7, 8, 9, 15, 16, 17, width - 9, width - 8, width - 1, width}
    lens = torch.tensor(
        sorted(n for n in edges if 0 <= n <= width), dtype=torch.int32, device=DEVICE
    )
    rows, stride = len(lens), -(-width // 8) * 8 + 8
    wide = torch.full((rows, stride), math.inf, dtype=dtype, device=DEVICE)
    logits = wide[:, :width]
    logits.copy_(torch.randn(rows, width, device=DEVICE))
    logits[:, ::5] = math.nan
    logits[:, 8:16] = math.nan
    for row, length in enumerate(lens.tolist()):
        logits[row, length:] = math.inf  # would win if it were read
    blocks = -(-width // 8)
    buffer = torch.full((rows, blocks + 5), 7.0, device=DEVICE)
    block_keys(logits, lens, out=buffer[:, :blocks])
    assert torch.equal(buffer[:, :blocks], reference(logits, lens))
    assert (buffer[:, blocks:] == 7).all()


def test_rows_with_few_blocks_are_left_alone() -> None:
    logits = torch.randn(4, 256, device=DEVICE)
    lens = torch.tensor([0, 64, 65, 256], dtype=torch.int32, device=DEVICE)
    out = torch.full((4, 32), 7.0, device=DEVICE)
    block_keys(logits, lens, out=out, skip_blocks=8)
    assert (out[:2] == 7).all()
    assert torch.equal(out[2:], reference(logits, lens)[2:])


def test_many_rows_long_rows_and_hostile_lengths() -> None:
    logits = torch.randn(70_000, 16, device=DEVICE)
    lens = torch.randint(0, 17, (70_000,), dtype=torch.int32, device=DEVICE)
    out = torch.empty(70_000, 2, device=DEVICE)
    block_keys(logits, lens, out=out)
    assert torch.equal(out, reference(logits, lens))
    lens[:2] = torch.tensor([-4, 1000], dtype=torch.int32)
    block_keys(logits, lens, out=out)
    assert torch.equal(out[:2], reference(logits[:2], lens[:2].clamp(0, 16)))

    width = 1 << 20
    logits = torch.empty(2049, width, device=DEVICE).normal_()
    lens = torch.full((2049,), width - 3, dtype=torch.int32, device=DEVICE)
    out = torch.empty(2049, width // 8, device=DEVICE)
    block_keys(logits, lens, out=out)
    for row in (0, 1000, 2048):
        some = slice(row, row + 1)
        assert torch.equal(out[some], reference(logits[some], lens[some]))


def test_empty_batches_and_mistakes() -> None:
    lens = torch.tensor([3, 4], dtype=torch.int32, device=DEVICE)
    block_keys(torch.empty(0, 64, device=DEVICE), lens[:0], out=torch.empty(0, 8, device=DEVICE))
    block_keys(torch.empty(2, 0, device=DEVICE), lens, out=torch.empty(2, 0, device=DEVICE))
    out = torch.empty(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="logits: expected rows at multiples of 16 bytes"):
        block_keys(torch.empty(2, 65, device=DEVICE)[:, :64], lens, out=out)
    with pytest.raises(ValueError, match="logits: expected an address that is a multiple of 16"):
        block_keys(torch.empty(2, 68, device=DEVICE)[:, 1:65], lens, out=out)
    with pytest.raises(ValueError, match=r"out: expected \[2, 8\] float32 on cuda:0, got \[2, 9\]"):
        block_keys(torch.empty(2, 64, device=DEVICE), lens, out=torch.empty(2, 9, device=DEVICE))
