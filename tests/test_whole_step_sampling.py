# SPDX-License-Identifier: Apache-2.0
"""Sampling in whole steps: the distribution of stock, and of the fused path the very draws."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from decoding import generate_both, inputs_for, one_thread  # noqa: F401
from fused_topk.generation import fused_decoding, stats
from fused_topk.generation.whole_step import reasons
from test_generation_sampling import is_likely
from whole_steps import encoder_decoder, family, source_for

sampled = functools.partial(fused_decoding, sampling=True, whole_step="eager")
DRAWS = 4000
needs_sorted_draws = pytest.mark.skipif(
    not reasons.SORTS_DRAWN_BEAMS, reason="this version's beam sampling goes on with other beams"
)


def drawn(model, inputs, draws, fused, **options):
    inputs = {name: each.expand(draws, *each.shape[1:]) for name, each in inputs.items()}
    stats(reset=True)
    with fused(model):
        return model.generate(**inputs, do_sample=True, **options), stats(reset=True)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"top_k": 20},
        {"top_k": 0, "top_p": 0.8},
        {"top_k": 0, "min_p": 0.05},
        {"top_k": 0, "repetition_penalty": 1.4, "sequence_bias": [[[9], 2.0], [[30], -2.0]]},
        {"top_k": 30, "top_p": 0.9, "temperature": 1.5, "repetition_penalty": 1.4, "bad_words_ids": [[9], [30]]},
    ],
    ids=lambda options: "-".join(options),
)
def test_the_second_token_has_the_stock_distribution(options):
    # The second looks into the cache. Of the texts that begin with the same token it has one distribution.
    model = family("Llama", 1)
    inputs = inputs_for(model, batch=1, length=3)
    torch.manual_seed(0)
    found, steps = drawn(model, inputs, DRAWS, sampled, max_new_tokens=2, eos_token_id=None, **options)
    assert steps.whole == 2 and not steps.not_whole, steps.not_whole
    first = found[:, 3].mode().values
    after_it = found[found[:, 3] == first]
    assert len(after_it) > 400
    stock = model.generate(
        after_it[:1, :4],
        do_sample=True,
        return_dict_in_generate=True,
        output_scores=True,
        max_new_tokens=1,
        eos_token_id=None,
        **options,
    )
    probabilities = stock.scores[0][0].softmax(-1)
    assert (probabilities > 0).sum() > 2
    assert is_likely(after_it[:, 4].bincount(minlength=97), probabilities, len(after_it))


@pytest.mark.parametrize(
    "options",
    [{"top_k": 7}, {"top_k": 0, "top_p": 0.7}, {"top_k": 0, "repetition_penalty": 1.3}, {"top_k": 9, "min_p": 0.1}],
)
def test_the_draws_are_those_of_the_fused_path(options):
    for model, inputs in (
        (family("Llama", 1), inputs_for(family("Llama"), batch=4, padding=2)),
        (encoder_decoder("Bart", 1), source_for(encoder_decoder("Bart"), 4)),
    ):
        found = []
        for fused in (functools.partial(fused_decoding, sampling=True), sampled):
            torch.manual_seed(5)
            given, steps = drawn(model, inputs, 4, fused, max_new_tokens=12, **options)
            found.append(given)
        assert steps.whole == steps.fused > 4 and not steps.not_whole
        assert torch.equal(*found)
        torch.manual_seed(6)
        assert not torch.equal(drawn(model, inputs, 4, sampled, max_new_tokens=12, **options)[0], found[0])


@needs_sorted_draws
@pytest.mark.parametrize("num_return_sequences", [1, 3])
def test_drawn_beams_are_those_of_the_fused_path(num_return_sequences):
    model = family("Llama", 2)
    inputs = inputs_for(model, batch=3, padding=2)
    options = {
        "num_beams": 3,
        "num_return_sequences": num_return_sequences,
        "top_k": 12,
        "max_new_tokens": 10,
        "return_dict_in_generate": True,
    }
    found = []
    for fused in (functools.partial(fused_decoding, sampling=True), sampled):
        torch.manual_seed(5)
        given, steps = drawn(model, inputs, 3, fused, **options)
        found.append(given)
    assert steps.whole == steps.fused > 4 and not steps.not_whole
    assert torch.equal(found[0]["sequences"], found[1]["sequences"])
    assert torch.equal(found[0]["beam_indices"], found[1]["beam_indices"])
    assert len(set(found[1]["beam_indices"][:, 1:].flatten().tolist())) > 2


def test_several_texts_of_a_prompt():
    model = family("Llama", 1)
    torch.manual_seed(1)
    found, steps = drawn(
        model, inputs_for(model, batch=2), 2, sampled, num_return_sequences=4, top_k=20, max_new_tokens=6
    )
    assert found.shape[0] == 8 and steps.whole == 6 and not steps.not_whole
    assert len({tuple(row) for row in found.tolist()}) > 4


def test_a_row_that_keeps_more_than_was_listed_is_drawn_from_the_whole(monkeypatch):
    from fused_topk.generation.choice import warping

    monkeypatch.setattr(warping, "_WINDOW", 3)
    model = family("Llama", 1)
    torch.manual_seed(0)
    found, steps = drawn(model, inputs_for(model, 1, 3), DRAWS, sampled, top_k=0, top_p=0.9, max_new_tokens=1)
    assert steps.whole == 1 and not steps.not_whole
    stock = model.generate(
        **inputs_for(model, 1, 3),
        do_sample=True,
        top_k=0,
        top_p=0.9,
        max_new_tokens=1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    probabilities = stock.scores[0][0].softmax(-1)
    assert (probabilities > 0).sum() > 3
    assert is_likely(found[:, -1].bincount(minlength=97), probabilities, DRAWS)


def test_what_is_not_served_draws_the_stock_tokens():
    model = family("Llama", 1)
    for options, reason in (
        ({"top_k": 0, "temperature": 1e31}, "sampling from the whole vocabulary"),
        ({"top_k": 5, "typical_p": 0.5}, "logits processor TypicalLogitsWarper"),
    ):
        stock, given = [], []
        for into, fused in ((stock, None), (given, sampled)):
            torch.manual_seed(3)
            if fused is None:
                into.append(model.generate(**inputs_for(model), do_sample=True, max_new_tokens=6, **options))
            else:
                found, steps = drawn(model, inputs_for(model), 2, fused, max_new_tokens=6, **options)
                into.append(found)
        assert torch.equal(stock[0], given[0])
        assert steps.not_whole == {reason: 1}


@pytest.mark.parametrize("num_beams", [1, 3])
def test_scores_of_samples(num_beams):
    if num_beams > 1 and not reasons.SORTS_DRAWN_BEAMS:
        pytest.skip("this version's beam sampling goes on with other beams")
    # With one token left of each row there is nothing random.
    options = {"do_sample": True, "top_k": 1, "num_beams": num_beams, "output_scores": True}
    if num_beams > 1:
        options |= {"top_k": 2, "temperature": 0.01}
    stock, given, steps = generate_both(family("Llama", 1), fused=sampled, **options)
    assert steps.whole == steps.fused > 0 and not steps.not_whole
    if num_beams == 1:
        assert torch.equal(stock["sequences"], given["sequences"])
        torch.testing.assert_close(given["scores"], stock["scores"], rtol=0, atol=2e-5)
    assert len(given["scores"]) == steps.whole
