# SPDX-License-Identifier: Apache-2.0
"""Whole steps with a row for each beam, of models whose attention is their own."""

import functools

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from decoding import PAD, SHAPE_OF_BOTH, TOKENS, assert_whole, inputs_for, one_thread, with_biases  # noqa: F401
from fused_topk.generation.whole_step import attention, entry
from fused_topk.generation.whole_step.cache import SourceLayer
from fused_topk.generation.whole_step.row_form import RowDecoder, decoder_of
from whole_steps import source_for, swaps

_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": PAD}
_MODELS = {
    "T5": ("ForConditionalGeneration", _T5),
    "UMT5": ("ForConditionalGeneration", _T5),
    "LED": (
        "ForConditionalGeneration",
        {**SHAPE_OF_BOTH, "attention_window": 4, "init_std": 0.3, "decoder_start_token_id": 2},
    ),
    "Bloom": ("ForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}),
    "Falcon": (
        "ForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3},
    ),
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
}


@functools.cache
def row_model(name: str):
    """A model with random weights. Not to be changed: it is kept."""
    head, options = _MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**TOKENS, **options)
    model = with_biases(getattr(transformers, f"{name}{head}")(config), 0).eval()
    if config.is_encoder_decoder:
        # Random embeddings of tokens that are read would choose themselves.
        generator = torch.Generator().manual_seed(0)
        head = torch.nn.Linear(32, 97, bias=False)
        head.weight.data = torch.randn(97, 32, generator=generator) * 0.4
        model.set_output_embeddings(head)
    return model


def _inputs(model):
    return source_for(model) if model.config.is_encoder_decoder else inputs_for(model)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", _MODELS)
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
def test_compiled(name, num_beams):
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
