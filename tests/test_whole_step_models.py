# SPDX-License-Identifier: Apache-2.0
"""Whole steps of models whose attention is their own, with a row for each beam, or has sinks, and of layers with states."""

import copy
import functools

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from decoding import (  # noqa: F401
    PAD,
    SHAPE_OF_BOTH,
    TOKENS,
    VERSION,
    SmallerIndexFirst,
    also,
    assert_same_cache,
    assert_whole,
    inputs_for,
    one_thread,
    stats,
    with_biases,
    with_own_head,
)
from fused_topk.generation import fused_decoding
from fused_topk.generation.whole_step import attention, entry
from fused_topk.generation.whole_step.cache import STATE_LAYER, SourceLayer
from fused_topk.generation.whole_step.decoder import Decoder
from fused_topk.generation.whole_step.facts import cache_argument
from fused_topk.generation.whole_step.row_form import RowDecoder, decoder_of
from whole_steps import assert_declined, source_for, swaps, traced_only, whole  # noqa: F401

_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": PAD}
_MODELS = {
    "T5": ("ForConditionalGeneration", _T5),
    "UMT5": ("ForConditionalGeneration", _T5),
    "LED": ("ForConditionalGeneration",
        {**SHAPE_OF_BOTH, "attention_window": 4, "init_std": 0.3, "decoder_start_token_id": 2}),
    "Bloom": ("ForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}),
    "Falcon": ("ForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}),
    "XGLM": ("ForCausalLM", {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "init_std": 0.3}),
    # A window that is shorter than the texts of the tests.
    "GPTNeo": (
        "ForCausalLM",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 5,
            "initializer_range": 0.3,
        },
    ),
}  # fmt: skip


@functools.cache
def row_model(name: str):
    """A model with random weights. Not to be changed: it is kept."""
    head, options = _MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**TOKENS, **options)
    model = with_biases(getattr(transformers, f"{name}{head}")(config), 0).eval()
    if config.is_encoder_decoder:
        with_own_head(model)
    return model


def _inputs(model):
    return source_for(model) if model.config.is_encoder_decoder else inputs_for(model)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["T5", "LED", "Bloom", "Falcon", "GPTNeo", *also("UMT5", "XGLM")])
def test_a_row_for_each_beam(name, num_beams):
    model = row_model(name)
    stock = assert_whole(model, _inputs(model), num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=12)
    assert decoder_of(entry.ready_for(model).twin) is RowDecoder
    if num_beams > 1:
        assert swaps(stock, num_beams) > 0


def test_models_without_a_static_cache_are_not_kept():
    assert entry.ready_for(row_model("T5")).is_static
    assert not entry.ready_for(row_model("GPTNeo")).is_static


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["T5", "Bloom", "Falcon"])
def test_compiled(name, num_beams, traced):
    model = row_model(name)
    assert_whole(model, _inputs(model), compile=True, num_beams=num_beams, max_new_tokens=12, output_scores=False)


@pytest.mark.parametrize("name", ["position_bias", "s_aux"])
def test_attention_with_a_tensor_that_is_not_read_raises(name):
    query, key = torch.randn(3, 4, 1, 8), torch.randn(1, 4, 5, 8)
    attention.plain(None, query, key, key, None, position_ids=torch.zeros(1))
    with pytest.raises(ValueError, match=name):
        attention.plain(None, query, key, key, None, **{name: torch.zeros(4)})


class Made(TorchDispatchMode):
    """Counts the bytes of tensors that are made."""

    def __init__(self, *known):
        super().__init__()
        self._known = {each.untyped_storage().data_ptr() for each in known}
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in self._known:
            self._known.add(found.untyped_storage().data_ptr())
            self.num_bytes += found.untyped_storage().nbytes()
        return found


def test_rows_of_a_source_are_written_without_a_copy():
    layer = SourceLayer(7, copies=3)
    for length in (7, 5):
        keys, values = torch.randn(2, 4, length, 8), torch.randn(2, 4, length, 6)
        held = [layer.keys, layer.values] if layer.is_initialized else []
        with Made(keys, values, *held) as made:
            layer.update(keys, values)
        for kept, written in ((layer.keys, keys), (layer.values, values)):
            assert torch.equal(kept[:, :, :length], written.repeat_interleave(3, 0))
            assert not kept[:, :, length:].any()
        # The first time the rows themselves. A number that is written is a tensor, too.
        rows = layer.keys.nbytes + layer.values.nbytes if length == 7 else 0
        assert rows <= made.num_bytes <= rows + 64


# Sinks, and encoder-decoders with experts.


@functools.cache
def _gpt_oss():
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **TOKENS,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=96,
        initializer_range=0.3,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        **(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
            if VERSION >= (5, 0)
            else {"rope_scaling": None}
        ),
    )
    model = with_biases(transformers.GptOssForCausalLM(config), 0).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            # So great that they take half of the weights and more.
            layer.self_attn.sinks.copy_(torch.linspace(1, 4, 4))
    return model


@pytest.mark.parametrize("num_beams", [1, 3])
def test_sinks(num_beams):
    model = _gpt_oss()
    inputs = inputs_for(model, batch=3, padding=3)
    stock = assert_whole(model, inputs, num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=14)
    if num_beams > 1:
        assert swaps(stock, num_beams) > 0


_EXPERTS = {
    "NllbMoe": {**SHAPE_OF_BOTH, **{f"{side}_sparse_step": 2 for side in ("encoder", "decoder")}, "num_experts": 4,
        "expert_capacity": 64, "max_position_embeddings": 96, "init_std": 0.3, "decoder_start_token_id": 2},
    "SwitchTransformers": {
        **{"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4},
        **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "expert_capacity": 64},
        "decoder_start_token_id": PAD,
    },
}  # fmt: skip


@pytest.mark.parametrize("num_beams", [3, *also(1)])
# Before transformers 5 Switch reads no text without a cache, and cannot be tried.
@pytest.mark.parametrize("name", [name for name in _EXPERTS if VERSION >= (5, 0) or name != "SwitchTransformers"])
def test_experts_of_encoder_decoders(name, num_beams, monkeypatch):
    tried = []
    made = entry._made_ready
    monkeypatch.setattr(entry, "_made_ready", lambda model: tried.append(1) or made(model))
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**TOKENS, **_EXPERTS[name])
    model = with_biases(getattr(transformers, f"{name}ForConditionalGeneration")(config), 0).eval()
    with_own_head(model)
    inputs = source_for(model)
    stock = assert_whole(model, inputs, num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=12)
    assert decoder_of(entry.ready_for(model).twin) is RowDecoder
    # Routers count how many tokens they have had.
    assert_whole(model, source_for(model, length=12), num_beams=num_beams, max_new_tokens=5)
    assert len(tried) == 1
    if num_beams > 1:
        assert swaps(stock, num_beams) > 0


def test_experts_that_leave_out_tokens():
    reason = "experts that leave out tokens"
    config = transformers.NllbMoeConfig(moe_eval_capacity_token_fraction=0.5)
    assert entry.reasons._of_config(config) == reason
    assert entry.reasons._of_config(transformers.NllbMoeConfig(second_expert_policy="random")) == reason
    assert entry.reasons._of_config(transformers.NllbMoeConfig()) is None


# Layers that have a state in the place of keys: convolutions, and recurrences.


# Before, models make caches of their own for states.
needs_states = pytest.mark.skipif(STATE_LAYER is None, reason="needs transformers with layers of caches for states")
_TOKENS = {**TOKENS, "initializer_range": 0.3}
_OF_STATES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
_OF_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_STATES = {
    # A state of a convolution, and one of a recurrence.
    "Qwen3Next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8,
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8), "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "shared_expert_intermediate_size": 32, **_OF_EXPERTS},
    # Of a convolution alone; attention comes first.
    "Lfm2Moe": {"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"], "num_dense_layers": 1,
        **_OF_EXPERTS},
    "Bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 8},
}  # fmt: skip


@functools.cache
def state_model(name: str):
    """A model with random weights. Not to be changed: it is kept."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_TOKENS, **_OF_STATES, **_STATES[name])
    return with_biases(getattr(transformers, f"{name}ForCausalLM")(config), 0).eval()


@needs_states
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["Qwen3Next", *also("Lfm2Moe", "Bamba")])
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
    with whole(model):
        found = model.generate(**inputs, **options, past_key_values=given[1])
    assert torch.equal(found, stock)
    assert_same_cache(*given)
    assert stats(reset=True).reasons == {"a cache with states that is used, or not of the model": 1}


@pytest.mark.skipif(STATE_LAYER is not None, reason="caches of transformers have states")
def test_a_result_with_a_cache_of_the_models_own_is_declined():
    config = transformers.Lfm2Config(**_TOKENS, **_OF_STATES, num_hidden_layers=2, layer_types=["full_attention"] * 2)
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
