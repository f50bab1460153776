# SPDX-License-Identifier: Apache-2.0
"""What stock generate() accepts beyond the documented: the same result from the fused one, or the same error."""

import copy

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from decoding import EOS, SmallerIndexFirst, assert_same, inputs_for, one_thread, stats, tiny  # noqa: F401
from fused_topk.generation import fused_decoding

BEAMS = pytest.mark.parametrize("num_beams", [1, 3])
SEARCH = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}


def outcome(model, inputs, options):
    """The result of generate(), or its error."""
    torch.manual_seed(0)
    try:
        with SmallerIndexFirst():
            return model.generate(**inputs, **SEARCH | options())
    except Exception as error:
        return error


def assert_like_stock(options, model=None, inputs=None):
    """Fused generate() gives or raises what stock gives or raises, with options made anew for each; its steps, as stats()."""
    model = model or tiny("llama")
    inputs = inputs or inputs_for(model)
    expected = outcome(model, inputs, options)
    stats(reset=True)
    with fused_decoding(model):
        found = outcome(model, inputs, options)
    steps = stats(reset=True)
    if isinstance(expected, Exception):
        assert type(found) is type(expected) and str(found) == str(expected)
    else:
        assert not isinstance(found, Exception), repr(found)
        assert_same(expected, found)
    return steps


@pytest.fixture
def default_dtype():
    """A function that sets torch's default dtype until the test ends."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@BEAMS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        # Numbers that the narrower types round.
        {"sequence_bias": [[[i, j], 1.2345 * (i % 7)] for i in range(8, 211) for j in (20, 30)]},
        {"exponential_decay_length_penalty": (1, 1.3), "repetition_penalty": 1.3},
        {"renormalize_logits": True, "prefix_allowed_tokens_fn": lambda batch, ids: range(8, 60)},
        {"forced_eos_token_id": EOS, "suppress_tokens": [8, 9]},
    ],
    ids=lambda options: "-".join(options) or "none",
)
def test_default_dtypes(default_dtype, dtype, options, num_beams):
    tiny("llama")
    default_dtype(dtype)
    steps = assert_like_stock(lambda: {"num_beams": num_beams, "output_scores": num_beams > 1, **options})
    assert steps.whole and not steps.stock, steps.reasons


class Reversed(LogitsProcessorList):
    """A list of processors that does something of its own."""

    def __call__(self, input_ids, scores, **kwargs):
        return -super().__call__(input_ids, scores, **kwargs)


@BEAMS
@pytest.mark.parametrize(
    "given",
    [Reversed([stock.SuppressTokensLogitsProcessor([8])]), lambda input_ids, scores: scores.flip(-1)],
    ids=["subclass", "function"],
)
def test_processors_that_a_models_own_method_gives(given, num_beams):
    class Own(type(tiny("llama"))):
        def _get_logits_processor(self, *args, **kwargs):
            return given

    model = copy.deepcopy(tiny("llama"))
    model.__class__ = Own
    steps = assert_like_stock(lambda: {"num_beams": num_beams}, model)
    assert not steps.whole and list(steps.reasons) == [f"logits processors in a {type(given).__name__}"]


@BEAMS
def test_an_error_of_the_function_is_the_users(num_beams):
    def options():
        calls = []

        def function(batch, ids):
            calls.append(batch)
            if len(calls) == 5:
                raise LookupError(f"the fifth call, of {batch}")
            return [8, 9, 10, 11]

        return {"num_beams": num_beams, "prefix_allowed_tokens_fn": function}

    assert_like_stock(options)
