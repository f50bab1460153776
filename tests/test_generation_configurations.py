# SPDX-License-Identifier: Apache-2.0
"""The configurations of transformers' own generation tests: stock and fused agree, and only what cannot be fused is not.

Taken from its GenerationTesterMixin: each decoding method with the processors that it sets for all of them, everything
returned that can be, with and without a cache, from tokens and from embeddings.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from decoding import assert_same, generate_both, inputs_for, one_thread, tiny  # noqa: F401
from fused_topk.generation import fused_decoding

MODELS = ("gpt2", "llama", "mixtral", "t5", "bart", "whisper")
PROCESSORS = {"bad_words_ids": [[1, 0]], "repetition_penalty": 1.2, "remove_invalid_values": True}
# One token is left of each row, so that stock and fused draws are comparable.
WARPERS = {"do_sample": True, "top_k": 1, "top_p": 0.7, "temperature": 0.7}
RETURNED = {"output_scores": True, "output_logits": True}
BEAMS = {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 2.0, "early_stopping": False}
METHODS = {
    "greedy": {},
    "greedy_returned": RETURNED,
    "sample": WARPERS,
    "sample_returned": {**WARPERS, **RETURNED},
    "beams": BEAMS,
    "beams_returned": {**BEAMS, **RETURNED},
    "constrained_prefix": {**BEAMS, "prefix_allowed_tokens_fn": lambda batch, text: [5, 7, 11, 13]},
}


def assert_all_whole(stock, given, steps) -> None:
    assert_same(stock, given)
    assert steps.whole > 0 and steps.stock == 0, steps.reasons


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_methods(name, method):
    options = {"max_new_tokens": 4, "output_scores": False, **PROCESSORS, **METHODS[method]}
    stock, given, steps = generate_both(tiny(name), **options)
    assert_all_whole(stock, given, steps)
    for field in ("scores", "logits"):
        assert (stock.get(field) is None) == (given.get(field) is None)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"min_new_tokens": 4, "max_new_tokens": 4},
        {"eos_token_id": [3, 5, 7], "min_length": 9},
    ],
    ids=lambda options: "-".join(options),
)
def test_ways_to_run(options, beams):
    assert_all_whole(
        *generate_both(tiny("llama"), num_beams=beams, **{"max_new_tokens": 6, "output_scores": False, **options})
    )


@pytest.mark.parametrize("beams", [1, 2])
def test_embeddings_for_tokens(beams):
    model = tiny("llama")
    inputs = inputs_for(model)
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach()
    given = {"inputs_embeds": embedded, "attention_mask": inputs["attention_mask"]}
    assert_all_whole(*generate_both(model, given, num_beams=beams, max_new_tokens=4, output_scores=False))


def test_continued_from_a_cache():
    model = tiny("llama")
    inputs = inputs_for(model)
    results = []
    for context in (None, fused_decoding):
        first = model.generate(**inputs, do_sample=False, max_new_tokens=3, return_dict_in_generate=True)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
        rest = {"past_key_values": first.past_key_values, "attention_mask": mask, "do_sample": False}
        if context is None:
            results.append(model.generate(first.sequences, **rest, max_new_tokens=3))
        else:
            with context(model):
                results.append(model.generate(first.sequences, **rest, max_new_tokens=3))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "options", [{"guidance_scale": 1.5}, {"do_sample": True, "typical_p": 0.9, "top_k": 1}], ids=str
)
def test_processors_that_are_not_known(options):
    assert_all_whole(*generate_both(tiny("llama"), inputs_for(tiny("llama"), batch=1), max_new_tokens=4, **options))


def test_what_is_not_served_is_counted():
    model = tiny("llama")
    options = {"prompt_lookup_num_tokens": 2, "max_new_tokens": 4, "output_scores": False}
    stock, given, steps = generate_both(model, inputs_for(model, batch=1), **options)
    assert_same(stock, given)
    assert (
        steps.stock > 0
        and not steps.whole
        and list(steps.reasons) == ["another mode of generate(), prompt_lookup_num_tokens"]
    )
