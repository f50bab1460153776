# SPDX-License-Identifier: Apache-2.0
"""Measurements as CSV: a line for each number, with where and of what it was measured."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import torch

import fused_topk
from fused_topk.machine import describe

OURS = "fused_topk"
PREDICTED = "predicted"


class Origin(NamedTuple):
    """Where, when and of which source something was measured."""

    machine: str  # the GPU, or the CPU and the number of threads
    versions: str  # of torch, transformers, Python and, for a GPU, of its driver and NVRTC
    date: str  # as 2026-11-28
    commit: str  # that the source stands at, "+" for changes since; empty outside a checkout


class Record(NamedTuple):
    """One number."""

    suite: str  # of the benchmark, or what a demo calls its own
    case: str  # the shape
    measure: str  # which number of that shape: "cold" and "hot" are times with inputs from memory and from the cache
    way: str  # who took it: "fused_topk", a rival, a floor
    value: float  # the median
    unit: str  # as µs, ms, GB
    p10: float | None  # a tenth of the samples lie below; None where it is not known
    p90: float | None  # a tenth lie above
    origin: Origin


_FIELDS = (*Record._fields[:-1], *Origin._fields)


def write(path: Path, records: Iterable[Record]) -> None:
    """Writes a file, and the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_FIELDS)
        for *found, origin in records:
            writer.writerow([_text(value) for value in (*found, *origin)])


def read(path: Path) -> list[Record]:
    """What write() has written.

    Raises:
        ValueError: it has not written this file.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != _FIELDS:
            raise ValueError(
                f"{path} must be a CSV file with the columns {', '.join(_FIELDS)}, got {reader.fieldnames}"
            )
        return [_record(row) for row in reader]


def grid(records: Iterable[Record]) -> dict[tuple[str, str], dict[str, Record]]:
    """By case and measure, then by way. Of a shape that stands in two suites, and so was timed twice, the first time counts."""
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        found.setdefault((record.case, record.measure), {}).setdefault(record.way, record)
    return found


def merged(old: Sequence[Record], new: Sequence[Record]) -> list[Record]:
    """The old records, but for suites that the new ones have. Of these the measures that a suite had, and no predictions."""
    measures, suites = {record[0:3:2] for record in old}, {record.suite for record in new}
    known = {suite for suite, _ in measures}
    kept = [r for r in new if r.way != PREDICTED and ((r.suite, r.measure) in measures or r.suite not in known)]
    return [*(record for record in old if record.suite not in suites), *kept]


def _record(row: dict[str, str]) -> Record:
    p10, p90 = (float(text) if (text := row.pop(name)) else None for name in ("p10", "p90"))
    value, origin = float(row.pop("value")), Origin(*(row.pop(name) for name in Origin._fields))
    return Record(**row, value=value, p10=p10, p90=p90, origin=origin)  # the others are words


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def origin_on(device: torch.device) -> Origin:
    """The origin of what this process measures on a device."""
    found = describe()
    versions = found["versions"]
    names = {"torch": "torch", "transformers": "transformers", "python": "Python"}
    machine = f"{found['cpu']['model']}, {found['cpu']['threads']} threads"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
        names |= {"cuda driver": "driver for CUDA", "nvrtc": "NVRTC"}
    said = ", ".join(f"{name} {versions[key]}" for key, name in names.items() if versions.get(key))
    return Origin(machine, said, datetime.now(timezone.utc).date().isoformat(), git_commit())


def git_commit() -> str:
    """The commit that the package's source stands at, "+" for changes since; empty outside a checkout."""
    root = Path(fused_topk.__file__).resolve().parents[1]
    # An installed package may lie in a virtual environment inside some other project's checkout.
    if not (root / ".git").exists() or not shutil.which("git"):
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def three_digits(number: float | None) -> str:
    """The number as in 1.42, 18.5, 667, 5,998; "-" for what was not measured."""
    if number is None:
        return "-"
    return f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 100 else f"{number:,.0f}"
