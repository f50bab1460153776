# SPDX-License-Identifier: Apache-2.0
"""Which choice of kernel is the quickest on this GPU: each shape, timed with every layout that makes sense for it.

What topk_choice.py and full_row_choice.py choose rests on this, measured on an H200. On another GPU it shows what they
would have to choose there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fused_topk.backends import cuda
from fused_topk.cuda_runtime import driver
from fused_topk.layout.full_row_choice import FullRowChoice
from fused_topk.layout.topk_choice import KernelChoice
from fused_topk.plans import row_result
from fused_topk.problem import FullRowProblem, TopkProblem
from fused_topk.rows import LogitRows

from .choices import of_full_rows, of_topk
from .inputs import DTYPES
from .report import origin, three_digits
from .runner import Settings, answer_error, first_line, floor, inputs_from_memory
from .suites import Case
from .timing import Function, Timing, time_graph

Choice = KernelChoice | FullRowChoice


@dataclass
class Sweep:
    """What one shape takes with each choice, inputs from memory."""

    case: Case
    chosen: Choice
    floor: Timing
    times: dict[Choice, Timing] = field(default_factory=dict)
    failures: dict[Choice, str] = field(default_factory=dict)

    @property
    def best(self) -> Choice:
        return min(self.times, key=lambda choice: self.times[choice].median)

    @property
    def loss(self) -> float | None:
        """The time of what is chosen, over that of the best."""
        chosen = self.times.get(self.chosen)
        return chosen.median / self.times[self.best].median if chosen else None


def run(
    cases: Iterable[Case], settings: Settings, on_start: Callable[[Case], None] = lambda case: None
) -> Iterator[Sweep]:
    """Each shape's sweep as it is done. A choice whose answer is wrong gets no time. Beams are swept as their rows."""
    for case in cases:
        case = case._replace(rows=case.num_rows, beams=0)
        on_start(case)
        inputs = inputs_from_memory(case, settings.device)
        choices = alternatives(case, settings.device)
        (read,) = floor(case, settings.device).values()
        swept = Sweep(case, choices[0], time_graph(read, inputs, settings.effort))
        for choice in choices:
            function = launcher(case, choice)
            try:
                error = answer_error(case, function, inputs, settings.device)
                if not error:
                    swept.times[choice] = time_graph(function, inputs, settings.effort)
            except RuntimeError as raised:
                error = first_line(raised)
            if error:
                swept.failures[choice] = error
        yield swept


def alternatives(case: Case, device: torch.device) -> list[Choice]:
    """What to time; what is chosen without a sweep comes first."""
    itemsize = DTYPES[case.dtype].itemsize
    properties = torch.cuda.get_device_properties(device)
    if case.k:
        return [*of_topk(case.rows, case.vocab, case.k, itemsize, properties.multi_processor_count)]
    return [
        *of_full_rows(
            case.vocab,
            itemsize,
            driver.max_shared_bytes_per_block(device.index or 0),
            properties.multi_processor_count,
            10 * properties.major + properties.minor,
        )
    ]


def launcher(case: Case, choice: Choice) -> Function:
    """The case's operation, always with that choice."""

    def topk(logits: Tensor) -> object:
        assert isinstance(choice, KernelChoice)
        out = row_result(logits, case.k, "log_softmax").empty(logits.device)
        problem = TopkProblem(LogitRows(logits), case.k, "log_softmax", "allowed")
        cuda.prepare_topk(problem, logits.device, choice=choice)(problem.rows, out)
        return out

    def softmax(logits: Tensor) -> object:
        assert isinstance(choice, FullRowChoice)
        out = torch.empty_like(logits)
        problem = FullRowProblem(LogitRows(logits), "softmax")
        cuda.prepare_full_rows(problem, logits.device, out.dtype, choice)(problem.rows, out)
        return out

    return topk if case.k else softmax


def document(sweeps: Iterable[Sweep], machine: Mapping[str, Any]) -> dict[str, Any]:
    """All of it, for JSON. All times are µs."""
    return {
        **origin(machine),
        "shapes": [
            {
                "shape": swept.case.label,
                "floor": swept.floor._asdict(),
                "loss": swept.loss,
                "choices": [
                    {"choice": choice._asdict(), "time": timing._asdict()} for choice, timing in swept.times.items()
                ],
                "failures": [{"choice": choice._asdict(), "error": error} for choice, error in swept.failures.items()],
            }
            for swept in sweeps
        ],
    }


def print_sweeps(sweeps: Iterable[Sweep], console: Console) -> None:
    """A row a shape: what is chosen, and the three best."""
    table = Table(
        title="Each shape with every choice of kernel, µs",
        caption="floor: a plain read of the same bytes, for softmax a copy. loss: what is chosen / the best.",
        caption_justify="left",
        header_style="bold",
    )
    table.add_column("rows x V", no_wrap=True)
    table.add_column("floor", justify="right")
    table.add_column("chosen")
    table.add_column("loss", justify="right")
    table.add_column("best")
    for swept in sweeps:
        ranked = sorted(swept.times, key=lambda choice: swept.times[choice].median)[:3]
        chosen, loss = swept.times.get(swept.chosen), swept.loss
        table.add_row(
            swept.case.label,
            three_digits(swept.floor.median),
            f"{three_digits(chosen.median if chosen else None)} {label(swept.chosen)}",
            f"{loss:.2f}" if loss else "-",
            ", ".join(f"{three_digits(swept.times[choice].median)} {label(choice)}" for choice in ranked),
        )
    console.print(table)
    for swept in sweeps:
        for choice, error in swept.failures.items():
            console.print(f"FAILED {swept.case.label}, {label(choice)}: {error}", style="bold red", markup=False)


def label(choice: Choice) -> str:
    """A choice in a few words."""
    if isinstance(choice, KernelChoice):
        if choice.lanes:
            return f"({choice.regime})"
        return f"({choice.warps} warps x {choice.splits})"
    waiting = f"{choice.vectors}+{choice.shared_vectors}"
    return f"({choice.kernel}, {choice.threads} threads of {waiting}, {choice.blocks_per_row} blocks)"
