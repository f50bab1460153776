# SPDX-License-Identifier: Apache-2.0
"""What demos/ladder.py measures: every rung checked against float64 and timed, beside torch and a plain copy or read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ladder_rungs as ladder
from benchmark.devices import reader
from benchmark.inputs import make_inputs, rotation_count
from benchmark.suites import Case
from benchmark.timing import Effort, time_graph, time_interleaved
from ladder_rungs import RUNGS, Rung

# Results are float32, with a few roundings an element. Naive softmax sums exponentials that nothing has scaled.
TOLERANCE = 1e-4
ON_GPU = Effort(replays=11, replay_us=1000.0, rounds=0, round_us=0.0)
ON_CPU = Effort(replays=0, replay_us=0.0, rounds=9, round_us=200.0)
_FLOORS = {"softmax": "copy", "topk": "read"}


class Shape(NamedTuple):
    """One measurement: which part of the demo asks for it, and of what size it is; k = 0 for softmax."""

    part: str  # "ladder", "batch", "k" or "rows"
    rows: int
    vocab: int
    k: int

    @property
    def gives(self) -> str:
        return "topk" if self.k else "softmax"


def shapes(on_gpu: bool, most_elements: int) -> list[Shape]:
    """All shapes that the demo measures, without those of more elements than `most_elements`."""
    lengths = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
    # On a CPU rows that its caches do not hold, so that a pass is a pass over memory.
    rows, vocab = (4000, 25_000) if on_gpu else (16, 1_000_000)
    rows = min(rows, max(1, most_elements // vocab))
    found = [Shape("ladder", rows, min(vocab, most_elements), k) for k in (0, 5)]
    found += [Shape("batch", batch, length, k) for batch in (4000, 10) for length in lengths for k in (0, 5)]
    found += [Shape("k", 4000 if on_gpu else 64, 25_000, k) for k in ladder.GPU_K]
    of_peers = (2048, 32728, 65536, 131072, 262144, 2097152, 4194304)
    found += [Shape("rows", 128, length, 0) for length in of_peers]
    return [shape for shape in found if shape.rows * shape.vocab <= most_elements]


def measure(shape: Shape, device: torch.device) -> Iterator[dict[str, Any]]:
    """A record for each contender. Raises RuntimeError where a rung's answer is wrong."""
    rows, vocab, k = shape.rows, shape.vocab, shape.k
    input_bytes = rows * vocab * 4
    count = 1
    if device.type == "cuda":
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        count = rotation_count(input_bytes, cache_bytes, torch.cuda.mem_get_info(device)[0])
    inputs = make_inputs(Case(rows, vocab, k, "fp32"), device, count)
    scratch = ladder.scratch_for(inputs[0], k)
    contenders: dict[str, Callable[[Tensor], object]] = {}
    for rung in RUNGS:
        if rung.gives == shape.gives and ladder.unavailable(rung, device, vocab, k) is None:
            ladder.climb(rung, inputs[0], scratch)
            check(rung, inputs[0], scratch)
            contenders[rung.name] = climber(rung, scratch)
    contenders["torch"] = with_torch(scratch, k)
    contenders[_FLOORS[shape.gives]] = scratch.y.copy_ if k == 0 else reader(device)

    if device.type == "cuda":
        times = {name: time_graph(function, inputs, ON_GPU) for name, function in contenders.items()}
    else:
        bound = {name: (lambda function=function: function(inputs[0])) for name, function in contenders.items()}
        times = time_interleaved(bound, ON_CPU)
    for name, time in times.items():
        yield {**shape._asdict(), "name": name, "us": time.median, "p10": time.p10, "p90": time.p90}


def climber(rung: Rung, scratch: ladder.Scratch) -> Callable[[Tensor], object]:
    return lambda logits: ladder.climb(rung, logits, scratch)


def with_torch(scratch: ladder.Scratch, k: int) -> Callable[[Tensor], object]:
    def softmax(logits: Tensor) -> Tensor:
        return torch.softmax(logits, -1, out=scratch.y)

    def softmax_topk(logits: Tensor) -> object:
        return torch.topk(softmax(logits), k, out=(scratch.values, scratch.indices))

    return softmax_topk if k else softmax


def check(rung: Rung, logits: Tensor, scratch: ladder.Scratch) -> None:
    """Raises RuntimeError where the rung's answer is wrong. Errors of probabilities are relative to the row's greatest."""
    # Some rows are enough, and float64 of all would not fit beside the largest inputs.
    some = slice(0, max(1, min(logits.shape[0], (1 << 24) // logits.shape[1])))
    exact = logits[some].double().softmax(-1)
    if rung.gives == "softmax":
        got = scratch.y[some].double()
    else:
        got, exact = scratch.values[some].double(), exact.gather(-1, scratch.indices[some])
        best = logits[some].topk(scratch.values.shape[-1]).values
        if not torch.equal(logits[some].gather(-1, scratch.indices[some]), best) and "then" not in rung.name:
            raise RuntimeError(f"rung {rung.number}, {rung.title}: not the greatest logits")
    error = float(((got - exact).abs() / exact.amax(-1, keepdim=True)).max())
    if not error <= TOLERANCE:
        raise RuntimeError(f"rung {rung.number}, {rung.title}: off by {error:.1e}")


def naive_overflow(device: torch.device) -> tuple[float, float]:
    """What naive and safe softmax make of a logit of 100 among zeros; the probability is 1."""
    logits = torch.zeros(1, 1000, device=device)
    logits[0, 0] = 100.0
    results = []
    for name in ("naive", "safe"):
        scratch = ladder.scratch_for(logits)
        ladder.climb(ladder.BY_NAME[name], logits, scratch)
        results.append(float(scratch.y[0, 0]))
    return results[0], results[1]
