# SPDX-License-Identifier: Apache-2.0
"""The documents that show figures, and their text with the figures that the JSON files of demos/results have now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ladder_report

from . import published
from .published import Document, Table
from .report import three_digits

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / name
    for name in (
        "README.md",
        "csrc/TUNING.md",
        "demos/README.md",
        "demos/results/cpu.md",
        "demos/results/h100x2.md",
        "demos/results/h100.md",
        "docs/generation.md",
        "docs/how_it_works.md",
    )
]
# A way that is no more. Runs before 0.2 have timed it.
_GONE = "fused"
_CALL_HEADINGS = ("first call, s", "first token, ms", "step, ms")


class _Column(NamedTuple):
    heading: str
    field: str
    scale: float
    digits: int


_COLUMNS = (
    _Column("step, ms", "step", 1e3, 2),
    _Column("first token, ms", "first_token", 1e3, 1),
    _Column("first call, s", "first_call", 1.0, 1),
    _Column("memory beyond weights, GB", "peak_beyond_weights", 1e-9, 2),
)


def decoding(run: Document) -> str:
    """What demos/decoding_latency.py wrote: a line for each mode."""
    return _by_way("generate()", run["calls"])


def whole_calls(run: Document) -> str:
    """What demos/generation_cost.py wrote: a line for each shape."""
    return _by_way("shape", {name: case["whole_calls"] for name, case in run["cases"].items()})


def _by_way(heading: str, calls: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each case. Each cell has a number for each way."""
    ways = [way for way in dict.fromkeys(way for of_case in calls.values() for way in of_case) if way != _GONE]
    has_memory = all(cost.get("peak_beyond_weights") for of_case in calls.values() for cost in of_case.values())
    columns = _COLUMNS if has_memory else _COLUMNS[:-1]

    def cell(of_case: Mapping[str, Any], column: _Column) -> str:
        costs = [of_case.get(way) for way in ways]
        numbers = ["-" if cost is None else f"{cost[column.field] * column.scale:.{column.digits}f}" for cost in costs]
        return " / ".join(numbers)

    lines = [[name, *(cell(of_case, column) for column in columns)] for name, of_case in calls.items()]
    table = Table([heading, *(column.heading for column in columns)], lines)
    return f"In each cell: {' / '.join(ways)}.\n\n{table.markdown()}"


def linear(run: Document) -> str:
    """What `bench --suite linear` wrote."""
    headings = (
        "rows x H -> V",
        "product",
        "product, log_softmax_topk",
        "product, torch",
        "ours",
        "ours / product",
        "MB",
    )
    lines = [
        [
            result["shape"],
            *(three_digits(result["times"][name]["median"]) for name in ("product", "stock", "torch", "fused")),
            f"{result['ratio_to_product']:.2f}",
            f"{result['scratch_bytes']['fused'] / 1e6:.0f}",
        ]
        for result in run["results"]
    ]
    return Table(headings, lines).markdown()


def distributed(run: Document) -> str:
    """What `bench --suite distributed` wrote."""
    pieces = ("local", "collective", "merge", "whole", "gathered", "empty")
    headings = ("rows x V", *pieces, "whole / (collective + local)", "bytes", "bytes of logits")
    lines = [
        [
            result["shape"],
            *(three_digits(result["times"][name]["median"]) for name in pieces),
            f"{result['ratio_to_collective_and_local']:.2f}",
            *(f"{result['bytes_of_process'][name]:,}" for name in ("whole", "gathered")),
        ]
        for result in run["results"]
    ]
    return Table(headings, lines).markdown()


def tensor_parallel(run: Document) -> str:
    """What demos/tensor_parallel_cost.py wrote: a line for each case and way."""
    lines = [
        [
            case if way == "stock" else "",
            way,
            f"{cost['first_call_s']:.1f}",
            f"{cost['first_token_ms']:.1f}",
            f"{cost['step_ms']:.2f}",
            f"{ways['stock']['step_ms'] / cost['step_ms']:.2f}",
        ]
        for case, ways in run["cases"].items()
        for way, cost in ways.items()
        if isinstance(cost, dict) and way != _GONE
    ]
    return Table(("batch", "way", *_CALL_HEADINGS, "stock / this"), lines, labels=2).markdown()


VIEWS = {
    **published.VIEWS,
    "ladder": ladder_report.ladder,
    "decoding": decoding,
    "whole_calls": whole_calls,
    "linear": linear,
    "distributed": distributed,
    "tensor_parallel": tensor_parallel,
}


def published_again(document: Path) -> str:
    """The document's text with the figures that the JSON files have now."""
    return published.filled(document.read_text(encoding="utf-8"), document.parent, VIEWS)
