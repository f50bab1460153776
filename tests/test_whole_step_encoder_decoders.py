# SPDX-License-Identifier: Apache-2.0
"""Whole-step generate() of encoder-decoders against stock: their encoder's keys are kept once for all beams of a sequence."""

import contextlib
import copy
import dataclasses
import functools

import pytest
import torch
import transformers
from transformers.generation import logits_process as stock
from transformers.modeling_outputs import BaseModelOutput

from decoding import also, assert_whole, generate_both, inputs_for, one_thread, stats, tiny  # noqa: F401
from fused_topk.generation import fused_decoding
from whole_steps import SERVED_WITH_SOURCE, assert_declined, assert_whole_of_seeds, encoder_decoder, source_for, whole


@pytest.mark.parametrize("num_beams", [1, 3, *also(8)])
@pytest.mark.parametrize("name", SERVED_WITH_SOURCE)
def test_families(name, num_beams):
    # Whisper's processors change scores, and beams give no scores of their texts without those of the steps.
    assert_whole_of_seeds(functools.partial(encoder_decoder, name), source_for, num_beams, output_scores=False)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_length": 9, "max_new_tokens": None},
        {"forced_bos_token_id": 9, "forced_eos_token_id": 5, "output_scores": False},
        {"decoder_start_token_id": 11},
        {"decoder_input_ids": torch.tensor([[2, 40, 41], [2, 30, 31], [2, 20, 21]])},
        {"eos_token_id": [5, 6, 7, 40]},
        {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2, "output_scores": False},
        {"output_logits": True, "output_scores": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options, num_beams):
    assert_whole(encoder_decoder("Bart", 1), source_for(encoder_decoder("Bart")), num_beams=num_beams, **options)


def test_an_encoder_that_has_run_before():
    model = encoder_decoder("Marian", 1)
    inputs = source_for(model)
    outputs = model.get_encoder()(**inputs)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": inputs["attention_mask"]}

    def again(**more):
        # generate() writes to what it is given.
        given = BaseModelOutput(outputs.last_hidden_state.detach())
        return model.generate(encoder_outputs=given, **options, **more), given.last_hidden_state

    for more in ({}, {"num_beams": 3}, {"output_attentions": True}, {"output_attentions": True, "num_beams": 3}):
        expected = again(**more)
        stats(reset=True)
        with whole(model):
            assert all(map(torch.equal, again(**more), expected))
        assert (stats(reset=True).whole == 0) == ("output_attentions" in more)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_whispers_own_prompts_and_pieces(num_beams):
    model = encoder_decoder("Whisper", 1)
    inputs = source_for(model)
    prompt = torch.tensor([3, 20, 21])
    options = {"num_beams": num_beams, "max_new_tokens": 9, "output_scores": False, "return_dict_in_generate": False}
    for extra in ({"decoder_input_ids": torch.tensor([[2, 40, 41]] * 3)}, {"prompt_ids": prompt}):
        stock, given, steps = generate_both(model, inputs, fused=whole, **options, **extra)
        assert torch.equal(stock, given)
        assert steps.whole > 0 and not steps.reasons


@pytest.mark.skipif("Speech2Text" not in SERVED_WITH_SOURCE, reason="not served")
def test_padding_of_sounds():
    # Speech2Text makes a mask of its own of this one. Whisper looks at no mask once its encoder has run.
    for beams in (1, 3):
        sounds = encoder_decoder("Speech2Text", 1)
        options = {"num_beams": beams, "output_scores": False}
        assert_declined(sounds, "padding of input_features", source_for(sounds, padding=2), **options)
        assert_whole(sounds, source_for(sounds, padding=0), **options)
        whisper = encoder_decoder("Whisper", 1)
        assert_whole(whisper, source_for(whisper, padding=2), **options)


@dataclasses.dataclass
class Masked(BaseModelOutput):
    attention_mask: torch.Tensor | None = None


def test_what_an_encoder_gives_beside_its_states():
    model = encoder_decoder("Bart", 1)
    inputs = source_for(model)
    states = model.get_encoder()(**inputs).last_hidden_state.detach()

    def generate(mask):
        # generate() changes what it is given.
        outputs = Masked(states.clone(), attention_mask=mask)
        return model.generate(encoder_outputs=outputs, num_beams=3, max_new_tokens=8, do_sample=False)

    for mask, reasons in ((inputs["attention_mask"], {"encoder_outputs with attention_mask": 1}), (None, {})):
        stock = generate(mask)
        stats(reset=True)
        with whole(model):
            assert torch.equal(generate(mask), stock)
        assert stats(reset=True).reasons == reasons


def test_calls_that_are_not_served():
    model = copy.deepcopy(encoder_decoder("Bart", 1))
    inputs = source_for(model, batch=2)
    padded = {
        "decoder_input_ids": torch.tensor([[0, 2], [2, 40]]),
        "decoder_attention_mask": torch.tensor([[0, 1], [1, 1]]),
    }
    assert_declined(model, "decoder_attention_mask with padding", inputs | padded, num_beams=3)
    assert_declined(model, "output_attentions", inputs, num_beams=3, output_attentions=True)


def test_a_cache_that_has_been_used_is_not_replaced():
    model = encoder_decoder("Bart", 1)
    inputs = source_for(model, padding=0)
    options = {"max_new_tokens": 5, "do_sample": False}
    begun = model.generate(**inputs, **options, return_dict_in_generate=True)
    name = "cache" if "cache" in begun else "past_key_values"
    with whole(model):
        model.generate(**inputs, **{**options, "decoder_input_ids": begun["sequences"], name: begun[name]})
    assert stats(reset=True).reasons == {"a cache of an encoder-decoder that has been used": 1}


@pytest.mark.skipif("EncoderDecoder" not in SERVED_WITH_SOURCE, reason="not served")
@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_decoder_that_views_its_source_in_another_shape(num_beams):
    shape = {"vocab_size": 97, "n_positions": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    encoder = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    decoder = transformers.GPT2Config(**shape, eos_token_id=1, bos_token_id=2)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.pad_token_id, config.bos_token_id, config.eos_token_id, config.decoder_start_token_id = 0, 2, 1, 2
    torch.manual_seed(0)
    model = transformers.EncoderDecoderModel(config).eval()
    inputs = {"input_ids": torch.arange(3, 17).view(2, 7)}
    assert_whole(model, inputs, num_beams=num_beams, max_new_tokens=6, eos_token_id=None, pad_token_id=0)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_whisper_with_timestamps(num_beams):
    model = copy.deepcopy(tiny("whisper"))
    config = model.generation_config
    config.no_timestamps_token_id, config.max_initial_timestamp_index = 99, 30
    config.suppress_tokens, config.begin_suppress_tokens = [7, 8, 9], [10]
    options = {"return_timestamps": True, "num_beams": num_beams, "max_new_tokens": 20}
    inputs = inputs_for(model)
    expected = model.generate(**inputs, **options)
    with fused_decoding(model):
        found = model.generate(**inputs, **options)
    steps = stats(reset=True)
    assert torch.equal(found, expected) and (found >= 100).any()
    assert steps.whole > 0 and steps.stock == 0, steps.reasons


# Each piece of a sound is read again with draws where its text is improbable or repeats itself.
FALLBACK = {"temperature": (0.0, 0.4, 0.8), "compression_ratio_threshold": 1.35}


@pytest.mark.parametrize("more", [{"temperature": 0.0}, FALLBACK], ids="-".join)
def test_long_sounds_with_detection_of_speech(more):
    # Behind a prompt the detector calls the model, once for each piece of the sound, and that is no step.
    model = copy.deepcopy(tiny("whisper"))
    config = model.generation_config
    config.no_timestamps_token_id, config.max_initial_timestamp_index = 99, 30
    config.is_multilingual, config.lang_to_id, config.task_to_id = True, {"<|en|>": 20}, {"transcribe": 21}
    config.language, config.task = "en", "transcribe"
    sound = torch.randn(1, 8, 5 * 2 * model.config.max_source_positions, generator=torch.Generator().manual_seed(1))
    inputs = {"input_features": sound, "attention_mask": torch.ones(1, sound.shape[-1], dtype=torch.int64)}
    options = {"return_timestamps": True, "max_new_tokens": 4, "condition_on_prev_tokens": False}
    options |= {"no_speech_threshold": 0.6, "logprob_threshold": -1.0, **more}
    torch.manual_seed(1)
    expected = model.generate(**inputs, **options)
    torch.manual_seed(1)
    with fused_decoding(model):
        found = model.generate(**inputs, **options)
    steps = stats(reset=True)
    assert torch.equal(found, expected)
    assert steps.whole > 4 and steps.stock == 0 and not steps.reasons


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("is_first", [True, False])
def test_detection_of_speech_looks_at_all_scores_once(is_first, num_beams):
    detectors = [stock.WhisperNoSpeechDetection(50, begin_index=1, scores_is_logprobs=num_beams > 1) for _ in range(2)]
    found = []
    for detector, is_fused in zip(detectors, (False, True), strict=True):
        stats(reset=True)
        with fused_decoding(tiny("bart")) if is_fused else contextlib.nullcontext():
            processors = [detector, stock.SuppressTokensLogitsProcessor([60, 61, 62])][:: 1 if is_first else -1]
            options = {"num_beams": num_beams, "max_new_tokens": 6, "logits_processor": processors}
            found.append(tiny("bart").generate(**inputs_for(tiny("bart")), **options))
    steps = stats(reset=True)
    assert torch.equal(*found)
    torch.testing.assert_close(*(detector.no_speech_prob for detector in detectors), rtol=1e-5, atol=0)
    assert (steps.whole, steps.stock) == (6, 0), steps.reasons
