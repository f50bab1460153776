# SPDX-License-Identifier: Apache-2.0
"""Calls that go on from a cache of the user's, that leave one for the next call, and prompts that are embeddings."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from decoding import (  # noqa: F401
    TOLERANCE,
    SmallerIndexFirst,
    also,
    assert_same,
    assert_same_cache,
    assert_whole,
    generate_both,
    inputs_for,
    one_thread,
    stats,
)
from fused_topk.generation.whole_step import reasons
from whole_steps import OTHER_LAYERS, SERVED, compiling, family, traced_only, whole  # noqa: F401

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
# What generate() calls a cache that it is given.
NAME = "cache" if reasons.HAS_CACHE_ARGUMENT else "past_key_values"
BEAMS = pytest.mark.parametrize("num_beams", [1, 3])


def caches(model):
    """Empty ones, as users make them."""
    config = model.config.get_text_config(decoder=True)
    return {"plain": DynamicCache(), "of the model": DynamicCache(config=config)}


def with_more(inputs, sequences, number=4):
    """The texts with some tokens of a user behind them."""
    generator = torch.Generator().manual_seed(number)
    more = torch.randint(8, 97, (len(sequences), number), generator=generator)
    ids = torch.cat([sequences, more], 1)
    mask = torch.nn.functional.pad(
        inputs["attention_mask"], (0, ids.shape[1] - inputs["attention_mask"].shape[1]), value=1
    )
    return {"input_ids": ids, "attention_mask": mask}


def compare(model, inputs, cache, fused=whole, **options):
    """The result of a call that is given a cache, with stock's results in it and in the cache."""
    given = copy.deepcopy(cache)
    options = {**OPTIONS, "return_dict_in_generate": True, "output_scores": True, **options}
    stats(reset=True)
    torch.manual_seed(1)
    with SmallerIndexFirst():
        stock = model.generate(**inputs, **options, **{NAME: cache})
    torch.manual_seed(1)
    with fused(model):
        found = model.generate(**inputs, **options, **{NAME: given})
    steps = stats(reset=True)
    assert not steps.reasons, steps
    assert steps.whole > 0
    assert_same(stock, found, TOLERANCE)
    # It is the user's own.
    assert_same_cache(cache, given)
    return stock


def assert_chat(name, kind, fused=whole, seed=0, padding=2, **options):
    model = family(name, seed)
    inputs = inputs_for(model, 2, 7, padding)
    cache = caches(model)[kind]
    first = compare(model, inputs, cache, fused, **options)
    # One token is read otherwise than several are.
    for number in (4, 1):
        inputs = with_more(inputs, first["sequences"], number)
        first = compare(model, inputs, cache, fused, **options)
    assert cache.get_seq_length() == first["sequences"].shape[1] - 1


@pytest.mark.parametrize(("name", "kind"), [("Llama", "plain"), ("Gemma2", "of the model")])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 20}], ids="-".join)
def test_a_chat_goes_on_from_its_cache(name, kind, options):
    assert_chat(name, kind, **options)


@pytest.mark.parametrize("name", OTHER_LAYERS)
def test_layers_of_other_kinds(name):
    assert_chat(name, "of the model")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["plain", "of the model"])
@pytest.mark.parametrize("name", SERVED)
def test_chats_of_all_families(name, kind):
    assert_chat(name, kind)
    assert_chat(name, kind, seed=1, repetition_penalty=1.3, eos_token_id=list(range(5, 40)))


@pytest.mark.parametrize(
    "options", [{"do_sample": True, "top_k": 20}, *also({}, {"repetition_penalty": 1.3})], ids="-".join
)
def test_compiled_steps_go_on_from_a_cache(options, traced):
    assert_chat("Mistral", "of the model", compiling, output_scores=False, **options)


def prefix_cache(model, beams, kind="plain"):
    """What a shared beginning leaves, for each beam."""
    ids = torch.randint(8, 97, (1, 9), generator=torch.Generator().manual_seed(5))
    cache = caches(model)[kind]
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(2 * beams)
    return ids, cache


@BEAMS
@pytest.mark.parametrize("kind", ["plain", "of the model"])
def test_a_beginning_that_calls_share(kind, num_beams):
    model = family("Mistral", 1)
    ids, cache = prefix_cache(model, num_beams, kind)
    inputs = inputs_for(model, 2, 5)
    inputs = {
        name: torch.cat([(ids if name == "input_ids" else ids * 0 + 1).expand(2, -1), each], 1)
        for name, each in inputs.items()
    }
    for options in ({}, {"num_return_sequences": num_beams, "eos_token_id": list(range(5, 60))}):
        result = compare(model, inputs, copy.deepcopy(cache), num_beams=num_beams, **options)
        # Of the tokens that are given all are in the result.
        assert torch.equal(
            result["sequences"][:, :14], inputs["input_ids"].repeat_interleave(len(result["sequences"]) // 2, 0)
        )


@pytest.mark.skipif(not reasons.TAKES_NEW_TOKENS, reason="this version of transformers takes all tokens")
@BEAMS
def test_new_tokens_alone(num_beams):
    model = family("Llama")
    ids, cache = prefix_cache(model, num_beams)
    inputs = inputs_for(model, 2, 5)
    inputs["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (9, 0), value=1)
    result = compare(model, inputs, cache, num_beams=num_beams)
    assert torch.equal(result["sequences"][:, :5], inputs["input_ids"])


def declined(model, inputs, cache, **options):
    stats(reset=True)
    with whole(model):
        model.generate(**inputs, **{**OPTIONS, **options, NAME: cache})
    return stats(reset=True).reasons


def test_caches_that_are_not_served():
    model = family("Llama")
    inputs, cache = inputs_for(model), DynamicCache()
    first = compare(model, inputs, cache, num_beams=3, num_return_sequences=3)
    more = with_more({"attention_mask": inputs["attention_mask"].repeat_interleave(3, 0)}, first["sequences"])
    more = {name: each[::3] for name, each in more.items()}
    assert declined(model, more, cache, num_beams=3) == {"a cache in which beams of a sequence differ": 1}
    static = StaticCache(config=model.config, max_cache_len=30)
    assert declined(model, inputs, static) == {"a StaticCache": 1}


def test_a_call_that_is_declined_on_its_way_leaves_the_cache_to_stock(monkeypatch):
    from fused_topk.generation.whole_step.choosing import Choices

    def failing(self, state, constants, logits, ids, step, *args):
        if step == 3:
            raise reasons.Declined("a reason")
        return chosen(self, state, constants, logits, ids, step, *args)

    chosen = Choices.after
    monkeypatch.setattr(Choices, "after", failing)
    model = family("Llama")
    inputs, stock, given = inputs_for(model), DynamicCache(), DynamicCache()
    expected = model.generate(**inputs, **OPTIONS, **{NAME: stock})
    with whole(model):
        assert torch.equal(model.generate(**inputs, **OPTIONS, **{NAME: given}), expected)
    assert stats(reset=True).reasons == {"a reason": 1}
    assert_same_cache(stock, given)


def embedded(model, batch=2, padding=2):
    inputs = inputs_for(model, batch, 7, padding)
    return {
        "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach(),
        "attention_mask": inputs["attention_mask"],
    }


@BEAMS
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_prompt_of_embeddings(name, num_beams):
    model = family(name)
    result = assert_whole(model, embedded(model), num_beams=num_beams, eos_token_id=None, max_new_tokens=6)
    assert result["sequences"].shape[1] == 6


@BEAMS
def test_embeddings_with_processors_and_their_tokens(num_beams):
    model = family("Llama")
    assert_whole(
        model, embedded(model), num_beams=num_beams, repetition_penalty=1.5, no_repeat_ngram_size=2, output_scores=False
    )
    inputs = {**embedded(model), "input_ids": inputs_for(model, 2, 7, 2)["input_ids"]}
    result = assert_whole(model, inputs, num_beams=num_beams, max_length=12, max_new_tokens=None, eos_token_id=None)
    assert torch.equal(result["sequences"][::1, :7], inputs["input_ids"])


def test_embeddings_that_go_on_from_a_cache():
    model = family("Llama")
    inputs, cache = inputs_for(model, 2, 6), DynamicCache()
    with torch.no_grad():
        model(**{name: each[:, :4] for name, each in inputs.items()}, past_key_values=cache, use_cache=True)
    compare(model, {**embedded(model, padding=0), "attention_mask": torch.ones(2, 7, dtype=torch.long)}, cache)
