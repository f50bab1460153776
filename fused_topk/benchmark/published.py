# SPDX-License-Identifier: Apache-2.0
"""Tables of published figures: a document names the rows and columns, the JSON of a run has the numbers.

A table stands below a line `<!-- figures: PATH -->`, PATH being the JSON relative to the document. Its first column says
which case a row is, as `64 x 128256, bf16, k = 8, ascending`; its other headings are those of `COLUMNS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .report import Document, load, three_digits
from .runner import FUSED

_MARKER = re.compile(r"<!-- figures: (?P<path>\S+) -->")
# What a row means where it names no operation.
_DEFAULT_OPERATION = "softmax"


def _median(name: str) -> Callable[[Mapping[str, Any]], str]:
    def cell(times: Mapping[str, Any]) -> str:
        return three_digits(times[name]["median"]) if name in times else "-"

    return cell


def _torch_over_fused(times: Mapping[str, Any]) -> str:
    return f"{times['torch']['median'] / times[FUSED]['median']:.1f}"


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "read": _median("read"),
    "copy": _median("copy"),
    "fused_topk": _median(FUSED),
    "torch": _median("torch"),
    "torch.softmax": _median("torch"),
    "torch.compile": _median("compiled"),
    "torch / fused": _torch_over_fused,
}
"""Heading of a column, and its cell for the times of a case."""


def filled(text: str, folder: Path) -> str:
    """The document with the numbers of its tables made anew.

    Args:
        text: a Markdown document.
        folder: where it lies; paths of the JSON files are relative to it.

    Raises:
        ValueError: a table names a case or a column that its run does not have.
    """
    return "\n".join(_lines(text.split("\n"), folder))


def _lines(lines: list[str], folder: Path) -> Iterator[str]:
    run: Document | None = None
    headings: list[str] = []
    for line in lines:
        marker = _MARKER.search(line)
        if marker is not None:
            run, headings = load(folder / marker["path"]), []
        elif run is not None and line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not headings:
                headings = cells[1:]
                unknown = [heading for heading in headings if heading not in COLUMNS]
                if unknown:
                    raise ValueError(f"columns must be among {', '.join(COLUMNS)}, got {', '.join(unknown)}")
            elif set(cells[0]) - set("-: "):
                times = _entry(run, cells[0])["times"]
                line = "| " + " | ".join([cells[0], *(COLUMNS[heading](times) for heading in headings)]) + " |"
        elif headings:
            run, headings = None, []
        yield line


def _entry(run: Document, row: str) -> Mapping[str, Any]:
    """The case of a run that a row names, with inputs from memory where the run has both."""
    wanted = _words(row)
    entries = [entry for entry in run["results"] if _words(entry["shape"]) == wanted]
    if not entries:
        raise ValueError(f"a row must name a case of the run of {run['date']}, got {row!r}")
    found: Mapping[str, Any] = min(entries, key=lambda entry: entry["cache"] == "hot")
    return found


def _words(label: str) -> frozenset[str]:
    """What a label says, however it is punctuated."""
    joined = label.replace(",", " ").replace(" = ", "=").replace("all logits equal", "equal")
    shape, _, rest = joined.partition(" x ")
    return frozenset([f"{shape.strip()} x", *rest.split()]) - {_DEFAULT_OPERATION, "x"}
