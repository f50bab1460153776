# SPDX-License-Identifier: Apache-2.0
"""Calls in a row of which the next one differs in one thing: none gets what is kept of another that it must not have."""

import copy
import functools

import pytest
import torch
from transformers import MaxLengthCriteria, StoppingCriteriaList

from decoding import also, assert_whole, inputs_for, one_thread  # noqa: F401
from whole_steps import compiling, encoder_decoder, family, source_for, traced_only  # noqa: F401

pytestmark = pytest.mark.usefixtures("traced")

# Ends that beams meet early and late, and more room than they need.
_BASE = {
    "max_new_tokens": 14,
    "eos_token_id": [*range(5, 30)],
    "output_scores": False,
    "length_penalty": 1.0,
    "early_stopping": True,
}
# What may differ in a call of the same shape, or of one that is rounded to it, and shows in the tokens.
_OPTIONS = {
    "other-ends": {"eos_token_id": [*range(60, 85)]},
    "room": {"max_new_tokens": 4},
    "length": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(9)])},
    "padding": {"pad_token_id": 3},
    "repetition": {"repetition_penalty": 2.0},
    "ngrams": {"no_repeat_ngram_size": 1},
    "least": {"min_new_tokens": 9},
    "suppressed": {"suppress_tokens": [*range(5, 60)]},
}
_OF_BEAMS = {
    "not-early": {"early_stopping": False},
    "never-early": {"early_stopping": "never", "length_penalty": 3.0},
    "short": {"length_penalty": -3.0},
    "long": {"length_penalty": 3.0},
}
# What is traced anew, which takes seconds.
_OF_ANOTHER_GRAPH = {"fewer-ends": {"eos_token_id": [5, 6]}, "no-ends": {"eos_token_id": None}}
# What does not.
_SAME_TOKENS = {"scores": {"output_scores": True}, "logits": {"output_logits": True}}


def assert_kept(model, inputs, **options):
    """Kept steps give what stock gives, which is returned."""
    options = {**_BASE, **options}
    if options["num_beams"] == 1:
        options = {name: value for name, value in options.items() if name not in ("early_stopping", "length_penalty")}
    return assert_whole(model, inputs, compile=True, kinds=["compiled"], **options)["sequences"]


def assert_each(model, calls, shows=True):
    """Calls with these inputs and options agree with stock, one after another, and the first once more at last."""
    found = [assert_kept(model, inputs, **options) for inputs, options in [*calls, calls[0]]]
    assert torch.equal(found[0], found[-1])
    if shows:
        assert all(not _are_equal(found[0], each) for each in found[1:-1]), "no difference shows"


def _are_equal(one, other):
    return one.shape == other.shape and torch.equal(one, other)


@functools.cache
def decoder_only():
    return copy.deepcopy(family("Phi", 1))


@functools.cache
def with_source():
    return copy.deepcopy(encoder_decoder("Bart", 1))


# Of options that take the same way one each is quick.
_QUICK = ("other-ends", "room", "length")
_OTHERS = [name for name in (*_OPTIONS, *_SAME_TOKENS, *_OF_ANOTHER_GRAPH) if name not in _QUICK]


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", [*_QUICK, *also(*_OTHERS)])
def test_another_option(name, num_beams):
    model = decoder_only()
    inputs = inputs_for(model, batch=4, padding=2)
    base = {"num_beams": num_beams}
    other = {**base, **{**_OPTIONS, **_SAME_TOKENS, **_OF_ANOTHER_GRAPH}[name]}
    assert_each(model, [(inputs, base), (inputs, other)], shows=name not in _SAME_TOKENS)


@pytest.mark.parametrize("name", [*_OF_BEAMS, *also("beams")])
def test_another_option_of_beams(name):
    model = decoder_only()
    inputs = inputs_for(model, batch=4, padding=2)
    base = {"num_beams": 3, "num_return_sequences": 3}
    assert_each(model, [(inputs, base), (inputs, {**base, **{**_OF_BEAMS, "beams": {"num_beams": 5}}[name]})])


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("kind", ["decoder", *also("both")])
def test_other_inputs_of_one_shape(kind, num_beams):
    # All lengths are rounded to one. Then others, and batches.
    model, made = (decoder_only(), inputs_for) if kind == "decoder" else (with_source(), source_for)
    lengths = ((4, 9, 0), (4, 5, 0), (4, 9, 3), (4, 12, 5), (4, 2, 1), (3, 9, 0), (4, 20, 0))
    assert_each(model, [(made(model, *each), {"num_beams": num_beams}) for each in lengths], shows=kind == "decoder")


@pytest.mark.parametrize("num_beams", [1, *also(3)])
def test_weights_that_are_written_to(num_beams):
    model = copy.deepcopy(decoder_only())
    inputs = inputs_for(model, batch=4)
    before = assert_kept(model, inputs, num_beams=num_beams)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1.25)
    assert not _are_equal(assert_kept(model, inputs, num_beams=num_beams), before)


@pytest.mark.parametrize("num_beams", [1, *also(3)])
@pytest.mark.parametrize("kind", ["decoder", *also("both")])
def test_nan_in_the_call_before(kind, num_beams):
    """Keys that are NaN, in places that the next call, whose texts are shorter, does not write to."""
    model = copy.deepcopy(decoder_only() if kind == "decoder" else with_source())
    inputs = inputs_for(model, 3, 5) if kind == "decoder" else source_for(model, 3, 5, 0)
    poisoned = inputs_for(model, 3, 12) if kind == "decoder" else source_for(model, 3, 12, 0)
    assert_kept(model, inputs, num_beams=num_beams)
    token = next(token for token in range(8, 97) if token not in inputs["input_ids"])
    poisoned["input_ids"][:] = token
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
    of_beams = {} if num_beams > 1 else {"early_stopping": False}
    with compiling(model):
        model.generate(**poisoned, **{**_BASE, **of_beams}, num_beams=num_beams, do_sample=False)
    assert token not in assert_kept(model, inputs, num_beams=num_beams)
