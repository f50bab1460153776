# SPDX-License-Identifier: Apache-2.0
"""A run as one JSON document, and that document as a table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import fused_topk

from .peers import PEERS
from .runner import FUSED, Result, Settings
from .suites import HOST_TARGET_US
from .timing import Timing

FORMAT = 1
Document = dict[str, Any]


def document(
    results: Iterable[Result],
    settings: Settings,
    machine: Mapping[str, Any],
    empty_kernel: Timing | None,
    host: Mapping[str, Timing],
) -> Document:
    """Everything that a later run needs to be compared with this one. All times are µs."""
    return {
        "format": FORMAT,
        "command": command(),
        **origin(machine),
        "device": str(settings.device),
        "backend": settings.backend,
        "quick": settings.quick,
        "empty_kernel": empty_kernel._asdict() if empty_kernel else None,
        "host": {name: timing._asdict() for name, timing in host.items()},
        "results": [_entry(result) for result in results],
    }


def command(launcher: str = "python") -> str:
    """What was typed to start this process."""
    return " ".join([launcher, "demos/benchmark", *sys.argv[1:]])


def origin(machine: Mapping[str, Any]) -> Document:
    """When, from which source and on which machine (as describe() has it) a document was made."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "machine": dict(machine),
    }


def load(path: Path) -> Document:
    loaded: Document = json.loads(path.read_text(encoding="utf-8"))
    if loaded.get("format") != FORMAT:
        raise ValueError(f"{path} must be the JSON of a benchmark of format {FORMAT}, got {loaded.get('format')!r}")
    if "backend" not in loaded:
        raise ValueError(f"{path} must be of other suites than linear and distributed")
    return loaded


def git_commit() -> str | None:
    """The commit that the package's source stands at, "+" for changes since, or None outside a checkout."""
    root = Path(fused_topk.__file__).resolve().parents[1]
    # An installed package may lie in a virtual environment inside some other project's checkout.
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def print_results(run: Document, console: Console) -> None:
    results = run["results"]
    others = [name for name in PEERS if name != "torch" and any(name in entry["times"] for entry in results)]
    table = Table(title=title(run), caption=_caption(others), caption_justify="left", header_style="bold")
    table.add_column("suite")
    table.add_column("rows x V", no_wrap=True)
    table.add_column("cache")
    targets = ["target"] * _has_targets(results)
    for heading in ("µs", "p10 to p90", "GB/s", "floor", "/ floor", *targets, "torch", "torch /"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    for entry in results:
        table.add_row(entry["suite"], entry["shape"], entry["cache"], *_cells(entry, others, bool(targets)))
    console.print(table)
    _print_host(run, console)
    for name, note in sorted({(name, note) for entry in results for name, note in entry["notes"].items()}):
        console.print(f"{name}: {note}", style="dim", markup=False)
    for entry in results:
        if entry["failure"]:
            console.print(f"FAILED {entry['shape']}: {entry['failure']}", style="bold red", markup=False)
    console.print(_summary(results))


def three_digits(number: float | None) -> str:
    """The number as in 1.42, 18.5, 667, 5,998; "-" for what was not measured."""
    if number is None:
        return "-"
    return f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 100 else f"{number:,.0f}"


def _entry(result: Result) -> dict[str, Any]:
    case = result.case
    return {
        "suite": result.suite,
        "shape": case.label,
        "cache": result.cache,
        "rows": case.rows,
        "beams": case.beams,
        "vocab": case.vocab,
        "k": case.k,
        "dtype": case.dtype,
        "distribution": case.distribution,
        "sampling": case.sampling,
        "router": case.router,
        "ragged": case.is_ragged,
        "rotation": result.rotation,
        "bytes": case.bytes_moved,
        "times": {name: timing._asdict() for name, timing in result.times.items()},
        "gigabytes_per_second": result.gigabytes_per_second,
        "ratio_to_read": result.ratio("read"),
        "ratio_to_copy": result.ratio("copy"),
        "ratio_to_torch": result.ratio("torch"),
        "target": result.target_us,
        "meets_target": result.meets_target,
        "failure": result.failure,
        "notes": result.notes,
    }


def _has_targets(results: Iterable[Mapping[str, Any]]) -> bool:
    return any(entry["target"] is not None for entry in results)


def median_of(entry: Mapping[str, Any], name: str) -> str:
    times = entry["times"]
    return three_digits(times[name]["median"]) if name in times else "-"


def cells_of_ours(entry: Mapping[str, Any]) -> list[str]:
    """Our time and its spread, the speed, the floor, and our time over the floor's."""
    fused, floor = entry["times"][FUSED], "read" if "read" in entry["times"] else "copy"
    to_floor = entry[f"ratio_to_{floor}"]
    return [
        three_digits(fused["median"]),
        f"{three_digits(fused['p10'])} to {three_digits(fused['p90'])}",
        three_digits(entry["gigabytes_per_second"]),
        median_of(entry, floor),
        f"{to_floor:.2f}" if to_floor else "-",
    ]


def _cells(entry: Mapping[str, Any], others: Iterable[str], has_targets: bool) -> list[str]:
    if FUSED not in entry["times"]:
        return ["[bold red]FAILED[/]"]
    verdict = {None: "", True: " [green]pass[/]", False: " [red]miss[/]"}[entry["meets_target"]]
    time, *ours = cells_of_ours(entry)
    to_torch = entry["ratio_to_torch"]
    return [
        f"[bold]{time}[/]",
        *ours,
        *[three_digits(entry["target"]) + verdict] * has_targets,
        median_of(entry, "torch"),
        f"{1 / to_torch:.2f}x" if to_torch else "-",
        *(median_of(entry, name) for name in others),
    ]


def title(run: Document) -> str:
    return f"fused softmax (+ top-k), backend {run['backend']}, {machine_of(run)}, µs per call"


def machine_of(run: Document) -> str:
    """The GPU, or the CPU, that a run was measured on."""
    machine = run["machine"]
    if (gpu := gpu_of(run)) is not None:
        return str(machine["gpus"][gpu]["name"])
    return f"{machine['cpu']['model']}, {machine['cpu']['threads']} threads"


def gpu_of(run: Document) -> int | None:
    """The number of the GPU that a run was measured on; None for a CPU. A run that names no device was measured on GPU 0."""
    kind, _, number = run.get("device", "cuda").partition(":")
    return int(number or 0) if kind == "cuda" and run["machine"]["gpus"] else None


def _caption(others: Iterable[str]) -> str:
    states = (
        "floor: a plain read of the same bytes (CPU: amax), for softmax a copy. cold: inputs from memory, hot: one input from the L2, "
        "cpu: one input, rounds interleaved."
    )
    return "\n".join([states, *(f"{name}: {PEERS[name].does}" for name in ("torch", *others))])


def _print_host(run: Document, console: Console) -> None:
    if run["empty_kernel"]:
        console.print(f"Smallest kernel in the same replays: {three_digits(run['empty_kernel']['median'])} µs")
    if run["host"]:
        times = ", ".join(f"{name} {three_digits(timing['median'])} µs" for name, timing in run["host"].items())
        target = f" (target {HOST_TARGET_US:.0f})" if _has_targets(run["results"]) else ""
        console.print(f"Eager call from Python, host time on 1 x 1024 fp32 k=8: {times}{target}")


def _summary(results: list[dict[str, Any]]) -> str:
    failed = sum(bool(entry["failure"]) for entry in results)
    judged = [entry["meets_target"] for entry in results if entry["meets_target"] is not None]
    slower = sum((entry["ratio_to_torch"] or 0) > 1 for entry in results)
    met = f"{sum(judged)} of {len(judged)} targets met; " if judged else ""
    return f"{len(results)} results, {failed} failed; {met}slower than torch in {slower}"


def _git(root: Path, *command: str) -> str:
    return subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=True).stdout.strip()
