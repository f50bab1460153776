# SPDX-License-Identifier: Apache-2.0
"""Models that mask logits of their own: of a padded vocabulary, of tokens that stand for images. Stock and fused agree."""

import pytest
import torch

from decoding import FILLS, assert_whole, is_likely, masking, one_thread, prompt_of_all  # noqa: F401
from fused_topk.generation import fused_decoding
from whole_steps import family

# Of them the texts hold every one, so that processors of the text leave nothing that is not masked.
SHOWN = 24
SUPPRESSED = {"suppress_tokens": list(range(SHOWN)), "eos_token_id": None}
OPTIONS = [
    {},
    {"repetition_penalty": 0.7, "renormalize_logits": True},
    {"repetition_penalty": 1.3, **SUPPRESSED},
    {"no_repeat_ngram_size": 1, "sequence_bias": [[[9], 2.0], [[SHOWN + 1], 4.0], [[SHOWN + 2, SHOWN + 3], 8.0]]},
    {"begin_suppress_tokens": list(range(SHOWN)), "exponential_decay_length_penalty": (1, 1.2)},
    {"prefix_allowed_tokens_fn": lambda batch, ids: range(3, SHOWN + 5, 2), "repetition_penalty": 1.3},
]
KINDS = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "none")
FILLED = pytest.mark.parametrize("fill", FILLS)
BEAMS = pytest.mark.parametrize("num_beams", [1, 3])


@KINDS
@FILLED
@BEAMS
def test_whole_steps(options, fill, num_beams):
    model = masking(family("Llama"), SHOWN, FILLS[fill])
    options = {"num_beams": num_beams, "max_new_tokens": 4, **options}
    assert_whole(model, prompt_of_all(model, SHOWN), **options)


@FILLED
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"top_k": 0, "top_p": 0.9, "temperature": 0.7},
        {"top_k": 0, "min_p": 0.1, "renormalize_logits": True},
        # What is left is masked by the model. Of equal tokens those that top-p keeps are arbitrary in stock.
        {"top_k": 0, **SUPPRESSED},
    ],
    ids=lambda options: "-".join(options),
)
def test_draws(options, fill):
    if SUPPRESSED.items() <= options.items() and fill == "inf":
        pytest.skip("no token is left")
    draws, model = 1000, masking(family("Llama"), SHOWN, FILLS[fill])
    prompt = {name: each[:1] for name, each in prompt_of_all(model, SHOWN).items()}
    options = {"do_sample": True, "max_new_tokens": 1, "repetition_penalty": 1.3, **options}
    scores = model.generate(**prompt, **options, return_dict_in_generate=True, output_scores=True).scores
    probabilities = scores[0][0].softmax(-1)
    assert (probabilities > 0).sum() > 2
    torch.manual_seed(0)
    with fused_decoding(model):
        found = model.generate(**{name: each.expand(draws, -1) for name, each in prompt.items()}, **options)
    assert is_likely(found[:, -1].bincount(minlength=97), probabilities, draws)
