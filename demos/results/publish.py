# SPDX-License-Identifier: Apache-2.0
"""Writes the figures of the documents again, from the JSON files beside this one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fused_topk.benchmark import published
from fused_topk.benchmark.published import Document, Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "demos"))

import ladder_report  # noqa: E402

DOCUMENTS = [
    ROOT / name
    for name in ("README.md", "demos/README.md", "demos/results/h200.md", "demos/results/cpu.md", "csrc/TUNING.md")
]
_WAYS = ("stock", "fused")


def generation_cost(run: Document) -> str:
    """What demos/generation_cost.py wrote, a shape a line."""
    headings = (
        "shape",
        "selection, GPU",
        "the kernel alone",
        "selection, host",
        "its memory, MB",
        "all kernels of a step",
        "whole step, fused against stock",
    )
    return Table(headings, [_cost_row(name, case) for name, case in run["cases"].items()]).markdown()


def _cost_row(name: str, case: Mapping[str, Any]) -> list[str]:
    def pair(field: str, scale: float = 1.0, digits: int = 0) -> str:
        return " / ".join(f"{case[way][field] * scale:,.{digits}f}" for way in _WAYS)

    low, middle, high = (
        f"{ratio - 1:+.1%}"
        for ratio in (case["fused_to_stock_quartiles"][0], case["fused_to_stock"], case["fused_to_stock_quartiles"][1])
    )
    return [
        name,
        pair("selection_gpu"),
        f"{case['function_alone_gpu']:,.0f}",
        pair("selection_host"),
        pair("selection_scratch_bytes", 1e-6, 1),
        pair("profiled_gpu"),
        f"{middle} ({low} to {high})",
    ]


def decoding(run: Document) -> str:
    """What demos/decoding_latency.py wrote: a line for each mode and way."""
    title = (
        f"{run['model']}: {run['batch']} prompts, {run['beams']} beams, {run['vocab_size']:,} tokens, {run['dtype']}."
    )
    headings = ("generate()", "", "selection, µs", "its memory, kB", "whole step, ms", "tokens/s")
    lines = []
    for mode, ways in run["summary"].items():
        for way in _WAYS:
            row = ways[way]
            memory, seconds = row["selection_memory_bytes"], (row["selection_s"], row["step_s"])
            cells = [f"{seconds[0] * 1e6:,.0f}", f"{memory / 1e3:,.1f}", f"{seconds[1] * 1e3:.2f}"]
            lines.append([mode if way == "stock" else "", way, *cells, f"{row['tokens_per_s']:,.0f}"])
        saved = [
            ways["stock"][name] / ways["fused"][name] for name in ("selection_s", "selection_memory_bytes", "step_s")
        ]
        lines.append(["", "stock / fused", *(f"{ratio:,.2f}x" for ratio in saved), ""])
    return f"{title}\n\n{Table(headings, lines, labels=2).markdown()}"


VIEWS = {
    **published.VIEWS,
    "ladder": ladder_report.ladder,
    "generation_cost": generation_cost,
    "decoding": decoding,
}


def published_again(document: Path) -> str:
    """The document's text with the figures that the JSON files have now."""
    return published.filled(document.read_text(encoding="utf-8"), document.parent, VIEWS)


if __name__ == "__main__":
    for path in DOCUMENTS:
        path.write_text(published_again(path), encoding="utf-8")
