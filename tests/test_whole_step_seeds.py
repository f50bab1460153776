# SPDX-License-Identifier: Apache-2.0
"""A seed gives the texts of stock generate(), which leaves the generator in the same state; any processor, any criterion."""

import contextlib
import copy
import functools
from unittest import mock

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from captured import InVain, graphs_of
from decoding import (  # noqa: F401
    Recorder,
    SmallerIndexFirst,
    assert_same,
    inputs_for,
    is_likely,
    one_thread,
    stats,
    tiny,
)
from fused_topk.generation import fused_decoding
from fused_topk.generation.whole_step import draws
from whole_steps import always_by_heads, encoder_decoder, family, source_for

eager = fused_decoding
SAMPLED = [
    {"top_k": 0},
    {"top_k": 7},
    {"top_k": 0, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.9, "temperature": 0.7},
    {"top_k": 0, "min_p": 0.05},
    {"top_k": 12, "repetition_penalty": 1.4, "bad_words_ids": [[9], [30]]},
    {"top_k": 0, "typical_p": 0.6},
    {"top_k": 0, "epsilon_cutoff": 0.02, "eta_cutoff": 0.02},
    {"top_k": 9, "num_return_sequences": 3},
    {"top_k": 9, "num_beams": 3},
    {"top_k": 0, "top_p": 0.9, "num_beams": 3, "num_return_sequences": 2},
    {"top_k": 9, "eos_token_id": list(range(5, 40))},
    {"top_k": 0, "temperature": 1e31},
]


def seeded(model, inputs, context, **options):
    torch.manual_seed(5)
    options = {"max_new_tokens": 10, "do_sample": True, "pad_token_id": 0, **options}
    with context:
        found = model.generate(**inputs, **options)
    return found, torch.randn(2)


def assert_stocks(model, inputs, fused=eager, **options):
    expected, after = seeded(model, inputs, contextlib.nullcontext(), **options)
    stats(reset=True)
    found, drawn = seeded(model, inputs, fused(model), **options)
    steps = stats(reset=True)
    assert steps.whole > 0 and not steps.reasons, steps
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(drawn, after)
    return found, expected


@pytest.mark.parametrize("options", SAMPLED, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("name", ["Llama", "Llama by its head", "Bart"])
def test_a_seed_gives_stocks_texts(monkeypatch, name, options):
    if name == "Llama by its head":
        always_by_heads(monkeypatch)
    of_both = name == "Bart"
    model = encoder_decoder("Bart", 1) if of_both else family("Llama", 1)
    assert_stocks(model, source_for(model, 4) if of_both else inputs_for(model, 4, padding=2), **options)


@pytest.mark.parametrize("options", SAMPLED[1:4:2], ids=lambda options: "-".join(options))
def test_the_logits_of_float64_too(options):
    model = copy.deepcopy(family("Llama", 1)).double()
    assert_stocks(model, inputs_for(model, 2), **options)


def test_top_k_keeps_all_tokens_that_are_equal_to_the_last():
    """Here 32 of each kind, of which a few more than k are not enough."""
    model = copy.deepcopy(family("Llama", 1))
    weight = model.lm_head.weight
    weight.data = weight[torch.arange(len(weight)) // 32 * 32].detach()
    for top_k in (1, 7, 33):
        assert_stocks(model, inputs_for(model, 4), top_k=top_k)


def test_quick_draws_are_torchs(monkeypatch):
    assert draws._is_quick_form_equal()
    for is_quick in (True, False):
        monkeypatch.setattr(draws, "_is_quick_form_equal", lambda is_quick=is_quick: is_quick)
        for columns, left in ((1, 1), (97, 97), (5000, 5000), (5000, 60)):
            scores = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns))
            scores[:, left:] = -torch.inf
            scores[1:3, 2:] = -torch.inf
            probs = scores.softmax(-1)
            for count in {1, min(columns, 4)}:
                torch.manual_seed(2)
                expected, state = torch.multinomial(probs, count), torch.get_rng_state()
                torch.manual_seed(2)
                assert torch.equal(draws.drawn(scores, count), expected)
                assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="probability tensor"):
        draws.drawn(torch.tensor([[0.5, torch.nan]]), 1)
    with pytest.raises(RuntimeError, match=r"2\^24"):
        draws.drawn(torch.zeros(1, 2**24 + 1), 1)


def test_the_generator_of_the_device_is_put_back(monkeypatch):
    """Not that of the current device."""
    generators = [mock.Mock(**{"get_offset.side_effect": [0, 4, 8, 8]}), mock.Mock()]
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    in_vain = draws.InVain(torch.device("cuda", 0))
    in_vain.note()
    in_vain.note()
    in_vain.take_back(1)
    generators[0].set_offset.assert_called_once_with(4)
    assert not generators[1].mock_calls


def test_steps_in_vain_draw_nothing(monkeypatch):
    """With a stand-in for a GPU, whose host learns of the end four steps later."""
    taken = []

    take_back = InVain.take_back
    monkeypatch.setattr(
        InVain, "take_back", lambda self, steps: taken.append(len(self.states) - 1 - steps) or take_back(self, steps)
    )
    model = family("Llama", 1)
    with graphs_of():
        for ends in (list(range(5, 40)), list(range(5, 90)), None):
            options = {"top_k": 9, "max_new_tokens": 20, "eos_token_id": ends}
            assert_stocks(model, inputs_for(model, 3), functools.partial(fused_decoding), **options)
    assert max(taken) == 4 and min(taken) == 0


class Own(LogitsProcessor):
    """A processor of a user's: it depends on the texts, keeps what it got, and writes in place."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.clone(), scores.clone()))
        scores[:, (3 * len(self.calls)) % 97] += 2.0
        scores.scatter_(1, input_ids[:, -1:], -torch.inf)
        return scores


class Ends(StoppingCriteria):
    """A criterion of a user's: a text ends after a token below 20 behind an even one."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.clone(), scores if scores is None else len(scores)))
        return (input_ids[:, -1] < 20) & (input_ids[:, -2] % 2 == 0)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("way", ["operations", "captured"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 9}], ids=str)
def test_processors_and_criteria_of_the_users_are_called_as_in_stock(options, way, streams):
    streams = streams and "num_beams" not in options
    model, found = family("Llama", 1), []
    for is_fused in (False, True):
        own, ends = Own(), Ends()
        given = {
            "logits_processor": LogitsProcessorList([own]),
            "stopping_criteria": StoppingCriteriaList([ends]),
            "return_dict_in_generate": True,
            "output_scores": True,
            "do_sample": False,
            **options,
        }
        if streams:
            given["streamer"] = Recorder()
        with contextlib.ExitStack() as stack:
            if is_fused and way == "captured":
                stack.enter_context(graphs_of())
            fused = contextlib.nullcontext() if not is_fused else fused_decoding(model)
            stats(reset=True)
            result, after = seeded(model, inputs_for(model, 1 if streams else 3), fused, max_new_tokens=14, **given)
        pieces = given["streamer"].pieces if streams else None
        found.append((result, after, own.calls, ends.calls, pieces))
    assert stats().whole > 0 and not stats(reset=True).reasons
    (stock, drawn, calls, ends, pieces), (fused, also, own, criteria, own_pieces) = found
    assert torch.equal(stock.sequences, fused.sequences) and torch.equal(drawn, also) and pieces == own_pieces
    assert len(calls) == len(own) and len(ends) == len(criteria)
    for (ids, scores), (own_ids, own_scores) in zip(calls, own):
        assert torch.equal(ids, own_ids)
        torch.testing.assert_close(scores, own_scores, rtol=0, atol=5e-5)
    for (ids, scores), (own_ids, own_scores) in zip(ends, criteria):
        assert torch.equal(ids, own_ids) and scores == own_scores


class Returns(LogitsProcessor):
    """A processor of a user's that writes to what it got, or to what it has returned, at the step before."""

    def __init__(self, what):
        self.what, self.before = what, None

    def __call__(self, input_ids, scores):
        if self.before is not None:
            self.before.mul_(0.5)
        result = scores + 1 if self.what == "returned" else scores
        self.before = result
        return result


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 9}], ids=str)
def test_returned_scores_are_those_of_their_step(options):
    """Whatever a processor writes to, and though a captured step writes over its logits."""
    model = family("Llama", 1)

    def call(fused, what):
        # Without beams stock's logits are those that the processors have written to.
        has_logits = what is None or "num_beams" in options
        of_result = {"return_dict_in_generate": True, "output_scores": True, "output_logits": has_logits}
        with SmallerIndexFirst():
            given = {"logits_processor": [] if what is None else [Returns(what)], "do_sample": False, **options}
            return seeded(model, inputs_for(model, 3), fused, **given, **of_result, max_new_tokens=6)[0]

    for what in (None, "got", "returned"):
        expected = call(contextlib.nullcontext(), what)
        stats(reset=True)
        found = [call(fused_decoding(model), what)]
        with graphs_of():
            found.append(call(fused_decoding(model), what))
        assert (stats().whole, stats().captured) == (12, 6)
        for each in found:
            assert_same(expected, each, 5e-5)


def assert_both_ways(call):
    """The texts, or an error of a kind, of stock and whole steps, which leave the generator alike.

    Args:
        call: makes the options of a call.
    """
    model, found = family("Llama", 1), []
    for block in (contextlib.nullcontext(), fused_decoding(model)):
        torch.manual_seed(3)
        with block, SmallerIndexFirst():
            try:
                result = model.generate(**inputs_for(model, 2), **call()).tolist()
            except Exception as error:
                result = error
        found.append((result if isinstance(result, list) else type(result), torch.get_rng_state().tolist()))
    assert found[0] == found[1]
    return result


class Sets(LogitsProcessor):
    """Changes a number of a warper between two steps."""

    def __init__(self, warper, name, values):
        self.warper, self.name, self.values = warper, name, list(values)

    def __call__(self, input_ids, scores):
        setattr(self.warper, self.name, self.values.pop(0))
        return scores


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (TemperatureLogitsWarper, "temperature", (5.0, 0.2, 9.0, 1e-6, 1.0)),
        (TopKLogitsWarper, "top_k", (50, 2, 90, 1, 30)),
    ],
)
def test_warpers_that_change_between_two_steps(kind, name, values):
    def call():
        warper = kind(values[0])
        processors = LogitsProcessorList([Sets(warper, name, values), warper])
        return {
            "logits_processor": processors,
            "do_sample": True,
            "top_k": 0,
            "max_new_tokens": 5,
            "eos_token_id": None,
        }

    assert_both_ways(call)


def test_a_draw_that_raises_leaves_the_generator_as_stock_does():
    def call():
        return {"do_sample": True, "logits_processor": [lambda ids, scores: scores * torch.nan]}

    assert type(assert_both_ways(call)) is RuntimeError


class At(StoppingCriteria):
    """Ends all texts at its n-th call."""

    def __init__(self, n):
        self.left = n

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        return torch.full((len(input_ids),), self.left <= 0)


def test_a_criterion_is_called_once_a_token_where_scores_become_nan():
    def call():
        nan = [0]

        def spoil(input_ids, scores):
            nan[0] += 1
            return scores * torch.nan if nan[0] == 3 else scores

        return {"num_beams": 3, "stopping_criteria": [At(4)], "logits_processor": [spoil], "max_new_tokens": 9}

    assert isinstance(assert_both_ways(call), list)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        lambda ids, scores: scores[:, :40],
        lambda ids, scores: torch.cat([scores, scores[:, :3] + 5], 1).contiguous(),
        lambda ids, scores: (scores * 100).round().long() if scores.amax() > 0 else scores,
        lambda ids, scores: scores.double(),
        lambda ids, scores: scores[:, ::2],
    ],
    ids=["fewer", "more", "integers", "float64", "every other"],
)
def test_scores_of_another_shape_or_dtype(change, options):
    given = {"max_new_tokens": 4, **options}
    model = family("Llama", 1)
    try:
        model.generate(**inputs_for(model, 2), logits_processor=[change], **given)
    except Exception:
        # Whole steps may serve it.
        pytest.skip("this version of transformers refuses it")
    assert_both_ways(lambda: {"logits_processor": [change], **given})
