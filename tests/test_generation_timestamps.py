# SPDX-License-Identifier: Apache-2.0
"""Whisper's timestamps: the fused choice against transformers' processor, alone, after others, and in generate()."""

from __future__ import annotations

import contextlib
import copy
import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

import transformers
from transformers.generation import logits_process as stock

from decoding import assert_fused, assert_same, generate_both, inputs_for, one_thread, tiny  # noqa: F401
from fused_topk.backends import cpu
from fused_topk.generation import fused_decoding, stats
from fused_topk.generation.choice.edit import NotSparse
from fused_topk.generation.choice.rows import Rows
from fused_topk.generation.choice.selection import best, best_continuations
from fused_topk.generation.edits.plan import Plan

VOCAB_SIZE, EOS, NO_TIMESTAMPS, BEGIN = 150, 90, 99, 100
# Of length 3 is the prompt. No timestamp, one, two, a pair closed, text after one, text after two pairs.
TEXTS = [
    [20, 21, 22],
    [20, 21, 100],
    [20, 104, 104],
    [104, 20, 110],
    [105, 20, 21],
    [100, 107, 107],
    [149, 20, 149],
    [100, 103, 30],
]


def processor(detects=True, begin_index=3, latest=None):
    config = SimpleNamespace(
        no_timestamps_token_id=NO_TIMESTAMPS,
        eos_token_id=EOS,
        bos_token_id=EOS,
        max_initial_timestamp_index=latest,
        _detect_timestamp_from_logprob=detects,
    )
    return stock.WhisperTimeStampLogitsProcessor(config, begin_index=begin_index)


def history(length):
    return torch.tensor([[1, 2, 3, *text][: 3 + length] for text in TEXTS])


def logits_of(shift):
    """Random rows; the timestamps are more probable by `shift`."""
    logits = torch.randn(len(TEXTS), VOCAB_SIZE, generator=torch.Generator().manual_seed(int(shift * 10) + 50))
    logits[:, BEGIN:] += shift
    return logits


@pytest.mark.parametrize("are_log_probs", [True, False], ids=["log_probs", "logits"])
@pytest.mark.parametrize("detects", [True, False], ids=["detects", "rules"])
@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_chooses_what_the_stock_processor_leaves(length, detects, are_log_probs):
    others = [stock.SuppressTokensLogitsProcessor([4, 5, EOS, 104]), stock.RepetitionPenaltyLogitsProcessor(1.4)]
    for chain in ([], others):
        for latest in (None, 4):
            for shift in (-2.0, -1.0, 0.0, 2.0):
                logits, ids = logits_of(shift), history(length)
                scores = logits.log_softmax(-1) if are_log_probs else logits
                processors = [*chain, processor(detects, latest=latest)]
                dense = transformers.LogitsProcessorList(processors)(ids, scores.clone())
                rows = Rows(logits, cpu)
                edits = Plan(processors, False).edits(ids, rows, are_log_probs)
                found = best(rows, edits, 5, are_log_probs)
                expected = dense.topk(5)
                torch.testing.assert_close(found.scores, expected.values, rtol=0, atol=1e-5)
                is_finite = expected.values.isfinite()
                assert torch.equal(found.ids[is_finite], expected.indices[is_finite])
                if are_log_probs:
                    beams = torch.tensor([[-1.0, -2.5]]).expand(len(ids) // 2, 2).contiguous()
                    values, _ = best_continuations(rows, edits, beams, 4)
                    total = (dense.view(len(ids) // 2, 2, -1) + beams[..., None]).flatten(1)
                    torch.testing.assert_close(values, total.topk(4).values, rtol=0, atol=1e-5)


def test_rows_with_nan_and_infinities():
    ids = history(1)
    for token in (30, 120):
        for value in (math.nan, math.inf, -math.inf):
            logits = logits_of(-1.0)
            logits[::2, token] = value
            dense = processor()(ids, logits.clone())
            rows = Rows(logits, cpu)
            found = best(rows, Plan([processor()], False).edits(ids, rows, False), 1, False).ids[:, 0]
            assert torch.equal(found, dense.argmax(-1)), (token, value)


@pytest.mark.parametrize("change", [{"eos_token_id": [3, 4]}, {"timestamp_begin": 500}, {"begin_index": -1}], ids=str)
def test_numbers_that_are_not_known_are_left_to_the_stock_processor(change):
    changed = processor()
    vars(changed).update(change)
    with pytest.raises(NotSparse, match="timestamps"):
        Plan([changed], False).edits(history(2), Rows(logits_of(0.0), cpu), False)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("begin", [60, 150])
def test_generate_with_timestamps(num_beams, begin):
    # In the vocabulary of 211, from `begin` on; the processor as Whisper's generate() gives it to the loop.
    config = SimpleNamespace(
        no_timestamps_token_id=begin - 1, eos_token_id=5, bos_token_id=1, max_initial_timestamp_index=20
    )
    timestamps = stock.WhisperTimeStampLogitsProcessor(config, begin_index=1)
    suppressed = stock.SuppressTokensLogitsProcessor([7, 8])
    processors = transformers.LogitsProcessorList([suppressed, timestamps])
    assert_fused(tiny("bart"), num_beams=num_beams, logits_processor=processors, max_new_tokens=14)


class Other(stock.WhisperTimeStampLogitsProcessor):
    pass


def test_a_subclass_runs_stock_operations():
    other = processor()
    other.__class__ = Other
    stock_result, given, steps = generate_both(
        tiny("t5"), num_beams=2, logits_processor=transformers.LogitsProcessorList([other])
    )
    assert_same(stock_result, given)
    assert steps.fused == 0 and list(steps.reasons) == [f"logits processor {__name__}.Other"]


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
    with fused_decoding(model, whole_step=False):
        found = model.generate(**inputs, **options)
    steps = stats(reset=True)
    assert torch.equal(found, expected) and (found >= 100).any()
    assert steps.fused > 0 and steps.fallback == 0, steps.reasons


@pytest.mark.parametrize("whole_step", [False, "eager"], ids=["fused", "whole"])
def test_long_sounds_with_detection_of_speech(whole_step):
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
    with fused_decoding(model, whole_step=whole_step):
        found = model.generate(**inputs, **options)
    steps = stats(reset=True)
    assert torch.equal(found, expected)
    # Before transformers 5 the detector comes behind other processors, and looks at what they leave.
    is_first = int(transformers.__version__.split(".")[0]) >= 5
    assert steps.fused > 4 and (steps.fallback == 0 or not is_first), steps.reasons
    assert steps.whole == (steps.fused if whole_step and is_first else 0) and not (steps.not_whole and is_first)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("is_first", [True, False])
def test_detection_of_speech_looks_at_all_scores_once(is_first, num_beams):
    detectors = [stock.WhisperNoSpeechDetection(50, begin_index=1, scores_is_logprobs=num_beams > 1) for _ in range(2)]
    found = []
    for detector, is_fused in zip(detectors, (False, True), strict=True):
        stats(reset=True)
        with fused_decoding(tiny("bart"), whole_step=False) if is_fused else contextlib.nullcontext():
            processors = [detector, stock.SuppressTokensLogitsProcessor([60, 61, 62])][:: 1 if is_first else -1]
            options = {"num_beams": num_beams, "max_new_tokens": 6, "logits_processor": processors}
            found.append(tiny("bart").generate(**inputs_for(tiny("bart")), **options))
    steps = stats(reset=True)
    assert torch.equal(*found) and torch.equal(*(detector.no_speech_prob for detector in detectors))
    # Behind others it would have to see what they leave of the scores.
    assert (steps.fused, steps.fallback) == ((6, 0) if is_first else (5, 1)), steps.reasons


def test_detection_of_speech_runs_once_where_stock_operations_choose():
    asked = []

    class Model:
        def __call__(self, **inputs):
            asked.append(inputs)
            return SimpleNamespace(logits=torch.zeros(2, 3, 211))

    stats(reset=True)
    for is_fused in (False, True):
        detector = stock.WhisperNoSpeechDetection(50, begin_index=2)
        detector.begin_index = 1
        detector.set_model(Model())
        detector.inputs = {}
        with fused_decoding(tiny("bart"), whole_step=False) if is_fused else contextlib.nullcontext():
            # The last token, which only the stock processor takes for one, in the step in which the detector looks.
            last = stock.ForcedBOSTokenLogitsProcessor(-1)
            tiny("bart").generate(**inputs_for(tiny("bart")), max_new_tokens=4, logits_processor=[detector, last])
    assert len(asked) == 2 and stats(reset=True).fallback == 1
