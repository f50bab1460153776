# SPDX-License-Identifier: Apache-2.0
"""What demos/ladder.py shows of its measurements: a table, and three of the paper's figures drawn again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmark.results import Record, grid, three_digits
from ladder_rungs import RUNGS

LADDER, BY_LENGTH, BY_K = "ladder", "ladder by length", "ladder by k"
"""Suites of records: the rungs at one shape; all contenders by the length of a row; by k."""
BASELINES = {0: "safe", 5: "safe_then_topk"}
"""What the rungs of softmax and of top-5 are compared with."""

# name -> (colour, marker, label). Okabe and Ito's palette: its colours differ for every kind of colour vision.
_STYLES = {
    "naive": ("#999999", "x", "naive"),
    "safe": ("#D55E00", "s", "safe"),
    "online": ("#E69F00", "^", "online"),
    "registers": ("#56B4E9", "v", "row kept on the chip"),
    "split": ("#CC79A7", "D", "row over many blocks"),
    "package_softmax": ("#0072B2", "o", "fused_topk"),
    "safe_then_topk": ("#D55E00", "s", "safe, unfused"),
    "online_then_topk": ("#E69F00", "^", "online, unfused"),
    "safe_topk": ("#56B4E9", "v", "safe, fused"),
    "online_topk": ("#CC79A7", "D", "online, fused (Algorithm 4)"),
    "package_topk": ("#0072B2", "o", "fused_topk"),
    "torch": ("#009E73", "P", "torch"),
    "copy": ("#000000", "", "plain copy"),
    "read": ("#000000", "", "plain read"),
}


def print_ladder(records: Sequence[Record], console: Console) -> None:
    """The rungs at one shape."""
    found = {case: ways for (case, _), ways in grid(r for r in records if r.suite == LADDER).items()}
    titles = {rung.number: (rung.title, rung.accesses) for rung in RUNGS}
    table = Table(title=f"The ladder, float32, k = 5; {records[0].origin.machine}", header_style="bold")
    for heading in ("", "rung", "accesses", "µs", "faster than 2 or 7a"):
        table.add_column(heading, justify="left" if heading in ("", "rung") else "right")
    for case, ways in found.items():
        title, accesses = titles.get(case, (case, ""))
        ratio = f"{ways['baseline'].value / ways['rung'].value:.2f}x"
        number = case if case in titles else ""
        table.add_row(number, title, str(accesses), three_digits(ways["rung"].value), ratio)
    console.print(table)


def draw(records: Sequence[Record], path: Path) -> None:
    """Elements a second by the length of a row, of softmax and of softmax + top-5; and the time by k."""
    figure = Figure(figsize=(16, 4.8), layout="constrained")
    axes = figure.subplots(1, 3)
    by_length = [record for record in records if record.suite == BY_LENGTH]
    for panel, has_topk, title in ((axes[0], False, "softmax"), (axes[1], True, "softmax + top-5")):
        _draw(panel, [record for record in by_length if ("k=" in record.case) == has_topk], "vocab")
        panel.set(title=title, xscale="log", xlabel="V, elements of a row", ylabel="elements a second")
    _draw(axes[2], [record for record in records if record.suite == BY_K], "k")
    axes[2].set(title="softmax + top-k, 25,000 elements a row", xlabel="k", ylabel="µs")
    origin = records[0].origin
    figure.suptitle(f"From three passes to one: {origin.machine}, {origin.date}, commit {origin.commit}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def _draw(axes: Any, records: Sequence[Record], over: str) -> None:
    """A line for each contender: over the length of a row its speed, over k its time."""
    for name, (colour, marker, label) in _STYLES.items():
        points = []
        for record in records:
            if record.way == name:
                # As "4000 x 25000 fp32 k=5".
                rows, _, vocab, *more = record.case.split()
                by_length = (int(vocab), int(rows) * int(vocab) / record.value * 1e6)
                points.append(by_length if over == "vocab" else (int(more[-1].removeprefix("k=")), record.value))
        if points:
            style: dict[str, Any] = {"marker": marker, "markersize": 4} if marker else {"linestyle": ":"}
            axes.plot(*zip(*points), color=colour, label=label, linewidth=1 + name.startswith("package"), **style)
    axes.set_yscale("log")
    axes.grid(which="major", color="#dddddd")
    if records:
        axes.legend(fontsize=7)
