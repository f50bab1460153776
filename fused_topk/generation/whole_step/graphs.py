# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of a step, and its end flag, which is read late so that nothing waits for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# How many steps the host may be ahead of what it knows of the device. A guess: a replay takes far longer on the device than on
# the host, so two would do. Each one more is a step that may run in vain at the end of a call.
LATENESS = 4


def is_cuda(device: torch.device) -> bool:
    """Whether the device is a GPU, whose steps are captured."""
    return device.type == "cuda"


class Graph:
    """The launches of a function, captured: one call launches them all again.

    The function has run before, so that all is compiled. It takes nothing: it reads and writes tensors that stay where
    they are. Other threads may use the device meanwhile.

    Args:
        beside: a graph whose memory this one may use, too: neither runs while the other does, and what one has in that memory
            another does not need.
    """

    def __init__(self, run: Callable[[], Any], device: torch.device, beside: Graph | None) -> None:
        with torch.cuda.device(device):
            stream: Any = torch.cuda.Stream(device) if beside is None else beside.stream  # type: ignore[no-untyped-call]
            self.stream: Any = stream
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                # Libraries set up their workspaces of a stream in its first calls.
                for _ in range(2 if beside is None else 1):
                    run()
            torch.cuda.current_stream(device).wait_stream(stream)
            # The capture empties the cache, too. So the memory that it adds to the reserved is the graph's.
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(device)
            self._graph = torch.cuda.CUDAGraph()
            pool = None if beside is None else beside._graph.pool()
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                # Lies in the graph's own memory, and is written anew by each replay.
                self.output = run()
            self.num_bytes = max(0, torch.cuda.memory_reserved(device) - before)

    def replay(self) -> None:
        self._graph.replay()


class EndFlag:
    """Whether a search goes on. On a GPU the answer is that of LATENESS steps ago, elsewhere that of this step.

    The lateness is always the same, whatever the device has done by then. Steps in vain draw random numbers, too, so their
    number must not depend on time.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_late = is_cuda(device)
        self._pending: deque[tuple[Any, Tensor]] = deque()
        self._spare: list[tuple[Any, Tensor]] = []

    def goes_on(self, flag: Tensor) -> bool:
        """After each step, with bool [] on the device: True while the search may go on."""
        if not self._is_late:
            return bool(flag)
        event, copied = self._spare.pop() if self._spare else _new()
        copied.copy_(flag, non_blocking=True)
        _record(event, flag.device)
        self._pending.append((event, copied))
        if len(self._pending) <= LATENESS:
            return True
        oldest = self._pending.popleft()
        # The device has LATENESS more steps to do: it does not wait for the host meanwhile.
        oldest[0].synchronize()
        self._spare.append(oldest)
        return bool(oldest[1])


def _new() -> tuple[Any, Tensor]:
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event, torch.empty((), dtype=torch.bool, pin_memory=True)


def _record(event: Any, device: torch.device) -> None:
    event.record(torch.cuda.current_stream(device))
