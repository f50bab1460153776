# SPDX-License-Identifier: Apache-2.0
"""A run as a figure: one line per shape, time to the right on a logarithmic axis, from the read floor to the peers."""

from __future__ import annotations

from pathlib import Path

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
    "flashinfer": ("v", "#2ca02c", "FlashInfer: top-k alone, unsorted"),
    "cupy": ("P", "#9467bd", "CuPy: log_softmax, argpartition"),
}


def plot(run: Document, path: Path) -> None:
    """Writes a PNG (or whatever the suffix of `path` asks for)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = [entry for entry in run["results"] if FUSED in entry["times"]]
    figure = Figure(figsize=(11, 1.8 + 0.3 * len(entries)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    heights = range(len(entries))
    for height, entry in zip(heights, entries):
        medians = {name: timing["median"] for name, timing in entry["times"].items()}
        axes.plot([min(medians.values()), max(medians.values())], [height] * 2, color="#dddddd", linewidth=1, zorder=1)
        axes.annotate(
            three_digits(medians[FUSED]),
            (medians[FUSED], height),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color=_MARKS[FUSED][1],
        )
    for name, (marker, colour, label) in _MARKS.items():
        timed = [(entry["times"].get(name), height) for height, entry in zip(heights, entries)]
        points = [(timing["median"], height) for timing, height in timed if timing]
        if points:
            xs, ys = zip(*points)
            axes.scatter(xs, ys, marker=marker, color=colour, label=label, s=45, zorder=3)
    targets = [(entry["target"], height) for height, entry in zip(heights, entries) if entry["target"] is not None]
    if targets:
        xs, ys = zip(*targets)
        axes.scatter(xs, ys, marker="4", color="#999999", label="target", s=45, zorder=2)

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("µs per call, median (logarithmic)")
    axes.set_yticks(list(heights), [f"{entry['shape']}  {entry['cache']}" for entry in entries], fontsize=8)
    axes.set_ylim(len(entries) - 0.4, -0.8)
    axes.grid(axis="x", which="both", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.set_title(title(run), fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
