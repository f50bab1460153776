# SPDX-License-Identifier: Apache-2.0
"""What is kept of a model: that it is made anew where the model has changed, and that it goes with the model."""

import contextlib
import copy
import functools
import gc
import threading
import types
import weakref

import pytest
import torch
from torch import nn
from transformers import modeling_utils
from transformers.models.llama import modeling_llama as llama

from captured import graphs_of
from decoding import assert_whole, generate_both, inputs_for, one_thread  # noqa: F401
from fused_topk.generation import fused_decoding
from fused_topk.generation.whole_step import entry
from fused_topk.generation.whole_step.twin import Snapshot
from whole_steps import assert_declined, family, own_model, traced_only, whole  # noqa: F401

pytestmark = pytest.mark.usefixtures("traced")

BEAMS = {"num_beams": 3, "max_new_tokens": 6}


def is_seen(model, change):
    """Whether a snapshot tells the model from what it was before the change."""
    snapshot = Snapshot(model)
    assert snapshot.is_of(model)
    change()
    assert Snapshot(model).is_of(model)
    return not snapshot.is_of(model)


class Adapter(nn.Module):
    """As adapters of weights are: with their state in containers that they change in place."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.scales = {"default": [1.0]}
        self.merged = []
        self.active = {"default"}

    def forward(self, hidden):
        out = self.base(hidden)
        if self.merged or not self.active:
            return out
        return out - self.scales["default"][0] * out.flip(-1)


class Negated(nn.Linear):
    def forward(self, hidden):
        return -super().forward(hidden)


class Reader(nn.Module):
    """Reads a number of another module by a name that it makes."""

    def __init__(self, model):
        super().__init__()
        self.of, self.names = [model], ["ga", "in"]

    def forward(self, hidden):
        return hidden * getattr(self.of[0], "".join(self.names))


# Of a layer with an adapter, and a configuration with an object.
CHANGES = {
    "list in a dictionary": lambda mlp: mlp.gate_proj.scales["default"].__setitem__(0, -2.0),
    "value of a dictionary": lambda mlp: mlp.gate_proj.scales.update(default=[1.0]),
    "key of a dictionary": lambda mlp: mlp.gate_proj.scales.update(other=[1.0]),
    "list": lambda mlp: mlp.gate_proj.merged.append("default"),
    "set": lambda mlp: mlp.gate_proj.active.clear(),
    "class": lambda mlp: setattr(mlp.up_proj, "__class__", Negated),
    "module": lambda mlp: setattr(mlp, "up_proj", copy.deepcopy(mlp.up_proj)),
    "parameter": lambda mlp: setattr(mlp.up_proj, "weight", nn.Parameter(mlp.up_proj.weight.data)),
    "strides": lambda mlp: setattr(mlp.up_proj.weight, "data", mlp.up_proj.weight.data.t().contiguous().t()),
    "dtype": lambda mlp: mlp.up_proj.double(),
    "attribute": lambda mlp: setattr(mlp, "scale", 2.0),
    "missing": lambda mlp: delattr(mlp, "hidden_size"),
    "buffer": lambda mlp: mlp.register_buffer("mask", torch.ones(2)),
    "training": lambda mlp: mlp.eval().train(),
    "configuration": lambda mlp: setattr(mlp.config, "hidden_act", "gelu"),
    "object of a configuration": lambda mlp: setattr(mlp.config.extra, "scale", 2.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_is_seen(change, model):
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = Adapter(mlp.gate_proj)
    mlp.config.extra = types.SimpleNamespace(scale=1.0)
    assert is_seen(model, lambda: CHANGES[change](mlp))


# What makes code that may read a number of the model.
READERS = {
    "none": lambda model, patch: None,
    "module": lambda model, patch: setattr(model.model, "norm", nn.Sequential(model.model.norm, Reader(model))),
    "forward": lambda model, patch: patch.setattr(type(model.model.norm), "forward", lambda self, hidden: hidden),
    "call": lambda model, patch: patch.setattr(type(model.model.norm), "__call__", lambda self, hidden: hidden),
    "function": lambda model, patch: patch.setattr(llama, "rotate_half", lambda x: x),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_number_counts_where_some_code_may_read_it(reader, model, monkeypatch):
    model.gain = 1.0
    READERS[reader](model, monkeypatch)
    assert is_seen(model, lambda: setattr(model, "gain", 2.0)) == (reader != "none")


def test_a_forward_method_that_is_replaced_in_a_class(model, monkeypatch):
    class Later(nn.Linear):
        pass

    model.model.layers[0].mlp.up_proj.__class__ = Later
    assert is_seen(model, lambda: monkeypatch.setattr(nn.Linear, "forward", Negated.forward))
    assert is_seen(model, lambda: setattr(Later, "forward", Negated.forward))


def test_an_attention_function_that_is_replaced(model, monkeypatch):
    functions = modeling_utils.ALL_ATTENTION_FUNCTIONS
    sdpa = functions["sdpa"]

    def negated(*args, **kwargs):
        out, weights = sdpa(*args, **kwargs)
        return -out, weights

    assert is_seen(model, lambda: monkeypatch.setitem(functions, "sdpa", negated))
    # It may do anything, and count its calls.
    assert_declined(model, "attention of your own, sdpa", num_beams=2)


@pytest.mark.parametrize("is_on_gpu", [True, False])
def test_weights_at_another_address_are_a_change_where_a_graph_may_have_it(is_on_gpu, model, monkeypatch):
    weight = model.lm_head.weight
    monkeypatch.setattr(torch.Tensor, "is_cuda", is_on_gpu, raising=False)
    assert is_seen(model, lambda: setattr(weight, "data", weight.data.clone())) == is_on_gpu


def test_what_computes_the_same_is_no_change(model):
    model.scale, model.names = 1.5, ["a", ("b", {"c": 2}), model]

    def change():
        model.scale = float("1.5")
        # Versions of transformers leave such a one behind.
        model.model.forward = model.model.forward
        with torch.no_grad():
            model.lm_head.weight.neg_()

    assert not is_seen(model, change)


@pytest.mark.parametrize("refers_to_itself", [False, True])
def test_a_model_goes_at_once(refers_to_itself):
    model = copy.deepcopy(family("Llama"))
    if refers_to_itself:
        model.old_generate = model.generate
    with whole(model):
        model.generate(**inputs_for(model), **BEAMS)
    assert entry._ready.get(model) is not None
    weight = weakref.ref(model.lm_head.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        # What is in a circle waits for the collector.
        assert (weight() is None) != refers_to_itself
        gc.collect()
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("made", [torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(2, 1, 32))])
def test_a_module_of_torch_jit(made, model):
    model.model.layers[0].mlp = made(nn.Sequential(nn.Linear(32, 32), nn.ReLU()))
    assert_declined(model, "a ScriptModule")


def test_a_configuration_that_cannot_be_copied(model):
    model.config.lock = threading.Lock()
    for _ in range(2):
        _, _, steps = generate_both(model, fused=whole, num_beams=2, max_new_tokens=6)
        (reason,) = steps.reasons
        assert reason.startswith("a twin of a LlamaForCausalLM raises TypeError: cannot pickle")
    del model.config.lock
    assert_whole(model, inputs_for(model), **BEAMS)


def gone(model):
    """Weights of the model, and what takes them away."""

    def replaced():
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())

    def of_a_layer():
        layer = model.model.layers[1].mlp.down_proj
        layer.weight = nn.Parameter(layer.weight.detach().clone())

    def to_meta():
        model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(torch.empty(1, device="meta"))

    def dropped():
        model.model.layers = model.model.layers[:1]

    def resized():
        model.resize_token_embeddings(120)

    layers = model.model.layers
    return {
        "replaced": ([model.lm_head.weight], replaced),
        "replaced in a layer": ([layers[1].mlp.down_proj.weight], of_a_layer),
        "offloaded": ([layers[0].self_attn.q_proj.weight], to_meta),
        "dropped": ([*layers[1].parameters()], dropped),
        # transformers itself holds the old embeddings for a while.
        "resized": ([model.lm_head.weight], resized),
    }


@pytest.mark.parametrize("way", ["eager", "compiled", "captured"])
@pytest.mark.parametrize("change", ["replaced", "replaced in a layer", "offloaded", "dropped", "resized"])
@pytest.mark.parametrize("is_enabled", [False, True])
def test_weights_that_go_are_not_held(change, way, is_enabled, model):
    """After a block, and in one, without the garbage collector."""
    fused = functools.partial(fused_decoding, compile=way == "compiled")
    with graphs_of() if way == "captured" else contextlib.nullcontext(), contextlib.ExitStack() as block:
        block.enter_context(fused(model))
        for num_beams in (1, 3) if way != "compiled" else (3,):
            model.generate(**inputs_for(model), **{**BEAMS, "num_beams": num_beams}, do_sample=False)
        if not is_enabled:
            block.close()
        weights, take = gone(model)[change]
        weights = [weakref.ref(each) for each in weights]
        if way == "compiled":
            # What torch.compile has noted of the modules lies in circles of its own.
            gc.collect()
        gc.disable()
        try:
            take()
            assert all(ref() is None for ref in weights)
        finally:
            gc.enable()
    if change != "offloaded":
        assert_whole(model, **BEAMS)


def test_weights_can_be_swapped(model):
    """torch.utils.swap_tensors refuses tensors that have weak references."""
    with fused_decoding(model):
        model.generate(**inputs_for(model), **BEAMS)
        for weight in (model.lm_head.weight, model.model.layers[0].mlp.up_proj.weight):
            torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().flip(0)))
    assert_whole(model, **BEAMS)


class WithoutMemory(torch.Tensor):
    """As tensors of quantization libraries may be: asked for its memory, it raises."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_other_kinds_of_tensors_are_not_asked_for_their_memory(model):
    model.table = torch.zeros(3).as_subclass(WithoutMemory)
    assert not is_seen(model, lambda: None)
    assert is_seen(model, lambda: setattr(model, "table", torch.ones(3).as_subclass(WithoutMemory)))
