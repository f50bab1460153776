# SPDX-License-Identifier: Apache-2.0
"""How long functions take, sample by sample in turns: what slows the machine for a while slows all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

Function = Callable[[Tensor], Any]
Sampler = Callable[[], float]
"""Takes a sample: µs per call."""

_CALLS_OF_PROCESSES = 10


class Timing(NamedTuple):
    """µs per call: the median of the samples and the values that a tenth of them lie below and above."""

    median: float
    p10: float
    p90: float


class Effort(NamedTuple):
    """How many samples, and how long each at least (µs)."""

    samples: int
    sample_us: float


FULL = Effort(samples=21, sample_us=1500.0)
QUICK = Effort(samples=5, sample_us=300.0)


def summarize(samples: Sequence[float]) -> Timing:
    p10, median, p90 = np.percentile(np.asarray(samples, dtype=np.float64), (10, 50, 90))
    return Timing(float(median), float(p10), float(p90))


def in_turns(samplers: Mapping[str, Sampler], samples: int) -> dict[str, Timing]:
    """The time of each function, from that many rounds in which each takes a sample."""
    taken: dict[str, list[float]] = {name: [] for name in samplers}
    names = list(samplers)
    for i in range(samples):
        # Every other round backwards, so that none always runs in the wake of the same neighbour.
        for name in names if i % 2 == 0 else reversed(names):
            if dist.is_initialized():
                dist.barrier()
            taken[name].append(samplers[name]())
    return {name: summarize(of_way) for name, of_way in taken.items()}


def sampler(function: Function, inputs: Sequence[Tensor], sample_us: float, is_captured: bool = True) -> Sampler:
    """What takes samples of a function. Each is of at least `sample_us`, of calls with input after input.

    On a GPU all calls of a sample are in one CUDA graph, so that its own launch is shared by many calls, and whatever Python does
    happened at capture. Kernels of one call follow those of the last without a gap.
    """
    is_cuda = inputs[0].is_cuda
    function(inputs[0])
    one_call_us = _gpu_us(lambda: function(inputs[-1])) if is_cuda else _host_us(lambda: function(inputs[-1]))
    calls = calls_per_sample(one_call_us, sample_us, len(inputs), at_least=8 if is_cuda and is_captured else 1)

    def run() -> None:
        for i in range(calls):
            function(inputs[i % len(inputs)])

    if not is_cuda:
        return lambda: _host_us(run) / calls
    if not is_captured:
        return lambda: _gpu_us(run) / calls
    replay = _captured(run, lambda: function(inputs[0]))

    def sample() -> float:
        # The first replay brings the caches into their state, and covers the time that a launch takes.
        replay()
        return _gpu_us(replay) / calls

    return sample


def calls_per_sample(one_call_us: float, sample_us: float, rotation: int = 1, at_least: int = 1) -> int:
    """How many calls make a sample of about `sample_us`: at most 200, rounded up to whole turns of the rotation. Several processes
    make as many calls each, or their collectives would wait for each other for ever."""
    if dist.is_initialized():
        return _CALLS_OF_PROCESSES
    calls = min(max(math.ceil(sample_us / max(one_call_us, 0.1)), at_least), 200)
    return math.ceil(calls / rotation) * rotation


def warm_up_gpu(seconds: float = 0.3) -> None:
    """Keeps the GPU busy until its clocks have risen from idle."""
    work = torch.zeros(1 << 24, device="cuda")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        work.add_(1.0)
        torch.cuda.synchronize()


def _captured(run: Callable[[], None], once: Callable[[], object]) -> Callable[[], None]:
    """Replays the launches of `run`. `once` is a part of it, which compiles and sets up all that it needs."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        once()
    torch.cuda.current_stream().wait_stream(stream)
    try:
        # Of torch, and not of this package, because some functions draw. Other threads, such as NCCL's, may go on.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
    except BaseException:
        # After a capture that fails torch's generator stays marked as captured, and every draw of the process would raise.
        generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    return graph.replay


def _host_us(run: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1000


def _gpu_us(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(1000.0 * start.elapsed_time(end))
