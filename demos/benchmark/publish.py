# SPDX-License-Identifier: Apache-2.0
"""The figures that documents show are those of CSV files.

Above a table of figures a document says from which file, relative to itself, and of which suites:

    <!-- figures: h100.csv decode,long -->
    | rows x V | read | fused_topk | torch / fused_topk | hot: fused_topk |

Every case of the suites gets a row. Without suites the table's rows stay, and the first cell of each names its case. A heading names
a way, with a measure in front if it is another than the first; or two ways, which are divided. What a cell names may stand in a comment
instead: `| a token of 50 <!-- 1 x 128256 bf16 k=50 --> |`. A column with the comment `text` stays. The suite `origins` has a row for each
origin of the file, and `losses` one for each case where a rival takes less.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from .report import losses
from .results import Record, grid, read, three_digits

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "csrc/*.md", "demos/*.md", "demos/results/*.md", "docs/*.md")
    for path in ROOT.glob(pattern)
    if "<!-- figures: " in path.read_text(encoding="utf-8")
)

_MARKER = re.compile(r"<!-- figures: (?P<path>\S+)(?: (?P<suites>.+?))? -->")
_COMMENT = re.compile(r"<!-- (.+?) -->")
# A case's own number is of the first of these that it has.
_MEASURES = ("cold", "time", "step", "share")
_TEXT = "text"

Measures = Mapping[str, Mapping[str, Record]]
"""Of one case: by measure and way."""


def draw_pictures() -> None:
    """Draws the pictures of demos/README.md again."""
    import decoding_report
    import ladder_report

    from . import plot

    h100, h200 = (read(ROOT / f"demos/results/{name}.csv") for name in ("h100", "h200"))
    folder, of_benchmark = ROOT / "demos/pictures", ("decode", "beams", "routers")
    plot.plot([record for record in h100 if record.suite in of_benchmark], folder / "benchmark.png")
    title = f"{h100[0].origin.machine}, bfloat16, random weights"
    decoding_report.save_plot(folder / "decoding_latency.png", title, h100)
    ladder_report.draw([record for record in h200 if record.suite.startswith("ladder")], folder / "ladder.png")


def published_again(document: Path) -> str:
    """The document's text with the figures that the CSV files have now."""
    return filled(document.read_text(encoding="utf-8"), document.parent)


def filled(text: str, folder: Path) -> str:
    """The same for a text whose files lie relative to that folder. ValueError if it names a case, a way or a suite that there is not."""
    return "\n".join(_lines(iter(text.split("\n")), folder))


def _lines(lines: Iterator[str], folder: Path) -> Iterator[str]:
    for line in lines:
        yield line
        marker = _MARKER.fullmatch(line.strip())
        if marker:
            heading, rule = next(lines), next(lines)
            rows, after = [], ""
            for after in lines:
                if not after.startswith("|"):
                    break
                rows.append(_cells(after))
            yield from (heading, rule)
            for cells in _table(read(folder / marker["path"]), marker["suites"] or "", _cells(heading), rows):
                yield f"| {' | '.join(cells)} |"
            yield after


def _table(
    records: Sequence[Record], suites: str, headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> Iterator[Sequence[str]]:
    if suites == "origins":
        return _origins(records)
    if suites == "losses":
        return _losses(records)
    names = suites.split(",") if suites else []
    if missing := set(names) - {record.suite for record in records}:
        raise ValueError(f"suites must be of the file, got {', '.join(missing)}")
    return _figures([r for r in records if not names or r.suite in names], headings, rows, bool(names))


def _figures(
    records: Sequence[Record], headings: Sequence[str], rows: Sequence[Sequence[str]], has_all: bool
) -> Iterator[Sequence[str]]:
    ways = {record.way for record in records}
    columns = [_name(heading) for heading in headings[1:]]
    for column in columns:
        if column != _TEXT and not {*_key(column)[1:]} <= ways | {""}:
            raise ValueError(f"a heading must name ways of {', '.join(sorted(ways))}, got {column!r}")
    of_cases: dict[frozenset[str], dict[str, dict[str, Record]]] = {}
    for (case, measure), of_measure in grid(records).items():
        of_cases.setdefault(_words(case), {})[measure] = of_measure
    if has_all:
        rows = [[record.case] for record in {record.case: record for record in records}.values()]
    for row in rows:
        measures = of_cases.get(_words(_name(row[0])))
        if measures is None:
            raise ValueError(f"a row must name a case of the file, got {row[0]!r}")
        yield [
            row[0],
            *(row[i] if column == _TEXT else _figure(measures, column) for i, column in enumerate(columns, start=1)),
        ]


def _figure(measures: Measures, column: str) -> str:
    measure, way, other = _key(column)
    measure = measure or next((name for name in _MEASURES if name in measures), "")
    found = measures.get(measure, {})
    if way not in found or (other and other not in found):
        return "-"
    value = found[way].value
    return three_digits(value / found[other].value if other else value)


def _key(column: str) -> tuple[str, str, str]:
    """The measure (empty for a case's own), the way and the other way (empty for none)."""
    measure, colon, ways = column.rpartition(": ")
    way, _, other = ways.partition(" / ")
    return measure if colon else "", way.strip(), other.strip()


def _origins(records: Iterable[Record]) -> Iterator[list[str]]:
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for record in records:
        found.setdefault(record.origin, {})[record.suite] = None
    for (machine, versions, date, commit), suites in found.items():
        yield [", ".join(suites), machine, date, commit, versions]


def _losses(records: Sequence[Record]) -> Iterator[list[str]]:
    for suite in dict.fromkeys(record.suite for record in records):
        for case, measure, way, its, ours in losses(r for r in records if r.suite == suite):
            yield [suite, case, measure, way, three_digits(its), three_digits(ours), f"{ours / its:.2f}"]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _name(cell: str) -> str:
    """What a cell names: its comment, or else its text."""
    comment = _COMMENT.search(cell)
    return comment[1] if comment else cell


def _words(label: str) -> frozenset[str]:
    """What a case's label says, however it is punctuated."""
    shape, _, rest = label.replace(",", " ").replace(" = ", "=").partition(" x ")
    return frozenset([f"{' '.join(shape.split())} x", *rest.split()]) - {"x"}
