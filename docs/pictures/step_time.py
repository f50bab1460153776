# SPDX-License-Identifier: Apache-2.0
"""Writes step_time.svg, beside this file, from the runs of demos/results: `python docs/pictures/step_time.py`."""

from __future__ import annotations

import csv
from pathlib import Path

HERE = Path(__file__).parent
NUMBERS = HERE.parents[1] / "demos" / "results" / "h200.csv"
CASE = "llama-1b-8x4"
LEFT, WIDTH, TOP, PITCH, BAR = 150, 500, 74, 46, 26

_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 254" role="img" font-family="system-ui, sans-serif" font-size="15">
  <title>The time of one decoding step on an H200</title>
  <style>
    .back { fill: #ffffff } .text { fill: #1f2328 } .dim { fill: #57606a }
    .choice { fill: #d55e00 } .model { fill: #0072b2 } .wait { fill: #c8cdd3 } .replay { fill: #009e73 }
    @media (prefers-color-scheme: dark) {
      .back { fill: #15181c } .text { fill: #e6edf3 } .dim { fill: #a8b1bb }
      .choice { fill: #e69f00 } .model { fill: #56b4e9 } .wait { fill: #4a525b } .replay { fill: #2fbf94 }
    }
  </style>
  <rect class="back" width="760" height="254" rx="8"/>
"""
_LEGEND = (
    ("choice", "choice of tokens", 24),
    ("model", "other kernels", 184),
    ("wait", "the GPU waits for the host", 324),
    ("replay", "one replay of a CUDA graph", 544),
)


def drawn() -> str:
    """The picture's text: a bar for each way, its pieces in ms from left to right."""
    with NUMBERS.open(encoding="utf-8", newline="") as file:
        # Steps in ms, by suite, case and way.
        steps = {
            (r["suite"], r["case"], r["way"]): float(r["value"]) for r in csv.DictReader(file) if r["measure"] == "step"
        }
    choice, kernels, step = (
        steps["parts of a stock step", CASE, part] for part in ("choice of tokens", "all kernels", "step")
    )
    bars = {"stock": [("choice", choice), ("model", kernels - choice), ("wait", step - kernels)]}
    for way in ("whole step", "whole step, compiled"):
        bars[way] = [("replay", steps["generate", f"{CASE}-prompt-512", way])]
    scale = WIDTH / max(sum(time for _, time in pieces) for pieces in bars.values())

    lines = [
        '  <text class="text" x="24" y="34">One step of beam search: 8 texts with 4 beams, Llama 1B, bfloat16</text>'
    ]
    for row, (way, pieces) in enumerate(bars.items()):
        x, y = float(LEFT), TOP + row * PITCH - 16
        name, _, more = way.partition(", ")
        lines.append(f'  <text class="text" x="24" y="{y + 18 - 7 * bool(more)}">{name}</text>')
        if more:
            lines.append(f'  <text class="dim" x="24" y="{y + 27}" font-size="12">{more}</text>')
        for kind, time in pieces:
            lines.append(f'  <rect class="{kind}" x="{x:.1f}" y="{y}" width="{time * scale:.1f}" height="{BAR}"/>')
            x += time * scale
        total = sum(time for _, time in pieces)
        lines.append(f'  <text class="text" x="{x + 8:.1f}" y="{y + 18}">{total:.2f} ms</text>')
    for kind, words, x in _LEGEND:
        lines.append(f'  <rect class="{kind}" x="{x}" y="216" width="14" height="14"/>')
        lines.append(f'  <text class="dim" x="{x + 20}" y="228" font-size="13">{words}</text>')
    return _HEAD + "\n".join(lines) + "\n</svg>\n"


if __name__ == "__main__":
    (HERE / "step_time.svg").write_text(drawn())
