# SPDX-License-Identifier: Apache-2.0
"""Options of generate() that stay fused: what is returned beside the sequences, and processors that touch whole rows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

import transformers
from transformers.generation import logits_process as stock

from decoding import assert_fused, assert_same, generate_both, inputs_for, one_thread, tiny  # noqa: F401
from fused_topk import cpu
from fused_topk.generation import fused_decoding
from fused_topk.generation.edits import NotSparse, Plan
from fused_topk.generation.record import Recorded
from fused_topk.generation.selection import Rows

RECORDS = [{"output_scores": True}, {"output_logits": True}, {"output_scores": True, "output_logits": True}]


def assert_recorded(stock, given, steps) -> None:
    """Every step was fused, and what is returned are plain tensors, bit for bit those of stock operations."""
    assert steps.fused == len(given.get("scores") or given["logits"]) and steps.fallback == 0, steps.reasons
    assert torch.equal(stock["sequences"], given["sequences"])
    for name in ("scores", "logits"):
        assert (stock.get(name) is None) == (given.get(name) is None), name
        for expected, found in zip(stock.get(name) or (), given.get(name) or (), strict=True):
            assert type(found) is torch.Tensor and not vars(found)
            assert torch.equal(expected, found)


@pytest.mark.parametrize("records", RECORDS, ids="-".join)
@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize(
    "options",
    [{}, {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 4}],
    ids=["plain", "edited"],
)
def test_greedy_search_returns_the_scores_it_would_and_is_still_fused(name, records, options):
    assert_recorded(*generate_both(tiny(name), **{"output_scores": False, **records, **options}))


@pytest.mark.parametrize("records", RECORDS, ids="-".join)
def test_sampling_returns_the_scores_it_would_and_is_still_fused(records):
    # One token is left of each row, so that stock and fused sequences are comparable.
    options = {"do_sample": True, "top_k": 1, "repetition_penalty": 1.2, "output_scores": False, **records}
    assert_recorded(*generate_both(tiny("llama"), fused=lambda model: fused_decoding(model, sampling=True), **options))


def test_recorded_scores_that_stock_operations_choose_from():
    # The choice falls back after the record has been made: processors run once all the same.
    calls = []

    class Counting(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            calls.append(type(scores))
            return scores + 1

    options = {"output_scores": True, "output_logits": True, "logits_processor": [Counting()]}
    stock, given, steps = generate_both(tiny("llama"), **options)
    assert_same(stock, given)
    assert steps.fused == 0 and list(steps.reasons) == ["logits processor Counting"]
    assert len(calls) == 2 * len(given["scores"]) and set(calls) == {torch.Tensor}
    assert {type(each) for each in (*given["scores"], *given["logits"])} == {torch.Tensor}


def test_a_users_function_is_called_once_a_step_though_scores_are_recorded():
    calls = []

    def allowed(batch, ids):
        calls.append(len(ids))
        return [9, 10, 11]

    options = {"output_scores": True, "prefix_allowed_tokens_fn": allowed}
    stock, given, steps = generate_both(tiny("llama"), **options)
    assert_same(stock, given)
    assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]


def test_recorded_scores_that_a_loop_changes():
    changed = Recorded.of(torch.arange(6.0).view(2, 3), _Dense())
    assert changed.shape == (2, 3) and type(changed) is Recorded
    changed[:, 2] = -1.0
    assert type(changed) is torch.Tensor and torch.argmax(changed, dim=-1).tolist() == [1, 1]


class _Dense:
    def dense(self, reason):
        assert reason == "operation __setitem__"


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"exponential_decay_length_penalty": (2, 1.5)},
        {"exponential_decay_length_penalty": (3, 0.4), "eos_token_id": [5, 9, 11], "repetition_penalty": 1.3},
        {"encoder_repetition_penalty": 1.6},
        {"encoder_repetition_penalty": 0.5, "no_repeat_ngram_size": 2},
    ],
    ids="-".join,
)
def test_generate_with_penalties(options, num_beams):
    for name in ("llama", "t5"):
        assert_fused(tiny(name), inputs_for(tiny(name), batch=3), num_beams=num_beams, **options)


def test_encoder_tokens_outside_the_vocabulary_are_left_to_the_stock_processor():
    processor = stock.EncoderRepetitionPenaltyLogitsProcessor(1.5, torch.tensor([[3, 40]]))
    with pytest.raises(NotSparse, match="vocabulary"):
        Plan([processor], False).edits(torch.zeros(2, 4, dtype=torch.int64), Rows(torch.zeros(2, 40), cpu), False)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_decay_of_what_another_processor_has_hidden(num_beams):
    # -inf stays -inf from transformers 5.20 on and becomes NaN before.
    options = {"min_new_tokens": 6, "exponential_decay_length_penalty": (2, 1.5), "num_beams": num_beams}
    stock_result, given, steps = generate_both(tiny("llama"), **options)
    assert torch.equal(stock_result["sequences"], given["sequences"])
    scores = stock.ExponentialDecayLengthPenalty((0, 2.0), 0, 0)(
        torch.zeros(1, 1).long(), torch.full((1, 1), -torch.inf)
    )
    assert (steps.fallback == 0) is bool(scores.isneginf())
