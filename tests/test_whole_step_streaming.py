# SPDX-License-Identifier: Apache-2.0
"""Streamers of whole steps: they get what stock gives them, each piece once, whatever a call turns into."""

from __future__ import annotations

import copy
import functools

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from decoding import Recorder, inputs_for, one_thread, stats  # noqa: F401
from fused_topk.generation import fused_decoding
from fused_topk.generation.whole_step import compiled
from whole_steps import family, whole

OPTIONS = {"max_new_tokens": 7, "do_sample": False}
compiling = functools.partial(fused_decoding, compile=True)


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
        assert steps.whole == len(expected) - 2 and not steps.reasons


def test_drawn_tokens_are_those_of_the_result(model, traced):
    for fused in (False, True):
        recorder = Recorder()
        with fused_decoding(model, compile=fused):
            found = model.generate(**inputs_for(model, 1), max_new_tokens=7, do_sample=True, streamer=recorder)
        assert [token for piece in recorder.pieces[1:-1] for token in piece] == found[0, 6:].tolist()


def test_a_token_whose_step_cannot_be_compiled_is_not_handed_on_twice(model, monkeypatch):
    def fail(graph, inputs):
        raise OSError("no compiler")

    monkeypatch.setattr(compiled, "_inductor", fail)
    for options in ({}, {"repetition_penalty": 1.7}):
        recorder = Recorder()
        with fused_decoding(model, compile=True):
            found = model.generate(
                **inputs_for(model, 1), max_new_tokens=7, do_sample=True, streamer=recorder, **options
            )
        assert [token for piece in recorder.pieces[1:-1] for token in piece] == found[0, 6:].tolist()


def test_beams_have_no_streamer_with_whole_steps_either(model):
    recorder = Recorder()
    with whole(model), pytest.raises(ValueError, match="streamer"):
        model.generate(**inputs_for(model), num_beams=3, max_new_tokens=4, streamer=recorder)
    assert recorder.pieces == []
