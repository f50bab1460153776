# SPDX-License-Identifier: Apache-2.0
"""The command line: its commands. command_options.py has what the text of their options means.

bench     how fast the functions are
calls     what a call costs on the CPU
sweep     how fast every possible choice of kernel is
counters  what the GPU does while a kernel runs
publish   writes the figures of the runs into the documents
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .command_options import cases_of, device_of, filters_of, gpu_of, judged, words

if TYPE_CHECKING:
    from rich.console import Console

    from .runner import Result, Settings
    from .suites import Case
    from .sweep import Sweep

# Each command imports what only it needs: rich's tables, matplotlib, the benchmark. So the others start quickly.
app = typer.Typer(
    help="Checks and times softmax and top-k in one read of the logits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

# The width of tables in a file or a pipe: every column fits.
_PIPE_WIDTH = 200

# Options that several commands have.
_Gpu = Annotated[str, typer.Option("--device", help="cuda or cuda:1.")]
_Rows = Annotated[str, typer.Option(help="Only these row counts (batch entries, for beams), as 1,64.")]
_Vocab = Annotated[str, typer.Option(help="Only these row lengths.")]
_K = Annotated[str, typer.Option(help="Only these k.")]
_Dtypes = Annotated[str, typer.Option(help="Only these dtypes: fp32, fp16, bf16.")]
_JsonPath = Annotated[Path | None, typer.Option("--json", help="Write all numbers here.")]


@app.command()
def bench(
    suite: Annotated[
        str,
        typer.Option(
            help="Comma-separated: decode, paper, routing, long, k, beams, softmax, sampling, routers, distributions, ragged, unaligned, "
            "cpu, or all; or linear alone; or distributed alone, under torchrun."
        ),
    ] = "",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu; by default a GPU where there is one.")] = "",
    backend: Annotated[str, typer.Option(help="cuda, cpu or reference; by default the device's own.")] = "",
    rows: _Rows = "",
    vocab: _Vocab = "",
    k: _K = "",
    dtype: _Dtypes = "",
    peers: Annotated[
        str, typer.Option(help="Comma-separated: torch, compiled, transformers, flashinfer, flashinfer-sorted, cupy.")
    ] = "torch",
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Time only ours and the plain read.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few samples and no hot cache: for a first look.")] = False,
    json_path: _JsonPath = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Draw a figure here (PNG, SVG, PDF).")] = None,
    compare: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Show the change since this older JSON.")
    ] = None,
    targets: Annotated[
        bool,
        typer.Option(
            "--targets",
            help="For developers: judge against the targets, an H200's or, on a CPU, those of cpu and sampling.",
        ),
    ] = False,
) -> None:
    """Check every answer, and time it against a plain read of the logits and against torch.

    Exits with 1 if any answer was wrong or any shape failed.
    """
    if suite in ("linear", "distributed"):
        for option, given in (("--plot", plot_path), ("--compare", compare)):
            if given:
                raise typer.BadParameter(f"{option} does not work with --suite {suite}; leave it out")
    if suite == "linear":
        _bench_linear(device, rows, vocab, k, dtype, quick, json_path)
        return
    if suite == "distributed":
        _bench_distributed(device, rows, vocab, k, dtype, quick, json_path)
        return
    import torch

    from fused_topk import backends
    from fused_topk.machine import describe

    from . import compare as comparison
    from . import report
    from .peers import PEERS
    from .runner import Settings, empty_kernel_time, host_times
    from .timing import warm_up_gpu

    chosen_device = device_of(device)
    on_gpu = chosen_device.type == "cuda"
    chosen_peers = () if no_peers else tuple(words(peers, PEERS, "--peers"))
    settings = Settings(chosen_device, backend or chosen_device.type, chosen_peers, quick)
    cases = judged(cases_of(suite, on_gpu, rows, vocab, k, dtype), on_gpu, targets)
    try:
        old = report.load(compare) if compare else None
    except ValueError as error:
        raise typer.BadParameter(f"--compare must be a JSON file that `bench` wrote, got {compare}: {error}") from error

    # An unavailable backend would fail every case with the same error, so it is reported once, before the first.
    available = backends.available(chosen_device)
    if settings.backend not in available:
        raise typer.BadParameter(f"--backend must be of {', '.join(available)}, got {settings.backend!r}")
    if cause := available[settings.backend]:
        typer.echo(f"Backend {settings.backend!r} does not work here: {cause}", err=True)
        raise typer.Exit(1)

    if on_gpu:
        torch.cuda.set_device(chosen_device)
        warm_up_gpu()
    empty_kernel = empty_kernel_time(settings) if on_gpu else None
    host = host_times(settings) if on_gpu else {}
    results = _run(cases, settings)
    run = report.document(results, settings, describe(), empty_kernel, host)

    console = _console()
    report.print_results(run, console)
    if old:
        comparison.print_changes(old, run, console)
    if json_path:
        _write_json(run, json_path, console)
    if plot_path:
        from .plot import plot

        plot(run, _parent(plot_path))
        console.print(f"Wrote {plot_path}")
    if any(result.failure for result in results):
        raise typer.Exit(1)


@app.command()
def sweep(
    suite: Annotated[
        str, typer.Option(help="Comma-separated: decode, paper, routing, long, k, beams, softmax, or all.")
    ] = "decode,paper,routing,long",
    device: _Gpu = "cuda",
    rows: _Rows = "",
    vocab: _Vocab = "",
    k: _K = "",
    dtype: _Dtypes = "",
    quick: Annotated[bool, typer.Option("--quick", help="Few samples: for a first look.")] = False,
    json_path: _JsonPath = None,
) -> None:
    """Time every shape with every choice of kernel, to see what this GPU should choose. Each answer is checked.

    Exits with 1 if any answer was wrong or any launch failed.
    """
    import torch

    from fused_topk.machine import describe

    from . import sweep as sweeping
    from .runner import Settings
    from .timing import warm_up_gpu

    settings = Settings(gpu_of(device), "cuda", (), quick)
    cases = [case for _, case in cases_of(suite, True, rows, vocab, k, dtype) if case.distribution == "normal"]
    torch.cuda.set_device(settings.device)
    warm_up_gpu()
    sweeps: list[Sweep] = []
    with _progress(len(cases)) as (show, advance):
        for swept in sweeping.run(cases, settings, on_start=show):
            sweeps.append(swept)
            best = swept.times[swept.best].median if swept.times else None
            advance(f"{swept.case.label}: {len(swept.times)} choices, best {_micros(best)}")
    console = _console()
    sweeping.print_sweeps(sweeps, console)
    if json_path:
        _write_json(sweeping.document(sweeps, describe()), json_path, console)
    if any(swept.failures for swept in sweeps):
        raise typer.Exit(1)


@app.command()
def counters(
    suite: Annotated[
        str,
        typer.Option(
            help="Comma-separated: decode, paper, routing, long, k, beams, softmax, distributions, unaligned, or all."
        ),
    ] = "decode",
    device: _Gpu = "cuda",
    rows: _Rows = "",
    vocab: _Vocab = "",
    k: _K = "",
    dtype: _Dtypes = "",
    hot: Annotated[
        bool, typer.Option("--hot", help="Caches as the launch before has left them; otherwise they are emptied.")
    ] = False,
    json_path: _JsonPath = None,
) -> None:
    """Count with Nsight Compute (`ncu`) what the GPU does while each shape's kernel runs, and what its warps wait for.

    Exits with 1 if ncu is missing or may not read the hardware's counters.
    """
    from fused_topk.machine import describe

    from . import counters as counting

    chosen = gpu_of(device)
    cases = list(dict.fromkeys(case for _, case in cases_of(suite, True, rows, vocab, k, dtype)))
    try:
        counted = counting.count(cases, chosen, hot)
    except RuntimeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    console = _console()
    counting.print_counted(counted, console, hot)
    if json_path:
        _write_json(counting.document(counted, describe(), hot), json_path, console)


@app.command()
def calls(
    words: Annotated[list[str] | None, typer.Argument(help="Only rows that have all of these words.")] = None,
) -> None:
    """Time what a call costs on the CPU: of few short rows beside torch's, and with options beside the plain call."""
    from .calls import print_comparisons

    print_comparisons(words or [])


@app.command()
def publish() -> None:
    """Write the figures of all documents again, from the JSON files of demos/results."""
    from .publish import DOCUMENTS, published_again

    for path in DOCUMENTS:
        path.write_text(published_again(path), encoding="utf-8")


def _bench_linear(device: str, rows: str, vocab: str, k: str, dtype: str, quick: bool, json_path: Path | None) -> None:
    """Times LM heads."""
    from fused_topk.machine import describe

    from . import linear
    from .suites import filtered

    chosen = device_of(device)
    of_device = linear.GPU_CASES if chosen.type == "cuda" else linear.CPU_CASES
    passing = set(filtered([head.case for head in of_device], *filters_of(rows, vocab, k, dtype)))
    cases = [head for head in of_device if head.case in passing]
    if not cases:
        raise typer.BadParameter("no shape of the suite passes the filters")

    def show(measured: linear.Measured) -> None:
        typer.echo(f"{measured.head.label}: {_micros(measured.times['fused'].median)}", err=True)

    try:
        measured = linear.run(cases, chosen, quick, show)
    except AssertionError as error:
        typer.echo(f"wrong answer: {error}", err=True)
        raise typer.Exit(1) from error
    console = _console()
    linear.print_measured(measured, console)
    if json_path:
        _write_json(linear.document(measured, chosen, quick, describe()), json_path, console)


def _bench_distributed(
    device: str, rows: str, vocab: str, k: str, dtype: str, quick: bool, json_path: Path | None
) -> None:
    """Times a vocabulary over the processes of torchrun. The first process prints and writes."""
    import torch.distributed as dist

    from fused_topk.machine import describe

    from . import distributed
    from .suites import filtered

    cases = filtered(distributed.CASES, *filters_of(rows, vocab, k, dtype))
    if not cases:
        raise typer.BadParameter("no shape of the suite passes the filters")
    try:
        chosen = distributed.join(device_of(device).type)
    except RuntimeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    is_first = dist.get_rank() == 0

    def show(measured: distributed.Measured) -> None:
        if is_first:
            typer.echo(f"{measured.case.label}: {_micros(measured.times['whole'].median)}", err=True)

    try:
        measured = distributed.run(cases, chosen, quick, show)
        if is_first:
            console = _console()
            distributed.print_measured(measured, console)
            if json_path:
                _write_json(distributed.document(measured, chosen, quick, describe()), json_path, console)
    finally:
        dist.destroy_process_group()


def _run(cases: list[tuple[str, Case]], settings: Settings) -> list[Result]:
    from . import runner

    results: list[Result] = []
    with _progress(len(cases)) as (show, advance):
        for finished in runner.run(cases, settings, on_start=show):
            results += finished
            lines = (
                f"{result.case.label}, {result.cache}: {result.failure or _micros(result.fused and result.fused.median)}"
                for result in finished
            )
            advance("\n".join(lines))
    return results


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[Case], None], Callable[[str], None]]]:
    """A progress bar, as two functions: `show(case)` names the case that begins, `advance(done)` counts a finished one.

    Without a terminal there is no bar, and `advance` prints its argument instead.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=total)

        def show(case: Case) -> None:
            progress.update(task, description=case.label)

        def advance(done: str) -> None:
            progress.advance(task)
            if not console.is_terminal:
                typer.echo(done, err=True)

        yield show, advance


def _micros(time: float | None) -> str:
    from .report import three_digits

    return f"{three_digits(time)} µs"


def _write_json(document: dict[str, Any], path: Path, console: Console) -> None:
    _parent(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(f"Wrote {path}")


def _parent(path: Path) -> Path:
    """Returns `path` after creating its parent folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
