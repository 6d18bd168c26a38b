# SPDX-License-Identifier: Apache-2.0
"""The picture of a demo: what each row published and selected, over the context."""

from __future__ import annotations

from pathlib import Path

import torch

from sparse_indexer.demo import DemoResult
from sparse_indexer.inputs import BLOCK_SIZE

try:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ImportError as error:
    want = "plot: expected matplotlib, got none: pip install 'sparse-indexer[plot]'"
    raise ImportError(want) from error

WIDTH, HEIGHT, DPI = 10.0, 3.4, 120  # inches; height of a panel
_MAX_CELLS = (512, 1024)  # rows, columns of a panel
_NOTHING, _PUBLISHED, _SELECTED = "#ffffff", "#bcd7ee", "#08306b"


def write_plot(result: DemoResult, path: Path) -> None:
    """Write a PNG, a panel for the source and one for the consumer.

    Left to right is the context, top to bottom the rows. Where a cell of the picture stands for
    several positions or rows, it shows the most that any of them is: selected, else published.
    """
    panels = {"source: its own selection": result.source_positions}
    if result.trace.consumer is not None:
        panels["consumer: selected among the source's blocks"] = result.positions
    figure = Figure(figsize=(WIDTH, HEIGHT * len(panels)), dpi=DPI, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, positions) in zip(axes, panels.items(), strict=True):
        _panel(axis, result, positions)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_ylabel("query token position")
    unit = f" of {result.trace.compress_ratio} tokens" if result.trace.compress_ratio > 1 else ""
    axes[-1].set_xlabel(f"position{unit} in the context")
    of = result.trace.metadata.get("model", result.trace.name)
    figure.suptitle(f"What each query token published and selected\n{of}", fontsize=10)
    figure.legend(
        handles=[
            Patch(facecolor=_PUBLISHED, label=f"published: {result.blocks.shape[1]} blocks of 8"),
            Patch(facecolor=_SELECTED, label=f"selected: {result.topk} positions"),
        ],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    figure.savefig(path, format="png")


def _panel(axis: Axes, result: DemoResult, positions: torch.Tensor) -> None:
    """Draw `[rows, topk]` positions over the published blocks."""
    tokens, context = result.trace.positions, max(result.context, 1)
    height, width = min(len(tokens), _MAX_CELLS[0]), min(context, _MAX_CELLS[1])
    cells = torch.zeros(height, width, dtype=torch.uint8)
    row_of = torch.arange(len(tokens)) * height // len(tokens)

    def mark(value: int, columns: torch.Tensor) -> None:
        rows, slots = ((columns >= 0) & (columns < context)).nonzero().unbind(1)
        cells[row_of[rows], columns[rows, slots].long() * width // context] = value

    first = result.blocks.long() * BLOCK_SIZE  # INT32_MAX is past any context
    for offset in range(BLOCK_SIZE):
        mark(1, first + offset)
    mark(2, positions)
    first_rows = (torch.arange(height) * len(tokens) + height - 1) // height
    edges = [*tokens[first_rows].tolist(), int(tokens[-1]) + 1]
    columns = [column * context / width for column in range(width + 1)]
    colors = ListedColormap([_NOTHING, _PUBLISHED, _SELECTED])
    axis.pcolormesh(columns, edges, cells.numpy(), cmap=colors, vmin=0, vmax=2)
    axis.set_xlim(-context / 200, context)  # room beside the first positions, often selected
    axis.invert_yaxis()
    axis.locator_params(integer=True)
    axis.spines[["top", "right"]].set_visible(False)
