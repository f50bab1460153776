# SPDX-License-Identifier: Apache-2.0
"""Whisper: timestamps, detection of speech, and long sounds."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from transformers.generation import logits_process as stock

from decoding import inputs_for, one_thread, stats, tiny  # noqa: F401
from fused_topk.generation import fused_decoding


@pytest.mark.parametrize("num_beams", [1, 3])
def test_whisper_with_timestamps(num_beams):
    model = copy.deepcopy(tiny("whisper"))
    config = model.generation_config
    config.no_timestamps_token_id, config.max_initial_timestamp_index = 99, 30
    config.suppress_tokens, config.begin_suppress_tokens = [7, 8, 9], [10]
    options = {"return_timestamps": True, "num_beams": num_beams, "max_new_tokens": 20}
    inputs = inputs_for(model)
    expected = model.generate(**inputs, **options)
    stats(reset=True)
    with fused_decoding(model):
        found = model.generate(**inputs, **options)
    steps = stats(reset=True)
    assert torch.equal(found, expected) and (found >= 100).any()
    assert steps.whole > 0 and steps.stock == 0, steps.reasons


def test_long_sounds_with_detection_of_speech():
    # Behind a prompt the detector calls the model, once for each piece of the sound, and that is no step.
    model = copy.deepcopy(tiny("whisper"))
    config = model.generation_config
    config.no_timestamps_token_id, config.max_initial_timestamp_index = 99, 30
    config.is_multilingual, config.lang_to_id, config.task_to_id = True, {"<|en|>": 20}, {"transcribe": 21}
    config.language, config.task = "en", "transcribe"
    sound = torch.randn(1, 8, 5 * 2 * model.config.max_source_positions, generator=torch.Generator().manual_seed(1))
    inputs = {"input_features": sound, "attention_mask": torch.ones(1, sound.shape[-1], dtype=torch.int64)}
    options = {"return_timestamps": True, "max_new_tokens": 4, "temperature": 0.0, "condition_on_prev_tokens": False}
    options |= {"no_speech_threshold": 0.6, "logprob_threshold": -1.0}
    expected = model.generate(**inputs, **options)
    stats(reset=True)
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
