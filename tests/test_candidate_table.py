# SPDX-License-Identifier: Apache-2.0
"""The candidate_table kernel against loops."""

import pytest
import torch

from sparse_indexer.formats import INT32_MAX
from sparse_indexer.ops.candidate_table import candidate_table

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")


def on_gpu(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("n", [1, 5, 64, 300, 2048])
@pytest.mark.parametrize("page_size", [8, 24, 64])
def test_equals_loops(n: int, page_size: int) -> None:
    lens = [0, 1, 7, 8, 9, 8 * n - 1, 8 * n, 8 * n + 1, 8 * n + 100, 8 * n + 777, -2]
    requests = [i % 3 for i in range(len(lens))]
    per_page, max_pages = page_size // 8, (8 * n + 777) // page_size + 1
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(0, 10_000, (3, max_pages), generator=generator).tolist()
    selected = []
    for length in lens:
        blocks = -(-max(0, length) // 8)
        if blocks <= n:
            selected.append([-99] * n)  # must not be read
        else:
            old = torch.randperm(blocks - 1, generator=generator)[: n - 1].sort().values.tolist()
            selected.append([*old, blocks - 1])
    kept = [9, 0, 3, 8, 6]
    for rows in (list(range(len(lens))), kept):
        out_blocks, out_slots = torch.full((2, len(rows), n), 7, dtype=torch.int32, device=DEVICE)
        out_lens = torch.full((len(rows),), 7, dtype=torch.int32, device=DEVICE)
        candidate_table(
            on_gpu(selected),
            on_gpu(lens),
            rows=None if rows is not kept else torch.tensor(rows, device=DEVICE),
            request_of_row=on_gpu(requests),
            page_table=on_gpu(table),
            page_size=page_size,
            out_blocks=out_blocks,
            out_slots=out_slots,
            out_lens=out_lens,
        )
        for i, row in enumerate(rows):
            length = max(0, lens[row])
            blocks = -(-length // 8)
            want = list(range(blocks)) if blocks <= n else selected[row]
            pages = table[requests[row]]
            slots = [pages[b // per_page] * per_page + b % per_page for b in want]
            assert out_blocks[i].tolist() == want + [INT32_MAX] * (n - len(want))
            assert out_slots[i].tolist() == slots + [0] * (n - len(want))
            assert int(out_lens[i]) == sum(min(8, length - 8 * b) for b in want)


def test_without_slots_and_empty() -> None:
    out_blocks = torch.full((2, 3), 7, dtype=torch.int32, device=DEVICE)
    out_lens = torch.full((2,), 7, dtype=torch.int32, device=DEVICE)
    candidate_table(
        on_gpu([[0, 4, 6], [0, 0, 0]]), on_gpu([50, 9]), out_blocks=out_blocks, out_lens=out_lens
    )
    assert out_blocks.tolist() == [[0, 4, 6], [0, 1, INT32_MAX]]
    assert out_lens.tolist() == [18, 9]
    empty = torch.empty(0, 3, dtype=torch.int32, device=DEVICE)
    candidate_table(
        empty, empty[:, 0].contiguous(), out_blocks=empty.clone(), out_lens=out_lens[:0]
    )
    with pytest.raises(
        ValueError, match="page_table, request_of_row, out_slots: expected all three or none"
    ):
        candidate_table(
            out_blocks, out_lens, out_blocks=out_blocks, out_lens=out_lens, out_slots=out_blocks
        )


def test_more_rows_than_65535_any_stride() -> None:
    rows, n = 70_000, 4
    wide = torch.zeros(rows, 9, dtype=torch.int32, device=DEVICE)
    wide[:, 2:6] = torch.arange(rows, device=DEVICE)[:, None] % 7 + on_gpu([0, 10, 20, 30])
    wide[:, 5] = 99
    lens = torch.full((rows,), 8 * 99 + 3, dtype=torch.int32, device=DEVICE)
    out_blocks = torch.full((rows, n), 7, dtype=torch.int32, device=DEVICE)
    out_lens = torch.full((rows,), 7, dtype=torch.int32, device=DEVICE)
    candidate_table(wide[:, 2:6], lens, out_blocks=out_blocks, out_lens=out_lens)
    assert torch.equal(out_blocks, wide[:, 2:6])
    assert (out_lens == 3 * 8 + 3).all()
