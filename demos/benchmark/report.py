# SPDX-License-Identifier: Apache-2.0
"""What a run shows: a table for each suite, and the change since an older run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from .results import OURS, PREDICTED, Record, grid, three_digits
from .rivals import FLOORS
from .runner import Found

# Below this a change is not worth a look, however small the spread: clocks and boards differ by as much.
_LEAST_CHANGE = 0.02
_CAPTION = (
    "cold: inputs from memory. hot: one input from the L2 cache. time: of one input, as the caches hold it. In brackets the time beside "
    f"ours. {', '.join(FLOORS)}: floors, which do less. {PREDICTED}: the bytes that the call must move, over the bandwidth of a plain read."
)


def print_found(found: Sequence[Found], console: Console) -> None:
    """A table for each suite, then what went wrong."""
    for suite in dict.fromkeys(each.suite for each in found):
        records = [record for each in found if each.suite == suite for record in each.records]
        if records:
            console.print(_table(suite, records))
    console.print(_CAPTION, style="dim", markup=False)
    for name, note in sorted({item for each in found for item in each.notes.items()}):
        console.print(f"{name}: {note}", style="dim", markup=False)
    for each in found:
        if each.failure:
            console.print(f"FAILED {each.case.label}: {each.failure}", style="bold red", markup=False)
    slower = [
        f"{case} ({measure})" for case, measure, *_ in losses(record for each in found for record in each.records)
    ]
    console.print(
        f"{len(found)} cases, {sum(bool(each.failure) for each in found)} failed. Slower than a rival: {slower or 'none'}"
    )


def _table(suite: str, records: Sequence[Record]) -> Table:
    others = [way for way in dict.fromkeys(record.way for record in records) if way != OURS]
    table = Table(title=f"{suite}, {records[0].origin.machine}, µs a call, memory in GB", header_style="bold")
    for heading in ("rows x V", "measure"):
        table.add_column(heading, no_wrap=True)
    for heading in (OURS, "p10 to p90", *others):
        table.add_column(heading, justify="right", no_wrap=True)
    for (case, measure), ways in grid(records).items():
        mine = ways[OURS]
        spread = "" if mine.p10 is None else f"{three_digits(mine.p10)} to {three_digits(mine.p90)}"
        cells = [_beside(ways[way], mine) if way in ways else "" for way in others]
        table.add_row(case, measure, f"[bold]{three_digits(mine.value)}[/]", spread, *cells)
    return table


def _beside(other: Record, mine: Record) -> str:
    ratio = f" ({other.value / mine.value:.2f})" if mine.value else ""
    return three_digits(other.value) + ratio


def losses(records: Iterable[Record]) -> list[tuple[str, str, str, float, float]]:
    """(case, measure, rival, its number, ours) where a rival's is the smaller one."""
    return [
        (case, measure, way, record.value, ways[OURS].value)
        for (case, measure), ways in grid(records).items()
        for way, record in ways.items()
        if OURS in ways and way not in (*FLOORS, PREDICTED, "top-k alone") and record.value < ways[OURS].value
    ]


class Change(NamedTuple):
    case: str
    measure: str
    old: float
    new: float
    verdict: str  # "faster" or "slower" beyond the spread of both runs, or ""


def changes(old: Iterable[Record], new: Iterable[Record]) -> list[Change]:
    """The change of our time for every case and measure that both runs have."""
    before = {key: ways[OURS] for key, ways in grid(old).items() if OURS in ways}
    after = {key: ways[OURS] for key, ways in grid(new).items() if OURS in ways}
    return [
        Change(*key, before[key].value, after[key].value, _verdict(before[key], after[key]))
        for key in after
        if key in before
    ]


def _verdict(old: Record, new: Record) -> str:
    if None in (old.p10, old.p90, new.p10, new.p90) or abs(new.value / old.value - 1) < _LEAST_CHANGE:
        return ""
    assert old.p10 is not None and old.p90 is not None and new.p10 is not None and new.p90 is not None
    # Beyond the spread: the middle 80 % of the two runs do not overlap.
    return "faster" if new.p90 < old.p10 else "slower" if new.p10 > old.p90 else ""


def print_changes(old: Sequence[Record], new: Sequence[Record], console: Console) -> None:
    was, now = old[0].origin, new[0].origin
    table = Table(title=f"Change since {was.date}, commit {was.commit or 'unknown'}", header_style="bold")
    for heading in ("rows x V", "measure"):
        table.add_column(heading, no_wrap=True)
    for heading in ("old µs", "new µs", "change", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    compared = changes(old, new)
    for change in compared:
        style = {"faster": "green", "slower": "bold red"}.get(change.verdict)
        cells = (
            three_digits(change.old),
            three_digits(change.new),
            f"{change.new / change.old - 1:+.1%}",
            change.verdict,
        )
        table.add_row(change.case, change.measure, *cells, style=style)
    console.print(table)
    if was.machine != now.machine:
        console.print(
            f"Not like with like: the machine was {was.machine}, is {now.machine}", style="yellow", markup=False
        )
    verdicts = [change.verdict for change in compared]
    console.print(f"{len(compared)} compared: {verdicts.count('faster')} faster, {verdicts.count('slower')} slower")
