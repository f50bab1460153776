# SPDX-License-Identifier: Apache-2.0
"""What is kept of a model: that it is made anew where the model has changed, and that it goes with the model."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from decoding import inputs_for, one_thread  # noqa: F401
from fused_topk.generation import fused_decoding, stats
from fused_topk.generation.whole_step import compiled, entry
from whole_steps import family

BEAMS = {"num_beams": 3, "max_new_tokens": 6}


@pytest.fixture(name="model")
def own_model():
    """A model of its own for each test, which may change it."""
    return copy.deepcopy(family("Llama"))


@pytest.fixture(autouse=True)
def traced_only(monkeypatch):
    """Steps are traced as they are to be compiled, and run as they were: the compiler itself takes its time."""
    monkeypatch.setattr(compiled, "_inductor", lambda graph, inputs: graph)


@pytest.mark.parametrize("is_one_piece", [True, False], ids=["one-piece", "pieces"])
def test_compiled_steps_do_not_outlive_the_model(is_one_piece, monkeypatch):
    if not is_one_piece:
        # What is taken where the step cannot be one piece.
        ways = compiled.ways
        monkeypatch.setattr(compiled, "ways", lambda *args: ways(*args)[1:])
    model = copy.deepcopy(family("Llama"))
    stats(reset=True)
    with fused_decoding(model, whole_step=True):
        model.generate(**inputs_for(model), **BEAMS)
    assert stats().compiled > 0
    (step,) = entry._ready[model].store._kept.values()
    kept = [weakref.ref(each) for each in (model.lm_head.weight, step.decoder._cache.layers[0].keys)]
    del model, step
    gc.collect()
    assert [each() for each in kept] == [None, None]
