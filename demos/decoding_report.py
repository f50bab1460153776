# SPDX-License-Identifier: Apache-2.0
"""What the demo shows of its measurements: the beams' text, a table, a plot and JSON."""

from __future__ import annotations

import json
import os
import re
import statistics
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from beam_search import Beams
from causal_models import CausalModel
from fused_topk.machine import describe
from selection_comparison import TOLERANCE, Agreement, StepTimes

# Okabe and Ito's palette: tells apart for every kind of colour vision.
_COLORS = {"torch": "#D55E00", "fused": "#0072B2", "rest": "#999999"}
_NAMES = {"torch": "torch operations", "fused": "fused_topk.beam_topk"}


@dataclass(frozen=True)
class Measurement:
    """All that one run of the demo found. Times are in seconds, of the steps of both decodings.

    `load_before` is the system's load average before the run, None where the system has none.
    """

    model: str
    device: str
    dtype: str
    batch: int
    beams: int
    vocab_size: int
    new_tokens: int
    first_call: float
    steps: list[StepTimes]
    agreement: Agreement
    same_tokens: bool
    load_before: float | None

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes took so much of the CPU that times on it say little."""
        return self.device == "cpu" and (self.load_before or 0.0) > (os.cpu_count() or 1) / 2

    @property
    def is_right(self) -> bool:
        """Whether every choice is right and any difference in the final tokens is explained by them."""
        are_different = self.agreement.tied + self.agreement.torch_worse
        return self.agreement.wrong == 0 and (self.same_tokens or are_different > 0)

    def selection(self, name: str) -> list[float]:
        """Seconds of the selection `name` ("torch" or "fused") in each step."""
        return [getattr(step, name) for step in self.steps]

    def whole_steps(self, name: str) -> list[float]:
        """Seconds of each step with the selection `name` and without the other one."""
        return [getattr(step, name) + step.rest for step in self.steps]

    def summary(self, name: str) -> dict[str, float]:
        selection, whole = self.selection(name), self.whole_steps(name)
        return {
            "selection_median_s": statistics.median(selection),
            "selection_p90_s": _p90(selection),
            "step_median_s": statistics.median(whole),
            "step_p90_s": _p90(whole),
            # Of the sums, so that each second counts the same.
            "share_of_step": sum(selection) / sum(whole),
            "tokens_per_s": self.batch / statistics.median(whole),
        }

    def title(self) -> str:
        return (
            f"{self.model}: {self.batch} prompts x {self.beams} beams x {self.vocab_size:,} tokens, "
            f"{self.dtype}, {self.device}"
        )


def print_beams(console: Console, model: CausalModel, prompts: list[str], found: Beams) -> None:
    """The text of each different prompt's beams; of all but the best only what differs from it."""
    for prompt in dict.fromkeys(prompts):
        row = prompts.index(prompt)
        tokens = [found.tokens[row, i, : found.lengths[row, i]].tolist() for i in range(found.tokens.shape[1])]
        lines = []
        for rank, beam in enumerate(tokens):
            if not beam:
                continue
            shared = _shared_length(beam, tokens[0]) if rank else 0
            text = ("... " if shared else "") + _text(model, beam[shared:])
            head = f"[bold]beam {rank}[/bold] (mean log-probability {found.scores[row, rank]:.3f})"
            lines.append(f"{head}\n{escape(text)}")
        console.print(Panel("\n".join(lines), title=escape(repr(prompt)), title_align="left", expand=False))


def print_table(console: Console, measured: Measurement) -> None:
    table = Table(title=measured.title(), title_justify="left", caption_justify="left", caption=_caption(measured))
    table.add_column("Selection by")
    for header in ("median", "p90", "Whole step, median", "p90", "Selection's share", "Tokens/s"):
        table.add_column(header, justify="right")
    summaries = {name: measured.summary(name) for name in _NAMES}
    for name, each in summaries.items():
        table.add_row(
            _NAMES[name],
            *(_time(each[key]) for key in ("selection_median_s", "selection_p90_s", "step_median_s", "step_p90_s")),
            f"{each['share_of_step']:.1%}",
            f"{each['tokens_per_s']:,.0f}",
        )
    table.add_section()
    table.add_row(
        "Speed-up",
        *(
            f"{summaries['torch'][key] / summaries['fused'][key]:.2f}x"
            for key in ("selection_median_s", "selection_p90_s", "step_median_s", "step_p90_s")
        ),
        "",
        f"{summaries['fused']['tokens_per_s'] / summaries['torch']['tokens_per_s']:.2f}x",
    )
    console.print(table)
    if measured.is_disturbed:
        console.print(
            f"[bold yellow]Note[/]: other processes keep this machine busy (load {measured.load_before:.1f} on "
            f"{os.cpu_count()} cores). That lengthens long operations more than short ones, so the speed-ups above are "
            "not to be trusted; run again when it is idle."
        )


def print_agreement(console: Console, measured: Measurement) -> None:
    agreement = measured.agreement
    console.print(
        f"Checked {agreement.choices} choices of {2 * measured.beams} continuations, both selections on the same "
        f"logits, against float64: {agreement.identical} identical, {agreement.tied} differ only in the order of "
        f"equals, {agreement.torch_worse} where torch's rounding made the worse choice, {agreement.wrong} wrong. "
        "Largest error of accumulated log-probabilities, relative to max(1, |value|): "
        f"torch {agreement.torch_error:.1e}, beam_topk {agreement.fused_error:.1e} (allowed {TOLERANCE:.0e})."
    )
    if agreement.wrong:
        console.print("[bold red]FAILED[/]: the fused selection made wrong choices.")
    elif measured.same_tokens:
        console.print("[bold green]Passed[/]: decoding with either selection gives the same tokens in every beam.")
    elif measured.is_right:
        console.print(
            "[bold green]Passed[/]: the two decodings went apart where the choices above differ, so their beams are "
            "not the same; every choice of the fused selection was right. Equal scores are common in bfloat16; "
            "--dtype float32 has nearly none."
        )
    else:
        console.print(
            "[bold red]FAILED[/]: the two decodings gave different tokens though every choice was identical, so the "
            "model did not compute the same logits twice. The selections agree."
        )


def save_plot(path: Path, measured: Measurement) -> None:
    """The selection's latency at every step, and what a step is made of, as a PNG."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    by_step, by_part = figure.subplots(1, 2, width_ratios=(3, 2))
    scale, unit = _unit(statistics.median(measured.selection("torch")))

    for name, marker in (("torch", "o"), ("fused", "s")):
        times = [seconds * scale for seconds in measured.selection(name)]
        label = f"{_NAMES[name]}: median {statistics.median(times):,.1f} {unit}"
        by_step.plot(range(1, len(times) + 1), times, marker, markersize=3, alpha=0.6, color=_COLORS[name])
        by_step.axhline(statistics.median(times), color=_COLORS[name], label=label)
    by_step.set_yscale("log")
    # Plain numbers (0.5, 20), and between powers of ten only as many as there is room for.
    by_step.yaxis.set_major_formatter("{x:g}")
    by_step.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    by_step.yaxis.set_minor_formatter("{x:g}")
    by_step.set_xlabel("Decoding step (first the decoding that follows torch, then the one that follows beam_topk)")
    by_step.set_ylabel(f"Latency of the selection ({unit})")
    by_step.set_title("Selection at each step, both on the same logits", pad=28)
    # Above the axes, where it hides no point.
    by_step.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    by_step.grid(alpha=0.3, which="both")

    step_scale, step_unit = _unit(statistics.median(measured.whole_steps("torch")))
    for place, name in enumerate(_NAMES):
        whole = statistics.median(measured.whole_steps(name)) * step_scale
        selection = statistics.median(measured.selection(name)) * step_scale
        rest = whole - selection
        by_part.bar(place, rest, color=_COLORS["rest"], label=None if place else "model, cache, bookkeeping")
        by_part.bar(place, selection, bottom=rest, color=_COLORS[name], label=f"selection, {_NAMES[name]}")
        by_part.annotate(
            f"{whole:,.2f} {step_unit}",
            (place, whole),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
        )
    by_part.set_xticks(range(len(_NAMES)), list(_NAMES.values()))
    by_part.set_ylabel(f"Median time of a step ({step_unit})")
    by_part.set_title("What a decoding step is made of", pad=28)
    # Room above the bars for the legend.
    by_part.set_ylim(0, by_part.get_ylim()[1] * 1.3)
    by_part.legend(loc="upper center")

    figure.suptitle(measured.title())
    figure.supxlabel(_machine(measured), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format="png")


def save_json(path: Path, measured: Measurement) -> None:
    """Every number of the run, the raw times of each step included."""
    content: dict[str, Any] = {
        **asdict(measured),
        "steps": [step._asdict() for step in measured.steps],
        "agreement": {**measured.agreement._asdict(), "tolerance": TOLERANCE},
        "summary": {name: measured.summary(name) for name in _NAMES},
        "machine": describe(),
        "date": date.today().isoformat(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _caption(measured: Measurement) -> str:
    return (
        f"{len(measured.steps)} steps, warmed up; {measured.new_tokens} new tokens a beam, decoded twice. Whole step: "
        "the model, moving its cache, the beams' bookkeeping and one selection. Tokens/s: of the best beams.\n"
        f"The first call of beam_topk (it compiles or loads the kernel), left out: {_time(measured.first_call)}.\n"
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


def _text(model: CausalModel, tokens: list[int]) -> str:
    if model.tokenizer is None:
        return " ".join(map(str, tokens))
    text = str(model.tokenizer.decode(tokens, skip_special_tokens=True))
    # A small model can like line breaks too much to print them all.
    return re.sub(r"\n{4,}", lambda breaks: f"\n\n({len(breaks[0]) - 1} empty lines)\n\n", text)


def _shared_length(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _p90(times: list[float]) -> float:
    return statistics.quantiles(times, n=10, method="inclusive")[-1]


def _unit(seconds: float) -> tuple[float, str]:
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    scale, unit = _unit(seconds)
    return f"{seconds * scale:.{1 if unit == 'µs' else 2}f} {unit}"
