# SPDX-License-Identifier: Apache-2.0
"""A run as a figure: a panel a suite, a line a shape; time to the right, from the floor to the rivals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .results import OURS, Record, grid, three_digits
from .rivals import FLOORS

# Okabe and Ito's palette: its colours differ for every kind of colour vision. A floor is a stroke.
_MARKS = {
    **dict.fromkeys(FLOORS, ("|", "#444444")),
    OURS: ("o", "#D55E00"),
    "top-k alone": ("D", "#E69F00"),
    "torch": ("s", "#0072B2"),
    "compiled": ("^", "#56B4E9"),
    "flashinfer": ("v", "#009E73"),
    "flashinfer sorted": ("<", "#8FD9B6"),
}
_OTHER_MARK = ("P", "#CC79A7")
_LINE_INCHES, _TITLE_INCHES, _WIDTH_INCHES = 0.24, 0.9, 9.0


def plot(records: Sequence[Record], path: Path) -> None:
    """Writes a PNG, or whatever the suffix of `path` asks for, with the first measure of each shape."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    times = [
        record for record in records if record.unit == "µs" and "," not in record.measure and record.measure != "hot"
    ]
    panels = {name: grid(r for r in times if r.suite == name) for name in dict.fromkeys(r.suite for r in times)}
    heights = [_TITLE_INCHES + _LINE_INCHES * len(lines) for lines in panels.values()]
    figure = Figure(figsize=(_WIDTH_INCHES, 1.2 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(len(panels), 1), 1, squeeze=False, height_ratios=heights or None)
    for (name, lines), (panel,) in zip(panels.items(), axes):
        _draw(panel, lines)
        panel.set_title(name, fontsize=10, loc="left")
    # One entry for all panels that have it.
    legend = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    runs = dict.fromkeys(f"{r.origin.machine}, {r.origin.date}, commit {r.origin.commit or 'unknown'}" for r in times)
    figure.suptitle("\n".join(runs), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _draw(axes: Any, lines: dict[tuple[str, str], dict[str, Record]]) -> None:
    for line, ways in enumerate(lines.values()):
        values = [record.value for record in ways.values()]
        axes.plot([min(values), max(values)], [line] * 2, color="#dddddd", linewidth=1, zorder=1)
        for way, record in ways.items():
            marker, colour = _MARKS.get(way, _OTHER_MARK)
            axes.plot(
                record.value, line, marker=marker, color=colour, linestyle="", markersize=5.5, label=way, zorder=3
            )
        at = (ways[OURS].value, line)
        more: dict[str, Any] = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center", "fontsize": 7}
        axes.annotate(three_digits(at[0]), at, color=_MARKS[OURS][1], **more)
    axes.set_yticks(range(len(lines)), [case for case, _ in lines], fontsize=8)
    axes.set_ylim(len(lines) - 0.4, -0.8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", which="both", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("µs a call, median (logarithmic)", fontsize=8)
