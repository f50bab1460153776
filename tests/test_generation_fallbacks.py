# SPDX-License-Identifier: Apache-2.0
"""Options of generate() that stay fused: what is returned beside the sequences, and processors that touch whole rows."""

from __future__ import annotations

import contextlib
import copy
import math

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

import transformers
from transformers.generation import logits_process as stock

from decoding import assert_fused, assert_same, generate_both, inputs_for, one_thread, tiny  # noqa: F401
from fused_topk.backends import cpu
from fused_topk.generation import fused_decoding, stats
from fused_topk.generation.choice.edit import NotSparse
from fused_topk.generation.choice.rows import Rows
from fused_topk.generation.edits.plan import Plan
from fused_topk.generation.interception.lazy_scores import LazyScores
from fused_topk.generation.interception.recorded import Recorded

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
    assert_recorded(
        *generate_both(
            tiny("llama"), fused=lambda model: fused_decoding(model, sampling=True, whole_step=False), **options
        )
    )


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
    assert steps.fused == 0 and list(steps.reasons) == [f"logits processor {__name__}.{Counting.__qualname__}"]
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


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
        {"sequence_bias": [[[20], 4.0], [[20, 21], 6.0]], "min_new_tokens": 8, "suppress_tokens": [30, 31]},
        {"bad_words_ids": [[i] for i in range(8, 80)]},
        {"forced_eos_token_id": [5, 9]},
    ],
    ids=lambda options: "-".join(options) or "alone",
)
def test_generate_with_renormalized_scores(options, num_beams):
    for output_scores in (True, False):
        assert_fused(
            tiny("llama"), renormalize_logits=True, num_beams=num_beams, output_scores=output_scores, **options
        )


def warped(*processors):
    return {"logits_processor": transformers.LogitsProcessorList(processors)}


@pytest.mark.parametrize(
    "options",
    [
        warped(stock.TemperatureLogitsWarper(0.7)),
        warped(stock.TopKLogitsWarper(5), stock.TopPLogitsWarper(0.7), stock.MinPLogitsWarper(0.1)),
        {"repetition_penalty": 1.5, **warped(stock.TemperatureLogitsWarper(1.3), stock.TopKLogitsWarper(3))},
        {"renormalize_logits": True, **warped(stock.TemperatureLogitsWarper(0.3))},
    ],
    ids=["temperature", "keep", "edited", "renormalized"],
)
def test_greedy_search_with_warpers(options):
    assert_fused(tiny("llama"), **options)


def test_warpers_of_a_beam_search_run_stock_operations():
    options = warped(stock.TopKLogitsWarper(50))
    stock_result, given, steps = generate_both(tiny("llama"), num_beams=3, **options)
    assert_same(stock_result, given)
    assert steps.fused == 0 and list(steps.reasons) == ["logits processor TopKLogitsWarper"]


def test_beam_sampling_with_renormalized_scores():
    # What is left of the rows is drawn altogether, so that stock and fused scores are comparable.
    options = {"do_sample": True, "top_k": 2, "num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 1}
    stock_result, given, steps = generate_both(
        tiny("llama"),
        fused=lambda model: fused_decoding(model, sampling=True, whole_step=False),
        renormalize_logits=True,
        eos_token_id=None,
        temperature=1e4,
        **options,
    )
    assert steps.fused == 1 and steps.fallback == 0, steps.reasons
    for found in (stock_result, given):
        assert torch.allclose(found["sequences_scores"], torch.full((4,), -math.log(2)), atol=1e-3)


def greedy(processors, logits):
    """What stock and fused greedy decoding choose, and the reasons of the latter's fallbacks."""
    history = torch.zeros(len(logits), 3, dtype=torch.int64)
    expected = transformers.LogitsProcessorList(processors)(history, logits.clone()).argmax(-1)
    lazy = LazyScores.of(Rows(logits, cpu), logits.unsqueeze(1))
    stats(reset=True)
    plan = Plan(processors, False)
    found = lazy.processed(plan, history, {})
    return expected, torch.argmax(found, dim=-1), stats(reset=True)


CHAINS = {
    "temperature": [stock.TemperatureLogitsWarper(0.7)],
    "normalize": [stock.LogitNormalization()],
    "both": [stock.TemperatureLogitsWarper(3.0), stock.LogitNormalization()],
    "top_k": [stock.TopKLogitsWarper(2)],
    "min_p": [stock.MinPLogitsWarper(0.5)],
}


# Renormalising makes equal what depends on the last place of the logsumexp: those are near-ties.
@pytest.mark.parametrize("chain", ["temperature", "top_k", "min_p"])
def test_greedy_choice_among_tokens_that_rounding_makes_equal(chain):
    # Neighbouring numbers, the greater ones last: dividing and shifting may make some equal, and then the first is taken.
    rows = torch.randint(2**29, 2**30, (400, 1), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    logits = (rows + torch.arange(3, dtype=torch.int32)).view(torch.float32)
    logits = torch.cat([torch.full((400, 40), -5.0), logits], 1)
    expected, found, steps = greedy(CHAINS[chain], logits)
    assert steps.fused == 1 and steps.fallback == 0
    assert torch.equal(expected, found)
    if chain == "temperature":
        assert not torch.equal(found, logits.argmax(-1))


@pytest.mark.parametrize("chain", CHAINS)
def test_greedy_choice_of_rows_with_nan_and_infinities(chain):
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(4))
    logits[0, 7], logits[1, 9], logits[2, 8:11], logits[3], logits[4, 20:] = (
        math.nan,
        math.inf,
        -math.inf,
        -math.inf,
        -math.inf,
    )
    logits[5, 3], logits[5, 4] = math.inf, math.nan
    expected, found, steps = greedy(CHAINS[chain], logits)
    assert torch.equal(expected, found)
    assert steps.fused == 1 and steps.fallback == 0


def test_greedy_choice_that_filters_do_not_keep_runs_stock_operations():
    for processors in ([stock.TemperatureLogitsWarper(1e-30)], [stock.TopKLogitsWarper(3), stock.LogitNormalization()]):
        expected, found, steps = greedy(processors, torch.tensor([[3e9, 1.0, 4e9, 2.0]]))
        assert torch.equal(expected, found) and steps.fused == 0


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "renormalize_logits": True},
        {"suppress_tokens": list(range(8, 80)), "min_new_tokens": 4},
    ],
    ids=lambda options: "-".join(options) or "alone",
)
def test_generate_that_removes_invalid_values(options, num_beams):
    assert_fused(tiny("llama"), remove_invalid_values=True, num_beams=num_beams, **options)


class Spoiled(torch.nn.Module):
    """A model's head of which some logits are not finite, in the second row only."""

    def __init__(self, head, value):
        super().__init__()
        self.head, self.value = head, value

    def forward(self, hidden):
        logits = self.head(hidden).clone()
        logits[1::2, :, 20::3] = self.value
        return logits


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.5, "bad_words_ids": [[20], [21]]}], ids=["alone", "edited"]
)
def test_invalid_values_are_removed_as_stock_does(options, value, num_beams):
    model = copy.deepcopy(tiny("llama"))
    model.lm_head = Spoiled(model.lm_head, value)
    stock_result, given, steps = generate_both(model, remove_invalid_values=True, num_beams=num_beams, **options)
    if num_beams == 1 or value == -math.inf:
        # Of NaN all log-probabilities become 0, and torch.topk takes any of them.
        assert_same(stock_result, given)
    # Logits of -inf do not stand in the way.
    assert (steps.fallback == 0) if value == -math.inf else list(steps.reasons) == ["invalid values to remove"]


@pytest.mark.parametrize("num_beams", [1, 2])
def test_what_is_hidden_is_as_low_as_finite_numbers_are_when_invalid_values_are_removed(num_beams):
    # Fewer tokens are left than beam search asks for, and the decay that follows lifts what was hidden.
    for options in (
        {"suppress_tokens": list(range(2, 211))},
        {"min_new_tokens": 5, "exponential_decay_length_penalty": (2, 3.0)},
    ):
        options = {"remove_invalid_values": True, "num_beams": num_beams, "max_new_tokens": 5, **options}
        stock_result, given, _ = generate_both(tiny("llama"), **options)
        assert_same(stock_result, given)


@pytest.mark.parametrize("beams", [2, 3])
def test_more_continuations_than_there_are_is_the_error_of_stock(beams):
    """End tokens ask for as many candidates as 1 + their number for each beam: here more than beams * vocabulary."""
    model = tiny("llama", vocab_size=37)
    options = {"num_beams": beams, "max_new_tokens": 3, "eos_token_id": list(range(37)), "do_sample": False}
    errors = []
    for block in (contextlib.nullcontext(), fused_decoding(model, whole_step=False)):
        with block, pytest.raises(RuntimeError) as caught:
            model.generate(**inputs_for(model), **options)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
