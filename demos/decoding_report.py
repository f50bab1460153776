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
from generate_comparison import Check
from whole_calls import COMPILED, STOCK, WHOLE, Calls

# Okabe and Ito's palette: its colours differ for every kind of colour vision.
_COLORS = {STOCK: "#D55E00", COMPILED: "#0072B2", WHOLE: "#009E73"}
_OTHER_COLOR = "#999999"
_TEXT_LINES = 8


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
    load_before: float | None
    # By mode and way.
    calls: dict[str, dict[str, Calls]]
    checks: list[Check] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return all(each.is_right for each in self.checks)

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes took so much of the CPU that times on it say little."""
        return self.device == "cpu" and (self.load_before or 0.0) > (os.cpu_count() or 1) / 2

    def title(self) -> str:
        return (
            f"{self.model}: {self.batch} prompts, {self.beams} beams in beam search, {self.vocab_size:,} tokens, "
            f"{self.dtype}, {self.device}"
        )


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


def print_calls(console: Console, measured: Measurement) -> None:
    """All ways side by side, with what each saves of a step."""
    has_peak = measured.device != "cpu"
    table = Table(
        title=measured.title(),
        title_justify="left",
        caption_justify="left",
        caption="First call: with all that is tried, compiled or captured in it, for later calls of the same shape.\n"
        "Step: of each token but the first, from calls for one token and for all. Same: the texts that are\nstock's.\n"
        + _machine(measured),
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
            cells += [f"{calls.share_of_same:.0%}", *([_size(calls.peak_beyond_weights)] if has_peak else [])]
            table.add_row(*cells, end_section=way == list(ways)[-1])
    console.print(table)
    if measured.is_disturbed:
        console.print(
            f"[bold yellow]Note[/]: other processes keep this machine busy (load {measured.load_before:.1f} on "
            f"{os.cpu_count()} cores), so the times are not to be trusted; run again when it is idle."
        )
    for mode, ways in measured.calls.items():
        for way, calls in ways.items():
            if calls.not_as_asked:
                console.print(escape(f"{mode}, {way}: some calls ran otherwise: {calls.not_as_asked}"))


def print_checks(console: Console, measured: Measurement) -> None:
    for each in measured.checks:
        verdict = "[bold green]Passed[/]" if each.is_right else "[bold red]FAILED[/]"
        reasons = f"; calls that ran otherwise: {each.reasons}" if each.reasons else ""
        seed = " for the same seed" if each.mode == "sampling" else ""
        console.print(
            f"{verdict}: {each.mode}: {each.share_of_same:.0%} of the texts in float32 are stock's{seed}{escape(reasons)}."
        )


def save_plot(path: Path, measured: Measurement) -> None:
    """Each mode's tokens a second and time to the first token, all ways side by side. A PNG."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplots(2, len(measured.calls), squeeze=False)
    for (rates, firsts), (mode, calls) in zip(axes.T, measured.calls.items(), strict=True):
        _plot_bars(rates, {way: measured.batch / each.step for way, each in calls.items()}, "{:,.0f}")
        _plot_bars(firsts, {way: 1e3 * each.first_token for way, each in calls.items()}, "{:,.1f} ms")
        rates.set_title(mode)
        rates.set_xlabel("tokens a second")
        firsts.set_xlabel("time to the first token (ms)")
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
    """Every number of the run."""
    content: dict[str, Any] = {**asdict(measured), **origin(describe())}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"


def _size(count: float | None) -> str:
    if count is None:
        return ""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB" if count >= 1e4 else f"{count:.0f} B"
