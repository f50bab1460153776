# SPDX-License-Identifier: Apache-2.0
"""Copies of an enabled model, files that it is saved in, and other patches of its methods."""

import copy
import functools
import gc
import io
import pickle
import types
import weakref
from unittest import mock

import pytest
import torch

from decoding import OPTIONS, also, one_thread, run, tiny  # noqa: F401
from fused_topk.generation import disable, enable, fused_decoding
from fused_topk.generation.whole_step import attribute, entry

STEPS = OPTIONS["max_new_tokens"]


@pytest.fixture(name="model")
def new_model():
    """Never asked for attentions or hidden states: transformers then adds hooks of its own, which cannot be pickled."""
    return tiny.__wrapped__("llama")


def pickled(model):
    data = pickle.dumps(model)
    assert b"fused_topk.generation" not in data
    return pickle.loads(data)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    assert b"fused_topk.generation" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickled, saved], ids=lambda each: each.__name__
)


@COPIES
def test_a_copy_of_an_enabled_model_is_not_enabled(model, duplicate):
    attributes = model.__dict__.keys() - {"_forward_hooks"}
    expected, _ = run(model)
    enable(model)
    # What is kept of the model is not the copy's.
    run(model, num_beams=3)
    other = duplicate(model)
    assert entry._ready.get(model) is not None and entry._ready.get(other) is None
    assert other.__dict__.keys() - {"_forward_hooks", attribute.KEPT} == attributes
    assert not other._forward_hooks
    found, steps = run(other)
    assert torch.equal(found, expected)
    assert steps[:3] == (0, 0, {})
    # Nor has either to do with the other.
    assert run(model)[1][:3] == (STEPS, 0, {})
    enable(other)
    disable(model)
    assert run(other)[1][:3] == (STEPS, 0, {})
    assert run(model)[1][:3] == (0, 0, {})
    disable(other)
    assert run(other)[1][:3] == (0, 0, {})


@COPIES
@pytest.mark.parametrize("is_compiled", [False, *also(True)])
def test_a_copy_within_a_call_is_not_enabled(model, is_compiled, duplicate):
    copies, expected = [], run(model)[0]
    if is_compiled:
        model.compile(backend="eager")
    with fused_decoding(model):
        run(model, logits_processor=[lambda ids, scores: copies.append(duplicate(model)) or scores], max_new_tokens=1)
    found, steps = run(copies[0])
    assert torch.equal(found, expected)
    assert steps[:3] == (0, 0, {})


def test_a_method_that_was_replaced_before_is_called_and_put_back(model):
    original = model.generate
    calls = []

    def patched(*args, **options):
        calls.append(options)
        return original(*args, **options)

    model.generate = patched
    with fused_decoding(model):
        assert run(model)[1][:3] == (STEPS, 0, {})
    assert len(calls) == 1
    assert model.__dict__["generate"] is patched


@pytest.mark.parametrize("name", ["generate", "_get_logits_processor"])
def test_a_method_that_is_replaced_later_stays(model, name):
    enable(model)
    below = getattr(model, name)
    num_calls = 0

    @functools.wraps(below)
    def patched(*args, **options):
        nonlocal num_calls
        num_calls += 1
        return below(*args, **options)

    setattr(model, name, patched)
    expected, steps = run(model)
    assert steps[:3] == (STEPS, 0, {})
    disable(model)
    assert model.__dict__[name] is patched
    # What it is in front of does nothing of its own any more.
    assert run(model)[1][:3] == (0, 0, {})
    # Both are served again, and count once.
    for _ in range(2):
        with fused_decoding(model, topk_per_step=1) as given:
            found, steps = run(model)
        assert torch.equal(found, expected) and len(given.topk) == steps.whole == STEPS
        assert model.__dict__[name] is patched
    assert num_calls == 4


def test_a_class_whose_generate_is_an_object(model, monkeypatch):
    mocked = mock.MagicMock(return_value="mocked")
    enable(model)
    monkeypatch.setattr(type(model), "generate", mocked, raising=False)
    assert model.generate(1, k=2) == "mocked"
    mocked.assert_called_once_with(1, k=2)


def test_an_enabled_model_is_freed(model):
    """And leaves nothing in its class."""
    other = copy.deepcopy(model)
    kind = other.__class__ = type("Freed", (type(model),), {"__module__": type(model).__module__})
    enable(other)
    run(other)
    assert "generate" in vars(kind)
    reference = weakref.ref(other)
    del other
    gc.collect()
    assert reference() is None and "generate" not in vars(kind)


def test_a_copy_of_a_model_with_a_generate_of_its_own(model):
    """The copy's is that of the user, bound to the copy."""

    def generate(self, *args, **kwargs):
        return self.mark

    model.generate, model.mark = types.MethodType(generate, model), 1
    with fused_decoding(model):
        other = copy.deepcopy(model)
        other.mark = 2
        assert other.generate() == 2 and model.generate() == 1
    assert type(other.generate) is types.MethodType and other.generate.__self__ is other
