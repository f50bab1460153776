# SPDX-License-Identifier: Apache-2.0
"""Options of generate() that stay fused: what is returned beside the sequences, and processors that touch whole rows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

import transformers

from decoding import assert_same, generate_both, one_thread, tiny  # noqa: F401
from fused_topk.generation import fused_decoding
from fused_topk.generation.record import Recorded

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
