# SPDX-License-Identifier: Apache-2.0
"""What decoding_latency.py shows of its measurements: the generated text, a table, and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from torch import Tensor

from benchmark.results import Origin, Record, grid
from whole_calls import COMPILED, CTRANSLATE2, STATIC, STOCK, SUITE, WHOLE, Calls

# Okabe and Ito's palette: its colours differ for every kind of colour vision. In the order in which bars are drawn.
_COLORS = {WHOLE: "#009E73", COMPILED: "#0072B2", STATIC: "#999999", CTRANSLATE2: "#CC79A7"}
# README.md's words.
_LABELS = {WHOLE: "fused_topk", COMPILED: "fused_topk, compile=True"}
_TEXT_LINES = 8


def print_texts(console: Console, tokenizer: Any, prompts: list[str], sequences: Tensor, length: int) -> None:
    """What beam search added to each different prompt; the first `length` tokens of a sequence are the prompt."""
    for prompt in dict.fromkeys(prompts):
        lines = str(tokenizer.decode(sequences[prompts.index(prompt), length:], skip_special_tokens=True)).split("\n")
        # A small model likes to repeat itself.
        more = f"\n({len(lines) - _TEXT_LINES} more lines)" if len(lines) > _TEXT_LINES else ""
        text = escape("\n".join(lines[:_TEXT_LINES]) + more)
        console.print(Panel(text, title=escape(repr(prompt)), title_align="left", expand=False))


def print_calls(console: Console, title: str, cases: Mapping[str, Mapping[str, Calls]], origin: Origin) -> None:
    """All ways side by side, with what each saves of a step."""
    has_peak = any(each.peak_beyond_weights is not None for ways in cases.values() for each in ways.values())
    caption = (
        "First call: with all that is tried, compiled or captured in it, for later calls of the same shape.\n"
        "Step: of each token but the first. Same: the texts that are stock's; in 16 bits a whole step rounds otherwise.\n"
        + "; ".join(origin)
    )
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for header in ("generate()", ""):
        table.add_column(header)
    headers = ("First call, s", "First token, ms", "Step, ms", "stock / this", "Same")
    for header in (*headers, *["Beyond weights, GB"] * has_peak):
        table.add_column(header, justify="right")
    for case, ways in cases.items():
        for way, calls in ways.items():
            cells = [case if way == STOCK else "", _LABELS.get(way, way)]
            cells += [f"{calls.first_call:.2f}", f"{1e3 * calls.first_token:.2f}"]
            cells += [f"{1e3 * calls.step:.2f}", f"{ways[STOCK].step / calls.step:.2f}x", f"{calls.share_of_same:.0%}"]
            cells += [f"{(calls.peak_beyond_weights or 0) / 1e9:.2f}"] * has_peak
            table.add_row(*cells, end_section=way == list(ways)[-1])
    console.print(table)
    for case, ways in cases.items():
        for way, calls in ways.items():
            if calls.not_as_asked:
                console.print(escape(f"{case}, {way}: some calls ran otherwise: {calls.not_as_asked}"))


def save_plot(path: Path, title: str, records: Iterable[Record]) -> None:
    """For each case how many times as fast as stock each way takes a step, as bars. A PNG."""
    steps = {
        case: {way: record.value for way, record in ways.items()}
        for (case, measure), ways in grid(record for record in records if record.suite == SUITE).items()
        if measure == "step"
    }
    number_of_bars = sum(way in times for times in steps.values() for way in _COLORS)
    figure = Figure(figsize=(9, 1.4 + 0.19 * number_of_bars + 0.17 * len(steps)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(1.0, color="#D55E00", label=STOCK)
    above = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    place, middles = 0.0, []
    for times in steps.values():
        ways = [way for way in _COLORS if way in times]
        middles.append(place + (len(ways) - 1) / 2)
        for way in ways:
            speed = times[STOCK] / times[way]
            bars = axes.barh(place, speed, 0.9, color=_COLORS[way], label=_LABELS.get(way, way))
            axes.bar_label(bars, [f"{speed:.1f} ({times[way]:.2f} ms)"], padding=4, fontsize=8, bbox=above)
            place += 1
        # A gap, which also has room for the two lines of a case's name.
        place += 0.9
    names = [f"{case}\nstock {times[STOCK]:.2f} ms" for case, times in steps.items()]
    axes.set_yticks(middles, names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15, y=0.02)
    axes.set_xlabel("times as fast as stock, a step after the first token")
    legend = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=len(legend), frameon=False)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, format="png")
