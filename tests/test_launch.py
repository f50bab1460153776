# SPDX-License-Identifier: Apache-2.0
"""What launching does on the host, shown without a GPU."""

import contextlib
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fused_topk.backends import cuda
from fused_topk.cuda_runtime import driver, tickets
from fused_topk.layout.topk_choice import KernelChoice, Method
from oracle import problem_of, start
from simt.row_topk import empty_result


@pytest.fixture
def one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose only stream is not capturing, with no counters yet; its memory is the host's."""
    zeros = torch.zeros

    def slow_zeros(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        time.sleep(0.02)  # long enough for every other thread to come here too
        return zeros(*shape, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", slow_zeros)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(tickets, "raw_stream", lambda device: 7)
    monkeypatch.setattr(tickets, "_stream_tickets", {})
    monkeypatch.setattr(tickets, "_outgrown_tickets", [])
    monkeypatch.setattr(tickets, "_spare_tickets", {})
    stream = types.SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


@pytest.mark.usefixtures("one_stream")
def test_streams_share_one_allocation(monkeypatch):
    """torch allocates 2 MiB at least, and a stream's counters take 16 KiB."""
    addresses = set()
    for stream in range(40):
        monkeypatch.setattr(tickets, "raw_stream", lambda device, stream=stream: stream)
        addresses.add(tickets.zeroed(0, 10))
    assert len(addresses) == 40
    assert len({each.untyped_storage().data_ptr() for each in tickets._stream_tickets.values()}) == 2


@pytest.mark.usefixtures("one_stream")
@pytest.mark.parametrize("counts", [(10, 10, 10, 10), (10, 5000, 20_000, 10), (9000, 4096, 9001, 1)])
def test_threads_that_ask_at_once_get_counters_that_last(counts):
    """A set that another thread's launch is about to use is not freed, however many come first or ask for more."""
    together = threading.Barrier(len(counts))

    def ask(count: int) -> int:
        together.wait()
        return tickets.zeroed(0, count)

    with ThreadPoolExecutor(len(counts)) as pool:
        addresses = list(pool.map(ask, counts))
    kept: list[Any] = [*tickets._stream_tickets.values(), *tickets._outgrown_tickets]
    size_at = {tickets.data_ptr(): tickets.numel() for tickets in kept}
    for count, address in zip(counts, addresses, strict=True):
        assert size_at.get(address, 0) >= count, (count, size_at)


@pytest.mark.usefixtures("one_stream")
def test_captured_launches_share_no_counters(monkeypatch):
    """Graphs may replay at the same time as each other, and as what is launched without one."""
    reserve = torch.empty(10, dtype=torch.int32)
    monkeypatch.setattr(tickets, "_reserves", {0: reserve})
    launched = tickets.zeroed(0, 5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    # A graph zeroes and owns what a reserve has no room for, and all where there is none.
    first_of = [(0, 4, 0), (1, 4, None), (0, 3, 4), (0, 5, None), (0, 2, 7), (0, 1, 9), (0, 1, None), (0, 20_000, None)]
    for device, count, first in first_of:
        address = tickets.zeroed(device, count)
        assert address != launched and (first is None or address == reserve.data_ptr() + 4 * first)
    assert len(tickets._reserves[0]) == len(reserve) - 10
    tickets.prepare(1)
    assert list(tickets._reserves) == [0] and len(tickets._stream_tickets) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tickets.zeroed(0, 5) == launched


@pytest.mark.usefixtures("one_stream")
def test_launches_of_one_graph_and_stream_share_counters(monkeypatch):
    reserve = torch.empty(10, dtype=torch.int32)
    monkeypatch.setattr(tickets, "_reserves", {0: reserve})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for first in (0, 5):
        with tickets.one_capture():
            # A launch that needs more gets others.
            found = [(tickets.zeroed(0, count) - reserve.data_ptr()) // 4 for count in (2, 1, 2, 3, 1, 3)]
            assert found == [first + place for place in (0, 0, 0, 2, 2, 2)]
    with tickets.one_capture():
        # Without a reserve nothing is shared: the graph uses the memory again.
        zeros = torch.zeros
        made = []
        monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: made.append(args) or zeros(*args, **kwargs))
        tickets.zeroed(0, 2), tickets.zeroed(0, 2)
        assert len(made) == 2
    with tickets.one_capture():
        monkeypatch.setattr(tickets, "_reserves", {0: torch.empty(10, dtype=torch.int32)})
        of_streams = set()
        for stream in (7, 8):
            monkeypatch.setattr(tickets, "raw_stream", lambda device, stream=stream: stream)
            of_streams |= {tickets.zeroed(0, 2), tickets.zeroed(0, 2)}
        assert len(of_streams) == 2


@pytest.mark.usefixtures("one_stream")
def test_counters_of_a_device_that_captures_while_another_is_current(monkeypatch):
    current = [0]

    @contextlib.contextmanager
    def device(number: int) -> Iterator[None]:
        current[0] = number
        yield
        current[0] = 0

    reserve = torch.empty(10, dtype=torch.int32)
    monkeypatch.setattr(tickets, "_reserves", {1: reserve})
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 1)
    assert tickets.zeroed(1, 4) == reserve.data_ptr()
    assert tickets.zeroed(0, 4) == tickets._stream_tickets[0, 7].data_ptr()
    tickets._reserves.clear()
    tickets.prepare(1)
    assert not tickets._reserves


def test_no_more_shared_memory_is_asked_for_than_there_is(monkeypatch):
    """Hardware without background copies has less of it, and its kernels need less."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(driver, "function", lambda device, kernel: kernel)
    monkeypatch.setattr(driver, "call", lambda *arguments: calls.append(arguments))
    most: dict[tuple[int, str], int] = {}
    monkeypatch.setattr(driver, "_most_dynamic_shared_bytes", most)
    problem = problem_of("topk", torch.zeros(2, 20_000), 5)
    choice = KernelChoice(8, 8, 1, 20, 1)

    def asked() -> int:
        start(cuda, problem, empty_result(problem), choice=choice)
        return int(calls[-1][5])

    assert asked() == choice.shared_bytes(Method.TILE_BY_TILE, True, True) > 60_000
    most[0, calls[-1][0]] = 60_000
    assert asked() == 60_000
