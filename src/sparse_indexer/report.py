# SPDX-License-Identifier: Apache-2.0
"""What the demo prints."""

from __future__ import annotations

import itertools
import math
import textwrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparse_indexer.demo import MEMORY_BUDGET, PAGE_SIZE, DemoResult
from sparse_indexer.errors import one_line
from sparse_indexer.trace import Trace

_EXAMPLES = 3  # query tokens whose selection is shown as text
_PASSAGES = 4  # of each, at most
_REACH = 5  # tokens before and after the best position of a passage


def print_report(console: Console, result: DemoResult) -> None:
    """What ran, what it cost, what it chose, and the text that some rows chose."""
    _print_setting(console, result)
    _print_steps(console, result)
    _print_findings(console, result)
    _print_examples(console, result)


def bytes_text(size: float) -> str:
    """Three digits and a decimal unit."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _print_setting(console: Console, result: DemoResult) -> None:
    trace, tokens = result.trace, result.trace.positions
    heads, keys = trace.source.index_q.values.shape[1], trace.source.index_k
    ratio = f" of {trace.compress_ratio} tokens" if trace.compress_ratio > 1 else ""
    lines = [("trace", trace.name)]
    lines += [(k, trace.metadata[k]) for k in ("model", "text", "layers") if k in trace.metadata]
    rows = f"{len(tokens)} rows, tokens {int(tokens[0])} to {int(tokens[-1])}, {heads} heads"
    lines.append(("queries", rows))
    pages = f"in pages of {PAGE_SIZE}, shuffled"
    lines.append(("keys", f"{result.context} positions{ratio}, {keys.format}, {pages}"))
    best = f"{result.blocks.shape[1]} blocks of 8 and {result.topk} positions a row"
    lines.append(("backend", f"{result.backend} on {result.device}, {best}"))
    _print_list(console, lines)


def _print_steps(console: Console, result: DemoResult) -> None:
    calls = {
        "source": "publish_prefill",
        "consumer": "select_prefill",
        "tail": "prefill_tail,\nselect_prefill",
        "full": "topk_prefill",
    }
    table = Table("step", "call", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("rows", "blocks", "positions", "share", "time", "memory"):
        table.add_column(name, justify="right")
    for step in result.steps:
        table.add_row(
            step.name,
            calls[step.name],
            str(step.rows),
            "" if step.blocks is None else f"{step.blocks:.5g}",
            f"{step.positions:.5g}",
            f"{step.share:.1%}",
            f"{step.seconds:.3f} s",
            bytes_text(step.peak_bytes),
        )
    console.print()
    console.print(table)
    kept = "blocks, positions: published or selected by a row, mean"
    share = "share: of the positions it sees"
    memory = f"memory: {result.memory_rule}"
    console.print(f"{kept}; {share}; {memory}\n", style="dim", markup=False)


def _print_findings(console: Console, result: DemoResult) -> None:
    trace, topk, lines = result.trace, result.topk, []
    if len(result.deep_rows):
        who = "the source" if trace.consumer is None else "the consumer"
        lines.append(
            (
                "recall",
                f"{result.recall:.2%} of {who}: the mean of |selected and in the full layer's top "
                f"{topk}| / {topk} over the {len(result.deep_rows)} rows that see more than {topk}",
            )
        )
    if trace.consumer is not None and not trace.shared_keys:
        own = "each layer's own: this is not a model that was trained to share index keys"
        lines.append(("keys", own))
    tail, equal = len(result.tail_positions), result.tail_rows_equal
    lines.append(("tail", f"{equal} of {tail} rows select what they do among all rows"))
    if not math.isnan(result.overlap):
        overlap = f"{result.overlap:.1%} of a row's published blocks were the row before's, too"
        lines.append(("overlap", overlap))
    dense = bytes_text(len(result.positions) * result.context * 4)
    matrix = f"[{len(result.positions)}, {result.context}] float32"
    blocks, positions = bytes_text(result.blocks.nbytes), bytes_text(result.positions.nbytes)
    lines.append(("unwritten", f"{dense} a layer: the matrix of logits, {matrix}"))
    lines.append(("written", f"{blocks} of block ids, and {positions} of positions a layer"))
    scratch = f"at most {bytes_text(MEMORY_BUDGET)}, whatever the context: one tile of logits"
    lines.append(("scratch", scratch))
    _print_list(console, lines)


def _print_examples(console: Console, result: DemoResult) -> None:
    """For a few rows, what their best positions are, and the text there."""
    trace, marks = result.trace, console.is_terminal
    ratio, tokens = trace.compress_ratio, trace.positions.tolist()
    order = "lowest" if result.logits is None else "best"
    if trace.token_text is None:
        console.print(f"\nsome of what was selected, {order} first", style="dim")
    else:
        how = "underlined" if marks else "in brackets"
        note = f"passages around the selected ({how}), {order} first: positions, logit, text"
        console.print(f"\n{note}", style="dim")
    for row in _example_rows(result):
        token, chosen = tokens[row], set(result.positions[row].tolist())
        title = Text(f"query token {token}  ", style="bold")
        if trace.token_text is None:
            best = ", ".join(str(position) for position, _ in _best(result, row))
            console.print(title + Text(best, style="not bold"), no_wrap=True, overflow="ellipsis")
            continue
        before = _marked(trace, max(0, token - 2 * _REACH), token + 1, {token}, marks)
        title += before[max(0, len(before) - console.width + len(title)) :]
        console.print()
        console.print(title, no_wrap=True, overflow="ellipsis")
        for first, last, logit in _passages(result, row):
            inside = chosen.intersection(range(first, last + 1))
            marked = {t for p in inside for t in range(p * ratio, (p + 1) * ratio)}
            text = _marked(trace, first * ratio, (last + 1) * ratio, marked, marks)
            where, value = f"{first}-{last}", "" if math.isnan(logit) else f"{logit:.2f}"
            line = Text(f"{where:>15}  {value:>6}  ") + text
            console.print(line, no_wrap=True, overflow="ellipsis")


def _example_rows(result: DemoResult) -> list[int]:
    """Rows spread evenly over those that select something, each moved on to a whole word."""
    rows = (result.positions >= 0).any(1).nonzero().squeeze(1).tolist()
    trace, tokens, found = result.trace, result.trace.positions.tolist(), []
    for i in range(_EXAMPLES):
        later = rows[len(rows) * (2 * i + 1) // (2 * _EXAMPLES) :]
        if trace.token_text is not None:
            word = (r for r in later if trace.words(tokens[r], tokens[r] + 1).strip().isalpha())
            later = [*itertools.islice(word, 1), *later]
        found += later[:1]
    return list(dict.fromkeys(found))


def _best(result: DemoResult, row: int) -> list[tuple[int, float]]:
    """(position, logit) of what a row selected, best first; lowest first and NaN without logits."""
    count = int((result.positions[row] >= 0).sum())
    positions = result.positions[row, :count]
    logits = positions * math.nan if result.logits is None else result.logits[row, :count]
    best = logits.argsort(descending=True, stable=True)
    return list(zip(positions[best].tolist(), logits[best].tolist(), strict=True))


def _passages(result: DemoResult, row: int) -> list[tuple[int, int, float]]:
    """(first, last, logit) of what is around a row's best positions, best first, none twice."""
    reach = -(-_REACH // result.trace.compress_ratio)
    newest = int(result.trace.compressed_lens[row]) - 1
    passages: list[tuple[int, int, float]] = []
    for position, logit in _best(result, row):
        first, last = max(0, position - reach), min(newest, position + reach)
        if all(last < p[0] or p[1] < first for p in passages):
            passages.append((first, last, logit))
    return passages[:_PASSAGES]


def _marked(trace: Trace, first: int, stop: int, tokens: set[int], style: bool) -> Text:
    """Tokens first ... stop - 1 as text, some of them marked, by style or by brackets."""
    line = Text()
    for marked, group in itertools.groupby(range(first, stop), tokens.__contains__):
        members = list(group)
        words = trace.words(members[0], members[-1] + 1)
        if marked and not style:
            line.append(f"{' ' * words.startswith(' ')}[{words.strip()}]")
        else:
            line.append(words, style="bold green underline" if marked else "not bold")
    return line


def _print_list(console: Console, lines: list[tuple[str, str]]) -> None:
    indent = 11
    for name, line in lines:
        room = max(20, console.width - indent)
        wrapped = textwrap.wrap(one_line(line), room, break_on_hyphens=False)
        console.print(Text(f"{name:<{indent}}", "bold") + Text(f"\n{'':{indent}}".join(wrapped)))
