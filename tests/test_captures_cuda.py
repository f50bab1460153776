# SPDX-License-Identifier: Apache-2.0
"""A capture leaves the process as it was, whether or not it fails: generators, memory, streams, and other threads."""

import copy
import gc
import threading

import pytest
import torch

import fused_topk
from decoding import inputs_for, stats
from fused_topk.cuda_runtime import tickets
from fused_topk.cuda_runtime.capture import Graph
from fused_topk.generation import disable, enable, fused_decoding
from whole_steps import family


class Asking(torch.nn.Module):
    """A layer of a user's that asks the device."""

    def __init__(self, layer, ask):
        super().__init__()
        self.layer, self.ask = layer, ask

    def forward(self, *args, **kwargs):
        output = self.layer(*args, **kwargs)
        self.ask(output)
        return output


ASKING = {
    "a number": lambda x: float(x.abs().max()),
    "places": lambda x: x.nonzero(),
    "a copy": lambda x: x.cpu(),
    "a mask": lambda x: x[x > 0],
}


def llama():
    return copy.deepcopy(family("Llama")).cuda()


def assert_draws():
    """All kinds of draws work, and follow the user's generator."""
    torch.manual_seed(5)
    expected = torch.randn(4, device="cuda"), torch.randint(9, (4,), device="cuda")
    torch.manual_seed(5)
    assert torch.equal(torch.randn(4, device="cuda"), expected[0])
    assert torch.equal(torch.randint(9, (4,), device="cuda"), expected[1])
    torch.nn.functional.dropout(torch.ones(4, device="cuda"), 0.5)
    torch.multinomial(torch.ones(4, device="cuda"), 1)


def states():
    is_capturing = torch.cuda.is_current_stream_capturing()
    return torch.cuda.get_rng_state().tolist(), torch.cuda.current_stream(), is_capturing, gc.isenabled()


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("ask", ASKING)
def test_a_model_that_asks_the_device_runs_as_stock_and_is_not_captured(cuda, ask, num_beams, monkeypatch):
    model, captures = llama(), []
    model.model.layers[1].mlp = Asking(model.model.layers[1].mlp, ASKING[ask])
    inputs = {name: each.cuda() for name, each in inputs_for(model, 2).items()}
    options = {"num_beams": num_beams, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    before = states()
    captured = Graph._captured
    monkeypatch.setattr(Graph, "_captured", lambda self, run: captures.append(run) or captured(self, run))
    stats(reset=True)
    with fused_decoding(model):
        for _ in range(3):
            assert torch.equal(model.generate(**inputs, **options), expected)
    # The trial's captures are all that there are.
    assert len(captures) == 2 and "cannot be captured" in str(stats(reset=True))
    assert states() == before
    assert_draws()


def failing(kind, at, launches=6):
    """A function of some launches on a tensor; one of them fails while the stream is captured."""
    x, calls = torch.ones(1 << 18, device="cuda"), []

    def run():
        y = x
        for launch in range(launches):
            if launch == at and torch.cuda.is_current_stream_capturing():
                calls.append(launch)
                if kind == "exception":
                    raise ValueError("a user's error")
                if kind == "forbidden":
                    float(y.sum())
                elif kind == "draw":
                    torch.randn(3, device="cuda")
                else:
                    torch.empty(1 << 50, device="cuda")
            y = y * 2
        return y

    return run


@pytest.mark.parametrize("at", [0, 3, 5])
@pytest.mark.parametrize("kind", ["exception", "forbidden", "draw", "memory"])
def test_a_capture_that_fails_leaves_nothing_behind(cuda, kind, at):
    device, run = torch.device("cuda"), failing(kind, at)
    # A capture that works first, because libraries take memory once.
    Graph(failing("exception", 99), device)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    reserved, before = torch.cuda.memory_reserved(), states()
    for _ in range(5):
        with pytest.raises((ValueError, RuntimeError)):
            Graph(run, device)
    assert states() == before
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved
    assert_draws()
    graph = Graph(failing("exception", 99), device)
    assert bool((graph.replay() == 64).all())


def test_the_memory_of_a_graph_comes_back(cuda):
    device = torch.device("cuda")
    x = torch.ones(1 << 22, device="cuda")
    Graph(lambda: x * 2, device).replay()
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    graph = Graph(lambda: (x * 2) @ x, device)
    beside = Graph(lambda: x * 3, device, graph)
    assert graph.num_bytes > 0 and bool((beside.replay() == 3).all())
    del graph, beside
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved


def test_garbage_is_not_collected_during_a_capture(cuda):
    """A graph's pool gives its memory back where Python finds the graph to be garbage. That breaks a capture."""
    x = torch.ones(4, device="cuda")
    circles = [[Graph(lambda: x * 2, x.device)]]
    circles[0].append(circles[0])

    def run():
        if torch.cuda.is_current_stream_capturing():
            circles.clear()
            [[] for _ in range(10_000)]  # Each list is one more object of the collector's youngest generation.
        return x + 1

    before = gc.get_threshold()
    gc.set_threshold(100, 1, 1)
    try:
        graph = Graph(run, x.device)
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled()
    assert graph.replay().tolist() == [2.0] * 4


def test_other_threads_draw_during_captures(cuda):
    device, x = torch.device("cuda"), torch.ones(1 << 16, device="cuda")
    errors, is_over, drawn = [], threading.Event(), []

    def draw():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not is_over.is_set():
                try:
                    torch.randn(8, device="cuda")
                    drawn.append(1)
                except RuntimeError as error:
                    errors.append(str(error))

    def run():
        y = x
        for _ in range(200):
            y = y + 1
        return y

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(60):
            assert bool((Graph(run, device).replay() == 201).all())
    finally:
        is_over.set()
        thread.join()
    print(f"{len(drawn)} draws during 60 captures")
    assert not errors and len(drawn) > 100


def test_threads_generate_with_one_model(cuda):
    model, errors = llama(), []
    inputs = [{name: each.cuda() for name, each in inputs_for(model, batch).items()} for batch in (1, 2, 3, 4)]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = [model.generate(**each, **options) for each in inputs]

    def call(number):
        try:
            for turn in range(5):
                each = (number + turn) % 4
                assert torch.equal(model.generate(**inputs[each], **options), expected[each])
        except BaseException as error:
            errors.append(error)

    stats(reset=True)
    enable(model)
    try:
        threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        disable(model)
    assert not errors
    # Two calls of one shape at the same time are the only ones that are not captured.
    found = stats(reset=True)
    assert set(found.reasons) <= {"another call of the same shape runs"} and found.captured > 0
    assert_draws()


def test_a_capture_that_another_thread_breaks_is_tried_again(cuda, monkeypatch):
    model = llama()
    inputs = {name: each.cuda() for name, each in inputs_for(model, 2).items()}
    options = {"max_new_tokens": 6, "do_sample": False}
    captured, tries, errors = Graph._captured, [], []

    def broken(self, run):
        def and_break():
            other = threading.Thread(target=lambda: errors.append(_synchronized()))
            other.start()
            other.join()
            return run()

        tries.append(run)
        # The first capture is that of the trial.
        return captured(self, and_break if len(tries) == 2 else run)

    monkeypatch.setattr(Graph, "_captured", broken)
    expected = model.generate(**inputs, **options)
    enable(model)
    stats(reset=True)
    try:
        for _ in range(3):
            assert torch.equal(model.generate(**inputs, **options), expected)
    finally:
        disable(model)
    assert errors and all(errors) and stats(reset=True).captured == 12
    assert_draws()


def _synchronized():
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_capture_takes_one_set_of_tickets(cuda):
    """However many launches it has: their number is limited, and none comes back."""
    x = torch.randn(1, 128256, device="cuda")
    index = torch.cuda.current_device()
    fused_topk.log_softmax_topk(x, 5)
    before = len(tickets._reserves[index])
    expected = fused_topk.log_softmax_topk(x, 5)
    graph = Graph(lambda: [fused_topk.log_softmax_topk(x, 5) for _ in range(9)], x.device)
    assert before - len(tickets._reserves[index]) == 1
    for _ in range(3):
        assert all(torch.equal(found.values, expected.values) for found in graph.replay())
