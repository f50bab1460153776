# SPDX-License-Identifier: Apache-2.0
"""Logits processors in whole steps: transformers' own, those of users, and the errors of both; and what a choice stands for."""

from types import FunctionType

import pytest
import torch
import transformers
from transformers.generation import logits_process as stock

from decoding import EOS, also, assert_same, assert_whole, generate_both, inputs_for, one_thread, tiny  # noqa: F401
from fused_topk.generation import FusedTopKLogitsProcessor, TokenTrie, TrieLogitsProcessor
from fused_topk.generation.whole_step import plan
from fused_topk.generation.whole_step.plan import Plan
from rows import adversarial_rows


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"min_length": 12, "exponential_decay_length_penalty": (1, 1.3)},
        {"min_new_tokens": 8, "remove_invalid_values": True},
        {"guidance_scale": 1.5},
        {"suppress_tokens": list(range(8, 60))},
        {"begin_suppress_tokens": list(range(8, 120))},
        {"suppress_tokens": [], "begin_suppress_tokens": []},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6},
        {"bad_words_ids": [[i] for i in range(8, 80)] + [[100, 101], [102, 103, 104]]},
        {"sequence_bias": [[[20], 4.0], [[20, 21], 6.0], [[21, 22], -6.0]]},
        {"prefix_allowed_tokens_fn": lambda batch, ids: range(8 + int(ids[-1]) % 5, 100, 3)},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [10 + len(ids)]},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 6, "bad_words_ids": [[9], [17, 18]]},
    ],
    ids=lambda options: "-".join(options),
)
def test_generate_with_processors(options, num_beams):
    # transformers' guidance is of one text.
    inputs = inputs_for(tiny("llama"), batch=1) if "guidance_scale" in options else inputs_for(tiny("llama"), padding=2)
    assert_whole(tiny("llama"), inputs, num_beams=num_beams, **options)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, *also(torch.bfloat16, torch.float16)], ids=str)
def test_default_dtypes(dtype, num_beams):
    model = tiny("llama")
    torch.set_default_dtype(dtype)
    try:
        assert_whole(model, num_beams=num_beams)
        assert_whole(model, num_beams=num_beams, repetition_penalty=1.3, output_scores=False)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("options", [{"exponential_decay_length_penalty": (1, 1.3)}, {"min_length": 12}], ids="-".join)
def test_a_text_that_no_token_ends(options):
    assert_whole(tiny("llama"), eos_token_id=[], **options)


class Doubled(stock.RepetitionPenaltyLogitsProcessor):
    """A subclass that does something else."""

    def __call__(self, input_ids, scores):
        return super().__call__(input_ids, super().__call__(input_ids, scores))


def flipped(ids, scores):
    return scores.flip(-1)


@pytest.mark.parametrize(
    "make", [lambda: Doubled(1.5), lambda: flipped, lambda: FunctionType(flipped.__code__, {}, "by_hand")]
)
@pytest.mark.parametrize("num_beams", [1, 4])
def test_any_other_processor_is_called(make, num_beams):
    """A function that is made by hand has no module."""
    processors = transformers.LogitsProcessorList([make()])
    assert_whole(tiny("llama"), num_beams=num_beams, logits_processor=processors)


@pytest.mark.parametrize("top_k", [1, 3, 50, 1000, 1200])
def test_top_k_removes_what_stocks_removes(top_k):
    """Ties at the border, rows of one value, infinities and NaN."""
    scores = torch.stack(list(adversarial_rows(1000, min(top_k, 1000), torch.float32).values()))
    warper, ids = stock.TopKLogitsWarper(top_k), torch.zeros(len(scores), 1, dtype=torch.int64)
    want, got = warper(ids, scores.clone()), plan.called([warper], ids, scores.clone())
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)) and torch.equal(got.isnan(), want.isnan())


def test_a_top_k_of_the_users_is_called(monkeypatch):
    class Own(stock.TopKLogitsWarper):
        def __call__(self, input_ids, scores):
            return scores + 1

    scores, ids = torch.zeros(1, 5), torch.zeros(1, 1, dtype=torch.int64)
    assert torch.equal(plan.called([Own(2)], ids, scores), scores + 1)
    monkeypatch.setattr(stock.TopKLogitsWarper, "__call__", lambda self, input_ids, scores: scores + 2)
    assert torch.equal(plan.called([stock.TopKLogitsWarper(2)], ids, scores), scores + 2)


# Which processors a choice stands for, and which are called.


TEMPERATURE, TOP_K = stock.TemperatureLogitsWarper(0.5), stock.TopKLogitsWarper(5)
TOP_P, MIN_P = stock.TopPLogitsWarper(0.5), stock.MinPLogitsWarper(0.25)
PENALTY, NORMALIZE = stock.RepetitionPenaltyLogitsProcessor(1.5), stock.LogitNormalization()


def changed(processor, **attributes):
    vars(processor).update(attributes)
    return processor


@pytest.mark.parametrize(
    ("processors", "parameters", "called"),
    [
        ([], {}, 0),
        ([TEMPERATURE, TOP_K, TOP_P, MIN_P], {"temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.25}, 0),
        ([PENALTY, TOP_K], {"top_k": 5}, 1),
        ([TOP_K, PENALTY, TOP_P], {"top_p": 0.5}, 2),
        # In another order than that of sample().
        ([TOP_P, TOP_K], {"top_k": 5}, 1),
        ([FusedTopKLogitsProcessor(5, temperature=0.5), MIN_P], {"temperature": 0.5, "top_k": 5, "min_p": 0.25}, 0),
        ([FusedTopKLogitsProcessor(5, min_p=0.5), MIN_P], {"min_p": 0.25}, 1),
        # What sample() does not do.
        ([stock.TopPLogitsWarper(0.5, min_tokens_to_keep=2)], {}, 1),
        ([stock.TemperatureLogitsWarper(1e-40)], {}, 1),
        ([stock.TypicalLogitsWarper(0.5)], {}, 1),
        # What a user has set.
        ([changed(stock.TopKLogitsWarper(5), top_k=torch.tensor(5))], {}, 1),
        ([changed(stock.TopKLogitsWarper(5), of_a_later_version=1)], {}, 1),
    ],
)
def test_warpers_at_the_end_are_parameters_of_a_draw(processors, parameters, called):
    plan = Plan(processors, is_drawn=True)
    assert plan.parameters == parameters
    assert plan.called == processors[:called]
    # Nothing is drawn from beams, or for greedy decoding.
    assert Plan(processors, is_drawn=False).called == processors


def test_one_trie_is_a_mask():
    trie = TrieLogitsProcessor(TokenTrie([[3, 4]], end_token_id=1), begin_index=2)
    assert Plan([trie], False).constraint is trie and Plan([trie, TOP_K], True).constraint is trie
    assert Plan([PENALTY, trie], False).constraint is None and Plan([trie, TOP_K], False).constraint is None


class Penalty(stock.RepetitionPenaltyLogitsProcessor):
    pass


@pytest.mark.parametrize(
    "processor",
    [Penalty(1.5), lambda ids, scores: scores, stock.PrefixConstrainedLogitsProcessor(lambda batch, ids: [3], 1)],
    ids=["subclass", "function", "prefix"],
)
def test_what_is_not_known_is_asked_once_a_token(processor):
    assert Plan([processor], False).asks_host
    assert not Plan([PENALTY, TEMPERATURE], True).asks_host


def test_a_class_that_somebody_has_patched_is_called(monkeypatch):
    monkeypatch.setattr(stock.TopKLogitsWarper, "__call__", lambda self, ids, scores: scores)
    plan = Plan([TOP_K], True)
    assert plan.called == [TOP_K] and plan.asks_host
