# SPDX-License-Identifier: Apache-2.0
"""generate() of compiled models, and within compiled functions: fused where the logits come out of the graph, or counted."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from decoding import OPTIONS, inputs_for, one_thread, own_model, run  # noqa: F401
from fused_topk.generation import disable, enable, fused_decoding, generate, stats

STEPS = OPTIONS["max_new_tokens"]


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Graphs of other tests' models are not kept: a function has only so many."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("when", "options"),
    [
        pytest.param("before", {"num_beams": 3}, marks=pytest.mark.exhaustive),
        ("after", {}),
        pytest.param("within", {"custom_generate": generate}, marks=pytest.mark.exhaustive),
    ],
    ids=["before", "after", "within"],
)
def test_model_compile_is_served(model, when, options):
    expected, _ = run(model, **options | {"custom_generate": None})
    if when == "before":
        model.compile(backend="eager")
    enable(model, whole_step=False)
    if when == "after":
        model.compile(backend="eager")
    with fused_decoding(model, whole_step=False):
        if when == "within":
            model.compile(backend="eager")
        found, steps = run(model, **options)
    assert torch.equal(found, expected)
    assert steps == (STEPS, 0, {})
    disable(model)
    assert run(model)[1] == (0, 0, {})
    assert model.__dict__.keys() - {"_compiled_call_impl"} == copy.deepcopy(model).__dict__.keys()
    assert type(model._compiled_call_impl).__module__ != "fused_topk.generation.hooks"


@pytest.mark.exhaustive
def test_model_compile_fullgraph_is_served(model):
    expected, _ = run(model, use_cache=False)
    model.compile(backend="eager", fullgraph=True)
    with fused_decoding(model, whole_step=False):
        found, steps = run(model, use_cache=False)
    assert torch.equal(found, expected)
    assert steps == (STEPS, 0, {})


@pytest.mark.exhaustive
def test_a_compiled_forward_method_is_served(model):
    expected, _ = run(model, use_cache=False)
    model.forward = torch.compile(model.forward, backend="eager")
    with fused_decoding(model, whole_step=False):
        found, steps = run(model, use_cache=False)
    assert torch.equal(found, expected)
    assert steps == (STEPS, 0, {})


@pytest.mark.exhaustive
def test_what_is_not_served_of_a_compiled_model_is_counted(model):
    model.compile(backend="eager")
    with fused_decoding(model, whole_step=False):
        assert run(model, do_sample=True)[1] == (0, STEPS, {"do_sample without sampling=True": STEPS})


def test_a_compiled_model_is_not_touched_outside_generate(model):
    model.compile(backend="eager")
    expected = model(**inputs_for(model)).logits
    with fused_decoding(model, whole_step=False):
        found = model(**inputs_for(model)).logits
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)


# To trace generate() takes ten seconds.
@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["around", "with its block", "custom_generate"])
def test_torch_compile_around_generate_runs_stock_and_is_counted(model, how):
    options = {**inputs_for(model), **OPTIONS, "max_new_tokens": 1}
    expected, _ = run(model, max_new_tokens=1)
    attributes = dict(model.__dict__)

    def call():
        if how == "with its block":
            with fused_decoding(model, whole_step=False):
                return model.generate(**options)
        if how == "custom_generate":
            return model.generate(**options, custom_generate=generate, whole_step=False)
        return model.generate(**options)

    if how == "around":
        enable(model, whole_step=False)
    compiled = torch.compile(call, backend="eager")
    # The second one is compiled already, and counts all the same.
    for _ in range(2):
        stats(reset=True)
        assert torch.equal(compiled(), expected)
        steps = stats(reset=True)
        assert steps.fused == 0 and steps.fallback == 1
        assert how == "custom_generate" or steps.reasons == {"torch.compile around generate()": 1}
    disable(model)
    assert model.__dict__.keys() == attributes.keys()
    assert not model._forward_hooks
