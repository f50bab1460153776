# SPDX-License-Identifier: Apache-2.0
"""What a call costs on the CPU: calls of few short rows beside torch's calls, and calls with options beside the plain call.

    python demos/benchmark calls [WORD ...]     only rows that have all of the words

Each row times two calls in turns. Our call may take `times` times as long as the other one, plus `plus` µs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import fused_topk

from .inputs import DTYPES
from .timing import FULL, time_interleaved

_WHOLE_ROWS = (
    *((1, vocab) for vocab in (8, 30, 64, 128, 1000)),
    *((16, 64), (64, 128), (256, 8), (4000, 8), (4000, 30), (4000, 64), (4000, 100), (4096, 128), (4096, 200)),
    *((4096, 256), (2048, 1000), (65536, 9), (65536, 30), (65536, 64)),
)
_ONE_ROW = ((128, 8), (1000, 8), (64, 2))
_ROUTERS = (
    *((4096, 8, 2), (4096, 16, 2), (4096, 64, 4), (4096, 64, 8), (4096, 128, 8), (4096, 256, 8)),
    *((65536, 64, 4), (65536, 128, 8)),
)
_WITH_OPTIONS = ((1, 128), (1, 1000), (64, 128), (4096, 128))


class Comparison(NamedTuple):
    name: str
    ours: Callable[[], object]
    other: Callable[[], object]
    times: float
    plus: float = 0.0  # µs


def comparisons() -> Iterator[Comparison]:
    # Arguments are bound by default values: a lambda in a loop would see the last ones.
    for dtype in ("fp32", "bf16"):
        for rows, vocab in _WHOLE_ROWS:
            x = torch.randn(rows, vocab).to(DTYPES[dtype])
            yield Comparison(
                f"softmax {rows} x {vocab} {dtype} / torch",
                lambda x=x: fused_topk.softmax(x),  # type: ignore[misc]
                lambda x=x: torch.softmax(x, -1),  # type: ignore[misc]
                times=1.0,
                plus=1.5 if rows == 1 else 0.0,
            )
    for rows, vocab, k in (*((1, *shape) for shape in _ONE_ROW), *_ROUTERS):
        for dtype in ("fp32", "bf16"):
            x = torch.randn(rows, vocab).to(DTYPES[dtype])
            yield Comparison(
                f"softmax_topk {rows} x {vocab} {dtype} k={k} / torch",
                lambda x=x, k=k: fused_topk.softmax_topk(x, k),  # type: ignore[misc]
                lambda x=x, k=k: torch.topk(torch.softmax(x, -1, dtype=torch.float32), k),  # type: ignore[misc]
                times=1.0 if rows == 1 else 1 / 8,
                plus=1.5 if rows == 1 else 0.0,
            )
    for rows, vocab in _WITH_OPTIONS:
        x, k = torch.randn(rows, vocab), 8
        temperature = torch.rand(rows) + 0.5
        options: dict[str, dict[str, Any]] = {
            "out": {"out": (torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64), torch.empty(rows))},
            "int32 out": {"out": (torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int32), torch.empty(rows))},
            "row temperatures": {"temperature": temperature},
            "mask": {"mask": torch.rand(rows, vocab) < 0.9},
            "packed mask": {"mask": torch.randint(-(2**31), 2**31 - 1, (rows, (vocab + 31) // 32), dtype=torch.int32)},
        }
        for name, option in options.items():
            yield Comparison(
                f"softmax_topk {rows} x {vocab} k={k} {name} / plain",
                lambda x=x, k=k, option=option: fused_topk.softmax_topk(x, k, **option),  # type: ignore[misc]
                lambda x=x, k=k: fused_topk.softmax_topk(x, k),  # type: ignore[misc]
                times=1.3,
            )
        yield Comparison(
            f"softmax {rows} x {vocab} row temperatures / plain",
            lambda x=x, t=temperature: fused_topk.softmax(x, temperature=t),  # type: ignore[misc]
            lambda x=x: fused_topk.softmax(x),  # type: ignore[misc]
            times=1.3,
        )


def print_comparisons(words: list[str]) -> None:
    """Times and prints the rows that have all of the words."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; medians, µs")
    for name, ours, other, times, plus in comparisons():
        if not all(word in name.split() for word in words):
            continue
        taken = time_interleaved({"ours": ours, "other": other}, FULL)
        a, b = taken["ours"].median, taken["other"].median
        verdict = "" if a <= times * b + plus else f"  over {times:.3g} x + {plus:g}"
        print(f"{name:58s} {a:9.2f} / {b:9.2f}   x {a / b:5.2f}  {a - b:+9.2f}{verdict}", flush=True)
