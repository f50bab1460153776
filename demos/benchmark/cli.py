# SPDX-License-Identifier: Apache-2.0
"""The command line."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from . import report, results
from .cases import Case
from .devices import device_of, join_processes
from .results import origin_on, three_digits
from .runner import Found, Settings, bandwidth_of, run
from .suites import SUITES, Suite
from .timing import warm_up_gpu

app = typer.Typer(
    help="Checks and times softmax and top-k in one read of the logits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

# The width of tables in a file or a pipe: every column fits.
_PIPE_WIDTH = 220
# A larger input takes a CPU minutes.
_MOST_CPU_BYTES = 256 << 20


@app.command()
def bench(
    suite: Annotated[str, typer.Option(help=f"Of {', '.join(SUITES)}, or all; by default decode, or cpu.")] = "",
    only: Annotated[str, typer.Option(help="Only shapes whose name has these words, as '64 x 128256 bf16'.")] = "",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu; by default a GPU where its kernels work.")] = "",
    rivals: Annotated[str, typer.Option(help="By default all that are installed but `compiled`; `none`: floors.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Few samples and no hot cache: for a first look.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Write all numbers here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a figure here (PNG, SVG, PDF).")] = None,
    compare: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Show the change since this older CSV.")
    ] = None,
) -> None:
    """Check every answer, and time it beside a floor and beside rivals, all in turns.

    Exits with 1 if any answer was wrong or any shape failed.
    """
    place = device_of(device)
    known = {name for of_suite in SUITES.values() for name in of_suite.others} | {"compiled", "none"}
    wanted = _names(rivals, known, "--rivals") if rivals else None
    cases = _cases(suite, only, place)
    try:
        older = results.read(compare) if compare else None
    except ValueError as error:
        raise typer.BadParameter(f"--compare must be a CSV file that `bench` wrote: {error}") from error
    if suite == "distributed":
        place = join_processes(place)
    if place.type == "cuda":
        warm_up_gpu()
    settings = Settings(place, origin_on(place), bandwidth_of(place), wanted, quick)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    found = []
    for each in run(cases, settings):
        found.append(each)
        if is_first:
            said = each.failure or f"{three_digits(each.records[0].value)} µs"
            typer.echo(f"{each.suite}: {each.case.label}: {said}", err=True)
    if is_first:
        _show(found, older, csv, plot)
    if dist.is_initialized():
        dist.destroy_process_group()
    if any(each.failure for each in found):
        raise typer.Exit(1)


@app.command()
def publish(
    run: Annotated[Path | None, typer.Argument(help="What `bench` or a demo wrote with --csv.")] = None,
    file: Annotated[Path | None, typer.Argument(help="That of its machine in demos/results.")] = None,
) -> None:
    """Write the figures of all documents, and draw the pictures of the demos, again from the CSV files of demos/results.

    With a RUN, its suites first take the place of those in FILE.
    """
    from .publish import DOCUMENTS, draw_pictures, published_again

    if (run is None) != (file is None):
        raise typer.BadParameter("RUN needs a FILE of demos/results behind it")
    if run and file:
        results.write(file, results.merged(results.read(file) if file.exists() else [], results.read(run)))
    draw_pictures()
    for path in DOCUMENTS:
        path.write_text(published_again(path), encoding="utf-8")


def _cases(suite: str, only: str, device: torch.device) -> list[tuple[str, Suite, Case]]:
    """The shapes of the suites that have the words and run on the device."""
    every = [name for name in SUITES if name != "distributed"]
    default = "decode" if device.type == "cuda" else "cpu"
    names = every if suite == "all" else _names(suite or default, SUITES, "--suite")
    if "distributed" in names and len(names) > 1:
        raise typer.BadParameter(f"--suite distributed goes alone, under torchrun, got {suite!r}")
    words = only.split()
    found = [
        (name, SUITES[name], case)
        for name in names
        if SUITES[name].device in ("", device.type)
        for case in SUITES[name].cases
        if all(word in case.label.split() for word in words)
        and (device.type == "cuda" or case.logit_bytes <= _MOST_CPU_BYTES)
    ]
    if not found:
        raise typer.BadParameter(f"--suite and --only must leave a shape for {device}, got {suite!r} and {only!r}")
    return found


def _names(text: str, known: Collection[str], option: str) -> list[str]:
    """The names between commas, each of them `known`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{option} must be of {', '.join(known)}, got {name!r}")
    return names


def _show(found: list[Found], older: list[results.Record] | None, csv: Path | None, plot: Path | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    records = [record for each in found for record in each.records]
    report.print_found(found, console)
    if older and records:
        report.print_changes(older, records, console)
    if csv:
        results.write(csv, records)
        console.print(f"Wrote {csv}")
    if plot:
        from .plot import plot as draw

        draw(records, plot)
        console.print(f"Wrote {plot}")
