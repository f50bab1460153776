# SPDX-License-Identifier: Apache-2.0
"""A run as a figure: a panel a suite, a line a shape; time to the right, from the read floor to the peers. Of a suite that
compares distributions of logits, the time relative to normal ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .report import Document, three_digits, title
from .runner import FUSED

# name -> (marker, colour, label), in the order of the legend
_MARKS = {
    "read": ("|", "#444444", "plain read of the same bytes"),
    "copy": ("|", "#8c564b", "plain copy"),
    FUSED: ("o", "#d62728", "fused_topk"),
    "rows": ("D", "#ff9896", "fused_topk, rows one by one"),
    "torch": ("s", "#1f77b4", "torch (log_softmax, then topk)"),
    "compiled": ("^", "#17becf", "torch.compile of the same"),
    "flashinfer": ("v", "#2ca02c", "FlashInfer: top-k alone, in any order"),
    "flashinfer-sorted": ("<", "#98df8a", "FlashInfer: top-k alone, sorted and deterministic"),
    "cupy": ("P", "#9467bd", "CuPy: log_softmax, argpartition"),
}
_TARGET = ("4", "#999999", "target")
_DISTRIBUTION_MARKS = {
    "peaked": ("^", "#9467bd"),
    "ascending": (">", "#d62728"),
    "descending": ("<", "#1f77b4"),
    "equal": ("s", "#2ca02c"),
    "sparse": ("x", "#444444"),
}
_LINE_INCHES, _TITLE_INCHES, _COLUMN_INCHES = 0.24, 0.9, 9.0
_LINES_OF_ONE_COLUMN = 30

Entry = dict[str, Any]


class _Panel(NamedTuple):
    suite: str
    shapes: dict[str, list[Entry]]  # the results of each, whatever the cache and the distribution

    @property
    def inches(self) -> float:
        return _TITLE_INCHES + _LINE_INCHES * len(self.shapes)

    @property
    def is_relative(self) -> bool:
        return any(entry["distribution"] != "normal" for entries in self.shapes.values() for entry in entries)


def plot(run: Document, path: Path) -> None:
    """Writes a PNG (or whatever the suffix of `path` asks for)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = _columns(_panels(run["results"]))
    inches = max((sum(panel.inches for panel in column) for column in columns), default=0)
    figure = Figure(figsize=(_COLUMN_INCHES * len(columns), 1.5 + inches), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1, len(columns))
    for c, column in enumerate(columns):
        # A shorter column ends with empty space, so that lines have the same height in both columns.
        heights = [panel.inches for panel in column]
        if (rest := inches - sum(heights)) > _LINE_INCHES:
            heights.append(rest)
        cells = grid[0, c].subgridspec(max(len(heights), 1), 1, height_ratios=heights or None)
        for r, panel in enumerate(column):
            axes = figure.add_subplot(cells[r, 0])
            (_draw_relative if panel.is_relative else _draw_times)(axes, panel)
            axes.set_title(panel.suite, fontsize=10, loc="left")
            axes.set_yticks(range(len(panel.shapes)), list(panel.shapes), fontsize=8)
            axes.set_ylim(len(panel.shapes) - 0.4, -0.8)
            axes.tick_params(axis="x", labelsize=8)
            axes.grid(axis="x", which="both", color="#eeeeee")
            axes.set_axisbelow(True)
    # One entry for all panels that have it.
    legend = {
        label: handle
        for axes in figure.axes
        if not axes.get_legend()
        for handle, label in zip(*axes.get_legend_handles_labels())
    }
    labels = [label for *_, label in (*_MARKS.values(), _TARGET) if label in legend]
    handles = [legend[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    has_hot = any(entry["cache"] == "hot" for entry in run["results"])
    figure.suptitle(title(run) + ("\nhollow or pale: one input, from the cache" if has_hot else ""), fontsize=10)
    figure.savefig(path, dpi=120)


def _panels(results: Iterable[Entry]) -> list[_Panel]:
    """Suite after suite. Shapes that are the same but for the distribution share a line."""
    panels: dict[str, _Panel] = {}
    for entry in results:
        if FUSED in entry["times"]:
            panel = panels.setdefault(entry["suite"], _Panel(entry["suite"], {}))
            shape = entry["shape"].removesuffix(f" {entry['distribution']}")
            panel.shapes.setdefault(shape, []).append(entry)
    return list(panels.values())


def _columns(panels: list[_Panel]) -> list[list[_Panel]]:
    """One, or for many lines two of about the same height."""
    total = sum(panel.inches for panel in panels)
    if sum(len(panel.shapes) for panel in panels) <= _LINES_OF_ONE_COLUMN or len(panels) == 1:
        return [panels]

    def height_of_higher(first: int) -> float:
        height = sum(panel.inches for panel in panels[:first])
        return max(height, total - height)

    split = min(range(1, len(panels)), key=height_of_higher)
    return [panels[:split], panels[split:]]


def _results(panel: _Panel) -> Iterator[tuple[int, bool, Entry]]:
    """(line, whether its input comes from the cache, result)."""
    for line, entries in enumerate(panel.shapes.values()):
        for entry in entries:
            yield line, entry["cache"] == "hot", entry


def _median(entry: Entry, name: str = FUSED) -> float:
    return float(entry["times"][name]["median"])


def _draw_times(axes: Any, panel: _Panel) -> None:
    for line, entries in enumerate(panel.shapes.values()):
        medians = [_median(entry, name) for entry in entries for name in entry["times"]]
        axes.plot([min(medians), max(medians)], [line] * 2, color="#dddddd", linewidth=1, zorder=1)
        axes.annotate(
            three_digits(_median(entries[0])),
            (_median(entries[0]), line),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color=_MARKS[FUSED][1],
        )
    for name, mark in _MARKS.items():
        _scatter(axes, [(_median(e, name), line, hot) for line, hot, e in _results(panel) if name in e["times"]], *mark)
    targets = [(e["target"], line, hot) for line, hot, e in _results(panel) if e["target"] is not None]
    _scatter(axes, targets, *_TARGET)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("µs per call, median (logarithmic)", fontsize=8)


def _draw_relative(axes: Any, panel: _Panel) -> None:
    normal = {(line, hot): _median(e) for line, hot, e in _results(panel) if e["distribution"] == "normal"}
    compared = [(line, hot, e) for line, hot, e in _results(panel) if (line, hot) in normal]
    for distribution, mark in _DISTRIBUTION_MARKS.items():
        ratios = [
            (_median(e) / normal[line, hot], line, hot)
            for line, hot, e in compared
            if e["distribution"] == distribution
        ]
        _scatter(axes, ratios, *mark, distribution)
    for limit in {round(e["target"] / normal[line, hot], 3) for line, hot, e in compared if e["target"] is not None}:
        axes.axvline(limit, color=_TARGET[1], linestyle=":", label=f"at most {limit:g}")
    axes.set_xlabel("time relative to that of normal logits", fontsize=8)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)


def _scatter(axes: Any, points: Iterable[tuple[float, int, bool]], marker: str, colour: str, label: str) -> None:
    """points: (x, line, whether its input comes from the cache)."""
    for i, (x, line, is_hot) in enumerate(points):
        # A mark that consists of lines has no inside.
        face = {"alpha": 0.5} if is_hot and marker in "|x4" else {"markerfacecolor": "none"} if is_hot else {}
        name = "" if i else label
        axes.plot(x, line, marker=marker, color=colour, linestyle="", markersize=5.5, label=name, zorder=3, **face)
