# SPDX-License-Identifier: Apache-2.0
"""What demos/ladder.py shows of its measurements: tables, and the paper's figures drawn again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmark.published import Table as Figures
from benchmark.report import machine_of, three_digits
from ladder_rungs import RUNGS

Document = dict[str, Any]

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
    "copy": ("#000000", None, "plain copy"),
    "read": ("#000000", None, "plain read"),
}
_BASELINES = {0: "safe", 5: "safe_then_topk"}


def print_ladder(run: Document, console: Console) -> None:
    """The rungs at one shape."""
    rows, vocab = _ladder_shape(run)
    _print(f"The ladder at {rows} x {vocab} float32, k = 5; {machine_of(run)}", ladder_table(run), console)
    naive, safe = run["overflow"]
    console.print(
        f"Why 2: of one logit 100 among zeros, whose probability is 1, naive softmax makes {naive}, safe {safe}."
    )


def ladder(run: Document) -> str:
    """The rungs at one shape, for a document."""
    rows, vocab = _ladder_shape(run)
    return f"The ladder at {rows} x {vocab} float32, k = 5:\n\n{ladder_table(run).markdown()}"


def ladder_table(run: Document) -> Figures:
    rows, vocab = _ladder_shape(run)
    times = {point["name"]: point["us"] for point in run["points"] if point["part"] == "ladder"}
    lines = []
    for rung in RUNGS:
        label = [rung.number, rung.title, str(rung.reads), str(rung.writes)]
        if rung.name not in times:
            lines.append([*label, *["-"] * 4])
            continue
        us, moved = times[rung.name], rung.accesses * rows * vocab * 4
        baseline = times[_BASELINES[0 if rung.gives == "softmax" else 5]]
        gigabytes_per_second = three_digits(moved / us / 1000)
        lines.append([*label, f"{moved / 1e6:.0f}", three_digits(us), gigabytes_per_second, f"{baseline / us:.2f}x"])
    for name in ("copy", "read"):
        lines.append(["", f"plain {name}", *["-"] * 3, three_digits(times[name]), *["-"] * 2])
    return Figures(("", "rung", "reads", "writes", "MB", "µs", "GB/s", "faster than 2 or 7a"), lines, labels=2)


def _ladder_shape(run: Document) -> tuple[int, int]:
    point = next(point for point in run["points"] if point["part"] == "ladder")
    return point["rows"], point["vocab"]


def print_rows(run: Document, console: Console) -> None:
    """128 x V, as in the project's table of peers."""
    _print(f"softmax of 128 x V float32, µs; {machine_of(run)}", rows_table(run), console)


def rows_table(run: Document) -> Figures:
    points = [point for point in run["points"] if point["part"] == "rows"]
    names = ("copy", "package_softmax", "torch", "naive", "safe", "online")
    lines = []
    for vocab in dict.fromkeys(point["vocab"] for point in points):
        times = {point["name"]: point["us"] for point in points if point["vocab"] == vocab}
        ratio = f"{times['package_softmax'] / times['copy']:.2f}"
        lines.append([str(vocab), *(three_digits(times.get(name)) for name in names), ratio])
    return Figures(("V", *(_STYLES[name][2] for name in names), "fused_topk / copy"), lines, labels=0)


def _print(title: str, figures: Figures, console: Console) -> None:
    table = Table(title=title, header_style="bold")
    for column, heading in enumerate(figures.headings):
        is_label = column < figures.labels
        table.add_column(heading, justify="left" if is_label else "right", no_wrap=not is_label)
    for line in figures.rows:
        table.add_row(*line)
    console.print(table)


def draw(run: Document, path: Path) -> None:
    """Elements a second against V, speed-ups over the baseline, growth with K."""
    figure = Figure(figsize=(12, 13), layout="constrained")
    axes = figure.subplots(3, 2)
    for row, k in enumerate((0, 5)):
        for column, batch in enumerate((4000, 10)):
            _draw_batch(axes[row, column], run, batch, k)
    _draw_bars(axes[2, 0], run)
    _draw_growth(axes[2, 1], run)
    versions = run["machine"]["versions"]
    about = [machine_of(run), f"torch {versions['torch']}", f"fused_topk {versions['fused_topk']}", run["date"][:10]]
    figure.suptitle("From three passes to one: float32, normal logits\n" + ", ".join(about), fontsize=11)
    figure.savefig(path, dpi=130)


def _draw_batch(axes: Axes, run: Document, batch: int, k: int) -> None:
    points = [point for point in run["points"] if (point["part"], point["rows"], point["k"]) == ("batch", batch, k)]
    for name, (colour, marker, label) in _STYLES.items():
        mine = [point for point in points if point["name"] == name]
        if mine:
            axes.plot(
                [point["vocab"] for point in mine],
                [batch * point["vocab"] / point["us"] * 1e6 for point in mine],
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=2 if name.startswith("package") else 1,
                linestyle="-" if marker else ":",
                label=label,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("V, elements of a row")
    axes.set_ylabel("elements a second")
    axes.set_title(f"softmax{' + top-5' if k else ''}, {batch} rows", fontsize=10)
    axes.grid(which="major", color="#dddddd")
    axes.legend(fontsize=7)


def _draw_bars(axes: Axes, run: Document) -> None:
    """Speed-up over safe softmax, and over safe softmax then top-k, for rows of a thousand and more."""
    bars: list[tuple[str, str, float]] = []
    for k in (0, 5):
        for batch in (4000, 10):
            points = [p for p in run["points"] if (p["part"], p["rows"], p["k"]) == ("batch", batch, k)]
            vocab = max((p["vocab"] for p in points if p["vocab"] <= 30_000), default=None)
            times = {p["name"]: p["us"] for p in points if p["vocab"] == vocab}
            for name in [n for n in _STYLES if n in times and n not in ("copy", "read", "naive", "registers", "split")]:
                where = f"softmax{' + top-5' if k else ''}\n{batch} x {vocab}"
                bars.append((where, name, times[_BASELINES[k]] / times[name]))
    places = list(dict.fromkeys(where for where, _, _ in bars))
    seen: set[str] = set()
    for place, where in enumerate(places):
        mine = [(name, ratio) for w, name, ratio in bars if w == where]
        for number, (name, ratio) in enumerate(mine):
            colour, _, label = _STYLES[name]
            x = place + (number - (len(mine) - 1) / 2) * 0.8 / len(mine)
            axes.bar(x, ratio, 0.75 / len(mine), color=colour, label=label if label not in seen else None)
            axes.text(x, ratio, f"{ratio:.1f}", ha="center", va="bottom", fontsize=6)
            seen.add(label)
    axes.axhline(1.0, color="#444444", linewidth=0.8)
    axes.set_xticks(range(len(places)), places, fontsize=8)
    axes.set_ylabel("times as fast as safe softmax (then top-k)")
    axes.set_title("Speed-up over three passes, unfused", fontsize=10)
    axes.legend(fontsize=7)


def _draw_growth(axes: Axes, run: Document) -> None:
    points = [point for point in run["points"] if point["part"] == "k"]
    for name, (colour, marker, label) in _STYLES.items():
        mine = [point for point in points if point["name"] == name]
        if mine:
            style: dict[str, Any] = {
                "color": colour,
                "marker": marker,
                "linestyle": "-" if marker else ":",
                "markersize": 4,
            }
            axes.plot([point["k"] for point in mine], [point["us"] for point in mine], label=label, **style)
    axes.set_yscale("log")
    axes.set_xticks(sorted({point["k"] for point in points}))
    axes.set_xlabel("K")
    axes.set_ylabel("µs")
    axes.grid(which="major", color="#dddddd")
    # A small --most leaves out the shape.
    if points:
        axes.set_title(f"softmax + top-K, {points[0]['rows']} x {points[0]['vocab']}", fontsize=10)
        axes.legend(fontsize=7)
