# SPDX-License-Identifier: Apache-2.0
"""What a run shows: a table for each suite, and the change since an older run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    failed = [each for each in found if each.failure]
    for each in failed:
        console.print(f"FAILED {each.case.label}: {each.failure}", style="bold red", markup=False)
    slower = [f"{case} ({measure})" for case, measure, *_ in losses(r for each in found for r in each.records)]
    console.print(f"{len(found)} cases, {len(failed)} failed. Slower than a rival: {', '.join(slower) or 'none'}")


def _table(suite: str, records: Sequence[Record]) -> Table:
    others = [way for way in dict.fromkeys(record.way for record in records) if way != OURS]
    table = Table(title=f"{suite}, {records[0].origin.machine}, µs a call, memory in GB", header_style="bold")
    for heading in ("rows x V", "measure", OURS, "p10 to p90", *others):
        table.add_column(heading, justify="left" if heading in ("rows x V", "measure") else "right", no_wrap=True)
    for (case, measure), ways in grid(records).items():
        mine = ways[OURS]
        spread = "" if mine.p10 is None else f"{three_digits(mine.p10)} to {three_digits(mine.p90)}"
        # Nothing may be held at all.
        ratios = {way: f"{other.value / (mine.value or other.value or 1):.2f}" for way, other in ways.items()}
        cells = [f"{three_digits(ways[way].value)} ({ratios[way]})" if way in ways else "" for way in others]
        table.add_row(case, measure, f"[bold]{three_digits(mine.value)}[/]", spread, *cells)
    return table


def losses(records: Iterable[Record]) -> list[tuple[str, str, str, float, float]]:
    """(case, measure, rival, its number, ours) where a rival's is the smaller one."""
    return [
        (case, measure, way, record.value, ways[OURS].value)
        for (case, measure), ways in grid(records).items()
        for way, record in ways.items()
        if OURS in ways and way not in (*FLOORS, PREDICTED, "top-k alone") and record.value < ways[OURS].value
    ]


def changes(old: Iterable[Record], new: Iterable[Record]) -> list[tuple[str, str, float, float, str]]:
    """(case, measure, old, new, verdict) of our time in both runs. The verdict is "faster" or "slower" beyond the spread, or empty."""
    before, after = ({key: ways[OURS] for key, ways in grid(run).items() if OURS in ways} for run in (old, new))
    both = [(*key, before[key], after[key]) for key in after if key in before]
    return [(case, measure, was.value, now.value, _verdict(was, now)) for case, measure, was, now in both]


def _verdict(old: Record, new: Record) -> str:
    has_spread = old.p10 and old.p90 and new.p10 and new.p90
    if not has_spread or abs(new.value / old.value - 1) < _LEAST_CHANGE:
        return ""
    # Beyond the spread: the middle 80 % of the two runs do not overlap.
    return "faster" if (new.p90 or 0) < (old.p10 or 0) else "slower" if (new.p10 or 0) > (old.p90 or 0) else ""


def print_changes(old: Sequence[Record], new: Sequence[Record], console: Console) -> None:
    was, now = old[0].origin, new[0].origin
    table = Table(title=f"Change since {was.date}, commit {was.commit or 'unknown'}", header_style="bold")
    for heading in ("rows x V", "measure", "old µs", "new µs", "change", ""):
        table.add_column(heading, justify="right" if "µs" in heading or heading == "change" else "left", no_wrap=True)
    compared = changes(old, new)
    for case, measure, before, after, verdict in compared:
        style = {"faster": "green", "slower": "bold red"}.get(verdict)
        cells = (three_digits(before), three_digits(after), f"{after / before - 1:+.1%}", verdict)
        table.add_row(case, measure, *cells, style=style)
    console.print(table)
    if was.machine != now.machine:
        console.print(f"[yellow]Not like with like[/]: the machine was {was.machine}, is {now.machine}")
    verdicts = [change[-1] for change in compared]
    console.print(f"{len(compared)} compared: {verdicts.count('faster')} faster, {verdicts.count('slower')} slower")
