# SPDX-License-Identifier: Apache-2.0
"""A function's launches, captured as a CUDA graph, so that the process stays as it is, also where the capture fails.

torch.cuda.CUDAGraph registers the default generator of the device. From the begin of a capture on, other threads cannot draw on that
device, and where the capture fails, nobody can draw any more. So the driver captures the stream here, and torch learns of it only what
its allocator must know: the thread allocates from a pool of its own. A captured function cannot draw from torch's generators. It gets
an exception, as for any operation that a capture does not permit.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .tickets import one_capture, raw_stream

# A capture begins with a wait for the device, which breaks the capture of any other thread. So captures wait for each other.
_lock = threading.Lock()


class Graph:
    """The launches of a function, captured: one call launches them all again.

    The function has no arguments. It reads and writes tensors that stay where they are. Other threads may use the device during the
    capture. They may not wait for the whole device (torch.cuda.synchronize()): they would get an exception, and the capture fails.

    Args:
        run: the function. It runs some times before, uncaptured, so that libraries have set up what they need.
        device: a GPU.
        beside: a graph whose stream and memory this one may use, too; None for its own. The two never run at the same time, and
            neither needs that memory to be unchanged between its runs.
    """

    def __init__(self, run: Callable[[], Any], device: torch.device, beside: Graph | None = None) -> None:
        from cupy_backends.cuda.api import runtime

        self._runtime: Any = runtime
        self._execution = 0
        # An index, which `device` may lack.
        self._index = torch.cuda.current_device() if device.index is None else device.index
        # Streams of torch come from a small pool. Other threads may have the same one, and would be captured with it.
        self._own: Any = _new_stream(device) if beside is None else beside._own
        self._stream: Any = torch.cuda.ExternalStream(self._own.ptr, device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.MemPool() if beside is None else beside._pool
        # What fails leaves the device, the stream and the pool of the thread as they were.
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                for _ in range(2 if beside is None else 1):
                    run()
            torch.cuda.current_stream(device).wait_stream(self._stream)
            with _lock:
                torch.cuda.synchronize(device)
                clear_workspaces()
                before = torch.cuda.memory_reserved(device)
                try:
                    # The output lies in the pool, and each replay writes it anew.
                    self._output = self._captured(run)
                finally:
                    clear_workspaces()
                # The pool takes whole segments, which no other memory is cut from.
                self.num_bytes = max(0, torch.cuda.memory_reserved(device) - before)

    def _captured(self, run: Callable[[], Any]) -> Any:
        runtime, stream = self._runtime, self._stream.cuda_stream
        pool = torch.cuda.use_mem_pool(self._pool, self._index)
        with _without_collector(), one_capture(), torch.cuda.stream(self._stream), pool:
            runtime.streamBeginCapture(stream, runtime.streamCaptureModeThreadLocal)
            try:
                output = run()
            except BaseException:
                # The stream must leave the capture. Where the capture is broken that raises, too.
                with contextlib.suppress(runtime.CUDARuntimeError):
                    runtime.graphDestroy(runtime.streamEndCapture(stream))
                raise
            graph = runtime.streamEndCapture(stream)
        try:
            self._execution = runtime.graphInstantiate(graph)
        finally:
            runtime.graphDestroy(graph)
        return output

    def replay(self) -> Any:
        """Launches all again, on the current stream. Returns the output."""
        self._runtime.graphLaunch(self._execution, raw_stream(self._index))
        return self._output

    def __del__(self) -> None:
        # The attribute is missing where CuPy is. The driver lets a replay that runs come to its end.
        if getattr(self, "_execution", 0):
            with contextlib.suppress(Exception):
                self._runtime.graphExecDestroy(self._execution)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Python's garbage collector waits. What it finds may own memory of the device, and a free of that breaks the capture."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _new_stream(device: torch.device) -> Any:
    import cupy

    with torch.cuda.device(device):
        return cupy.cuda.Stream(non_blocking=True)


def clear_workspaces() -> None:
    """Gives back the workspaces of cuBLAS on every stream. torch keeps one for each stream, and a product allocates a missing one.

    Called before a capture, so that its products allocate a workspace in the graph's memory. Any other workspace may be freed while
    replays still write to it, as by torch.compile when it captures a graph of its own. Called after a capture, so that no other
    graph uses the workspace of this one.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:
        raise NotImplementedError("this torch cannot give back cuBLAS's workspaces, so no graph has one of its own")
    clear()
