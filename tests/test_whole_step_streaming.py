# SPDX-License-Identifier: Apache-2.0
"""Streamers of whole steps: they get what stock gives them, each piece once, whatever a call turns into. And texts that end by what they say."""

import contextlib
import copy

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria

from captured import StandIn, as_on_a_gpu, graphs_of
from decoding import TOLERANCE, Recorder, also, assert_same, assert_whole, generate_both, inputs_for, one_thread, stats  # noqa: F401
from fused_topk.generation import fused_decoding
from fused_topk.generation.whole_step import compiled, graphs, room
from test_generation_interface import letter, tokenizer
from whole_steps import assert_declined, family, own_model, traced_only, whole  # noqa: F401

OPTIONS = {"max_new_tokens": 7, "do_sample": False}


@pytest.fixture(params=["operations", "compiled", "captured"])
def way(request, traced, monkeypatch):
    """How steps are run: traced, but not compiled, or captured by a stand-in for a GPU, whose host learns of tokens late."""
    if request.param == "captured":
        as_on_a_gpu(monkeypatch)
        monkeypatch.setattr(StandIn, "made", 0)
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
    with fused_decoding(model, compile=True):
        found, pieces = streamed(model, inputs_for(model, 1), do_sample=True)
    assert [token for piece in pieces[1:-1] for token in piece] == found[0, 6:].tolist()


def test_beams_have_no_streamer_with_whole_steps_either(model):
    recorder = Recorder()
    with whole(model), pytest.raises(ValueError, match="streamer"):
        model.generate(**inputs_for(model), num_beams=3, max_new_tokens=4, streamer=recorder)
    assert recorder.pieces == []


# Texts that end by what they say.


BEAMS = pytest.mark.parametrize("num_beams", [1, 3])
# Ends of texts by chance: some of the letters, and two pairs.
STRINGS = [letter(token) for token in range(5, 25)] + [letter(40) + letter(41), letter(50) + letter(51)]


@BEAMS
@pytest.mark.parametrize("ends", [None, [30, 31, 32]], ids=["no-end-token", "end-tokens"])
def test_texts_end_with_a_string(ends, num_beams):
    """Without an end token a text that has ended goes on with the others, as in stock generate()."""
    lengths = set()
    for seed in range(3):
        model = family("Llama", seed)
        options = {"stop_strings": STRINGS, "tokenizer": tokenizer(), "eos_token_id": ends, "num_beams": num_beams}
        options["early_stopping"] = num_beams > 1
        result = assert_whole(model, inputs_for(model, 4, padding=2), max_new_tokens=14, **options)
        lengths.add(result["sequences"].shape[1])
        assert_whole(model, inputs_for(model, 4), repetition_penalty=1.3, output_scores=False, **options)
    assert len(lengths) > 1


def test_a_string_that_begins_in_the_prompt():
    model = family("Llama")
    inputs = inputs_for(model, 1)
    free = model.generate(**inputs, max_new_tokens=3, do_sample=False, eos_token_id=None)
    stop = letter(int(free[0, 5])) + letter(int(free[0, 6]))
    result = assert_whole(model, inputs, stop_strings=stop, tokenizer=tokenizer(), eos_token_id=None)
    assert result["sequences"].shape[1] == 7


@BEAMS
def test_a_criterion_of_the_users(num_beams):
    model = family("Llama", 1)
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer(), STRINGS)])
    assert_whole(model, inputs_for(model, 3), stopping_criteria=criteria, num_beams=num_beams)
    both = {"stopping_criteria": criteria, "stop_strings": ["a"], "tokenizer": tokenizer()}
    assert_declined(model, "stop_strings", inputs_for(model, 3), num_beams=num_beams, **both)


def test_what_is_not_served():
    model = family("Llama")
    assert_declined(model, "tokenizer", tokenizer=tokenizer())
    config = GenerationConfig(stop_strings=["a"], do_sample=False, max_new_tokens=4)
    options = {"generation_config": config, "tokenizer": tokenizer()}
    assert_declined(model, "stop_strings of a configuration", **options)


@BEAMS
@pytest.mark.parametrize("way", ["captured", *also("compiled")])
def test_steps_that_are_kept(way, num_beams, traced):
    model = copy.deepcopy(family("Llama", 1))
    options = {"stop_strings": STRINGS, "tokenizer": tokenizer(), "num_beams": num_beams, "max_new_tokens": 14}
    with graphs_of() if way == "captured" else contextlib.nullcontext():
        assert_whole(model, inputs_for(model, 4), compile=way == "compiled", kinds=[way], **options)
