# SPDX-License-Identifier: Apache-2.0
"""Texts that end by what they say, in whole steps."""

import contextlib
import copy
import functools

import pytest
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria

from captured import graphs_of
from decoding import TOLERANCE, also, assert_same, assert_whole, generate_both, inputs_for, one_thread  # noqa: F401
from fused_topk.generation import fused_decoding
from fused_topk.generation.whole_step import compiled
from test_generation_interface import letter, tokenizer
from whole_steps import assert_declined, family

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
def test_steps_that_are_kept(way, num_beams, monkeypatch):
    monkeypatch.setattr(compiled, "_inductor", lambda graph, inputs: graph)
    model = copy.deepcopy(family("Llama", 1))
    kept = functools.partial(fused_decoding, compile=way == "compiled")
    options = {"stop_strings": STRINGS, "tokenizer": tokenizer(), "num_beams": num_beams, "max_new_tokens": 14}
    with graphs_of() if way == "captured" else contextlib.nullcontext():
        stock, given, steps = generate_both(model, inputs_for(model, 4), fused=kept, **options)
    assert_same(stock, given, TOLERANCE)
    assert getattr(steps, way) == steps.whole > 0
