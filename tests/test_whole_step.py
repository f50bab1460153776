# SPDX-License-Identifier: Apache-2.0
"""Whole-step generate() against stock: sequences, scores and beams of greedy and beam search."""

import copy
import functools

import pytest
import torch

from decoding import also, assert_whole, generate_both, inputs_for, one_thread  # noqa: F401
from whole_steps import OTHER_LAYERS, SERVED, assert_whole_of_seeds, family, whole

# Each way that attention, positions and experts are computed.
_QUICK = [
    name for name in SERVED if name in ("Llama", "Mistral", "Gemma2", "Gemma3", "Qwen2", "GPT2", "Phi", "Mixtral")
]


@pytest.mark.parametrize("num_beams", [1, 3, *also(8)])
@pytest.mark.parametrize("name", [*_QUICK, *also(*(name for name in SERVED if name not in _QUICK))])
def test_families(name, num_beams):
    of_seed = functools.partial(family, name)
    assert_whole_of_seeds(of_seed, lambda model: inputs_for(model, batch=3, padding=3), num_beams)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("name", OTHER_LAYERS)
def test_layers_of_other_kinds(name, num_beams):
    model = family(name)
    assert_whole(model, inputs_for(model, padding=2), num_beams=num_beams, max_new_tokens=14)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("name", ["Gemma2", *also("Llama", "Mistral")])
def test_the_models_own_attention_decides_of_the_cap(name, num_beams):
    for attention in (None, "eager"):
        assert_whole(family(name, attention=attention), num_beams=num_beams, max_new_tokens=14)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 2.0])
def test_every_rule_of_stopping(length_penalty, early_stopping):
    for seed, ends in ((0, [5, 6, 7, 40]), (1, [5]), (2, list(range(5, 30)))):
        assert_whole(
            family("Llama", seed),
            inputs_for(family("Llama"), batch=4, padding=2),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=14,
            eos_token_id=ends,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_length": 9, "max_new_tokens": None},
        {"min_new_tokens": 6},
        {"min_length": 12, "eos_token_id": [5, 6, 7, 8, 9]},
        {"pad_token_id": 3},
        {"output_scores": True, "output_logits": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options, num_beams):
    options = dict(options)
    # Beams give the scores of their texts only with those of all steps, which no processor may have changed.
    if options.keys() & {"min_new_tokens", "min_length"}:
        options["output_scores"] = False
    assert_whole(family("Llama", 1), inputs_for(family("Llama"), batch=3, padding=2), num_beams=num_beams, **options)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(
    "name", ["Llama", "Gemma2", *also(*(name for name in SERVED if name not in ("Llama", "Gemma2")))]
)
def test_a_prompt_of_one_token(name, num_beams):
    assert_whole(family(name), inputs_for(family(name), batch=2, length=1), num_beams=num_beams)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_float64(num_beams):
    assert_whole(family("Llama", dtype=torch.float64), num_beams=num_beams)


def test_more_beams_than_a_first_step_has_tokens():
    # Beams that are no candidates in the first step come in.
    assert_whole(family("Llama"), num_beams=40, eos_token_id=[5, 6, 7], max_new_tokens=4)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "Gemma3"])
def test_bfloat16_runs_and_scores_as_the_model_does(name, num_beams):
    # Sums are ordered otherwise, so that texts may differ; on a model this small they are as probable on average.
    model = family(name, dtype=torch.bfloat16)
    inputs = inputs_for(model, batch=4)
    stock, given, steps = generate_both(model, inputs, fused=whole, num_beams=num_beams, max_new_tokens=8)
    assert steps.whole and not steps.reasons
    if num_beams > 1:
        assert given["sequences_scores"].mean() >= stock["sequences_scores"].mean() - 0.1


def test_a_model_without_a_padding_token():
    model = copy.deepcopy(family("Llama"))
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    for beams in (1, 3):
        assert_whole(model, num_beams=beams)
