# SPDX-License-Identifier: Apache-2.0
"""Random generate() calls in the manner of users: texts, scores and the generator's state are stock's, and nearly all are served."""

import random

import pytest
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from decoding import SmallerIndexFirst, also, inputs_for, one_thread, stats  # noqa: F401
from fused_topk.generation import FusedTopKLogitsProcessor, disable, enable
from test_whole_step_models import row_model
from whole_steps import SERVED, SERVED_WITH_SOURCE, always_by_heads, encoder_decoder, family, source_for

# What gives texts that lie a rounding apart is not compared: see decoding.stock_gap().
_GAP = 2e-5


class Stateful(LogitsProcessor):
    """A processor that counts its calls, and lets the count decide."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, (7 * self.calls) % scores.shape[1]] -= 3.0
        return scores


class Even(StoppingCriteria):
    """A criterion of a user's."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] % 8 == 0) & (input_ids.shape[1] > 9)


def call_of(pick: random.Random):
    """The options of a call. What keeps a state is made anew by each use of the options."""
    options = {"max_new_tokens": pick.choice([1, 3, 8, 14]), "num_beams": pick.choice([1, 1, 1, 2, 3])}
    options["do_sample"] = pick.random() < 0.5
    some = [
        ("repetition_penalty", [1.2, 1.6]),
        ("no_repeat_ngram_size", [2, 3]),
        ("bad_words_ids", [[[9], [11, 12]]]),
        ("suppress_tokens", [[20, 21, 22]]),
        ("min_new_tokens", [4]),
        ("eos_token_id", [5, [5, 6, 7, 8, 9, 10], list(range(5, 40))]),
        ("sequence_bias", [[[[30], 2.0], [[31, 32], -2.0]]]),
        ("exponential_decay_length_penalty", [(3, 1.2)]),
        ("renormalize_logits", [True]),
        ("remove_invalid_values", [True]),
        ("output_scores", [True]),
        ("output_logits", [True]),
        ("processor", [Stateful]),
        ("criterion", [Even]),
        ("num_return_sequences", [2]),
    ]
    if options["do_sample"]:
        some += [("temperature", [0.5, 1.3]), ("top_k", [0, 1, 7, 50]), ("top_p", [0.5, 0.9]), ("min_p", [0.05])]
        some += [("typical_p", [0.7]), ("epsilon_cutoff", [0.02]), ("eta_cutoff", [0.02]), ("fused", [True])]
    if options["num_beams"] > 1:
        some += [("length_penalty", [0.5, 2.0]), ("early_stopping", [True, "never"])]
    for name, values in pick.sample(some, pick.choice([0, 1, 2, 3, 4])):
        options[name] = pick.choice(values)
    if not options["do_sample"] and options["num_beams"] == 1:
        options.pop("num_return_sequences", None)
    return options


def run(model, inputs, options, seed):
    options = {"return_dict_in_generate": True, "pad_token_id": 0, **options}
    processor, criterion, fused = (options.pop(name, None) for name in ("processor", "criterion", "fused"))
    own = [processor()] if processor else []
    own += [FusedTopKLogitsProcessor(9, top_p=0.9)] if fused else []
    if own:
        options["logits_processor"] = LogitsProcessorList(own)
    if criterion:
        options["stopping_criteria"] = StoppingCriteriaList([criterion()])
    torch.manual_seed(seed)
    order = SmallerIndexFirst(model.config.vocab_size)
    # Of beams that do not exist stock takes any.
    with order:
        result = model.generate(**inputs, **options)
    return result, torch.get_rng_state(), order.gap


@pytest.mark.parametrize("seed", [0, *also(*range(1, 13))])
def test_random_calls(monkeypatch, seed):
    transformers.logging.set_verbosity_error()
    pick, served, calls = random.Random(seed), 0, 40
    kinds = ["Llama", "Llama", "GPT2", "Mistral", "Bart", "T5"]
    if seed % 2:
        kinds = [*SERVED, *SERVED_WITH_SOURCE]
    for number in range(calls):
        kind = pick.choice(kinds)
        made = encoder_decoder if kind in SERVED_WITH_SOURCE else family
        model = row_model(kind) if kind == "T5" else made(kind, pick.choice([0, 1]))
        of_source = model.config.is_encoder_decoder
        batch = pick.choice([1, 2, 3])
        inputs = source_for(model, batch) if of_source else inputs_for(model, batch, padding=pick.choice([0, 2]))
        options = call_of(pick)
        if number == calls // 2:
            always_by_heads(monkeypatch)
        try:
            expected, state, gap = run(model, inputs, options, number)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            expected, state, gap = error, None, 1.0
        stats(reset=True)
        enable(model)
        try:
            if isinstance(expected, Exception):
                with pytest.raises(type(expected)):
                    run(model, inputs, options, number)
                calls -= 1
                continue
            found, after, _ = run(model, inputs, options, number)
        finally:
            disable(model)
        steps = stats(reset=True)
        served += steps.whole > 0 and not steps.stock
        if gap < _GAP and not options["do_sample"]:
            continue
        said = f"call {number} of {kind}: {options}, {steps}"
        assert torch.equal(found.sequences, expected.sequences), said
        assert torch.equal(after, state), said
        for name in ("scores", "logits"):
            if expected.get(name) is not None:
                torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-4, msg=said)
    assert served >= 0.95 * calls
