# SPDX-License-Identifier: Apache-2.0
"""Streamers of whole steps: they get what stock gives them, each piece once, whatever a call turns into."""

import pytest
import torch

from captured import StandIn, as_on_a_gpu
from decoding import Recorder, inputs_for, one_thread, stats  # noqa: F401
from fused_topk.generation import fused_decoding
from fused_topk.generation.whole_step import compiled, graphs, room
from whole_steps import own_model, whole  # noqa: F401

OPTIONS = {"max_new_tokens": 7, "do_sample": False}


@pytest.fixture(params=["operations", "compiled", "captured"])
def way(request, monkeypatch):
    """How steps are run: traced, but not compiled, or captured by a stand-in for a GPU, whose host learns of tokens late."""
    if request.param == "captured":
        as_on_a_gpu(monkeypatch)
        monkeypatch.setattr(StandIn, "made", 0)
    monkeypatch.setattr(compiled, "_inductor", lambda graph, inputs: graph)
    return request.param


def streamed(model, inputs, **options):
    recorder = Recorder()
    found = model.generate(**inputs, **{**OPTIONS, **options}, streamer=recorder)
    return found, recorder.pieces


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eos_token_id": list(range(5, 60))},
        {"repetition_penalty": 1.7, "eos_token_id": list(range(5, 60)), "max_new_tokens": 30},
        {"max_new_tokens": 1},
        {"do_sample": True, "max_new_tokens": 12},
    ],
    ids=lambda options: "-".join(options),
)
def test_a_streamer_gets_each_token_and_none_after_the_end(options, way, model):
    for batch in (1, 3):
        inputs = inputs_for(model, batch)
        torch.manual_seed(3)
        _, expected = streamed(model, inputs, **options)
        stats(reset=True)
        torch.manual_seed(3)
        with fused_decoding(model, compile=way == "compiled"):
            found, pieces = streamed(model, inputs, **options)
        assert pieces == expected
        if batch == 1:
            assert [token for piece in pieces[1:-1] for token in piece] == found[0, 6:].tolist()
        steps = stats()
        assert steps.whole == len(expected) - 2 == getattr(steps, way, steps.whole) and not steps.reasons


def failing_from_the_second(run, device, beside):
    if StandIn.made:
        raise RuntimeError("out of memory")
    return StandIn(run, device, beside)


@pytest.mark.parametrize("way", ["captured"], indirect=True)
@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_capture_that_fails_after_tokens_have_been_streamed(is_drawn, way, model, monkeypatch):
    """The call goes on: nothing is drawn or handed on twice."""
    monkeypatch.setattr(room, "FIRST", 8)
    options = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": is_drawn}
    torch.manual_seed(3)
    _, expected = streamed(model, inputs_for(model, 1), **options)
    monkeypatch.setattr(graphs, "Graph", failing_from_the_second)
    torch.manual_seed(3)
    with fused_decoding(model):
        assert streamed(model, inputs_for(model, 1), **options)[1] == expected


def test_a_token_whose_step_cannot_be_compiled_is_not_handed_on_twice(model, monkeypatch):
    def fail(graph, inputs):
        raise OSError("no compiler")

    monkeypatch.setattr(compiled, "_inductor", fail)
    for options in ({}, {"repetition_penalty": 1.7}):
        with fused_decoding(model, compile=True):
            found, pieces = streamed(model, inputs_for(model, 1), **{"do_sample": True, **options})
        assert [token for piece in pieces[1:-1] for token in piece] == found[0, 6:].tolist()


def test_beams_have_no_streamer_with_whole_steps_either(model):
    recorder = Recorder()
    with whole(model), pytest.raises(ValueError, match="streamer"):
        model.generate(**inputs_for(model), num_beams=3, max_new_tokens=4, streamer=recorder)
    assert recorder.pieces == []
