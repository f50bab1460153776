# SPDX-License-Identifier: Apache-2.0
"""What is not served as a whole step takes the fused path and says why; the model stays as it is."""

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import nn
from transformers import MaxLengthCriteria, StoppingCriteriaList

from decoding import VERSION, also, assert_whole, inputs_for, one_thread, stats  # noqa: F401
from fused_topk.generation import disable, fused_decoding
from fused_topk.generation.whole_step import attribute, entry
from fused_topk.generation.whole_step.facts import num_positions
from whole_steps import (  # noqa: F401
    SERVED,
    SERVED_WITH_SOURCE,
    assert_declined,
    encoder_decoder,
    family,
    own_model,
    source_for,
    traced_only,
    whole,
)

BEAMS = {"num_beams": 3, "max_new_tokens": 6}


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("use_cache=False", {"use_cache": False}),
        ("cache_implementation", {"cache_implementation": "dynamic"}),
        ("cache_implementation", {"cache_implementation": "static"}),
        # transformers 5.0 itself fails with it.
        pytest.param(
            "prefill_chunk_size",
            {"prefill_chunk_size": 2},
            marks=pytest.mark.skipif(VERSION == (5, 0), reason="broken"),
        ),
        ("output_attentions", {"output_attentions": True}),
        ("output_hidden_states", {"output_hidden_states": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_are_not_served(reason, options, model):
    for beams in (1, 3):
        assert_declined(model, reason, num_beams=beams, max_new_tokens=6, **options)


@pytest.mark.parametrize("way", [False, *also(True)])
@pytest.mark.parametrize("length", [8, 9, 11, 12, 13, 30])
def test_a_length_of_the_users_own(length, way, model, traced):
    # The prompt has six tokens, and the call asks for six.
    criteria = StoppingCriteriaList([MaxLengthCriteria(length)])
    for inputs in (inputs_for(model), inputs_for(model, batch=1)):
        options = {"stopping_criteria": criteria, "max_new_tokens": 6, "eos_token_id": None}
        stock = assert_whole(model, inputs, compile=way, **options)
        assert stock["sequences"].shape[1] == length
        if length <= 12:
            assert_whole(model, inputs, compile=way, num_beams=3, **options)


def test_a_criterion_of_length_that_somebody_has_patched(model, monkeypatch):
    own = MaxLengthCriteria.__call__
    monkeypatch.setattr(MaxLengthCriteria, "__call__", lambda self, *args, **kwargs: own(self, *args, **kwargs))
    assert_declined(model, "stopping criterion MaxLengthCriteria", max_new_tokens=6)


def test_a_longer_length_of_the_users_own_with_beams(model):
    # Stock beam search has no place for it, and serves it where all texts end before.
    options = {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(20)]), **BEAMS}
    reason = "a MaxLengthCriteria beyond max_length, with beams"
    assert_declined(model, reason, eos_token_id=[*range(5, 97)], early_stopping=True, **options)
    with pytest.raises(IndexError), whole(model):
        model.generate(**inputs_for(model), eos_token_id=None, do_sample=False, **options)


# Tokens of a text that is nearly as long as models are trained for.
LONG = 90


def long_text(model):
    """The inputs of a call that begins with a long text."""
    if not model.config.is_encoder_decoder:
        return inputs_for(model, batch=1, length=LONG)
    begin = [model.generation_config.decoder_start_token_id]
    return {
        **source_for(model, batch=1),
        "decoder_input_ids": torch.tensor([begin + [40, 41, 42] * (LONG // 3)])[:, :LONG],
    }


@pytest.mark.parametrize("way", [False, True])
@pytest.mark.parametrize("name", sorted({"GPT2", "Bart", "EncoderDecoder"} & {*SERVED, *SERVED_WITH_SOURCE}))
def test_texts_of_more_than_the_positions_that_were_learned(name, way, traced):
    model = copy.deepcopy((encoder_decoder if name in SERVED_WITH_SOURCE else family)(name))
    positions, inputs = num_positions(model.config), long_text(model)
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": positions + 1 - LONG}
    # The last token is not read: stock raises one token later.
    reason = f"texts of more than the {positions} positions of a {type(model).__name__}"
    assert_declined(model, reason, inputs, **options)
    # Also where steps cannot be kept.
    entry._ready[model] = entry._ready.get(model)._replace(is_static=False)
    assert_declined(model, reason, inputs, **options)
    options["max_new_tokens"] += 1
    raised = []
    for block in (nullcontext(), fused_decoding(model, compile=way)):
        with pytest.raises(Exception) as error, block:
            model.generate(**inputs, **options)
        raised.append((error.type, str(error.value)))
    assert raised[0] == raised[1]


def test_more_positions_than_were_trained_where_they_are_computed(model):
    of_both = [encoder_decoder("M2M100")] if "M2M100" in SERVED_WITH_SOURCE else []
    for each in (model, *of_both):
        assert_whole(each, long_text(each), max_new_tokens=20, eos_token_id=None)


_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}


_FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [3.0, 4.0, 5.0, 7.0]}
_LONGEST = {"max_position_embeddings": 96, "original_max_position_embeddings": 20}
_CHANGING = {
    "Llama-dynamic": ("Llama", {"rope_type": "dynamic", "factor": 4.0}, {"max_position_embeddings": 20}),
    "Llama-longrope": ("Llama", {"rope_type": "longrope", "factor": 4.0, **_FACTORS, **_LONGEST}, {}),
    "Phi3-longrope": ("Phi3", {"type": "longrope", **_FACTORS}, _LONGEST),
}
_QUICK = [("Llama-dynamic", 3), ("Phi3-longrope", 1)]


def _changing(case):
    name, rotary, options = _CHANGING[case]
    if VERSION >= (5, 0):
        rotary = {"rope_theta": 1e4, "rope_type": "longrope", **rotary}
        rotary = {**rotary, **({"original_max_position_embeddings": 20} if case != "Llama-dynamic" else {})}
    rotary = {name: value for name, value in rotary.items() if name != "max_position_embeddings"}
    options = {"max_position_embeddings": 96, **options, "num_key_value_heads": 2, "intermediate_size": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 5}
    torch.manual_seed(0)
    own = {"rope_parameters" if VERSION >= (5, 0) else "rope_scaling": rotary}
    config = getattr(transformers, f"{name}Config")(**{**_SHAPE, **options, **tokens, **own})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("case", "num_beams"),
    [
        pytest.param(case, beams, marks=() if (case, beams) in _QUICK else pytest.mark.exhaustive)
        for case in _CHANGING
        for beams in (1, 3)
    ],
)
def test_rotary_embeddings_that_change_with_the_length(case, num_beams):
    model = _changing(case)
    inputs = inputs_for(model, batch=3, length=8, padding=3)
    options = {"num_beams": num_beams, "eos_token_id": None}
    # As long as they stay as they are, to the last token.
    assert_whole(model, inputs, max_new_tokens=12, **options)
    if case == "Llama-dynamic" and VERSION < (5, 24):
        # There two stock calls of a long text may differ.
        return
    reason = "texts of more than 20 tokens, where rotary embeddings change"
    if case.startswith("Phi") and VERSION < (5, 24):
        reason = "a preparation of the model's own for texts of more than 20 tokens"
    assert_declined(model, reason, inputs, max_new_tokens=24, **options)
    # A long text leaves other numbers in the model, which stay there.
    long = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=0, **options)
    assert_whole(model, inputs, max_new_tokens=12, **options)
    again = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=0, **options)
    assert torch.equal(again, long)


def test_rotary_embeddings_that_differ_among_layers():
    config = transformers.LlamaConfig()
    config.rope_scaling = config.rope_parameters = {
        "full_attention": {"rope_type": "longrope"},
        "sliding_attention": {"rope_type": "default"},
    }
    assert entry.reasons._of_config(config) == "rotary embeddings of kind longrope"


@pytest.mark.skipif(VERSION < (5, 24), reason="this version of transformers goes on with another text")
def test_phi_3_reads_its_text_again_and_is_served():
    # Its own preparation drops the cache where texts pass that length, and comes to the same.
    config = transformers.Phi3Config(
        **_SHAPE, intermediate_size=64, original_max_position_embeddings=10, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(config).eval()
    for beams in (1, 3):
        assert_whole(model, num_beams=beams, max_new_tokens=12)


def test_hooks_and_replaced_functions(model):
    assert_whole(model, **BEAMS)
    layer = model.model.layers[0]
    for register in (layer.register_forward_hook, layer.register_forward_pre_hook):
        handle = register(lambda *args: None)
        assert_declined(model, "a forward hook of a LlamaDecoderLayer", **BEAMS)
        handle.remove()
        assert_whole(model, **BEAMS)
    layer = model.model.layers[0].mlp
    # As transformers leaves it behind after a call with output_attentions, in some versions.
    layer.forward = layer.forward
    assert_whole(model, **BEAMS)
    layer.forward = type(layer)(model.config).forward
    assert_declined(model, "forward() of a LlamaMLP that has been replaced", **BEAMS)


def test_modules_that_the_user_compiles(model):
    layers = model.model.layers
    layers[0].mlp = torch.compile(layers[0].mlp, backend="eager")
    assert_declined(model, "forward() of a OptimizedModule that has been replaced", **BEAMS)
    layers[0].mlp = layers[0].mlp._orig_mod
    layers[1].mlp.compile(backend="eager")
    assert_declined(model, "a compiled model", **BEAMS)


class Int8Linear(nn.Linear):
    """A linear layer with integer weights and a scale for each row, as libraries for quantization have it."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.scale = nn.Parameter(linear.weight.detach().abs().amax(1, keepdim=True) / 7)
        rounded = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(rounded, requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def test_layers_with_integer_weights(model):
    for path, module in [*model.named_modules()]:
        if type(module) is nn.Linear:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Int8Linear(module))
    assert_whole(model, **BEAMS)


def test_the_model_is_as_it_was(model):
    # The model that it is a copy of may have been served before.
    disable(model)
    before = dict(vars(model)), copy.deepcopy(model.config), [dict(vars(each)) for each in model.modules()]
    assert_whole(model, **BEAMS)
    # All that is there, until disable(), is what is kept for later calls.
    assert vars(model).keys() - before[0].keys() == {attribute.KEPT}
    disable(model)
    assert vars(model) == before[0] and model.config.to_dict() == before[1].to_dict()
    assert model.config._attn_implementation == before[1]._attn_implementation
    assert [dict(vars(each)) for each in model.modules()] == before[2]


def test_other_threads_run_the_model_with_its_own_attention(model):
    inputs = inputs_for(model)
    options = {"max_new_tokens": 20, "do_sample": False, "num_beams": 4}
    expected = model.generate(**inputs, **options)
    logits = model(**inputs).logits

    def texts():
        return [torch.equal(model.generate(**inputs, **options), expected) for _ in range(6)]

    with whole(model), ThreadPoolExecutor(3) as pool:
        running = [pool.submit(texts), pool.submit(texts)]
        running += [pool.submit(lambda: [torch.equal(model(**inputs).logits, logits) for _ in range(6)])]
        assert all(all(each.result()) for each in running)


@pytest.mark.parametrize("padding", [-1, 97])
def test_padding_that_is_no_token(padding):
    # The model reads it where one text ends before another.
    model = family("Llama")
    ends = {"eos_token_id": [5, *range(40, 60)], "pad_token_id": padding, "max_new_tokens": 6, "do_sample": False}
    for batch, beams in ((1, 1), (2, 3)):
        assert_whole(model, inputs_for(model, batch=batch), num_beams=beams, **ends)
    for block in (contextlib.nullcontext(), whole(model)):
        with block, pytest.raises(IndexError):
            model.generate(**inputs_for(model, batch=3), **ends)
    assert "a pad_token_id that is no token" in stats(reset=True).reasons


def test_a_length_that_stands_for_none(model):
    criteria = StoppingCriteriaList([MaxLengthCriteria(10**11)])
    options = {"stopping_criteria": criteria, "max_new_tokens": 3, "eos_token_id": [*range(5, 97)]}
    assert_declined(model, f"texts of up to {10**11} tokens", **options)


def test_an_empty_list_of_end_tokens_with_beams(model):
    # Beam search has no padding then, and raises.
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": [], "num_beams": 2}
    for block in (contextlib.nullcontext(), whole(model)):
        with block, pytest.raises(IndexError):
            model.generate(**inputs_for(model), **options)
    assert stats().reasons == {"an empty eos_token_id, with beams": 1}
