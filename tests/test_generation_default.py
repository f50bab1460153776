# SPDX-License-Identifier: Apache-2.0
"""fused_decoding(model) as it is without options: whole steps where they are quicker, transformers' loop elsewhere."""

from __future__ import annotations

import copy
import functools
import logging

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from transformers import GenerationConfig

from decoding import SmallerIndexFirst, inputs_for, one_thread, tiny  # noqa: F401
from fused_topk.generation import disable, enable, fused_decoding, generate, stats, ways
from fused_topk.generation.whole_step import entry, graphs, head, reasons
from fused_topk.generation.whole_step.head import WholeHead
from test_whole_step_graphs import Event, StandIn, new_on_the_host
from test_whole_step_rows import row_model
from whole_steps import encoder_decoder, family, source_for

OPTIONS = {"max_new_tokens": 8, "do_sample": False}


def both(model, inputs, **options):
    """What stock and default generate() give, and the steps of the latter."""
    options = {**OPTIONS, **options}
    with SmallerIndexFirst():
        stock = model.generate(**inputs, **options)
        stats(reset=True)
        with fused_decoding(model):
            given = model.generate(**inputs, **options)
    return stock, given, stats(reset=True)


def counted(function, calls):
    """The function, which adds to the calls."""

    @functools.wraps(function)
    def run(*args):
        calls.append(1)
        return function(*args)

    return run


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Graphs are captured, by a stand-in."""
    monkeypatch.setattr(graphs, "is_cuda", lambda device: True)
    monkeypatch.setattr(graphs, "Graph", StandIn)
    monkeypatch.setattr(graphs, "_new", new_on_the_host)
    monkeypatch.setattr(graphs, "_record", lambda event, device: None)
    monkeypatch.setattr(Event, "synchronize", lambda event: None)


def test_beams_on_a_cpu_run_in_whole_steps():
    model = family("Llama")
    stock, given, steps = both(model, inputs_for(model), num_beams=3)
    assert torch.equal(stock, given)
    assert steps.whole == steps.fused > 0 and steps.compiled == steps.captured == 0 and not steps.not_whole


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
@pytest.mark.parametrize("operations", [0, 1 << 62], ids=["head", "logits"])
def test_a_single_beam_on_a_cpu_runs_in_whole_steps(name, operations, monkeypatch):
    # From that many operations on a step chooses from hidden states.
    monkeypatch.setattr(head, "_OPERATIONS", operations)
    model = family(name)
    for padding in (0, 2):
        stock, given, steps = both(model, inputs_for(model, padding=padding), max_new_tokens=20)
        assert torch.equal(stock, given)
        assert steps.whole == steps.fused > 0 and not steps.not_whole


@pytest.mark.parametrize("operations", [0, 1 << 62], ids=["head", "logits"])
def test_beams_from_hidden_states(operations, monkeypatch):
    monkeypatch.setattr(head, "_OPERATIONS", operations)
    model = family("Llama")
    asked = []
    monkeypatch.setattr(WholeHead, "continuations", counted(WholeHead.continuations, asked))
    stock, given, _ = both(model, inputs_for(model, padding=2), num_beams=3, max_new_tokens=20, eos_token_id=[5, 6])
    assert torch.equal(stock, given)
    assert bool(asked) == (operations == 0)


def test_what_is_not_asked_for_is_prepared_once():
    model = copy.deepcopy(encoder_decoder("Bart"))
    runs = []
    model.get_encoder().register_forward_hook(lambda *_: runs.append(1))
    model.generation_config.do_sample = True
    config = GenerationConfig(do_sample=True, max_new_tokens=4, decoder_start_token_id=2)
    with fused_decoding(model):
        for options in ({"generation_config": config}, {"max_new_tokens": 4}):
            runs.clear()
            stats(reset=True)
            model.generate(**source_for(model), **options)
            assert len(runs) == 1 and stats().not_whole == {"do_sample without sampling=True": 1}


@pytest.mark.parametrize("num_beams", [1, 3])
def test_on_a_gpu_steps_are_captured_from_the_first_call_on(on_a_gpu, num_beams):
    model = copy.deepcopy(family("Llama"))
    stock, given, steps = both(model, inputs_for(model), num_beams=num_beams)
    assert torch.equal(stock, given)
    assert steps.captured == steps.whole == steps.fused > 0 and not steps.not_whole


def test_a_capture_that_fails_leaves_the_call_to_the_stock_loop(on_a_gpu, monkeypatch, caplog):
    def fails(run, device, beside):
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(graphs, "Graph", fails)
    model = copy.deepcopy(family("Llama"))
    stock, given, steps = both(model, inputs_for(model), num_beams=3)
    assert torch.equal(stock, given)
    assert steps.whole == 0 and steps.fused > 0 and "no graphs here" in str(steps.not_whole)
    assert not caplog.records


def test_a_result_that_can_go_on_has_its_cache():
    model = family("Llama")
    stock, given, steps = both(model, inputs_for(model), num_beams=3, return_dict_in_generate=True)
    assert given.past_key_values.get_seq_length() == stock.past_key_values.get_seq_length() > 6
    assert steps.whole > 0 and not steps.not_whole


def test_nothing_is_said_of_what_is_not_served(caplog):
    model = tiny("mamba")
    with caplog.at_level(logging.WARNING):
        stock, given, steps = both(model, inputs_for(model), num_beams=2)
    assert torch.equal(stock, given)
    assert steps.whole == 0 and steps.not_whole and not caplog.records


def test_a_model_that_is_known_not_to_be_served_is_prepared_once(monkeypatch):
    """The first call is prepared for whole steps before its model is tried, later ones are not."""
    model = copy.deepcopy(row_model("T5"))
    made, loop = [], ways.Loop
    monkeypatch.setattr(ways, "Loop", lambda *arguments: made.append(1) or loop(*arguments))
    with fused_decoding(model):
        for _ in range(2):
            stats(reset=True)
            model.generate(**source_for(model), **OPTIONS, num_beams=2)
            assert stats(reset=True).not_whole == {"a row for each beam on a CPU": 1}
    assert len(made) == 1


def test_a_model_is_looked_at_once_a_call(monkeypatch):
    """To look at every module of a large model takes as long as a step."""
    model, looked_at, of_model = family("Llama"), [], reasons.of_model
    monkeypatch.setattr(reasons, "of_model", lambda model: looked_at.append(model) or of_model(model))
    for number in (1, 2, 3):
        _, _, steps = both(model, inputs_for(model), num_beams=2)
        assert steps.whole > 0 and looked_at == [model] * number


def test_steps_that_cannot_be_kept_are_left_to_the_stock_loop_on_a_gpu(on_a_gpu, monkeypatch):
    # The model is on a CPU.
    monkeypatch.setattr(entry, "_of_default", lambda ready: None)
    model = row_model("GPTNeo")
    stock, given, steps = both(model, inputs_for(model), num_beams=3)
    assert torch.equal(stock, given)
    assert steps.whole == 0 and steps.not_whole == {"steps that cannot be kept": 1}


def test_encoder_decoders_run_in_whole_steps():
    model = encoder_decoder("Bart")
    stock, given, steps = both(model, source_for(model), num_beams=3)
    assert torch.equal(stock, given) and steps.whole == steps.fused > 0


def test_enable_and_custom_generate_have_the_same_default():
    model = copy.deepcopy(family("Llama"))
    inputs = inputs_for(model)
    stock = model.generate(**inputs, **OPTIONS, num_beams=3)
    stats(reset=True)
    given = model.generate(**inputs, **OPTIONS, num_beams=3, custom_generate=generate)
    assert torch.equal(stock, given) and stats(reset=True).whole > 0
    enable(model)
    given = model.generate(**inputs, **OPTIONS, num_beams=3)
    disable(model)
    assert torch.equal(stock, given) and stats(reset=True).whole > 0
