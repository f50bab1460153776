# SPDX-License-Identifier: Apache-2.0
"""Streamers of whole steps: they get what stock gives them, each piece once, whatever a call turns into."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from decoding import Recorder, inputs_for, one_thread  # noqa: F401
from fused_topk.generation import fused_decoding, generate, stats
from fused_topk.generation.whole_step import Once, compiled
from fused_topk.generation.whole_step.choosing import Choices
from fused_topk.generation.whole_step.reasons import Declined
from whole_steps import family, whole

OPTIONS = {"max_new_tokens": 7, "do_sample": False}
compiling = functools.partial(fused_decoding, whole_step=True)


@pytest.fixture(name="model")
def own_model():
    return copy.deepcopy(family("Llama"))


@pytest.fixture(name="traced")
def traced_only(monkeypatch):
    monkeypatch.setattr(compiled, "_inductor", lambda graph, inputs: graph)


def streamed(model, inputs, **options):
    recorder = Recorder()
    model.generate(**inputs, **{**OPTIONS, **options}, streamer=recorder)
    return recorder.pieces


@pytest.mark.parametrize("fused", [whole, compiling], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "options",
    [{}, {"eos_token_id": list(range(5, 60))}, {"repetition_penalty": 1.7}, {"max_new_tokens": 1}],
    ids=lambda options: "-".join(options),
)
def test_a_streamer_gets_each_token(options, fused, model, traced):
    for batch in (1, 3):
        inputs = inputs_for(model, batch)
        expected = streamed(model, inputs, **options)
        stats(reset=True)
        with fused(model):
            assert streamed(model, inputs, **options) == expected
        steps = stats()
        assert steps.whole == steps.fused == len(expected) - 2 and not steps.not_whole
        assert streamed(model, inputs, custom_generate=generate, whole_step="eager", **options) == expected
        assert not stats().not_whole


def test_drawn_tokens_are_those_of_the_result(model, traced):
    for fused in ("eager", True):
        recorder = Recorder()
        with fused_decoding(model, sampling=True, whole_step=fused):
            found = model.generate(**inputs_for(model, 1), max_new_tokens=7, do_sample=True, streamer=recorder)
        assert [token for piece in recorder.pieces[1:-1] for token in piece] == found[0, 6:].tolist()


def test_a_piece_is_handed_on_once_where_a_call_declines_on_its_way(model, monkeypatch):
    inputs = inputs_for(model, 1)
    free = functools.partial(streamed, model, inputs, eos_token_id=None)
    expected = free()
    chosen = Choices.after

    def failing(self, state, constants, logits, ids, step, *args):
        if step == 4:
            raise Declined("a reason")
        return chosen(self, state, constants, logits, ids, step, *args)

    monkeypatch.setattr(Choices, "after", failing)
    stats(reset=True)
    with whole(model):
        assert free() == expected
    assert free(custom_generate=generate, whole_step="eager") == expected
    assert stats().not_whole == {"a reason": 2}


def test_a_token_whose_step_cannot_be_compiled_is_not_handed_on_twice(model, monkeypatch):
    def fail(graph, inputs):
        raise OSError("no compiler")

    monkeypatch.setattr(compiled, "_inductor", fail)
    for options in ({}, {"repetition_penalty": 1.7}):
        recorder = Recorder()
        with fused_decoding(model, sampling=True, whole_step=True):
            found = model.generate(
                **inputs_for(model, 1), max_new_tokens=7, do_sample=True, streamer=recorder, **options
            )
        assert [token for piece in recorder.pieces[1:-1] for token in piece] == found[0, 6:].tolist()


def test_beams_have_no_streamer_with_whole_steps_either(model):
    recorder = Recorder()
    with whole(model), pytest.raises(ValueError, match="streamer"):
        model.generate(**inputs_for(model), num_beams=3, max_new_tokens=4, streamer=recorder)
    assert recorder.pieces == []


def test_what_is_put_before_a_call_is_served_waits():
    recorder = Recorder()
    once = Once(recorder)
    once.put(torch.tensor([1]))
    assert recorder.pieces == []
    once.restart()
    once.put(torch.tensor([1]))
    once.put(torch.tensor([2]))
    once.restart()
    for token in (1, 2, 3):
        once.put(torch.tensor([token]))
    once.end()
    assert recorder.pieces == [[1], [2], [3], "end"]
