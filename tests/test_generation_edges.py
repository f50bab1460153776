# SPDX-License-Identifier: Apache-2.0
"""What stock generate() accepts beyond the documented: the same result from the fused one, or the same error."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

import transformers
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from decoding import EOS, SmallerIndexFirst, assert_same, inputs_for, one_thread, tiny  # noqa: F401
from fused_topk.generation import fused_decoding, stats
from fused_topk.generation.edits import biases

BEAMS = pytest.mark.parametrize("num_beams", [1, 3])
SEARCH = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}


def outcome(model, inputs, options):
    """The result of generate(), or its error."""
    torch.manual_seed(0)
    try:
        with SmallerIndexFirst():
            return model.generate(**inputs, **SEARCH | options())
    except Exception as error:
        return error


def assert_like_stock(options, model=None, inputs=None):
    """Fused generate() gives or raises what stock gives or raises, with options made anew for each; its steps, as stats()."""
    model = model or tiny("llama")
    inputs = inputs or inputs_for(model)
    expected = outcome(model, inputs, options)
    stats(reset=True)
    with fused_decoding(model, whole_step=False):
        found = outcome(model, inputs, options)
    steps = stats(reset=True)
    if isinstance(expected, Exception):
        assert type(found) is type(expected) and str(found) == str(expected)
    else:
        assert not isinstance(found, Exception), repr(found)
        assert_same(expected, found)
    return steps


@pytest.fixture
def default_dtype():
    """A function that sets torch's default dtype until the test ends."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@BEAMS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bad_words_ids": [[20, 21], [21, 22]], "repetition_penalty": 1.3, "min_new_tokens": 3},
        # Numbers that the narrower types round.
        {"sequence_bias": [[[i, j], 1.2345 * (i % 7)] for i in range(8, 211) for j in (20, 30)]},
        {"exponential_decay_length_penalty": (1, 1.3), "repetition_penalty": 1.3},
        {"renormalize_logits": True, "prefix_allowed_tokens_fn": lambda batch, ids: range(8, 60)},
        {"forced_eos_token_id": EOS, "suppress_tokens": [8, 9]},
    ],
    ids=lambda options: "-".join(options) or "none",
)
def test_default_dtypes(default_dtype, dtype, options, num_beams):
    tiny("llama")
    default_dtype(dtype)
    steps = assert_like_stock(lambda: {"num_beams": num_beams, "output_scores": num_beams > 1, **options})
    assert steps.fused and not steps.fallback, steps.reasons


@BEAMS
def test_biases_of_one_token_with_another_default_dtype(default_dtype, num_beams):
    # Versions of torch and transformers refuse them, or round them.
    default_dtype(torch.bfloat16)
    for options in ({"bad_words_ids": [[20], [21, 22]]}, {"sequence_bias": [[[i], 0.37 * i] for i in range(8, 40)]}):
        assert_like_stock(lambda options=options: {"num_beams": num_beams, **options})


@BEAMS
def test_biases_are_prepared_in_the_first_step_only(monkeypatch, num_beams):
    """Preparing waits for the device, so that a graph can be captured of the steps after the first."""
    calls, prepared = [], biases._prepare

    def prepare(*arguments):
        calls.append(arguments)
        return prepared(*arguments)

    monkeypatch.setattr(biases, "_prepare", prepare)
    steps = assert_like_stock(lambda: {"num_beams": num_beams, "bad_words_ids": [[20], [21, 22]]})
    assert steps.fused > 2 and not steps.fallback
    assert len(calls) == 1


def processors(*make):
    return lambda: {"logits_processor": LogitsProcessorList(each() for each in make)}


@BEAMS
@pytest.mark.parametrize(
    "length", [np.int64(3), [3, 3], 3, True, 0, 99, torch.tensor([3, 0]), torch.tensor([1, 2, 3, 4, 5, 6])], ids=repr
)
def test_lengths_of_prompts_that_a_penalty_ignores(length, num_beams):
    def options():
        penalty = stock.RepetitionPenaltyLogitsProcessor(3.0)
        try:
            penalty = stock.RepetitionPenaltyLogitsProcessor(3.0, copy.copy(length))
        except ValueError:
            # This version refuses it, but can be given it.
            penalty.prompt_ignore_length = copy.copy(length)
        return {"num_beams": num_beams, "logits_processor": LogitsProcessorList([penalty])}

    assert_like_stock(options)


@BEAMS
@pytest.mark.parametrize("token", [9, -1, -3, 211, 10**6, -(10**6), [9, 10], [9, -1], []], ids=repr)
def test_forced_tokens(token, num_beams):
    for forced in (
        lambda: stock.ForcedBOSTokenLogitsProcessor(token),
        lambda: stock.ForcedBOSTokenLogitsProcessor(torch.tensor(token)),
        lambda: stock.ForcedEOSTokenLogitsProcessor(4, token),
    ):
        made = processors(forced)
        assert_like_stock(lambda made=made: {"num_beams": num_beams, **made()}, tiny("bart"))


@BEAMS
def test_tokens_that_are_no_whole_numbers(num_beams):
    for make in (
        lambda: stock.SuppressTokensLogitsProcessor([8.0, 9.5]),
        lambda: stock.MinLengthLogitsProcessor(20, torch.tensor([5.0])),
        lambda: stock.ForcedBOSTokenLogitsProcessor(None),
    ):
        made = processors(make)
        steps = assert_like_stock(lambda made=made: {"num_beams": num_beams, **made()})
        assert not steps.fused


class Reversed(LogitsProcessorList):
    """A list of processors that does something of its own."""

    def __call__(self, input_ids, scores, **kwargs):
        return -super().__call__(input_ids, scores, **kwargs)


@BEAMS
@pytest.mark.parametrize(
    "given",
    [Reversed([stock.SuppressTokensLogitsProcessor([8])]), lambda input_ids, scores: scores.flip(-1)],
    ids=["subclass", "function"],
)
def test_processors_that_a_models_own_method_gives(given, num_beams):
    class Own(type(tiny("llama"))):
        def _get_logits_processor(self, *args, **kwargs):
            return given

    model = copy.deepcopy(tiny("llama"))
    model.__class__ = Own
    steps = assert_like_stock(lambda: {"num_beams": num_beams}, model)
    assert not steps.fused and list(steps.reasons) == [f"logits processors in a {type(given).__name__}"]


def twice(self, input_ids, scores):
    return scores * 2 - torch.arange(scores.shape[-1])


class Twice(stock.SuppressTokensLogitsProcessor):
    __call__ = twice


class OfOthers(stock.SuppressTokensLogitsProcessor):
    suppress_tokens = property(lambda self: torch.arange(8, 150))


def cuts_prompt(processor):
    processor.prompt_ignore_length = 4


@torch.inference_mode()
def made_for_inference():
    return stock.SuppressTokensLogitsProcessor(range(8, 110))


CHANGES = {
    "number": (lambda: stock.RepetitionPenaltyLogitsProcessor(1.1), lambda p: setattr(p, "penalty", 9.0)),
    "option": (lambda: stock.RepetitionPenaltyLogitsProcessor(3.0), cuts_prompt),
    "tokens": (
        lambda: stock.SuppressTokensLogitsProcessor([8]),
        lambda p: setattr(p, "suppress_tokens", torch.arange(8, 150)),
    ),
    "tokens in place": (
        lambda: stock.SuppressTokensLogitsProcessor(range(8, 110)),
        lambda p: p.suppress_tokens.add_(100),
    ),
    "biases": (
        lambda: stock.SequenceBiasLogitsProcessor([[[20], 2.0]]),
        lambda p: p.sequence_bias.update({(20,): -9.0, (20, 21): 7.0}),
    ),
    "other biases": (
        lambda: stock.SequenceBiasLogitsProcessor([[[i, j], 2.0] for i in range(8, 20) for j in range(20, 200)]),
        lambda p: p.sequence_bias.update({key: 50.0 - key[1] for key in p.sequence_bias}),
    ),
    "an encoder's n-grams": (
        lambda: stock.EncoderNoRepeatNGramLogitsProcessor(1, torch.tensor([[8], [9]])),
        lambda p: p.generated_ngrams[0].update({(): list(range(8, 150))}),
    ),
    "tokens of inference mode": (made_for_inference, torch.inference_mode()(lambda p: p.suppress_tokens.add_(100))),
    "prepared biases": (
        lambda: stock.SequenceBiasLogitsProcessor([[[i, j], 2.0] for i in range(8, 20) for j in range(20, 200)]),
        # Of single versions only.
        lambda p: [biases.neg_() for _, _, biases in getattr(p, "multi_token_biases", ())],
    ),
    "an attribute": (lambda: stock.SuppressTokensLogitsProcessor([8]), lambda p: setattr(p, "other", 1)),
    "class": (lambda: stock.SuppressTokensLogitsProcessor([8]), lambda p: setattr(p, "__class__", Twice)),
    "class of the same call": (
        lambda: stock.SuppressTokensLogitsProcessor([8]),
        lambda p: setattr(p, "__class__", OfOthers),
    ),
    "call": (
        lambda: stock.SuppressTokensLogitsProcessor([8]),
        lambda p: setattr(stock.SuppressTokensLogitsProcessor, "__call__", twice),
    ),
    "temperature": (lambda: stock.TemperatureLogitsWarper(1.0), lambda p: setattr(p, "temperature", -1.0)),
    "warper": (lambda: stock.TemperatureLogitsWarper(1.0), lambda p: setattr(p, "temperature", torch.tensor(-2.0))),
    "function": (
        lambda: stock.PrefixConstrainedLogitsProcessor(lambda batch, ids: [8, 9, 10, 11], 1),
        lambda p: setattr(p, "_prefix_allowed_tokens_fn", lambda batch, ids: [12, 13, 14, 15]),
    ),
}


@BEAMS
@pytest.mark.parametrize("change", CHANGES)
def test_processors_that_change_between_two_steps(change, num_beams, monkeypatch):
    make, changes = CHANGES[change]

    def options():
        # Undone in the end, and before the second run.
        monkeypatch.undo()
        monkeypatch.setattr(stock.SuppressTokensLogitsProcessor, "__call__", CALL)
        processor = make()

        def criterion(input_ids, scores, **kwargs):
            if input_ids.shape[1] == 8:
                changes(processor)
            return torch.zeros(len(input_ids), dtype=torch.bool)

        return {
            "num_beams": num_beams,
            "logits_processor": LogitsProcessorList([processor]),
            "stopping_criteria": transformers.StoppingCriteriaList([criterion]),
        }

    assert_like_stock(options)


CALL = stock.SuppressTokensLogitsProcessor.__call__


@BEAMS
def test_processors_with_a_call_of_somebody_elses(num_beams, monkeypatch):
    monkeypatch.setattr(stock.SuppressTokensLogitsProcessor, "__call__", twice)
    steps = assert_like_stock(lambda: {"num_beams": num_beams, "suppress_tokens": [8]})
    assert not steps.fused


def allowed(batch, ids):
    return [8 + (7 * batch + int(ids[-1]) + 5 * i) % 200 for i in range(9)]


def mask_of(tokens):
    mask = torch.zeros(211, dtype=torch.bool)
    mask[tokens] = True
    return mask


FORMS = {
    "list": list,
    "tuple": tuple,
    "range": lambda tokens: range(tokens[0] % 50, 200, 7),
    "tensor": torch.tensor,
    "int32": lambda tokens: torch.tensor(tokens, dtype=torch.int32),
    "array": np.array,
    "list of tensors": lambda tokens: [torch.tensor(token) for token in tokens],
    "numpy integers": lambda tokens: list(np.array(tokens)),
    "mask": mask_of,
    "mask as a list": lambda tokens: mask_of(tokens).tolist(),
    "mask as an array": lambda tokens: mask_of(tokens).numpy(),
    "nonzero": lambda tokens: mask_of(tokens).nonzero(),
    "nested lists": lambda tokens: [tokens[:3], tokens[3:6], tokens[6:]],
    "negative": lambda tokens: [token - 211 for token in tokens],
    "repeated": lambda tokens: tokens + tokens,
    # These are errors.
    "mask of bytes": lambda tokens: mask_of(tokens).to(torch.uint8),
    "empty": lambda tokens: [],
    "empty tensor": lambda tokens: torch.tensor([], dtype=torch.int64),
    "beyond": lambda tokens: [*tokens, 211],
    "ragged": lambda tokens: [tokens[:2], tokens[2:]],
    "floats": lambda tokens: [float(token) for token in tokens],
    "set": set,
    "number": lambda tokens: tokens[0],
    "generator": iter,
    "none": lambda tokens: None,
    "short mask": lambda tokens: mask_of(tokens)[:-1],
    "no token of a mask": lambda tokens: mask_of([]),
    "no token of nested lists": lambda tokens: [[]],
}


@BEAMS
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_allowed_tokens(form, num_beams):
    calls = []

    def function(batch, ids):
        calls.append((batch, ids.tolist()))
        return FORMS[form](allowed(batch, ids))

    steps = assert_like_stock(lambda: {"num_beams": num_beams, "prefix_allowed_tokens_fn": function})
    assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]
    if list(FORMS).index(form) < list(FORMS).index("mask of bytes"):
        assert steps.fused == 6 and not steps.fallback, steps.reasons


@BEAMS
@pytest.mark.parametrize(
    "records", [{}, {"output_scores": True}, {"output_scores": True, "output_logits": True}], ids=len
)
@pytest.mark.parametrize(
    "others",
    [
        {},
        {"repetition_penalty": 1.2, "renormalize_logits": True},
        {"logits_processor": [lambda ids, scores: scores * 2]},
    ],
    ids=["alone", "others", "foreign"],
)
def test_a_function_that_remembers_is_called_as_often_as_in_stock(records, others, num_beams):
    logs = []

    def options():
        log = []
        logs.append(log)

        def function(batch, ids):
            log.append((batch, ids.tolist()))
            return range(8 + len(log) % 5, 200, 6)

        return {"num_beams": num_beams, "prefix_allowed_tokens_fn": function, **records, **others}

    others = {name: LogitsProcessorList(value) if type(value) is list else value for name, value in others.items()}
    assert_like_stock(options)
    assert logs[0] == logs[1] and len(logs[0]) == 6 * 2 * num_beams


@BEAMS
def test_a_function_that_changes_the_list_it_gave(num_beams):
    def options():
        tokens = []

        def function(batch, ids):
            tokens[:] = allowed(batch, ids)
            return tokens

        return {"num_beams": num_beams, "prefix_allowed_tokens_fn": function, "output_scores": True}

    steps = assert_like_stock(options)
    assert steps.fused == 6 and not steps.fallback, steps.reasons


@BEAMS
def test_an_error_of_the_function_is_the_users(num_beams):
    def options():
        calls = []

        def function(batch, ids):
            calls.append(batch)
            if len(calls) == 5:
                raise LookupError(f"the fifth call, of {batch}")
            return [8, 9, 10, 11]

        return {"num_beams": num_beams, "prefix_allowed_tokens_fn": function}

    assert_like_stock(options)


@BEAMS
@pytest.mark.parametrize("dead", [0, 1])
def test_one_prompt_without_a_token_left_among_others(dead, num_beams):
    # Versions from 5.20 on force the allowed tokens there, and only there; the ones before do not.
    def options():
        return {
            "num_beams": num_beams,
            "bad_words_ids": [[20], [21]],
            "prefix_allowed_tokens_fn": lambda batch, ids: [20, 21] if batch == dead else range(15, 40),
        }

    steps = assert_like_stock(options)
    assert not steps.fused


@BEAMS
def test_one_beam_without_a_token_left_among_others(num_beams):
    def options():
        return {
            "num_beams": num_beams,
            "bad_words_ids": [[20], [21]],
            "prefix_allowed_tokens_fn": lambda batch, ids: [20, 21] if int(ids[-1]) % 2 else range(15, 40),
            # Which of the continuations of score -inf a beam goes on with is open, and so is a cache's content.
            "use_cache": False,
        }

    steps = assert_like_stock(options)
    assert steps.fused > 0


@pytest.mark.parametrize("num_beams", [1, 2])
def test_processors_made_for_other_beams(num_beams):
    for beams in (2, 4, 0):
        made = processors(lambda beams=beams: stock.PrefixConstrainedLogitsProcessor(allowed, beams))
        assert_like_stock(lambda made=made: {"num_beams": num_beams, **made()})


@functools.cache
def with_fewer_logits():
    """A model whose prompts may have tokens that its logits have no place for."""
    model = copy.deepcopy(tiny("llama"))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:150].clone())
    model.config.vocab_size = 150
    return model


@BEAMS
@pytest.mark.parametrize("token", [149, 150, 151, 210])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 1},
        {"encoder_repetition_penalty": 1.5},
        {"bad_words_ids": [[20], [30, 31]], "min_new_tokens": 3},
    ],
    ids=lambda options: "-".join(map(str, *options.items())) if len(options) == 1 else "others",
)
def test_prompts_with_tokens_that_the_logits_have_no_place_for(options, token, num_beams):
    # Some versions leave them out, and others raise, if only where the token matters.
    ids = torch.tensor([[20, 30, token, 40, 50, token], [20, token, 30, 20, 60, 20]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert_like_stock(lambda: {"num_beams": num_beams, **options}, with_fewer_logits(), inputs)


@BEAMS
@pytest.mark.parametrize(
    "make",
    [
        lambda: stock.RepetitionPenaltyLogitsProcessor(1.5),
        lambda: stock.NoRepeatNGramLogitsProcessor(1),
        lambda: stock.EncoderNoRepeatNGramLogitsProcessor(1, torch.tensor([[8, -1], [9, 10]])),
        lambda: stock.EncoderNoRepeatNGramLogitsProcessor(1, torch.tensor([[8, 9]] * 4)),
        lambda: stock.EncoderNoRepeatNGramLogitsProcessor(3, torch.tensor([[8, 9], [9, 10]])),
    ],
    ids=["penalty", "ngram", "encoder", "texts of other rows", "shorter than an n-gram"],
)
def test_texts_of_other_tokens_and_rows(make, num_beams):
    # Padding that no embedding has, hidden from the model.
    inputs = inputs_for(tiny("llama"), padding=2)
    model = copy.deepcopy(tiny("llama"))
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: (args[0].clamp(min=0),))
    inputs["input_ids"][0, :2] = -1
    made = processors(make)
    assert_like_stock(lambda: {"num_beams": num_beams, **made()}, model, inputs)
