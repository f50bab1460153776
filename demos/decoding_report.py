# SPDX-License-Identifier: Apache-2.0
"""What the demo shows of its measurements: the generated text, a table, a plot and JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from torch import Tensor

from benchmark.report import origin
from causal_models import CausalModel
from fused_topk.machine import describe
from generate_comparison import WAYS, Comparison
from whole_calls import FUSED, STOCK, WHOLE, Calls

# Okabe and Ito's palette: its colours differ for every kind of colour vision.
_COLORS = {STOCK: "#D55E00", FUSED: "#0072B2", WHOLE: "#009E73"}
_OTHER_COLOR = "#999999"
_TEXT_LINES = 8
_MARKERS = {"stock": "o", "fused": "s"}


@dataclass(frozen=True)
class Measurement:
    """All that one run of the demo found.

    `load_before` is the system's load average before the run, None where the system has none.
    """

    model: str
    device: str
    dtype: str
    batch: int
    beams: int
    vocab_size: int
    new_tokens: int
    modes: list[Comparison]
    load_before: float | None
    # By mode and way, of whole calls.
    calls: dict[str, dict[str, Calls]] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        return all(mode.is_right for mode in self.modes)

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes took so much of the CPU that times on it say little."""
        return self.device == "cpu" and (self.load_before or 0.0) > (os.cpu_count() or 1) / 2

    def title(self) -> str:
        return (
            f"{self.model}: {self.batch} prompts, {self.beams} beams in beam search, {self.vocab_size:,} tokens, "
            f"{self.dtype}, {self.device}"
        )

    def row(self, mode: Comparison, way: str) -> dict[str, float | None]:
        """The figures of the table."""
        found = mode.ways[way]
        step = mode.step(way)
        return {
            "selection_s": found.selection,
            "selection_memory_bytes": found.selection_memory,
            "step_s": step,
            "tokens_per_s": self.batch / step,
            "peak_memory_bytes": found.peak_memory,
        }


def print_texts(console: Console, model: CausalModel, prompts: list[str], sequences: Tensor, length: int) -> None:
    """What beam search added to each different prompt; the first `length` tokens of a sequence are the prompt."""
    for prompt in dict.fromkeys(prompts):
        text = str(model.tokenizer.decode(sequences[prompts.index(prompt), length:], skip_special_tokens=True))
        # A small model likes to repeat itself.
        lines = text.split("\n")
        text = "\n".join(lines[:_TEXT_LINES]) + (
            f"\n({len(lines) - _TEXT_LINES} more lines)" * (len(lines) > _TEXT_LINES)
        )
        console.print(Panel(escape(text), title=escape(repr(prompt)), title_align="left", expand=False))


def print_table(console: Console, measured: Measurement) -> None:
    """The step in transformers' loops."""
    has_peak = measured.device != "cpu"
    title = "The step in transformers' loops"
    table = Table(title=title, title_justify="left", caption_justify="left", caption=_caption(measured))
    for header in ("generate()", ""):
        table.add_column(header)
    for header in ("Selection", "its memory", "Step", "Tokens/s", *(["Peak memory"] if has_peak else [])):
        table.add_column(header, justify="right")
    for mode in measured.modes:
        rows = {way: measured.row(mode, way) for way in WAYS}
        for way, row in rows.items():
            cells = [mode.mode if way == "stock" else "", way, _time(row["selection_s"])]
            cells += [_size(row["selection_memory_bytes"]), _time(row["step_s"]), f"{row['tokens_per_s']:,.0f}"]
            table.add_row(*cells, *([_size(row["peak_memory_bytes"])] if has_peak else []))
        ratios = [_ratio(rows, "selection_s"), _ratio(rows, "selection_memory_bytes"), _ratio(rows, "step_s")]
        table.add_row("", "[bold]stock / fused[/]", *ratios, end_section=True)
    console.print(table)
    if measured.is_disturbed:
        console.print(
            f"[bold yellow]Note[/]: other processes keep this machine busy (load {measured.load_before:.1f} on "
            f"{os.cpu_count()} cores), so the times are not to be trusted; run again when it is idle."
        )


def print_calls(console: Console, measured: Measurement) -> None:
    """Whole calls: all ways side by side, with what each saves of a step."""
    has_peak = measured.device != "cpu"
    table = Table(
        title=measured.title(),
        title_justify="left",
        caption_justify="left",
        caption="First call: with all that is compiled or captured in it, which later calls of the same shape find. Step: of "
        "each token\nbut the first, from calls for one token and for all. Same: the sequences are stock's; draws are not compared.",
    )
    for header in ("generate()", ""):
        table.add_column(header)
    headers = ("First call", "First token", "Step", "stock / this", "Tokens/s", "Same")
    for header in (*headers, *(["Beyond weights"] if has_peak else [])):
        table.add_column(header, justify="right")
    for mode, ways in measured.calls.items():
        for way, calls in ways.items():
            cells = [mode if way == STOCK else "", way, _time(calls.first_call), _time(calls.first_token)]
            cells += [_time(calls.step), f"{ways[STOCK].step / calls.step:.2f}x", f"{measured.batch / calls.step:,.0f}"]
            same = "" if calls.share_of_same is None else f"{calls.share_of_same:.0%}"
            cells += [same, *([_size(calls.peak_beyond_weights)] if has_peak else [])]
            table.add_row(*cells, end_section=way == list(ways)[-1])
    console.print(table)
    for mode, ways in measured.calls.items():
        for way, calls in ways.items():
            if calls.not_as_asked:
                console.print(escape(f"{mode}, {way}: some calls ran otherwise: {calls.not_as_asked}"))


def print_checks(console: Console, measured: Measurement) -> None:
    for mode in measured.modes:
        verdict = "[bold green]Passed[/]" if mode.is_right else "[bold red]FAILED[/]"
        fallbacks = f"; steps that ran stock operations: {mode.fallbacks}" if mode.fallbacks else ""
        console.print(f"{verdict}: {mode.mode}: {mode.check}{escape(fallbacks)}.")


def save_plot(path: Path, measured: Measurement) -> None:
    """Each mode's tokens a second, all ways side by side; the latency of every step of the loops; the selection. A PNG."""
    figure = Figure(figsize=(12, 9), layout="constrained")
    axes = figure.subplots(3, len(measured.modes), squeeze=False, height_ratios=(4, 4, 2))
    for (rates, steps, bars), mode in zip(axes.T, measured.modes, strict=True):
        calls = measured.calls.get(mode.mode, {})
        per_second = {way: measured.batch / each.step for way, each in calls.items()}
        _plot_bars(rates, per_second, "{:,.0f}")
        rates.set_title(mode.mode)

        for way in WAYS:
            times = [1e3 * seconds for seconds in mode.ways[way].steps]
            label = f"{way}: median {1e3 * mode.step(way):,.2f} ms"
            steps.plot(times, _MARKERS[way], markersize=2.5, alpha=0.5, color=_COLORS[way])
            steps.axhline(1e3 * mode.step(way), color=_COLORS[way], label=label)
        if WHOLE in calls:
            # The ends of its steps cannot be seen from outside, so there is only their mean.
            step = 1e3 * calls[WHOLE].step
            steps.axhline(step, color=_COLORS[WHOLE], label=f"{WHOLE}: {step:,.2f} ms")
        # One step that the system interrupted should not flatten all others.
        steps.set_ylim(0, 1.6 * max(1e3 * mode.step(way) for way in WAYS))
        steps.set_xlabel("step, all rounds")
        steps.legend(loc="lower left", fontsize=8)
        steps.grid(alpha=0.3)

        selections = {way: 1e3 * mode.ways[way].selection for way in WAYS}
        _plot_bars(bars, selections, "{:,.3f} ms")
        bars.set_title(f"selection alone: {selections[STOCK] / selections[FUSED]:.1f}x", fontsize=10)
    axes[0, 0].set_ylabel("tokens a second")
    axes[1, 0].set_ylabel("latency of a step (ms)")
    figure.suptitle(measured.title())
    figure.supxlabel(_machine(measured), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format="png")


def _plot_bars(axes: Any, values: dict[str, float], form: str) -> None:
    """A bar for each way, from top to bottom."""
    drawn = axes.barh(list(values), values.values(), color=[_COLORS.get(way, _OTHER_COLOR) for way in values])
    axes.bar_label(drawn, [f" {form.format(value)}" for value in values.values()])
    axes.set_xlim(0, 1.35 * max(values.values(), default=1.0))
    axes.invert_yaxis()


def save_json(path: Path, measured: Measurement) -> None:
    """Every number of the run, the raw times of each step included."""
    content: dict[str, Any] = {
        **asdict(measured),
        "summary": {mode.mode: {way: measured.row(mode, way) for way in WAYS} for mode in measured.modes},
        **origin(describe()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _caption(measured: Measurement) -> str:
    return (
        "Selection: from the model's logits to the chosen tokens, by itself. Step: the model, its cache, the "
        "selection and\nthe loop's bookkeeping; medians over all steps but the first of each call.\n"
        + _machine(measured)
    )


def _machine(measured: Measurement) -> str:
    facts = describe()
    versions = facts["versions"]
    if measured.device.startswith("cuda"):
        hardware = torch.cuda.get_device_name(torch.device(measured.device))
        versions = {**versions, "cuda": versions["cuda runtime of torch"]}
    else:
        hardware = f"{facts['cpu']['model']}, {facts['cpu']['threads']} threads"
    if measured.is_disturbed:
        hardware += f" (busy: load {measured.load_before:.1f})"
    names = ("fused_topk", "torch", "transformers", "cuda", "python")
    return "; ".join(
        [hardware, *(f"{name} {versions[name]}" for name in names if versions.get(name)), str(date.today())]
    )


def _ratio(rows: dict[str, dict[str, float | None]], name: str) -> str:
    stock, fused = rows["stock"][name], rows["fused"][name]
    return f"[bold]{stock / fused:.2f}x[/]" if stock and fused else ""


def _time(seconds: float | None) -> str:
    assert seconds is not None
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"


def _size(count: float | None) -> str:
    if count is None:
        return ""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB" if count >= 1e4 else f"{count:.0f} B"
