# SPDX-License-Identifier: Apache-2.0
"""Steps as on a GPU with compile=True: layers as one piece of code for all of them, with a stand-in for the CUDA graph.

Layers are traced as they are to be compiled, and run as they were, but for one test: the compiler itself takes its time.
"""

import copy
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from captured import StandIn, as_on_a_gpu
from decoding import also, assert_same, assert_whole, generate_both, inputs_for, one_thread  # noqa: F401
from fused_topk.generation import disable
from fused_topk.generation.whole_step import entry
from test_whole_step_models import row_model
from whole_steps import compiling, encoder_decoder, family, source_for, traced_only  # noqa: F401

OPTIONS = {"max_new_tokens": 12, "eos_token_id": [5, 6, 7, 8], "output_scores": False}
SHAPES = [(3, 6, 12), (2, 17, 12)]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    as_on_a_gpu(monkeypatch)


@pytest.fixture(name="model")
def own_model():
    model = copy.deepcopy(family("Llama"))
    yield model
    disable(model)


def pieces(model):
    """How many pieces of code have been made for the model."""
    return len(entry.ready_for(model).store._codes)


def assert_compiled(model, inputs, **options):
    assert_whole(model, inputs, compile=True, kinds=["compiled", "captured"], **{**OPTIONS, **options})


def assert_captured_alone(model, reason, **options):
    """Of a model that has no layers to compile, for that reason."""
    stock, given, steps = generate_both(model, inputs_for(model), fused=compiling, **{**OPTIONS, **options})
    assert_same(stock, given)
    assert steps.captured == steps.whole > 0 and steps.compiled == 0
    (found,) = steps.reasons
    assert reason in found


@pytest.mark.parametrize(
    ("name", "kinds"),
    # Half of Gemma 2's layers have a window.
    [
        ("Llama", 1),
        *also(("Gemma2", 2), ("GPT2", 1), ("Mistral", 1), ("Qwen3", 1), ("Phi", 1), ("Bart", 1), ("Whisper", 1)),
    ],
)
def test_one_piece_serves_all_layers_and_shapes(name, kinds, traced):
    is_both = name in ("Bart", "Whisper")
    model = copy.deepcopy((encoder_decoder if is_both else family)(name))
    # Greedy search has a piece, and any number of beams has one.
    for number, more in ((1, ()), (2, (4,))):
        for beams in (number if number == 1 else 3, *more):
            for batch, length, most in SHAPES:
                inputs = source_for(model, batch, length) if is_both else inputs_for(model, batch, length, padding=2)
                assert_compiled(model, inputs, num_beams=beams, max_new_tokens=most)
        assert pieces(model) == number * kinds


def test_a_capture_compiles_nothing(monkeypatch, traced):
    """In a capture transformers does not look whether a mask hides anything, and makes one where there is none elsewhere."""
    model, found = copy.deepcopy(encoder_decoder("Bart")), []

    def count():
        return len(entry._ready.get(model).store._codes)

    class Capture(StandIn):
        def __init__(self, *args):
            before = count()
            with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
                super().__init__(*args)
            found.append((before, count()))

    as_on_a_gpu(monkeypatch, Capture)
    # Sources that fill the places that a step has for them.
    assert_compiled(model, source_for(model, 2, 64, padding=0))
    assert found and all(before == after for before, after in found)


@pytest.mark.exhaustive
def test_one_piece_serves_a_model_with_attention_of_its_own(traced):
    model = copy.deepcopy(row_model("Falcon"))
    for batch, length, most in SHAPES:
        assert_compiled(model, inputs_for(model, batch, length), num_beams=3, max_new_tokens=most)
    assert pieces(model) == 1


def test_compiled_layers_give_the_stock_sequences(model):
    for beams in (1, 3):
        assert_compiled(model, inputs_for(model), num_beams=beams)


@pytest.mark.exhaustive
def test_scores_and_processors(model, traced):
    assert_compiled(model, inputs_for(model), num_beams=3, output_scores=True, no_repeat_ngram_size=2)
    assert_compiled(model, inputs_for(model), repetition_penalty=1.5)


class Numbered(nn.Module):
    """Scales what a module computes by the number of its layer."""

    def __init__(self, inner, layer_idx):
        super().__init__()
        self.inner, self.layer_idx = inner, layer_idx

    def forward(self, x):
        return self.inner(x) * (1 + self.layer_idx)


def test_layers_that_tell_which_one_they_are_are_not_compiled(model, traced):
    for number, layer in enumerate(model.model.layers):
        layer.mlp = Numbered(layer.mlp, number)
    assert_captured_alone(model, "computes something else")


class Unlisted(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.first, self.second = layers

    def __getitem__(self, of):
        return [self.first, self.second][of]


def test_a_model_without_a_list_of_layers(model, traced):
    model.model.layers = Unlisted(model.model.layers)
    assert_captured_alone(model, "no list of layers")


def test_a_compiler_that_is_switched_off(model):
    with torch._dynamo.config.patch(disable=True):
        assert_captured_alone(model, "torch.compile")


@pytest.mark.exhaustive
def test_weights_that_change(model, traced):
    assert_compiled(model, inputs_for(model), num_beams=3)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.neg_()
    assert_compiled(model, inputs_for(model), num_beams=3)
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.randn(64, 32))
    assert_compiled(model, inputs_for(model), num_beams=3)


@pytest.mark.exhaustive
def test_no_weight_is_held(model, traced):
    assert_compiled(model, inputs_for(model), num_beams=3)
    held = [weakref.ref(each) for each in model.parameters()]
    for module in model.modules():
        for name, each in module._parameters.items():
            if each is not None:
                module._parameters[name] = nn.Parameter(each.detach().clone())
    assert not [each for each in held if each() is not None]
