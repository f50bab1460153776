# SPDX-License-Identifier: Apache-2.0
"""How long a function takes: on the GPU by CUDA-graph replays, on the CPU by interleaved rounds, and on the host."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Function = Callable[[Tensor], object]


class Timing(NamedTuple):
    """µs per call: the median of the samples and the values that a tenth of them lie below and above."""

    median: float
    p10: float
    p90: float
    samples: int


def summarize(samples: Sequence[float]) -> Timing:
    p10, median, p90 = np.percentile(np.asarray(samples, dtype=np.float64), (10, 50, 90))
    return Timing(float(median), float(p10), float(p90), len(samples))


class Effort(NamedTuple):
    """How many samples, and how long each at least (µs)."""

    replays: int
    replay_us: float
    rounds: int
    round_us: float


FULL = Effort(replays=25, replay_us=2000.0, rounds=21, round_us=1000.0)
QUICK = Effort(replays=5, replay_us=500.0, rounds=5, round_us=200.0)


def calls_per_sample(one_call_us: float, sample_us: float, rotation: int = 1, at_least: int = 1) -> int:
    """How many calls make a sample of about `sample_us`: at most 200, rounded up to whole turns of the rotation."""
    calls = min(max(math.ceil(sample_us / max(one_call_us, 0.1)), at_least), 200)
    return math.ceil(calls / rotation) * rotation


def time_graph(function: Function, inputs: Sequence[Tensor], effort: Effort) -> Timing:
    """GPU time per call. One graph calls the function on input after input, so that its own launch is shared by many
    calls; whatever Python does happened at capture. Kernels of one call follow those of the last without a gap.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with _on_stream(stream):
        # Outside the capture: compilation, handles, choices of kernel. The second pass is timed, for the number of
        # calls only: where Python is slower than the GPU it overestimates, and the sample gets shorter.
        function(inputs[0])
        (one_call_us,) = _event_times(lambda: function(inputs[-1]), 1)
    calls = calls_per_sample(one_call_us, effort.replay_us, rotation=len(inputs), at_least=8)

    graph = torch.cuda.CUDAGraph()
    try:
        # Of torch, and not of this package, because some functions draw.
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                function(inputs[i % len(inputs)])
    except BaseException:
        # After a capture that fails torch's generator stays marked as captured, and every draw of the process would raise.
        generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    with _on_stream(stream):
        for _ in range(3):
            graph.replay()
        return summarize([us / calls for us in _event_times(graph.replay, effort.replays)])


def time_eager(function: Function, inputs: Sequence[Tensor], effort: Effort) -> Timing:
    """GPU time per call of a function that a graph cannot capture: back-to-back calls, Python included where it is the
    slower of the two."""
    function(inputs[0])
    (one_call_us,) = _event_times(lambda: function(inputs[-1]), 1)
    calls = calls_per_sample(one_call_us, effort.replay_us, rotation=len(inputs), at_least=8)

    def run() -> None:
        for i in range(calls):
            function(inputs[i % len(inputs)])

    return summarize([us / calls for us in _event_times(run, effort.replays)])


def time_host(function: Callable[[], object], synchronize: Callable[[], None], effort: Effort) -> Timing:
    """Host µs per call, without waiting for the device. The queue of launches must not fill up: give it small work."""
    calls = 200
    for _ in range(calls):
        function()
    samples = []
    # As in timeit: a collection would walk all that the benchmark holds, and be counted as the call's.
    gc.disable()
    try:
        for _ in range(effort.replays):
            synchronize()
            start = time.perf_counter_ns()
            for _ in range(calls):
                function()
            samples.append((time.perf_counter_ns() - start) / 1000 / calls)
    finally:
        gc.enable()
    synchronize()
    return summarize(samples)


def time_interleaved(functions: Mapping[str, Callable[[], object]], effort: Effort) -> dict[str, Timing]:
    """CPU time per call of each function, taken turn by turn: what slows the machine for a while slows all of them."""
    calls = {}
    for name, function in functions.items():
        function()
        calls[name] = calls_per_sample(_host_us(function, 1), effort.round_us)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for i in range(effort.rounds):
        # Every other round backwards, so that none always runs in the wake of the same neighbour.
        for name in names if i % 2 == 0 else reversed(names):
            samples[name].append(_host_us(functions[name], calls[name]))
    return {name: summarize(taken) for name, taken in samples.items()}


def warm_up_gpu(seconds: float = 0.3) -> None:
    """Keeps the GPU busy until its clocks have risen from idle."""
    work = torch.zeros(1 << 24, device="cuda")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        work.add_(1.0)
        torch.cuda.synchronize()


def _host_us(function: Callable[[], object], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    return (time.perf_counter_ns() - start) / 1000 / calls


def _event_times(run: Callable[[], object], count: int) -> list[float]:
    """µs of each of `count` runs on the current stream, queued without a wait between them."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    return [1000.0 * before.elapsed_time(after) for before, after in pairwise(marks)]


@contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work on `stream`, ordered after what the current stream was given and before what it is given next."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
