# SPDX-License-Identifier: Apache-2.0
"""Greedy and beam search of fused generate() against stock, over models, options and inputs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

import transformers

from decoding import (
    EOS,
    NAMES,
    assert_same,
    assert_whole,
    generate_both,
    inputs_for,
    one_thread,  # noqa: F401
    tiny,
)

DECODERS = ("gpt2", "llama", "mixtral")


@pytest.mark.parametrize("num_beams", [1, 3, 4, 8])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "mamba"])
def test_generate_gives_the_stock_sequences(name, num_beams):
    for seed in range(2):
        assert_whole(tiny(name, seed=seed), num_beams=num_beams, num_return_sequences=min(2, num_beams))


@pytest.mark.parametrize(
    ("name", "vocab_size"), [("gpt2", 50257), ("llama", 128256), ("t5", 32128), ("whisper", 51865)]
)
def test_generate_at_real_vocabulary_sizes(name, vocab_size):
    model = tiny(name, vocab_size=vocab_size)
    for num_beams in (1, 4):
        assert_whole(model, num_beams=num_beams, max_new_tokens=6)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 2.0])
def test_generate_with_every_rule_of_stopping(length_penalty, early_stopping):
    for name in ("llama", "bart"):
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping, "eos_token_id": [5, 6, 7, 40]}
        assert_whole(tiny(name), num_beams=4, num_return_sequences=4, max_new_tokens=14, **options)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"eos_token_id": [EOS, 6]},
        {"return_dict_in_generate": False, "output_scores": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_generate_with_options_of_the_loop(options, num_beams):
    model = tiny("llama")
    if options.get("return_dict_in_generate", True):
        assert_whole(model, num_beams=num_beams, **options)
    else:
        stock, given, steps = generate_both(model, num_beams=num_beams, **options)
        assert torch.equal(stock, given) and steps.whole and not steps.stock


@pytest.mark.parametrize("name", DECODERS)
def test_generate_with_left_padding(name):
    model = tiny(name)
    for num_beams in (1, 4):
        assert_whole(model, inputs_for(model, batch=3, padding=3), num_beams=num_beams)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_generate_from_embeddings(num_beams):
    model = tiny("llama")
    inputs = inputs_for(model)
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    assert_whole(model, {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]}, num_beams=num_beams)


def test_beam_search_returns_the_scores_it_would_and_is_still_fused():
    options = {"output_scores": True, "output_logits": True, "num_return_sequences": 3}
    for name in ("llama", "t5"):
        assert_whole(tiny(name), num_beams=4, **options)
        assert_whole(tiny(name), num_beams=4, repetition_penalty=1.5, no_repeat_ngram_size=2, **options)


def test_wide_beams_of_a_small_vocabulary():
    # More candidates are kept than a row has tokens, so beams that are no candidates in the first step come in.
    assert_whole(tiny("llama"), num_beams=130, eos_token_id=[5, 6, 7], max_new_tokens=4)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"output_attentions": True},
        {"output_hidden_states": True},
        # transformers 5.0 itself fails with it.
        pytest.param(
            {"prefill_chunk_size": 2},
            marks=pytest.mark.skipif(transformers.__version__.startswith("5.0."), reason="broken in transformers 5.0"),
        ),
    ],
    ids=lambda options: "-".join(options),
)
def test_options_that_stock_serves(options, num_beams):
    stock, given, steps = generate_both(tiny("llama"), num_beams=num_beams, **options)
    assert_same(stock, given)
    assert not steps.whole and steps.stock and steps.reasons, steps


@pytest.mark.parametrize("num_beams", [1, 3])
def test_states_alone_are_left_to_stock(num_beams):
    for inputs in (inputs_for(tiny("mamba")), inputs_for(tiny("mamba"), batch=3, padding=3)):
        stock, given, steps = generate_both(tiny("mamba"), inputs, num_beams=num_beams)
        assert torch.equal(stock.sequences, given.sequences)
        assert not steps.whole and steps.stock, steps


def test_float64():
    for num_beams in (1, 3):
        assert_whole(tiny("llama", torch.float64), num_beams=num_beams)
