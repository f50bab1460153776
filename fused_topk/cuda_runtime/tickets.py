# SPDX-License-Identifier: Apache-2.0
"""Tickets: zeroed counters on the GPU, which tell the blocks of a launch which of them comes last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_RESERVED_TICKETS = 1 << 20
# How many counters a stream gets, unless a launch needs more, and for how many streams they are allocated at once.
_TICKETS_OF_STREAM = 4096
_STREAMS = 32


raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)
"""The address of torch's current stream on a device. A private function of torch saves a microsecond over the public one."""

_lock = threading.Lock()


# Zeroed counters for captured graphs, by device: those that are left. Graphs may replay at any time, so no counter is reused.
_reserves: dict[int, Tensor] = {}
_stream_tickets: dict[tuple[int, int], Tensor] = {}
# The counters of streams that have asked for none so far, by device. One allocation serves many streams: torch allocates 2 MiB at least.
_spare_tickets: dict[int, list[Tensor]] = {}
_outgrown_tickets: list[Tensor] = []
# By device and stream, the address and the number of the counters that the launches of a capture share, in a block of one_capture().
_of_capture: ContextVar[dict[tuple[int, int], tuple[int, int]] | None] = ContextVar("fused_topk_tickets", default=None)


def _is_capturing(device: int) -> bool:
    """Whether the device's current stream is being captured. torch answers for the current device."""
    if torch.cuda.current_device() == device:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def prepare(device: int) -> None:
    """Makes the device's reserve of counters for captured graphs, if there is none yet."""
    if device not in _reserves and not _is_capturing(device):
        tickets = torch.zeros(_RESERVED_TICKETS, dtype=torch.int32, device=f"cuda:{device}")
        # This waits, once for each device: a graph may be replayed on another stream than this one.
        torch.cuda.current_stream(device).synchronize()
        _reserves[device] = tickets


@contextmanager
def one_capture() -> Iterator[None]:
    """A with block in which all captured launches of this thread are of one graph. Those of one stream then share one set of counters."""
    token = _of_capture.set({})
    try:
        yield
    finally:
        _of_capture.reset(token)


def zeroed(device: int, count: int) -> int:
    """Address of `count` zeroed counters that no launch running at the same time uses.

    A launch leaves them zero, so the launches of one stream share one set. A captured launch gets a set of its own, unless it says of
    which graph it is: see :func:`one_capture`.
    """
    if _is_capturing(device):
        return _of_captured(device, count)
    key = device, raw_stream(device)
    tickets = _stream_tickets.get(key)
    if tickets is None or tickets.numel() < count:
        with _lock:
            tickets = _stream_tickets.get(key)
            if tickets is None or tickets.numel() < count:
                if tickets is not None:
                    # They are kept: another thread may be about to launch with them.
                    _outgrown_tickets.append(tickets)
                tickets = _stream_tickets[key] = _new(device, count)
    return tickets.data_ptr()


def _of_captured(device: int, count: int) -> int:
    sets, key = _of_capture.get(), (device, raw_stream(device))
    address, number = (0, 0) if sets is None else sets.get(key, (0, 0))
    if number >= count:
        return address
    with _lock:
        reserve = _reserves.get(device)
        if reserve is not None and len(reserve) >= count:
            address, _reserves[device] = reserve.data_ptr(), reserve[count:]
            if sets is not None:
                sets[key] = address, count
            return address
    # The reserve is used up. These counters are in the graph's own memory, and the graph zeroes them at every replay. Later launches use
    # that memory for other tensors.
    return torch.zeros(count, dtype=torch.int32, device=f"cuda:{device}").data_ptr()


def _new(device: int, count: int) -> Tensor:
    """At least `count` zeroed counters for a stream."""
    if count > _TICKETS_OF_STREAM:
        return torch.zeros(count, dtype=torch.int32, device=f"cuda:{device}")
    spare = _spare_tickets.setdefault(device, [])
    if not spare:
        spare += torch.zeros(_STREAMS, _TICKETS_OF_STREAM, dtype=torch.int32, device=f"cuda:{device}")
        # This waits once for many streams: the next one may be another than this, which makes the zeros.
        torch.cuda.current_stream(device).synchronize()
    return spare.pop()
