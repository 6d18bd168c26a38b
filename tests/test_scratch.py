# SPDX-License-Identifier: Apache-2.0
"""Pieces of one allocation: whole, apart, aligned, and given back together."""

import pytest
import torch

from sparse_indexer.scratch import Scratch

CPU = torch.device("cpu")
SHAPES = [
    ((3, 5), torch.float32),
    ((1,), torch.uint8),
    ((7, 1, 2), torch.int16),
    ((0, 4), torch.float32),
    ((257,), torch.uint8),
    ((2, 33), torch.bfloat16),
    ((64,), torch.int32),
]


def offset(scratch: Scratch, piece: torch.Tensor) -> int:
    return piece.data_ptr() - scratch._memory.data_ptr()


def test_pieces_are_as_asked_and_do_not_overlap() -> None:
    scratch = Scratch(1 << 14, 1 << 14, CPU)
    pieces = [scratch.take(shape, dtype) for shape, dtype in SHAPES]
    for i, (piece, (shape, dtype)) in enumerate(zip(pieces, SHAPES, strict=True)):
        assert (tuple(piece.shape), piece.dtype, piece.device) == (shape, dtype, CPU)
        assert piece.is_contiguous()
        piece.fill_(i + 1)
    for i, piece in enumerate(pieces):
        assert (piece == i + 1).all()


def test_pieces_begin_at_multiples_of_256_bytes() -> None:
    scratch = Scratch(1 << 14, 1 << 14, CPU)
    offsets = [
        offset(scratch, scratch.take((n,), torch.uint8)) for n in (1, 255, 256, 257, 512, 3, 1)
    ]
    assert offsets == [0, 256, 512, 768, 1280, 1792, 2048]


def test_peek_is_the_piece_that_comes_next() -> None:
    scratch = Scratch(1 << 12, 1 << 12, CPU)
    scratch.take((300,), torch.uint8)
    first, second = scratch.peek((4, 8), torch.float32), scratch.peek((9,), torch.int16)
    taken = scratch.take((2,), torch.int32)
    assert offset(scratch, first) == offset(scratch, second) == offset(scratch, taken) == 512
    assert (tuple(first.shape), second.dtype) == ((4, 8), torch.int16)
    taken.fill_(5)
    assert first.view(torch.int32)[0, :2].tolist() == [5, 5]
    assert offset(scratch, scratch.take((1,), torch.uint8)) == 768


def test_restart_takes_back_what_is_not_kept() -> None:
    scratch = Scratch(1 << 12, 1 << 12, CPU)
    assert scratch.restart() is scratch
    kept = scratch.take((100,), torch.uint8).fill_(3)
    scratch.keep()
    for _ in range(100):  # else it would run out
        piece = scratch.take((1000,), torch.uint8).fill_(4)
        assert offset(scratch, piece) == 256
        assert scratch.restart() is scratch
    assert (kept == 3).all()
    assert scratch.clear() is scratch
    assert offset(scratch, scratch.take((1,), torch.uint8)) == 0
    scratch.keep()
    assert offset(scratch.restart(), scratch.take((1,), torch.uint8)) == 256


@pytest.mark.parametrize("limit", [256, 1000, 1024, 3 << 10, 1 << 20])
def test_sizes_are_powers_of_two_up_to_the_limit(limit: int) -> None:
    """Or what is needed if that is more; always multiples of 256."""
    for nbytes in (1, 2, 255, 256, 257, 500, 512, 513, 1000, 1024, 1025, 2049, 5000):
        scratch = Scratch(nbytes, limit, CPU)
        size, needed = len(scratch._memory), -(-nbytes // 256) * 256
        assert needed <= size <= max(needed, min(limit, 2 * needed))
        assert size in (needed, limit // 256 * 256) or size & (size - 1) == 0
        assert scratch.peek((nbytes,), torch.uint8).nbytes == nbytes
        with pytest.raises(AssertionError):
            scratch.peek((size + 1,), torch.uint8)
    sizes = {len(Scratch(n, 1 << 16, CPU)._memory) for n in range(1, 1 << 16, 97)}
    assert len(sizes) < 12  # all that calls of growing chunks ask the allocator for


def test_slack_is_what_sixteen_pieces_lose_by_alignment() -> None:
    sizes = [1, 257, 513, 769] * 4  # each loses 255 bytes
    scratch = Scratch(sum(sizes) + Scratch.SLACK, 0, CPU)
    for size in sizes:
        scratch.take((size,), torch.uint8)


def test_more_than_there_is_is_our_mistake() -> None:
    scratch = Scratch(1024, 1024, CPU)
    scratch.take((256,), torch.float32)
    scratch.take((0,), torch.float32)
    with pytest.raises(AssertionError):
        scratch.take((1,), torch.uint8)
