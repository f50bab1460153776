# SPDX-License-Identifier: Apache-2.0
"""Models of many families with random weights, and the comparison of stock and whole-step generate()."""

import copy
import functools
import sys

import pytest
import torch
import transformers

from decoding import (
    PAD,
    SHAPE_OF_BOTH,
    SOUND,
    TOKENS,
    VERSION,
    assert_same,
    assert_whole,
    generate_both,
    stock_gap,
    with_biases,
)
from fused_topk.generation import fused_decoding
from fused_topk.generation.whole_step import compiled, head


def always_by_heads(monkeypatch):
    """Steps that are not kept go on by the kernels of LM heads, however small these are."""
    monkeypatch.setattr(head, "_OPERATIONS", 0)
    monkeypatch.setattr(head, "_LEAST_HIDDEN_SIZE", 0)


whole, compiling = fused_decoding, functools.partial(fused_decoding, compile=True)

_SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "head_dim": 8,
}  # fmt: skip
_WINDOW = {"sliding_window": 5}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Windows are shorter than the texts of the tests, and in half of the layers where a family has two kinds of them.
FAMILIES = {
    "Llama": {},
    "Mistral": _WINDOW,
    "Gemma2": {**_WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0},
    "Gemma3": {**_WINDOW, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Qwen2": {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": {},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96},
    "Phi": {"partial_rotary_factor": 0.5},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": _EXPERTS,
}
# Keys and values of other sizes, and layers that read the keys of layers before them.
OTHER_LAYERS = {
    "DeepseekV3": {
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 16),
        **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
        **dict.fromkeys(("n_routed_experts", "num_key_value_heads"), 4),
        "num_experts_per_tok": 2,
    },
    "Gemma3n": {
        **_WINDOW,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "vocab_size_per_layer_input": 97,
        **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 8),
        "altup_num_inputs": 2,
    },
}
if not hasattr(transformers.cache_utils, "DummyLayer"):
    # Without a cache its layers read keys of their own there, which is not what generate() computes.
    del OTHER_LAYERS["Gemma3n"]
_HEADS = {"GPT2": "GPT2LMHeadModel"}
_CONFIGS = {"Gemma3": "Gemma3TextConfig", "Gemma3n": "Gemma3nTextConfig"}


def _head(name: str) -> type:
    return getattr(transformers, _HEADS.get(name, f"{name}ForCausalLM"))


def has_interface(name: str) -> bool:
    """Whether this version of the family asks transformers' attention interface: some had attention of their own."""
    return hasattr(sys.modules[_head(name).__module__], "ALL_ATTENTION_FUNCTIONS")


SERVED = [name for name in FAMILIES if has_interface(name)]


@functools.cache
def family(name: str, seed: int = 0, attention: str | None = None, dtype: torch.dtype = torch.float32):
    """A model with random weights, large enough that beams cross. Not to be changed: it is kept."""
    config = getattr(transformers, _CONFIGS.get(name, f"{name}Config"))
    options = {} if name == "GPT2" else _SHAPE
    torch.manual_seed(seed)
    made = config(
        initializer_range=0.3,
        attn_implementation=attention,
        **{**TOKENS, **options, **(FAMILIES | OTHER_LAYERS)[name]},
    )
    return with_biases(_head(name)(made), seed).to(dtype).eval()


@pytest.fixture(name="traced")
def traced_only(monkeypatch):
    """Steps are traced as they are to be compiled, and run as they were: the compiler itself takes its time."""
    monkeypatch.setattr(compiled, "_inductor", lambda graph, inputs: graph)


@pytest.fixture(name="model")
def own_model():
    """A model of its own for each test, which may change it."""
    return copy.deepcopy(family("Llama"))


_OF_BOTH = {
    **SHAPE_OF_BOTH,
    "max_position_embeddings": 96,
    "init_std": 0.5,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
# An embedding that is not scaled leaves random weights with the same token again and again.
ENCODER_DECODERS = {
    "Bart": ("ForConditionalGeneration", {"scale_embedding": True}),
    "Marian": ("MTModel", {"decoder_start_token_id": PAD, "scale_embedding": True}),
    "M2M100": ("ForConditionalGeneration", {}),
    "Whisper": ("ForConditionalGeneration", SOUND),
    # An encoder and a decoder that could generate by itself, of other sizes.
    "EncoderDecoder": ("Model", {}),
    "Speech2Text": ("ForConditionalGeneration", {**SOUND, "input_feat_per_channel": 8, "conv_channels": 32}),
}
# Before transformers 5 the first two have attention, or masks, of their own. The last one draws in every pass.
_SERVED_LATER = {"EncoderDecoder": (5, 0), "Speech2Text": (5, 0), "M2M100": (5, 17)}
SERVED_WITH_SOURCE = [name for name in ENCODER_DECODERS if _SERVED_LATER.get(name, (0, 0)) <= VERSION]


@functools.cache
def encoder_decoder(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **options):
    """A model with random weights. Not to be changed: it is kept."""
    head, own = ENCODER_DECODERS[name]
    torch.manual_seed(seed)
    options = {**TOKENS, **_OF_BOTH, **own, **options}
    config = getattr(transformers, f"{name}Config")
    config = _of_two_berts(options) if name == "EncoderDecoder" else config(**options)
    model = with_biases(getattr(transformers, f"{name}{head}")(config), seed).to(dtype).eval()
    # Random embeddings of tokens that are read are those that are chosen from: a token would choose itself.
    generator = torch.Generator().manual_seed(seed)
    head = copy.deepcopy(model.get_output_embeddings())
    head.weight = torch.nn.Parameter(torch.randn(head.weight.shape, generator=generator).to(dtype) * 0.4)
    model.set_output_embeddings(head)
    return model


def _of_two_berts(options):
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "initializer_range": 0.3}
    shape |= {"vocab_size": 97, "max_position_embeddings": 96}
    encoder, decoder = (transformers.BertConfig(hidden_size=size, **shape) for size in (48, 32))
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    for name in (*TOKENS, "decoder_start_token_id"):
        setattr(config, name, options[name])
    return config


def source_for(model, batch: int = 3, length: int = 7, padding: int | None = None) -> dict[str, torch.Tensor]:
    """Random sources.

    Args:
        padding: how many of the last places of the first text are padding. By default two, or none in a sound whose padding
            is not served.
    """
    generator = torch.Generator().manual_seed(batch * 100 + length)
    kind = model.config.model_type
    if padding is None:
        padding = 0 if kind == "speech_to_text" else 2
    if model.main_input_name == "input_ids":
        ids = torch.randint(8, model.config.vocab_size, (batch, length), generator=generator)
        mask = torch.ones_like(ids)
        if padding:
            ids[0, -padding:], mask[0, -padding:] = PAD, 0
        return {"input_ids": ids, "attention_mask": mask}
    # Of four frames, or two, each place of what the encoder gives.
    frames = 2 * model.config.max_source_positions if kind == "whisper" else 4 * length
    sound = torch.randn(batch, frames, 8, generator=generator).to(model.dtype)
    mask = torch.ones(batch, frames, dtype=torch.int64)
    mask[0, frames - 4 * padding :] = 0
    return {"input_features": sound.mT if kind == "whisper" else sound, "attention_mask": mask}


def assert_declined(model, reason, inputs=None, **options):
    """The call ran on the fused path, for that reason, with the results of stock."""
    stock, given, steps = generate_both(model, inputs, fused=whole, **options)
    if options.get("return_dict_in_generate", True):
        assert_same(stock, given)
    else:
        assert torch.equal(stock, given)
    assert steps.whole == 0
    assert steps.reasons == {reason: 1}


def assert_whole_of_seeds(made, inputs_of, num_beams, **options) -> None:
    """assert_whole() of the models of two seeds, or of more until beams have crossed often enough."""
    options = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": 14, **options}
    crossed = compared = 0
    for seed in range(8):
        model = made(seed)
        inputs = inputs_of(model)
        # Of two candidates a rounding apart stock takes one in float32 and the other in float64.
        is_enough = compared >= 2 and (num_beams == 1 or crossed >= 20)
        if not is_enough and stock_gap(model, inputs, **options) > 2e-5:
            result = assert_whole(model, inputs, **options)
            compared += 1
            crossed += 0 if num_beams == 1 else swaps(result, num_beams)
    assert compared >= 2
    assert num_beams == 1 or crossed >= 20


def swaps(result, beams: int) -> int:
    """How often a returned text goes on from another beam than the one that its last token was in."""
    indices = result["beam_indices"]
    is_token = indices[:, 1:] >= 0
    return int(((indices[:, 1:] % beams != indices[:, :-1] % beams) & is_token).sum())
