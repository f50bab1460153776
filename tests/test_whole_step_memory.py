# SPDX-License-Identifier: Apache-2.0
"""The default holds no more beyond the weights than stock generate() of the same call: bytes of torch's allocator, at the peak."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MaxLengthCriteria, StoppingCriteriaList

from decoding import also, one_thread, stats, tiny  # noqa: F401
from fused_topk.generation import fused_decoding
from live_bytes import live_bytes
from whole_steps import encoder_decoder, source_for

# Of numbers and tables of integers, of which a step has a few.
FEW_BYTES = 4096


@functools.cache
def llama(vocab_size):
    """Keys and values are more than what else it computes, more so with few tokens to choose among."""
    torch.manual_seed(0)
    shape = {
        "initializer_range": 0.3,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
    }
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocab_size, pad_token_id=0, **shape)).eval()


def ends_after(model, batch, prompt, written):
    """A prompt and end tokens, of which the last text has its first as the last of so many tokens, without beams."""
    for seed in range(100):
        ids = torch.randint(8, model.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(seed))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        texts = model.generate(**inputs, do_sample=False, max_new_tokens=written, eos_token_id=None)[:, prompt:]
        ends = texts[:, -1].unique()
        if not torch.isin(texts[:, :-1], ends).any(1).all():
            return inputs, ends.tolist()
    raise AssertionError("no such text")


def peaks(model, inputs, written, ends=None, most=64, **options):
    """Of stock and of default generate(). Beams are ended by a criterion, other texts by their end tokens."""
    options |= {"max_new_tokens": most, "do_sample": False, "eos_token_id": ends}
    if ends is None:
        start = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        options["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(start + written)])
    with fused_decoding(model):
        # Its first call tries the model.
        model.generate(**inputs, **options)
        stats(reset=True)
        with live_bytes() as given:
            model.generate(**inputs, **options)
    steps = stats(reset=True)
    assert steps.whole == written and not steps.reasons
    with live_bytes() as stock:
        model.generate(**inputs, **options)
    return stock.most, given.most


def peaks_of_llama(vocab_size, batch, beams, prompt, written, most=64):
    model = llama(vocab_size)
    inputs, ends = ends_after(model, batch, prompt, written)
    return peaks(model, inputs, written, ends if beams == 1 else None, most, num_beams=beams)


@pytest.mark.parametrize(("batch", "beams"), [(2, 1), (1, 3), *also((1, 1), (1, 16))])
@pytest.mark.parametrize("written", [2, 18, *also(1, 34)])
@pytest.mark.parametrize("prompt", [3, *also(200)])
@pytest.mark.parametrize("vocab_size", [200, *also(32000)])
def test_a_call_holds_no_more_than_stock(vocab_size, prompt, written, batch, beams):
    stock, given = peaks_of_llama(vocab_size, batch, beams, prompt, written)
    assert given <= stock + FEW_BYTES, (stock, given)


@pytest.mark.parametrize("beams", [1, *also(3)])
def test_an_encoder_decoder_holds_no_more_than_stock(beams):
    model = encoder_decoder("Bart")
    stock, given = peaks(model, source_for(model), 18, num_beams=beams)
    assert given <= stock + FEW_BYTES, (stock, given)


@pytest.mark.parametrize("written", [18, *also(40)])
@pytest.mark.parametrize("beams", [1, *also(2, 3, 5)])
def test_a_model_with_a_row_for_each_beam_holds_one_more_copy_of_a_layer(beams, written):
    model = tiny("t5")
    inputs = source_for(model)
    stock, given = peaks(model, inputs, written, num_beams=beams)
    rows, config = len(inputs["input_ids"]) * beams, model.config
    keys_and_values = 2 * rows * config.num_heads * config.d_kv * written * 4
    assert given <= stock + keys_and_values + FEW_BYTES, (stock, given)


@pytest.mark.parametrize("beams", [1, 4])
def test_what_is_allowed_is_not_held(beams):
    few, many = (peaks_of_llama(200, 2, beams, 6, 24, most)[1] for most in (64, 1500))
    assert many <= few + FEW_BYTES, (few, many)
