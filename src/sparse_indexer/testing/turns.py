# SPDX-License-Identifier: Apache-2.0
"""Which layout, head count and page size a case is run with in which format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, product

from sparse_indexer.formats import KeyFormat
from sparse_indexer.testing.data import Layout


def turns(
    names: Sequence[str],
    formats: Sequence[KeyFormat],
    layouts: Sequence[Layout],
    heads: Sequence[int],
    page_sizes: Sequence[int],
) -> Iterator[tuple[str, KeyFormat, Layout, int, int]]:
    """Each case in each format once, with what it has met least.

    What gives a case most that is new to it comes first, among those what has least been combined.
    Over the formats, a case so meets as many layouts, head counts and page sizes as can be. A flat
    layout has no pages: its page size is the first and does not count.
    """
    choices = [
        (layout, count, page_sizes[0] if layout == "flat" else page_size)
        for layout, count, page_size in product(layouts, heads, page_sizes)
        if layout != "flat" or page_size == page_sizes[0]
    ]
    met: Counter[tuple[tuple[int, object], ...]] = Counter()
    chosen = {}
    for i, name in enumerate(names):
        for j in range(len(formats)):
            form = formats[(i + j) % len(formats)]  # the first ones have more to choose from
            options = []
            for choice in choices:
                layout, count, page_size = choice
                pages = None if layout == "flat" else page_size
                run = list(enumerate((name, form, layout, count, pages)))
                of_case = sum(not met[run[0], value] for value in run[2:])
                pairs = list(combinations(run, 2))
                options.append((-of_case, sum(met[pair] for pair in pairs), choice, pairs))
            _, _, choice, pairs = min(options, key=lambda option: option[:2])
            met.update(pairs)
            chosen[form, name] = choice
    for form, name in product(formats, names):
        yield name, form, *chosen[form, name]
