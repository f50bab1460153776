# SPDX-License-Identifier: Apache-2.0
"""fused_decoding(model) as it is without options: whole steps where they are quicker, transformers' loop elsewhere."""

import copy
import functools
import logging

import pytest
import torch
from transformers import GenerationConfig

from captured import as_on_a_gpu
from decoding import generate_both, inputs_for, one_thread, stats, tiny  # noqa: F401
from fused_topk.generation import fused_decoding
from fused_topk.generation.whole_step import entry, head, reasons
from fused_topk.generation.whole_step.head import Head
from test_whole_step_models import row_model
from whole_steps import family

OPTIONS = {"max_new_tokens": 8, "do_sample": False}


# What stock and default generate() give, and the steps of the latter.
both = functools.partial(generate_both, return_dict_in_generate=False, **OPTIONS)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Graphs are captured, by a stand-in."""
    as_on_a_gpu(monkeypatch)


@pytest.fixture(params=["head", "logits"])
def chooses_from(request, monkeypatch):
    """What a step chooses from: hidden states or logits."""
    monkeypatch.setattr(head, "_OPERATIONS", 0 if request.param == "head" else 1 << 62)
    monkeypatch.setattr(head, "_LEAST_HIDDEN_SIZE", 0)
    return request.param


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_single_beam_on_a_cpu_runs_in_whole_steps(name, chooses_from):
    model = family(name)
    for padding in (0, 2):
        stock, given, steps = both(model, inputs_for(model, padding=padding), max_new_tokens=20)
        assert torch.equal(stock, given)
        assert steps.whole > 0 and not steps.reasons


def test_beams_from_hidden_states(chooses_from, monkeypatch):
    model = family("Llama")
    asked, found = [], Head.continuations
    monkeypatch.setattr(Head, "continuations", lambda *args: asked.append(1) or found(*args))
    stock, given, _ = both(model, inputs_for(model, padding=2), num_beams=3, max_new_tokens=20, eos_token_id=[5, 6])
    assert torch.equal(stock, given)
    assert bool(asked) == (chooses_from == "head")


def test_long_hidden_states_alone_are_chosen_from(monkeypatch):
    """To add up the lanes of a short sum takes as long as the sum."""
    monkeypatch.setattr(head, "_OPERATIONS", 0)
    for size, is_quicker in ((127, False), (128, True)):
        assert Head(None, torch.nn.Linear(size, 50)).is_quicker(1) == is_quicker


class TestFewLogits:
    """Greedy search of few logits on a CPU is left to stock generate(), with nothing fused."""

    WHY = "few logits on a CPU"

    @pytest.fixture(autouse=True)
    def are_few(self, monkeypatch):
        """Of the two prompts of inputs_for(), and not of three."""
        self.model = copy.deepcopy(family("Llama"))
        monkeypatch.setattr(reasons, "FEW_LOGITS", 2 * self.model.config.vocab_size + 1)

    def test_they_are_left_to_stock(self, monkeypatch):
        monkeypatch.setattr(entry, "ready_for", None)  # no trial
        inputs = inputs_for(self.model)
        stock, given, steps = both(self.model, inputs)
        assert torch.equal(stock, given)
        assert steps[:3] == (0, 8, {self.WHY: 1})

    @pytest.mark.parametrize(
        ("options", "logits"),
        [({"num_beams": 3}, 3), ({"do_sample": True}, 15), ({"do_sample": True, "num_beams": 3}, 3)],
    )
    def test_so_are_beams_and_draws_of_small_models(self, options, logits, monkeypatch):
        """Args: logits: as many times those of the prompts decide."""
        inputs = inputs_for(self.model)
        of_prompts = 2 * self.model.config.vocab_size
        for least, weights, is_served in ((1, 10**6, False), (0, 10**6, True), (1, 10, True)):
            monkeypatch.setattr(reasons, "FEW_LOGITS", logits * of_prompts + least * logits)
            monkeypatch.setattr(reasons, "_FEW_WEIGHTS", weights)
            stats(reset=True)
            with fused_decoding(self.model):
                self.model.generate(**inputs, **{**OPTIONS, **options})
            steps = stats(reset=True)
            assert (steps.whole > 0) == is_served and steps.reasons == ({} if is_served else {self.WHY: 1}), steps

    def test_more_run_in_whole_steps(self):
        few = inputs_for(self.model)
        more = {name: torch.cat([each, each[:1]]) for name, each in few.items()}
        with fused_decoding(self.model):
            for given, whole in ((few, 0), (more, 8)):
                ids, mask = given["input_ids"], given["attention_mask"]
                embeds = self.model.get_input_embeddings()(ids)
                of_call = {**OPTIONS, "attention_mask": mask}
                for args, kwargs in (((ids,), {}), ((), {"inputs": ids}), ((), {"inputs_embeds": embeds})):
                    stats(reset=True)
                    self.model.generate(*args, **kwargs, **of_call)
                    assert stats(reset=True).whole == whole

    def test_what_is_asked_for_is_done(self):
        inputs = inputs_for(self.model)
        assert both(self.model, inputs, generation_config=GenerationConfig(num_beams=2))[2].whole > 0
        stats(reset=True)
        with fused_decoding(self.model, topk_per_step=2) as block:
            self.model.generate(**inputs, **OPTIONS)
        assert stats(reset=True).whole == len(block.topk) == 8

    @pytest.mark.parametrize("error", [None, AttributeError, ValueError, TypeError])
    def test_a_model_that_does_not_say_how_many_they_are(self, error):
        class Config:
            is_encoder_decoder = False
            vocab_size = 2

            def get_text_config(self, decoder):
                if error is not None:
                    raise error
                return self

        for device in ("cpu", "meta"):
            model = torch.nn.Linear(1, 1, device=device)
            model.config = Config()
            is_known = error is None and device == "cpu"
            assert reasons.reads_few_logits(model, reasons.Asked(False, 1, 1)) == is_known


def test_nothing_is_said_of_what_is_not_served(caplog):
    model = tiny("mamba")
    with caplog.at_level(logging.WARNING):
        stock, given, steps = both(model, inputs_for(model), num_beams=2)
    assert torch.equal(stock, given)
    assert steps.whole == 0 and steps.reasons and not caplog.records


def test_a_model_is_looked_at_once_a_call(monkeypatch):
    """To look at every module of a large model takes as long as a step."""
    model, looked_at, of_model = family("Llama"), [], reasons.of_model
    monkeypatch.setattr(reasons, "of_model", lambda model: looked_at.append(model) or of_model(model))
    for number in (1, 2, 3):
        _, _, steps = both(model, inputs_for(model), num_beams=2)
        assert steps.whole > 0 and looked_at == [model] * number


def test_steps_that_cannot_be_kept_are_left_to_the_stock_loop_on_a_gpu(on_a_gpu):
    model = row_model("GPTNeo")
    stock, given, steps = both(model, inputs_for(model), num_beams=3)
    assert torch.equal(stock, given)
    assert steps.whole == 0 and steps.reasons == {"steps that cannot be kept": 1}
