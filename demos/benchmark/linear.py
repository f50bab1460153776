# SPDX-License-Identifier: Apache-2.0
"""LM heads: what the product costs, what it costs with all logits kept, and what it costs without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fused_topk
from fused_topk import TopK

from . import report
from .check import log_softmax_topk_error
from .devices import read_rows
from .inputs import DTYPES
from .suites import Case
from .timing import FULL, QUICK, Timing, time_graph, time_interleaved

SUITE = "linear"
_MIB = 1 << 20


class HeadCase(NamedTuple):
    """`case.rows` hidden states of size `depth`, and a vocabulary of `case.vocab` tokens.

    The targets: our time is at most `of_product` times that of the product alone, and at most `of_stock` times that of the
    product with log_softmax_topk. Without `of_product`, at most `of_read` times a read of the weight will do as well: the
    product cannot take less than that read.
    """

    case: Case
    depth: int
    of_product: float | None = None
    of_stock: float | None = None
    of_read: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.case.rows} x {self.depth} -> {self.case.vocab} {self.case.dtype} k={self.case.k}"


_HEADS = ((128, 32000), (512, 50257), (2048, 128256))
CPU_CASES = tuple(
    HeadCase(Case(rows, vocab, 8, dtype), depth, None, 0.5 if rows <= 8 else 1.0 if rows <= 32 else 1.05, 1.3)
    for dtype in ("fp32", "bf16")
    for depth, vocab in _HEADS
    for rows in (1, 4, 8, 16, 32, 64)
)
GPU_CASES = (
    *(HeadCase(Case(rows, 128256, 8, "bf16"), 2048, None, 1.05) for rows in (1, 16, 64, 256)),
    *(HeadCase(Case(rows, 128256, 8, "bf16"), 2048, 1.12) for rows in (2048, 8192)),
    HeadCase(Case(2048, 128256, 256, "bf16"), 2048),
)
FUNCTIONS = {
    "read": "the weight is read once, and nothing else",
    "product": "hidden @ weight.T by the library, all logits",
    "stock": "the same, then log_softmax_topk",
    "torch": "the same, then torch's log_softmax in float32 and topk",
    "fused": "linear_log_softmax_topk",
}


class Measured(NamedTuple):
    head: HeadCase
    times: dict[str, Timing]  # of FUNCTIONS, µs per call
    scratch: dict[str, int]  # bytes beyond the result, at the most; of a GPU only

    def ratio(self, to: str) -> float:
        return self.times["fused"].median / self.times[to].median

    @property
    def teraflops(self) -> float:
        """The speed of our call, if all of it were the product."""
        return 2e-6 * self.head.case.rows * self.head.depth * self.head.case.vocab / self.times["fused"].median

    @property
    def meets_targets(self) -> bool:
        limits = (("product", self.head.of_product), ("stock", self.head.of_stock))
        is_quick = all(limit is None or self.ratio(to) <= limit for to, limit in limits)
        is_at_the_floor = self.head.of_product is None and self.ratio("read") <= self.head.of_read
        return (is_quick or is_at_the_floor) and self.scratch.get("fused", 0) <= 64 * _MIB


def run(
    cases: Iterable[HeadCase], device: torch.device, quick: bool, on_finish: Callable[[Measured], None]
) -> list[Measured]:
    """Checks and times each case.

    Raises:
        AssertionError: an answer was wrong.
    """
    found = []
    for head in cases:
        found.append(_measure(head, device, quick))
        on_finish(found[-1])
    return found


def _measure(head: HeadCase, device: torch.device, quick: bool) -> Measured:
    hidden, weight = _exact(head, device)
    k, effort = head.case.k, QUICK if quick else FULL

    def product(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, weight)

    functions: dict[str, Callable[[Tensor], object]] = {
        "read": lambda x: _read(weight),
        "product": product,
        "stock": lambda x: fused_topk.log_softmax_topk(product(x), k),
        "torch": lambda x: torch.topk(torch.log_softmax(product(x), -1, dtype=torch.float32), k),
        "fused": lambda x: fused_topk.linear_log_softmax_topk(x, weight, k),
    }
    with torch.inference_mode():
        found = fused_topk.linear_log_softmax_topk(hidden, weight, k)
        # Some rows at a time: float64 numbers of all logits would not fit.
        for first in range(0, len(hidden), 256):
            part = slice(first, first + 256)
            error = log_softmax_topk_error(product(hidden[part]), k, TopK(*(x[part] for x in found)))
            assert error is None, f"{head.label}: {error}"
        scratch: dict[str, int] = {}
        if device.type == "cuda":
            scratch = {name: _scratch(function, hidden, device) for name, function in functions.items()}
            times = {name: time_graph(function, [hidden], effort) for name, function in functions.items()}
        else:
            bound = {name: (lambda function=function: function(hidden)) for name, function in functions.items()}
            times = time_interleaved(bound, effort)
    return Measured(head, times, scratch)


def _read(weight: Tensor) -> None:
    """Reads the weight once. On a CPU torch's maximum comes closest; pairs of bfloat16 are read as one float32."""
    if weight.is_cuda:
        read_rows(weight)
    else:
        weight.view(torch.float32).amax()


def _exact(head: HeadCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """Hidden states and a weight whose products add up exactly in float32 in any order, so that answers can be compared."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = DTYPES[head.case.dtype]

    def drawn(rows: int, unit: float) -> Tensor:
        return (torch.randint(-7, 8, (rows, head.depth), generator=generator, device=device) * unit).to(dtype)

    return drawn(head.case.rows, 2.0**-3), drawn(head.case.vocab, 2.0**-5)


def _scratch(function: Callable[[Tensor], object], hidden: Tensor, device: torch.device) -> int:
    """The most bytes that a call holds beyond its result, after a first one has made the library's workspace."""
    function(hidden)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = function(hidden)
    torch.cuda.synchronize(device)
    tensors = result if isinstance(result, tuple) else (result,)
    held = sum(int(x.nbytes) for x in tensors if isinstance(x, Tensor))
    return torch.cuda.max_memory_allocated(device) - before - held


def document(
    measured: Iterable[Measured], device: torch.device, quick: bool, machine: Mapping[str, Any]
) -> report.Document:
    """The document of report.document(); all times are µs."""
    return {
        "format": report.FORMAT,
        "command": report.command(),
        **report.origin(machine),
        "device": str(device),
        "quick": quick,
        "threads": torch.get_num_threads(),
        "results": [
            {
                "suite": SUITE,
                "shape": each.head.label,
                "rows": each.head.case.rows,
                "depth": each.head.depth,
                "vocab": each.head.case.vocab,
                "k": each.head.case.k,
                "dtype": each.head.case.dtype,
                "times": {name: timing._asdict() for name, timing in each.times.items()},
                "scratch_bytes": each.scratch,
                "ratio_to_read": each.ratio("read"),
                "ratio_to_product": each.ratio("product"),
                "ratio_to_stock": each.ratio("stock"),
                "meets_targets": each.meets_targets,
            }
            for each in measured
        ],
    }


def print_measured(measured: Iterable[Measured], console: Console) -> None:
    caption = "\n".join(f"{name}: {does}" for name, does in FUNCTIONS.items())
    table = Table(title="LM heads, µs per call", caption=caption, caption_justify="left", header_style="bold")
    table.add_column("rows x H -> V", no_wrap=True)
    for heading in (*FUNCTIONS, "fused / read", "/ product", "/ stock", "TFLOP/s", "scratch MB", "target"):
        table.add_column(heading, justify="right")
    for each in measured:
        verdict = "met" if each.meets_targets else "missed"
        cells = [report.three_digits(each.times[name].median) for name in FUNCTIONS]
        ratios = [f"{each.ratio(name):.2f}" for name in ("read", "product", "stock")]
        scratch = f"{each.scratch['fused'] / _MIB:.0f}" if each.scratch else ""
        table.add_row(each.head.label, *cells, *ratios, f"{each.teraflops:.2f}", scratch, verdict)
    console.print(table)
