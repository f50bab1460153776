# SPDX-License-Identifier: Apache-2.0
"""FusedTopKLogitsProcessor: it keeps what the four warpers of transformers keep, and says what is wrong with an argument."""

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding import inputs_for, one_thread, stats, tiny  # noqa: F401
from fused_topk.generation import FusedTopKLogitsProcessor, fused_decoding


def logits_of(vocab_size):
    """float32 [6, V]."""
    return 2.5 * torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0))


def stock_chain(top_k, temperature=1.0, top_p=1.0, min_p=0.0):
    chain = [TemperatureLogitsWarper(float(temperature)), TopKLogitsWarper(top_k)]
    chain += [TopPLogitsWarper(float(top_p))] if top_p < 1 else []
    return LogitsProcessorList(chain + ([MinPLogitsWarper(float(min_p))] if min_p > 0 else []))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"top_k": 1},
        {"top_k": 50, "temperature": 0.7},
        {"top_k": 20, "temperature": 2.0, "min_p": 0.1},
        {"top_k": 2999},
        {"top_k": 10**6},
        {"top_k": 40, "temperature": 1.3, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_processor_keeps_what_the_chain_of_warpers_keeps(arguments, dtype):
    scores = logits_of(3000).to(dtype)
    before = scores.clone()
    given = FusedTopKLogitsProcessor(**arguments)(None, scores)
    assert torch.equal(scores, before), "scores were changed in place"
    assert given.dtype == dtype and given.shape == scores.shape
    expected = stock_chain(**arguments)(None, scores)
    if dtype == torch.float32 or "top_p" not in arguments:
        assert torch.equal(given, expected)
        return
    # Among equals at the boundary transformers' sort keeps any, the processor those of smaller index: as many, and
    # differences only between equals.
    assert torch.equal(given.sort().values, expected.sort().values)


@pytest.mark.parametrize(
    "arguments", [{"top_p": 0.3}, {"top_p": 0.99}, {"min_p": 0.5}, {"top_p": 0.5, "min_p": 0.1}], ids=str
)
def test_what_is_likely_counts_all_that_tie(arguments):
    """Also those beyond the room for them, where top-p removes the last of the list."""
    scores = torch.zeros(2, 1000)
    scores[:, :3] = torch.tensor([3.0, 2.0, 1.0])
    given = FusedTopKLogitsProcessor(top_k=5, **arguments)(None, scores)
    expected = stock_chain(5, **arguments)(None, scores)
    assert torch.equal(given.isfinite().sum(-1), expected.isfinite().sum(-1))


ARGUMENTS = {"top_k": 40, "temperature": 1.3, "top_p": 0.9, "min_p": 0.01}


@pytest.mark.parametrize("arguments", [{"top_k": 3}, ARGUMENTS], ids=["top_k", "all"])
def test_float64_scores_stay_exact(arguments):
    # What tells these numbers apart is beyond float32.
    scores = logits_of(3000).double().round() + 1e-12 * torch.arange(3000)
    given = FusedTopKLogitsProcessor(**arguments)(None, scores)
    assert given.dtype == torch.float64
    assert torch.equal(given, stock_chain(**arguments)(None, scores))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3000,), (2, 3, 3000), (3, 2, 1, 3000), (2, 0, 3000)], ids=len)
def test_scores_of_any_number_of_dimensions(shape, dtype):
    scores = logits_of(3000).to(dtype)[: math.prod(shape[:-1])].reshape(shape)
    for arguments in ({"top_k": 7}, {"top_k": 40, "temperature": 1.3, "min_p": 0.01}):
        given = FusedTopKLogitsProcessor(**arguments)(None, scores)
        assert given.shape == shape
        assert torch.equal(given.view(-1, 3000), stock_chain(**arguments)(None, scores.view(-1, 3000)))
    expected = TopKLogitsWarper(7)(None, scores)
    assert torch.equal(FusedTopKLogitsProcessor(7)(None, scores), expected)


def test_processor_keeps_a_least_number_of_tokens():
    scores = logits_of(300)
    given = FusedTopKLogitsProcessor(2, np.float32(1), top_p=0.01, min_p=np.float64(1), min_tokens_to_keep=np.int64(6))
    assert given.top_k == TopKLogitsWarper(2, min_tokens_to_keep=6).top_k == 6
    assert (given(None, scores).isfinite().sum(-1) == 6).all()
    given = FusedTopKLogitsProcessor(20, top_p=0.01, min_tokens_to_keep=6)
    expected = LogitsProcessorList([TopKLogitsWarper(20), TopPLogitsWarper(0.01, min_tokens_to_keep=6)])(None, scores)
    assert torch.equal(given(None, scores), expected)


def test_processor_sets_its_filter_value():
    given = FusedTopKLogitsProcessor(top_k=2, filter_value=-7.0)(None, torch.tensor([[1.0, 3.0, 2.0]]))
    assert given.tolist() == [[-7.0, 3.0, 2.0]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "`top_k` must be at least 1, got 0"),
        ({"top_k": 2.0}, TypeError, "`top_k` must be an int, got float"),
        ({"top_k": 2, "min_tokens_to_keep": 0}, ValueError, "`min_tokens_to_keep` must be at least 1, got 0"),
        ({"top_k": 2, "temperature": 0.0}, ValueError, "`temperature` must be positive and finite, got 0.0"),
        ({"top_k": 2, "temperature": "hot"}, TypeError, "`temperature` must be a number, got str"),
        ({"top_k": 2, "top_p": 0.0}, ValueError, "`top_p` must satisfy 0 < top_p <= 1, got 0.0"),
        ({"top_k": 2, "min_p": 1.5}, ValueError, "`min_p` must satisfy 0 <= min_p <= 1, got 1.5"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_processor_says_what_is_wrong_with_an_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        FusedTopKLogitsProcessor(**arguments)


def test_processor_in_generate():
    model = tiny("llama")
    processors = LogitsProcessorList([FusedTopKLogitsProcessor(top_k=5, temperature=0.8, top_p=0.9)])
    options = {"do_sample": True, "max_new_tokens": 6, "top_k": 0}
    # In stock generate() it draws what the chain of warpers draws, and so it does in whole steps.
    torch.manual_seed(0)
    expected = model.generate(**inputs_for(model), **options | {"top_k": 5, "temperature": 0.8, "top_p": 0.9})
    torch.manual_seed(0)
    assert torch.equal(model.generate(**inputs_for(model), logits_processor=processors, **options), expected)
    torch.manual_seed(0)
    with fused_decoding(model):
        assert torch.equal(model.generate(**inputs_for(model), logits_processor=processors, **options), expected)
    steps = stats(reset=True)
    assert steps.whole == 6 and not steps.reasons, steps
