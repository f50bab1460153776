# SPDX-License-Identifier: Apache-2.0
"""NaN and infinities in a model's logits, such as float16 gives when it overflows: the tokens that stock generate() chooses."""

import contextlib
import copy
import math

import pytest
import torch
from transformers import TemperatureLogitsWarper

from decoding import EOS, SmallerIndexFirst, inputs_for, one_thread, stats, tiny  # noqa: F401
from fused_topk.generation import fused_decoding

VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# Which of the rows, by their hidden states [rows, length, H], and which of their tokens.
SOME = lambda hidden: hidden[..., :1] > 0  # noqa: E731
EVERY = lambda hidden: hidden[..., :1] == hidden[..., :1]  # noqa: E731
PLACES = {
    "some": (SOME, slice(20, None, 3)), "one": (SOME, slice(77, 78)), "first": (SOME, slice(0, 1)),
    "row": (SOME, slice(None)), "all": (EVERY, slice(None)), "last": (EVERY, slice(-1, None)),
}  # fmt: skip
OPTIONS = {
    "none": {},
    "bad words": {"bad_words_ids": [[20], [23], [77], [0]]},
    "biases": {"sequence_bias": [[[20], 3.0], [[77], -3.0], [[26], -math.inf], [[29], math.inf]]},
    "allowed": {"prefix_allowed_tokens_fn": lambda batch, ids: range(20, 80, 2)},
    "penalty": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1},
    "normalized": {"renormalize_logits": True},
    "normalized edits": {"renormalize_logits": True, "suppress_tokens": [20, 77], "repetition_penalty": 1.5},
    "lengths": {"min_new_tokens": 3, "forced_eos_token_id": EOS},
}


class Spoiled(torch.nn.Module):
    """A model's head of which some logits are not finite, while `is_on`. The model has been tried before."""

    is_on = False

    def __init__(self, head, value, rows, tokens):
        super().__init__()
        self.head, self.value, self.rows, self.tokens = head, value, rows, tokens

    def forward(self, hidden):
        logits = self.head(hidden)
        if not Spoiled.is_on:
            return logits
        is_out = torch.zeros_like(logits[:1, :1], dtype=torch.bool)
        is_out[..., self.tokens] = True
        return torch.where(self.rows(hidden) & is_out, torch.tensor(self.value, dtype=logits.dtype), logits)


def both(value, rows, tokens, dtype=torch.float32, **options):
    """The sequences, or the errors, of stock and fused generate(), and the latter's steps."""
    model = copy.deepcopy(tiny("llama", dtype))
    model.lm_head = Spoiled(model.lm_head, value, rows, tokens)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for block in (contextlib.nullcontext(), fused_decoding(model)):
            with block, SmallerIndexFirst():
                model.generate(**inputs_for(model), max_new_tokens=1, do_sample=False)
                patch.setattr(Spoiled, "is_on", True)
                torch.manual_seed(0)
                stats(reset=True)
                try:
                    found.append(model.generate(**inputs_for(model), max_new_tokens=4, **options))
                except Exception as error:
                    found.append(f"{type(error).__name__}: {error}")
                patch.setattr(Spoiled, "is_on", False)
    return *found, stats(reset=True)


def assert_same(expected, found):
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
    else:
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("spoiled", PLACES)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_tokens_that_are_chosen(value, spoiled, options, num_beams):
    spoil = (VALUES[value], *PLACES[spoiled])
    expected, found, steps = both(*spoil, num_beams=num_beams, do_sample=False, **OPTIONS[options])
    assert_same(expected, found)
    if value == "-inf" and options == "bad words" and spoiled == "some":
        assert steps.whole and not steps.stock, steps.reasons


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("spoiled", ["some", "one"])
@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_sampling_draws_nothing_where_stock_raises(value, spoiled, options, num_beams):
    options = {"do_sample": True, "top_k": 5, "num_beams": num_beams, **OPTIONS[options]}
    expected, found, _ = both(VALUES[value], *PLACES[spoiled], **options)
    assert isinstance(found, str) == isinstance(expected, str)
    if isinstance(expected, str):
        assert found == expected


@pytest.mark.parametrize("options", ["none", "bad words", "allowed", "penalty", "normalized"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_float16_logits_that_overflow(options, num_beams):
    expected, found, steps = both(
        1e5, *PLACES["some"], dtype=torch.float16, num_beams=num_beams, do_sample=False, **OPTIONS[options]
    )
    assert_same(expected, found)
    if num_beams > 1 and options != "allowed":
        assert list(steps.reasons) == ["NaN among the scores"]


@pytest.mark.parametrize("spoiled", PLACES)
@pytest.mark.parametrize("value", VALUES)
def test_greedy_with_a_temperature(value, spoiled):
    # Of a row with NaN no score equals the best.
    stock, fused, steps = both(VALUES[value], *PLACES[spoiled], logits_processor=[TemperatureLogitsWarper(0.7)])
    assert torch.equal(stock, fused)
    assert not steps.stock, steps.reasons
