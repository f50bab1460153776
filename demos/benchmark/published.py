# SPDX-License-Identifier: Apache-2.0
"""Published figures: a document says which it shows, and the JSON of a run has the numbers.

A document marks its figures in two ways, with the JSON's path relative to itself:

- `<!-- figures: PATH -->` stands above a table that names its rows and columns. Its first column says which case a row is, as
  `64 x 128256, bf16, k = 8, ascending`; its other headings are those of `COLUMNS`. The numbers are filled in.
- `<!-- figures: PATH VIEW -->` and `<!-- end of figures -->` enclose what a view writes of the whole run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .report import Document as Document  # of which views are made
from .report import cells_of_ours, gpu_of, machine_of, median_of, three_digits
from .runner import FUSED

View = Callable[[Document], str]

_MARKER = re.compile(r"<!-- figures: (?P<path>\S+)(?: (?P<view>\w+))? -->")
_END = "<!-- end of figures -->"
_WAITS_SHOWN = 3
# Peers that get a column if the run has timed them.
_OTHERS = ("compiled", "cupy", "flashinfer", "flashinfer-sorted")


class Table(NamedTuple):
    """A table of texts. The first `labels` columns are words, the others numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1

    def markdown(self) -> str:
        rule = ["---" if column < self.labels else "---:" for column in range(len(self.headings))]
        return "\n".join(_row(cells) for cells in (self.headings, rule, *self.rows))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def filled(text: str, folder: Path, views: Mapping[str, View]) -> str:
    """The document with its figures made anew.

    Args:
        text: a Markdown document.
        folder: where it lies; paths of the JSON files are relative to it.
        views: what the document may name as VIEW.

    Raises:
        ValueError: the document names a case, a column or a view that there is not, or does not end a view's figures.
    """
    return "\n".join(_lines(iter(text.split("\n")), folder, views))


def _lines(lines: Iterator[str], folder: Path, views: Mapping[str, View]) -> Iterator[str]:
    run: Document | None = None
    headings: list[str] = []
    for line in lines:
        marker = _MARKER.search(line)
        if marker is not None:
            run, headings = json.loads((folder / marker["path"]).read_text(encoding="utf-8")), []
            if marker["view"]:
                if marker["view"] not in views:
                    raise ValueError(f"views must be among {', '.join(views)}, got {marker['view']}")
                if _END not in lines:  # takes what the view writes again
                    raise ValueError(f"{marker[0]} must be followed by {_END}")
                yield line
                yield ""
                yield views[marker["view"]](run)
                yield ""
                line, run = _END, None
        elif run is not None and line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not headings:
                headings = cells[1:]
                unknown = [heading for heading in headings if heading not in COLUMNS]
                if unknown:
                    raise ValueError(f"columns must be among {', '.join(COLUMNS)}, got {', '.join(unknown)}")
            elif set(cells[0]) - set("-: "):
                entry = _entry(run, cells[0])
                line = _row([cells[0], *(COLUMNS[heading](entry) for heading in headings)])
        elif headings:
            run, headings = None, []
        yield line


def _entry(run: Document, row: str) -> Mapping[str, Any]:
    """The case of a run that a row names, with inputs from memory where the run has both."""
    wanted = _words(row)
    # `bench` writes results, `counters` launches.
    entries = [*run.get("results", ()), *run.get("launches", ())]
    found = [entry for entry in entries if _words(entry.get("shape") or entry["case"]) == wanted]
    if not found:
        raise ValueError(f"a row must name a case of the run of {run['date']}, got {row!r}")
    return min(found, key=lambda entry: entry.get("cache") == "hot")


def _words(label: str) -> frozenset[str]:
    """What a label says, however it is punctuated."""
    joined = label.replace(",", " ").replace(" = ", "=")
    shape, _, rest = joined.partition(" x ")
    return frozenset([f"{shape.strip()} x", *rest.split()]) - {"x"}


def _median(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda entry: median_of(entry, name)


def _torch_over_fused(entry: Mapping[str, Any]) -> str:
    return f"{1 / entry['ratio_to_torch']:.1f}" if entry["ratio_to_torch"] else "-"


def _share(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda launch: f"{launch['shares'][name]:.0%}"


def _waits(launch: Mapping[str, Any]) -> str:
    """What a warp waits for the longest. A warp that waits for "nothing" works, which is left out."""
    shares = sorted(launch["states"].items(), key=lambda state: -state[1])
    return "; ".join([f"{name} {share:.0%}" for name, share in shares if name != "nothing"][:_WAITS_SHOWN])


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "read": _median("read"),
    "fused_topk": _median(FUSED),
    "torch": _median("torch"),
    "torch / fused_topk": _torch_over_fused,
    "issue slots": _share("issue slots"),
    "memory": _share("memory"),
    "a warp waits for": _waits,
}
"""Heading of a column, and its cell for a case."""


def about(run: Document) -> str:
    """Where, with what and from which commit the run was made, as one line."""
    versions = run["machine"]["versions"]
    names = ["torch", "transformers", "python"]
    parts = [f"{name} {versions[name]}" for name in names if versions.get(name)]
    if gpu_of(run) is not None:
        parts += [f"driver for CUDA {versions['cuda driver']}", f"NVRTC {versions['nvrtc']}"]
    date, commit = run.get("date"), run.get("git_commit")
    when = f"{date[:10]}, commit {commit or 'unknown'}" if date else "date and commit not recorded"
    return f"*{machine_of(run)}; {', '.join(parts)}; {when}.*"


def summary(run: Document) -> str:
    """How the run compares with torch, and the time of a call on the host."""
    slower = [
        f"{entry['shape']} takes {entry['ratio_to_torch']:.2f} times as long"
        for entry in run["results"]
        if (entry["ratio_to_torch"] or 0) > 1
    ]
    verb = "are" if len(slower) > 1 else "is"
    text = f"Of {len(run['results'])} measurements {len(slower) or 'none'} {verb} slower than torch"
    text += f": {', '.join(slower)}." if slower else "."
    if run["host"]:
        host = {name: three_digits(timing["median"]) for name, timing in run["host"].items()}
        text += f" An eager call takes {host[FUSED]} µs on the host, torch's two operations {host['torch']} µs."
    return text


def suites(run: Document) -> str:
    """Every result, a table for each suite."""
    results = run["results"]
    others = [name for name in _OTHERS if any(name in entry["times"] for entry in results)]
    headings = ["rows x V", "cache", "µs", "p10 to p90", "GB/s", "floor", "µs / floor", "torch", "torch / µs", *others]
    tables = []
    for suite in dict.fromkeys(entry["suite"] for entry in results):
        rows = [_suite_row(entry, others) for entry in results if entry["suite"] == suite]
        tables += [f"### {suite}", Table(headings, rows, labels=2).markdown()]
    return "\n\n".join(tables)


def _suite_row(entry: Mapping[str, Any], others: Iterable[str]) -> list[str]:
    return [
        entry["shape"],
        entry["cache"],
        *cells_of_ours(entry),
        median_of(entry, "torch"),
        _torch_over_fused(entry),
        *(median_of(entry, name) for name in others),
    ]


def sampling(run: Document) -> str:
    """The suite sampling: each draw beside the top-k of the same rows, and peers."""
    known = ("torch", "transformers", "flashinfer")
    peers = [name for name in known if any(name in entry["times"] for entry in run["results"])]
    lines = []
    for entry in run["results"]:
        of_rows = f"{entry['times'][FUSED]['median'] / entry['times']['rows']['median']:.2f}"
        cells = [median_of(entry, name) for name in (FUSED, "rows")]
        lines.append([entry["shape"], entry["cache"], *cells, of_rows, *(median_of(entry, name) for name in peers)])
    return Table(["rows x V", "cache", "µs", "top-k alone", "µs / top-k", *peers], lines, labels=2).markdown()


VIEWS: dict[str, View] = {"about": about, "summary": summary, "suites": suites, "sampling": sampling}
"""Views of a run of `python demos/benchmark bench`; `about` is one of any run."""
