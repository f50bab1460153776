# SPDX-License-Identifier: Apache-2.0
"""Writes the numbers of README.md's tables again, from the JSON files beside this one."""

from __future__ import annotations

from pathlib import Path

from fused_topk.benchmark.published import filled

README = Path(__file__).resolve().parents[2] / "README.md"

if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8"), README.parent), encoding="utf-8")
