# SPDX-License-Identifier: Apache-2.0
"""This run against an older one's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from .report import Document, three_digits
from .runner import FUSED

# Below this a change is not worth a look, however small the spread: clocks and boards differ by as much.
_LEAST_CHANGE = 0.02


class Change(NamedTuple):
    shape: str
    cache: str
    old_us: float
    new_us: float
    verdict: str  # "faster" or "slower" beyond the spread of both runs, or ""

    @property
    def relative(self) -> float:
        return self.new_us / self.old_us - 1


def changes(old: Document, new: Document) -> list[Change]:
    """The change of our time for every shape and state of the cache that both runs have."""
    before = {_key(entry): entry["times"][FUSED] for entry in old["results"] if FUSED in entry["times"]}
    found: dict[tuple[str, str], Change] = {}
    for entry in new["results"]:
        key = _key(entry)
        if key in before and FUSED in entry["times"]:
            # A shape that stands in two suites was timed twice; one line is enough.
            found.setdefault(key, _change(*key, before[key], entry["times"][FUSED]))
    return list(found.values())


def print_changes(old: Document, new: Document, console: Console) -> None:
    table = Table(title=f"Change since {old['date']}, commit {old['git_commit'] or 'unknown'}", header_style="bold")
    for heading in ("rows x V", "cache"):
        table.add_column(heading, no_wrap=True)
    for heading in ("old µs", "new µs", "change", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    compared = changes(old, new)
    for change in compared:
        style = {"faster": "green", "slower": "bold red"}.get(change.verdict)
        cells = (three_digits(change.old_us), three_digits(change.new_us), f"{change.relative:+.1%}", change.verdict)
        table.add_row(change.shape, change.cache, *cells, style=style)
    console.print(table)
    for name in ("device", "backend", "quick"):
        if old[name] != new[name]:
            console.print(f"Not like with like: {name} was {old[name]}, is {new[name]}", style="yellow", markup=False)
    verdicts = [change.verdict for change in compared]
    console.print(f"{len(compared)} compared: {verdicts.count('faster')} faster, {verdicts.count('slower')} slower")


def _key(entry: Mapping[str, Any]) -> tuple[str, str]:
    return entry["shape"], entry["cache"]


def _change(shape: str, cache: str, old: Mapping[str, float], new: Mapping[str, float]) -> Change:
    verdict = ""
    if abs(new["median"] / old["median"] - 1) >= _LEAST_CHANGE:
        # Beyond the spread: the middle 80 % of the two runs do not overlap.
        if new["p90"] < old["p10"]:
            verdict = "faster"
        elif new["p10"] > old["p90"]:
            verdict = "slower"
    return Change(shape, cache, old["median"], new["median"], verdict)
