# SPDX-License-Identifier: Apache-2.0
"""Whole steps of models with layers that have a state in the place of keys: convolutions, and recurrences."""

import copy
import functools

import pytest
import torch
import transformers
from transformers import DynamicCache

from decoding import PAD, TOKENS, SmallerIndexFirst, assert_same_cache, assert_whole, inputs_for, stats, with_biases
from fused_topk.generation import fused_decoding
from fused_topk.generation.whole_step import entry
from fused_topk.generation.whole_step.cache import STATE_LAYER
from fused_topk.generation.whole_step.decoder import Decoder
from fused_topk.generation.whole_step.facts import cache_argument
from whole_steps import assert_declined, swaps, whole

# Before, models make caches of their own for states.
needs_states = pytest.mark.skipif(STATE_LAYER is None, reason="needs transformers with layers of caches for states")
exhaustive = pytest.mark.exhaustive
_TOKENS = {**TOKENS, "initializer_range": 0.3}
_SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MODELS = {
    # A state of a convolution, and one of a recurrence.
    "Qwen3Next": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 8,
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "shared_expert_intermediate_size": 32,
        **_EXPERTS,
    },
    # Of a convolution alone; attention comes first.
    "Lfm2Moe": {"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"], "num_dense_layers": 1, **_EXPERTS},
    "Bamba": {
        "num_hidden_layers": 2,
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    },
}


@functools.cache
def state_model(name: str):
    """A model with random weights. Not to be changed: it is kept."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_TOKENS, **_SHAPE, **_MODELS[name])
    return with_biases(getattr(transformers, f"{name}ForCausalLM")(config), 0).eval()


@needs_states
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(
    "name", ["Qwen3Next", *(pytest.param(each, marks=exhaustive) for each in ("Lfm2Moe", "Bamba"))]
)
def test_states_go_with_their_beams(name, num_beams):
    model = state_model(name)
    options = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": 12}
    # The cache of the result, with its states, is compared, too.
    for inputs in (inputs_for(model, 2, 6, padding=3), inputs_for(model, 3, 1)):
        stock = assert_whole(model, inputs, **options)
        assert isinstance(stock.get("cache", stock.get("past_key_values")), DynamicCache)
        if num_beams > 1:
            assert swaps(stock, num_beams) > 0
    ends = stock["sequences"][:, -4].tolist()
    assert_whole(model, inputs, **options, eos_token_id=ends)


@needs_states
def test_steps_with_states_are_not_kept():
    model = state_model("Qwen3Next")
    inputs = inputs_for(model)
    options = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    with SmallerIndexFirst():
        stock = model.generate(**inputs, **options)
        stats(reset=True)
        with fused_decoding(model, compile=True):
            assert torch.equal(model.generate(**inputs, **options), stock)
    steps = stats(reset=True)
    assert steps.whole > 0 and steps.compiled == 0
    assert not entry.ready_for(model).is_static


@needs_states
def test_a_cache_with_states_that_is_used_is_declined():
    model = state_model("Qwen3Next")
    inputs = inputs_for(model, 1, 8)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(inputs["input_ids"][:, :4], use_cache=True, **{cache_argument(model): cache})
    given = [copy.deepcopy(cache), cache]
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    stock = model.generate(**inputs, **options, past_key_values=given[0])
    stats(reset=True)
    with whole(model):
        found = model.generate(**inputs, **options, past_key_values=given[1])
    assert torch.equal(found, stock)
    assert_same_cache(*given)
    assert stats(reset=True).reasons == {"a cache with states that is used, or not of the model": 1}


@pytest.mark.skipif(STATE_LAYER is not None, reason="caches of transformers have states")
def test_a_result_with_a_cache_of_the_models_own_is_declined():
    config = transformers.Lfm2Config(**_TOKENS, **_SHAPE, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    model = with_biases(transformers.Lfm2ForCausalLM(config), 0).eval()
    assert_declined(model, "a cache of the model's own", num_beams=3)
    with whole(model):
        model.generate(**inputs_for(model), max_new_tokens=4, do_sample=False)
    assert stats(reset=True).whole > 0


@needs_states
def test_the_trial_sees_states_of_another_beam(monkeypatch):
    monkeypatch.setattr(Decoder, "_follow", lambda self, parents, step: None)
    model = state_model("Qwen3Next")
    entry.drop(model)
    assert_declined(model, "Qwen3NextForCausalLM computes something else with a shared prompt", num_beams=3)
    entry.drop(model)
