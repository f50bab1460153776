# SPDX-License-Identifier: Apache-2.0
"""A vocabulary over the processes of torchrun: what a call costs, what its pieces cost, and what moving the logits costs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import fused_topk
from fused_topk import distributed
from fused_topk.cuda_runtime.capture import Graph
from fused_topk.distributed import collective, functions, packing
from fused_topk.operators import calls
from fused_topk.rows import LogitRows

from . import report
from .inputs import DTYPES, make_inputs
from .suites import Case
from .timing import Timing, summarize

SUITE = "distributed"
CASES = tuple(Case(rows, vocab, k, "bf16") for vocab in (128256, 262144) for rows in (1, 8, 32, 256) for k in (8, 50))
PIECES = {
    "local": "the state of the process's columns, into the buffer",
    "collective": "the all-gather of the buffers",
    "merge": "the states of all processes into the result",
    "whole": "the call: softmax_topk of fused_topk.distributed",
    "gathered": "the all-gather of the logits, their columns side by side, then softmax_topk",
    "empty": "the all-gather of 8 bytes a process",
}

# The same number everywhere, so that all processes make the same collectives.
_CALLS = 10
_ROUNDS, _QUICK_ROUNDS = 21, 5


class Measured(NamedTuple):
    """One case, as rank 0 saw it."""

    case: Case
    times: dict[str, Timing]  # of PIECES, µs per call
    bytes_of_process: dict[str, int]  # what it gives to the collectives of "whole" and of "gathered"


def join(device_type: str) -> torch.device:
    """Initialises torch.distributed from the environment of torchrun, and returns this process's device.

    Raises:
        RuntimeError: the process was not started by torchrun.
    """
    if "RANK" not in os.environ:
        raise RuntimeError(
            "the suite `distributed` needs several processes; start it with "
            "`torchrun --nproc-per-node 2 demos/benchmark bench --suite distributed`"
        )
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    return device


def run(
    cases: Iterable[Case], device: torch.device, quick: bool, on_finish: Callable[[Measured], None]
) -> list[Measured]:
    """Checks and times each case, on all processes at once.

    Raises:
        AssertionError: a call chose other tokens than softmax_topk of the gathered logits.
    """
    found = []
    for case in cases:
        measured = _measure(case, device, _QUICK_ROUNDS if quick else _ROUNDS)
        on_finish(measured)
        found.append(measured)
    return found


def _measure(case: Case, device: torch.device, rounds: int) -> Measured:
    size, rank = dist.get_world_size(), dist.get_rank()
    group = collective.group_of(None)
    (logits,) = make_inputs(case, device, 1)
    own = logits.tensor_split(size, -1)[rank].contiguous()
    width = -(-case.vocab // size)
    padded = torch.nn.functional.pad(own, (0, width - own.shape[-1]), value=-torch.inf)

    layout = packing.Packing((case.rows,), case.k, DTYPES[case.dtype])
    buffer = torch.zeros(layout.words, dtype=torch.int64, device=device)
    header = packing.Header.of(own.shape[-1], case.k, case.rows, own.dtype, "allowed")
    buffer[:2].copy_(packing.header_words(header, buffer))
    state = layout.state(buffer)
    arguments = (LogitRows(own), min(case.k, own.shape[-1]), "allowed", None)
    one_word = buffer[:1].clone()

    def gathered() -> Any:
        everywhere = torch.empty(size * case.rows, width, dtype=own.dtype, device=device)
        collective.all_gather_single(everywhere, padded)
        whole = everywhere.view(size, case.rows, width).movedim(0, 1).flatten(1)
        return fused_topk.softmax_topk(whole, case.k)

    functions.write_state(*arguments, state)
    parts = layout.parts(collective.exchange(buffer, header, group))
    pieces: dict[str, Callable[[], Any]] = {
        "local": lambda: functions.write_state(*arguments, state),
        "collective": lambda: collective.exchange(buffer, header, group),
        "merge": lambda: calls.merge_parts(*parts, case.k, 1.0, None, "softmax", "allowed", None),
        "whole": lambda: distributed.softmax_topk(own, case.k),
        "gathered": gathered,
        "empty": lambda: collective.all_gather_single(one_word.new_empty(size), one_word),
    }
    # If the processes have different numbers of columns, the gathered logits have padding in between, and other indices.
    if case.vocab % size == 0:
        want, got = pieces["gathered"](), pieces["whole"]()
        assert torch.equal(got.indices, want.indices), f"{case.label}: other tokens than those of the gathered logits"
    samples = _samples_of_graphs(pieces, rounds, device) if device.type == "cuda" else _samples(pieces, rounds)
    times = {name: summarize(of_piece) for name, of_piece in samples.items()}
    return Measured(case, times, {"whole": buffer.nbytes, "gathered": padded.nbytes})


def _samples(pieces: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """µs per call by the clock, the pieces in turn."""
    samples: dict[str, list[float]] = {name: [] for name in pieces}
    for turn in range(rounds + 1):
        for name, piece in pieces.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(_CALLS):
                piece()
            # The first turn warms up.
            if turn:
                samples[name].append((time.perf_counter() - begin) * 1e6 / _CALLS)
    return samples


def _samples_of_graphs(
    pieces: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """µs per call of CUDA graphs, each of several calls."""
    samples: dict[str, list[float]] = {}
    for name, piece in pieces.items():
        graph = Graph(lambda piece=piece: [piece() for _ in range(_CALLS)], device)  # type: ignore[misc]
        samples[name] = []
        for turn in range(rounds + 1):
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                samples[name].append(begin.elapsed_time(end) * 1e3 / _CALLS)
    return samples


def document(
    measured: Iterable[Measured], device: torch.device, quick: bool, machine: Mapping[str, Any]
) -> report.Document:
    """The document of report.document(); all times are µs."""
    return {
        "format": report.FORMAT,
        "command": report.command("torchrun"),
        **report.origin(machine),
        "device": str(device),
        "quick": quick,
        "processes": dist.get_world_size(),
        "engine": dist.get_backend(),
        "results": [
            {
                "suite": SUITE,
                "shape": case.label,
                "rows": case.rows,
                "vocab": case.vocab,
                "k": case.k,
                "dtype": case.dtype,
                "bytes_of_process": of_process,
                "times": {name: timing._asdict() for name, timing in times.items()},
                "ratio_to_collective_and_local": _ratio(times),
            }
            for case, times, of_process in measured
        ],
    }


def _ratio(times: Mapping[str, Timing]) -> float:
    """The call against its collective and the local top-k, which the target is about."""
    return times["whole"].median / (times["collective"].median + times["local"].median)


def print_measured(measured: Iterable[Measured], console: Console) -> None:
    title = f"vocabulary over {dist.get_world_size()} processes, {dist.get_backend()}, µs per call"
    caption = "\n".join(f"{name}: {does}" for name, does in PIECES.items())
    table = Table(title=title, caption=caption, caption_justify="left", header_style="bold")
    table.add_column("rows x V", no_wrap=True)
    for heading in (*PIECES, "whole / (collective + local)", "bytes", "bytes of logits"):
        table.add_column(heading, justify="right")
    for case, times, of_process in measured:
        cells = [report.three_digits(times[name].median) for name in PIECES]
        sizes = [f"{of_process[name]:,}" for name in ("whole", "gathered")]
        table.add_row(case.label, *cells, f"{_ratio(times):.2f}", *sizes)
    console.print(table)
