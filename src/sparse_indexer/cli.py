# SPDX-License-Identifier: Apache-2.0
"""The command line: `demo`, `doctor`, `compile` and `cache`."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:  # imported where used: `--help` needs none of it
    from rich.console import Console

    from sparse_indexer.demo import OnProgress

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # which would refill the table of a trace's keys
    help="Sparse-attention indexers: see one work, and see which of them work here.",
)

_PROGRESS_AFTER = 1.5  # seconds


class _DemoCommand(TyperCommand):
    """Ends `demo --help`, and it alone, with the format of a trace."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from sparse_indexer import trace

        paragraphs = (trace.__doc__ or "").strip().split("\n\n")
        self.epilog = "\n\n".join(f"\b\n{paragraph}" for paragraph in paragraphs)
        super().format_help(ctx, formatter)


def _show_version(wanted: bool) -> None:
    if wanted:
        from sparse_indexer import __version__

        typer.echo(f"sparse_indexer {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """What all commands share."""


@app.command(cls=_DemoCommand)
def demo(
    ctx: typer.Context,
    path: Annotated[
        Path | None, typer.Option("--input", metavar="FILE", help="A trace of your own.")
    ] = None,
    topk: Annotated[int, typer.Option(help="Positions that a row selects.")] = 64,
    topk_blocks: Annotated[int, typer.Option(help="Blocks of 8 that a row publishes.")] = 128,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one.")
    ] = None,
    backend: Annotated[str, typer.Option(help="One that doctor lists.")] = "auto",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw what was selected: a PNG.")
    ] = None,
) -> None:
    """Run an indexer on captured tensors and show its work."""
    with _clean_errors(ctx):
        from sparse_indexer.demo import run_demo
        from sparse_indexer.errors import mismatch
        from sparse_indexer.report import print_report
        from sparse_indexer.trace import load_trace

        if plot is not None:
            from sparse_indexer.plot import write_plot

            if plot.suffix not in ("", ".png"):
                raise mismatch("plot", "a .png file", str(plot))
            if plot.is_dir() or not plot.parent.is_dir():
                raise mismatch("plot", "a file in a folder that exists", str(plot))
        console, trace = _console(), load_trace(path)
        with _progress(console) as on_progress:
            result = run_demo(
                trace,
                topk=topk,
                topk_blocks=topk_blocks,
                device=device,
                backend=backend,
                on_progress=on_progress,
            )
        print_report(console, result)
        if plot is not None:
            write_plot(result, plot)
            console.print(f"\nwrote {plot}", markup=False, soft_wrap=True)


@app.command()
def doctor(ctx: typer.Context) -> None:
    """Show which backends and compilers work here and what the others need."""
    with _clean_errors(ctx):
        _examine()


def _examine() -> None:
    import torch
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    from sparse_indexer import __version__
    from sparse_indexer.deep_gemm_report import deep_gemm_report
    from sparse_indexer.factory import BACKENDS, why_not, why_not_torch
    from sparse_indexer.jit.doctor import report, why_no_kernels
    from sparse_indexer.report import bytes_text

    console, cuda = _console(wide=True), torch.version.cuda
    build = f"built for CUDA {cuda}" if cuda else "built without CUDA"
    console.print(f"sparse_indexer {__version__}, torch {torch.__version__}, {build}")
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    if not gpus:
        console.print("no GPU that torch can use")
    for gpu in gpus:
        found = torch.cuda.get_device_properties(gpu)
        capability = f"compute capability {found.major}.{found.minor}"
        console.print(f"{gpu}: {found.name}, {capability}, {bytes_text(found.total_memory)}")
    deep_gemm = deep_gemm_report()
    table = Table("device", "backend", "for capability", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("here", overflow="fold")
    for device in [*gpus, torch.device("cpu")]:
        reasons = {name: why_not(name, device) for name in BACKENDS}
        for name in [name for name, reason in reasons.items() if reason is None]:
            kernels, lacking = BACKENDS[name].kernels(), why_not_torch(device)
            if kernels and not lacking:
                lacking = why_no_kernels(kernels, torch.cuda.get_device_capability(device))
            reasons[name] = lacking and f"not usable: {lacking}"
        if reasons["sm100"] is None and not deep_gemm.usable:
            reasons["sm100"] = "needs DeepGEMM: see below"
        chosen = next((name for name, reason in reasons.items() if reason is None), None)
        for name, reason in reasons.items():
            usable = "usable, auto takes it" if name == chosen else "usable"
            style = "green" if reason is None else None
            capabilities = BACKENDS[name].capabilities
            table.add_row(str(device), name, capabilities, escape(reason or usable), style=style)
        table.add_section()
    console.print(table)
    tools = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("for kernels", "found"):
        tools.add_column(name, overflow="fold")
    wanted = any(why_not("sm100", gpu) is None for gpu in gpus)
    missing = ("DeepGEMM", "not installed")
    lines = deep_gemm.lines if wanted or missing not in deep_gemm.lines else [missing]
    here = [torch.cuda.get_device_capability(gpu) for gpu in gpus]
    for subject, finding in [*report(here), *lines]:
        tools.add_row(subject, escape(finding))
    console.print(tools)


@app.command("compile")
def compile_(
    ctx: typer.Context,
    arch: Annotated[
        list[str], typer.Option("--arch", metavar="LIST", help="Such as 7.0,8.0,9.0a,12.0f.")
    ],
    kernels: Annotated[
        list[str] | None, typer.Option(metavar="LIST", help="Some; default: all.")
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Compilers at once.")] = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="A cache to ship, instead of your own.")
    ] = None,
) -> None:
    """Compile the kernels now, for GPUs that need not be here."""
    with _clean_errors(ctx):
        from sparse_indexer.jit.commands import compile_command

        names = None if kernels is None else ",".join(kernels)
        status = compile_command(_console(wide=True), ",".join(arch), names, jobs, out)
    raise typer.Exit(status)


@app.command()
def cache(
    ctx: typer.Context,
    clear: Annotated[bool, typer.Option("--clear", help="Remove what was compiled.")] = False,
) -> None:
    """Show what was compiled, and where it is."""
    with _clean_errors(ctx):
        from sparse_indexer.jit.commands import cache_command

        cache_command(_console(), clear=clear)


@contextmanager
def _progress(console: Console) -> Iterator[OnProgress]:
    """A progress bar on a terminal, once the work has taken a while."""
    from rich.progress import Progress

    bar, start = Progress(console=console, transient=True), time.perf_counter()
    task = bar.add_task("", total=1.0)

    def show(step: str, share: float) -> None:
        bar.update(task, description=step, completed=share)
        if console.is_terminal and time.perf_counter() - start > _PROGRESS_AFTER:
            bar.start()

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def _clean_errors(ctx: typer.Context) -> Iterator[None]:
    """A caller's mistake, or what is missing here, is said in red, exit code 1; Ctrl-C has 130."""
    try:
        from sparse_indexer.errors import BackendUnavailable, JitError, one_line

        yield
    except KeyboardInterrupt:
        _console(stderr=True).print("interrupted")
        raise typer.Exit(128 + signal.SIGINT) from None
    except (ValueError, OSError, ImportError, BackendUnavailable, JitError) as error:
        message = str(error)  # of several lines only if a compiler had its say
        if not isinstance(error, JitError):
            message = one_line(message).strip()
        message = f"error: {_with_options(message, ctx)}"
        _console(stderr=True).print(message, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _with_options(message: str, ctx: typer.Context) -> str:
    """A message about arguments, with the options of this command that gave them."""
    for option in ctx.command.params:
        flag, name = option.opts[0], re.escape(option.name or "")
        message = re.sub(rf"^{name}(?=: expected)", flag, message)
        message = re.sub(rf"(?<= ){name}=(['\"]?)(\w+)\1(?![^\s,])", rf"{flag} \2", message)
    return message


def _console(*, stderr: bool = False, wide: bool = False) -> Console:
    """A console for text that its encoding may not hold; if `wide`, no file or pipe cuts it."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    columns = os.environ.get("COLUMNS", "")
    free = wide and not columns and not (stream and stream.isatty())
    default = 80 if columns.isdigit() and not int(columns) else None  # of 0 nothing is printed
    return Console(stderr=stderr, highlight=False, width=100_000 if free else default)
