# SPDX-License-Identifier: Apache-2.0
"""Modules that users, or their libraries, put into a model: compiled, quantized, with adapters, with hooks. What is not known stays."""

import copy

import pytest
import torch
from torch import nn

from decoding import inputs_for, one_thread  # noqa: F401
from fused_topk.generation import disable, fused_decoding, stats
from whole_steps import family, own_model, traced_only  # noqa: F401

pytestmark = pytest.mark.usefixtures("traced")
NEW = 8
MODES = {"greedy": {}, "beams": {"num_beams": 3}, "sampling": {"do_sample": True, "top_p": 0.9}}
# How often a function of the user's has run. No attribute of a module, which would be a trace.
calls: list[str] = []


class Int8Linear(nn.Linear):
    """A linear layer with integer weights and a scale for each row, as libraries for quantization have it."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.scale = nn.Parameter(linear.weight.detach().abs().amax(1, keepdim=True) / 7)
        rounded = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(rounded, requires_grad=False)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            calls.append("linear")
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def with_int8(model):
    for path, module in [*model.named_modules()]:
        if type(module) is nn.Linear:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Int8Linear(module))


def counted(graph, inputs):
    """A backend of torch.compile."""
    return lambda *args: calls.append("piece") or graph(*args)


def with_compiled_mlp(model, backend=counted):
    for layer in model.model.layers:
        layer.mlp = torch.compile(layer.mlp, backend=backend)


def with_mlp_compiled_in_place(model):
    model.model.layers[0].mlp.compile(backend=counted)


def with_hook(model):
    model.model.norm.register_forward_hook(lambda module, args, output: calls.append("hook") or output.roll(1, -1))


def with_pre_hook(model):
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_pre_hook(lambda module, args: calls.append("hook") or (args[0].roll(1, -1),))


# Each change, and what stats() says of a model that has it; None where it runs in whole steps.
CHANGES = {
    "compiled": (with_compiled_mlp, "forward() of a OptimizedModule that has been replaced"),
    "compiled by aot_eager": (
        lambda model: with_compiled_mlp(model, "aot_eager"),
        "forward() of a OptimizedModule that has been replaced",
    ),
    "compiled in place": (with_mlp_compiled_in_place, "a compiled model"),
    "hook": (with_hook, "a forward hook of a LlamaRMSNorm"),
    "hook before": (with_pre_hook, "a forward hook of a LlamaRMSNorm"),
    "int8": (with_int8, None),
}


def run(model, mode):
    calls.clear()
    torch.manual_seed(7)
    texts = model.generate(**inputs_for(model), max_new_tokens=NEW, eos_token_id=None, **MODES[mode])
    return texts.tolist(), [*calls]


def assert_as_stock(model, mode, compile, reason):
    """The texts are those of stock, from the first call on."""
    torch._dynamo.reset()
    expected = run(model, mode)[0]
    plain = run(model, mode)
    assert plain[0] == expected
    stats(reset=True)
    with fused_decoding(model, compile=compile):
        assert run(model, mode)[0] == expected
        found = run(model, mode)
    counts = stats(reset=True)
    assert found[0] == expected
    # A compiled step runs no Python of the user's: only the prompt's pass does. Calls of the trial, in the first call, do not count.
    passes = 1 if compile and reason is None else NEW
    assert found[1] == plain[1][: passes * len(plain[1]) // NEW]
    assert counts == ((2 * NEW, 0, {}) if reason is None else (0, 2 * NEW, {reason: 2}))
    disable(model)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_texts_and_calls_are_those_of_stock(change, mode, compile, model):
    make, reason = CHANGES[change]
    plain = run(model, mode)[0]
    make(model)
    assert_as_stock(model, mode, compile, reason)
    if "compiled" not in change:
        assert run(model, mode)[0] != plain


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_adapters_of_peft(mode, compile):
    """More of them in tests/clients.py."""
    peft = pytest.importorskip("peft")
    parts = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=parts, init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = peft.get_peft_model(copy.deepcopy(family("Llama")), config).eval()
    assert_as_stock(model, mode, compile, None)
