# SPDX-License-Identifier: Apache-2.0
"""Which processors a choice stands for, and which are called."""

import pytest
import torch
from transformers.generation import logits_process as stock

from fused_topk.generation import FusedTopKLogitsProcessor, TokenTrie, TrieLogitsProcessor
from fused_topk.generation.whole_step.plan import Plan

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
