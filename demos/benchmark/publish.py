# SPDX-License-Identifier: Apache-2.0
"""The documents that show figures, and their text with the figures that the JSON files of demos/results have now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        "docs/whole_steps.md",
    )
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


_CALL_HEADINGS = ("first call, s", "first token, ms", "step, ms")


def _call_cells(cost: Mapping[str, Any]) -> list[str]:
    return [f"{cost['first_call']:.1f}", f"{cost['first_token'] * 1e3:.1f}", f"{cost['step'] * 1e3:.2f}"]


def decoding(run: Document) -> str:
    """What demos/decoding_latency.py wrote of whole calls: a line for each mode and way."""
    headings = ("generate()", "", *_CALL_HEADINGS, "stock / this")
    lines = [
        [
            mode if way == "stock" else "",
            way,
            *_call_cells(cost),
            f"{ways['stock']['step'] / cost['step']:.2f}",
        ]
        for mode, ways in run["calls"].items()
        for way, cost in ways.items()
    ]
    return Table(headings, lines, labels=2).markdown()


def whole_calls(run: Document) -> str:
    """What demos/generation_cost.py wrote of whole calls: a line for each shape and way."""
    headings = ("shape", "way", *_CALL_HEADINGS, "memory beyond weights, GB")
    lines = [
        [
            name if way == "stock" else "",
            way,
            *_call_cells(cost),
            f"{cost['peak_beyond_weights'] / 1e9:.2f}",
        ]
        for name, case in run["cases"].items()
        for way, cost in case["whole_calls"].items()
    ]
    return Table(headings, lines, labels=2).markdown()


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
        if isinstance(cost, dict)
    ]
    return Table(("batch", "way", *_CALL_HEADINGS, "stock / this"), lines, labels=2).markdown()


VIEWS = {
    **published.VIEWS,
    "ladder": ladder_report.ladder,
    "generation_cost": generation_cost,
    "decoding": decoding,
    "whole_calls": whole_calls,
    "linear": linear,
    "distributed": distributed,
    "tensor_parallel": tensor_parallel,
}


def published_again(document: Path) -> str:
    """The document's text with the figures that the JSON files have now."""
    return published.filled(document.read_text(encoding="utf-8"), document.parent, VIEWS)
