# SPDX-License-Identifier: Apache-2.0
"""What the hardware counts while a shape's kernel runs once: what bounds it. Nsight Compute (`ncu`) counts. This module
calls it, and is also, as `python -m`, the program that it watches."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from .inputs import make_inputs
from .report import origin, three_digits
from .runner import Settings, fused_function
from .suites import Case

_TIME, _INSTRUCTIONS = "gpu__time_duration.sum", "smsp__inst_executed.sum"
# Of the most there could be, in per cent: heading -> metric.
SHARES = {
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "issue slots": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "exponentials": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "integers": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "L2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
}
# What a warp waits for, or does: heading -> metric, warps in that state for each instruction issued.
_STATE = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STATES = {
    heading: _STATE.format(name)
    for heading, name in {
        "memory": "long_scoreboard",
        "shared memory, shuffles": "short_scoreboard",
        "its last instruction": "wait",
        "a barrier": "barrier",
        "instructions": "no_instruction",
        "arguments": "imc_miss",
        "a fence": "membar",
        "a branch": "branch_resolving",
        "a busy unit": "math_pipe_throttle",
        "the queue to shared memory": "mio_throttle",
        "the queue to memory": "lg_throttle",
        "its turn": "not_selected",
        "nothing": "selected",
    }.items()
}
METRICS = (_TIME, _INSTRUCTIONS, *SHARES.values(), *STATES.values())


class Counted(NamedTuple):
    """One launch. Shares are of 1."""

    case: Case
    us: float  # as ncu times it, which is longer than in a graph
    instructions: float  # of warps
    shares: dict[str, float]
    states: dict[str, float]  # of a warp's time, the greatest first


def count(cases: Sequence[Case], device: torch.device, hot: bool = False) -> list[Counted]:
    """Counts each case's launch, in one run of ncu.

    Args:
        cases: the shapes.
        device: a CUDA device.
        hot: whether caches hold what the launch before has left there, which is the same input and the kernel's code.
            Otherwise they are empty: then few rows wait for their instructions more than for their logits.

    Raises:
        RuntimeError: ncu is not there, may not read the counters, or has counted something else than one kernel a case.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise RuntimeError("`ncu` is not on the PATH; install NVIDIA Nsight Compute (it comes with the CUDA toolkit)")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        watched = json.dumps([case._replace(target=None, hot=None) for case in cases])
        command = [
            *(ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)),
            # The kernels that make the inputs are not counted. The clocks stay as they are.
            *("--profile-from-start", "off", "--clock-control", "none"),
            *("--cache-control", "none" if hot else "all"),
            *("--metrics", ",".join(METRICS)),
            *(sys.executable, "-m", __name__, watched, str(device)),
        ]
        # From the demos' folder, where Python finds this module.
        demos = Path(__file__).parents[1]
        done = subprocess.run(command, cwd=demos, capture_output=True, text=True, check=False)
        written = log.read_text(encoding="utf-8") if log.exists() else ""
    rows = parse(written)
    if done.returncode or len(rows) != len(cases):
        said = "\n".join([*written.splitlines(), *done.stderr.splitlines()][-5:])
        raise RuntimeError(
            f"`ncu` ended with {done.returncode} and {len(rows)} launches counted of {len(cases)} shapes; it said:\n{said}"
        )
    return [_counted(case, row) for case, row in zip(cases, rows)]


def parse(written: str) -> list[dict[str, float]]:
    """The metrics of each launch, from ncu's raw page as CSV: a line of names, one of units, one for each launch."""
    lines = written.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    return [
        {name: _number(value) for name, value in row.items() if name in METRICS}
        for row in csv.DictReader(lines[begin:])
        if row["ID"]
    ]


def document(counted: Iterable[Counted], machine: Mapping[str, Any], hot: bool = False) -> dict[str, Any]:
    """All of it, for JSON."""
    return {
        **origin(machine),
        "cache": "hot" if hot else "cold",
        "launches": [{**found._asdict(), "case": found.case.label} for found in counted],
    }


def print_counted(counted: Iterable[Counted], console: Console, hot: bool = False) -> None:
    table = Table(
        title=f"One launch each, caches {'as the launch before has left them' if hot else 'empty'}, counted by Nsight Compute",
        caption="Of the most there could be. waits for: the share of a warp's time; nothing: it issues an instruction.",
        caption_justify="left",
        header_style="bold",
    )
    table.add_column("rows x V", no_wrap=True)
    for heading in ("µs", "instructions a tile", *SHARES):
        table.add_column(heading, justify="right")
    table.add_column("a warp waits for")
    for found in counted:
        tiles = found.case.num_rows * -(-found.case.vocab // 1024)
        table.add_row(
            found.case.label,
            three_digits(found.us),
            three_digits(found.instructions / tiles),
            *(f"{share:.0%}" for share in found.shares.values()),
            ", ".join(f"{state} {share:.0%}" for state, share in list(found.states.items())[:4]),
        )
    console.print(table)


def _counted(case: Case, row: Mapping[str, float]) -> Counted:
    states = {heading: row.get(metric, 0.0) for heading, metric in STATES.items()}
    total = sum(states.values()) or 1.0
    ranked = sorted(states, key=lambda heading: -states[heading])
    return Counted(
        case,
        row.get(_TIME, 0.0) / 1000,
        row.get(_INSTRUCTIONS, 0.0),
        {heading: row.get(metric, 0.0) / 100 for heading, metric in SHARES.items()},
        {heading: states[heading] / total for heading in ranked},
    )


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:  # "n/a": not on this hardware
        return 0.0


def _launch(cases: Iterable[Case], device: torch.device) -> None:
    """What ncu watches: one launch a case."""
    settings = Settings(device, "cuda", ())
    for case in cases:
        (logits,) = make_inputs(case, device, 1)
        function = fused_function(case, settings)
        # Compiled, and its memory allocated, before anyone counts.
        function(logits)
        torch.cuda.synchronize(device)
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        function(logits)
        torch.cuda.synchronize(device)
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    _launch([Case(*values) for values in json.loads(sys.argv[1])], torch.device(sys.argv[2]))
