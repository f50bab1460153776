# SPDX-License-Identifier: Apache-2.0
"""Whole steps of models whose attention has sinks, and of encoder-decoders with experts."""

import functools

import pytest
import torch
import transformers

from decoding import PAD, SHAPE_OF_BOTH, TOKENS, assert_whole, inputs_for, with_biases
from fused_topk.generation.whole_step import entry
from fused_topk.generation.whole_step.row_form import RowDecoder, decoder_of
from whole_steps import source_for, swaps

_IS_5 = int(transformers.__version__.split(".")[0]) >= 5


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
        **({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} if _IS_5 else {"rope_scaling": None}),
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
    "NllbMoe": {
        **SHAPE_OF_BOTH,
        **{f"{side}_sparse_step": 2 for side in ("encoder", "decoder")},
        "num_experts": 4,
        "expert_capacity": 64,
        "max_position_embeddings": 96,
        "init_std": 0.3,
        "decoder_start_token_id": 2,
    },
    "SwitchTransformers": {
        **{"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4},
        **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "expert_capacity": 64},
        "decoder_start_token_id": PAD,
    },
}


@pytest.mark.parametrize("num_beams", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
# Before transformers 5 Switch reads no text without a cache, and cannot be tried.
@pytest.mark.parametrize("name", [name for name in _EXPERTS if _IS_5 or name != "SwitchTransformers"])
def test_experts_of_encoder_decoders(name, num_beams, monkeypatch):
    tried = []
    made = entry._made_ready
    monkeypatch.setattr(entry, "_made_ready", lambda model: tried.append(1) or made(model))
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**TOKENS, **_EXPERTS[name])
    model = with_biases(getattr(transformers, f"{name}ForConditionalGeneration")(config), 0).eval()
    # Random embeddings of tokens that are read would choose themselves.
    head = torch.nn.Linear(32, 97, bias=False)
    head.weight.data = torch.randn(97, 32, generator=torch.Generator().manual_seed(0)) * 0.4
    model.set_output_embeddings(head)
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
