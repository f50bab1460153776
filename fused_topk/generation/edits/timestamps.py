# SPDX-License-Identifier: Apache-2.0
"""Whisper's rules for timestamps as an edit. The rules of a row depend on its text, so a step waits for the tokens, as in stock.

The last rule looks at the scores: where the timestamps together are more probable than the best token of the text, there must
be one. Two more scans of the logits answer that, one of the text and one of the timestamps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation import logits_process as stock

from ..choice import masks
from ..choice.edit import Edit, NotSparse
from ..choice.selection import best, logsumexp
from .adapter import Adapter, Adapters, Step
from .bans import Ban


def _may_follow(p: Any, text: list[int], vocab_size: int) -> np.ndarray:
    """bool [V]: the tokens that the rules allow after a text, whatever their scores."""
    begin: int = p.timestamp_begin
    allowed = np.ones(vocab_size, dtype=bool)
    allowed[p.no_timestamps_token_id] = False
    # Timestamps come in pairs, except for one right before the end.
    is_after_one = len(text) >= 1 and text[-1] >= begin
    is_after_two = is_after_one and (len(text) < 2 or text[-2] >= begin)
    if is_after_two:
        allowed[begin:] = False
    elif is_after_one:
        allowed[: p.eos_token_id] = False
    # They do not go back; only the second of a pair may repeat the first.
    last = next((token for token in reversed(text) if token >= begin), None)
    if last is not None:
        allowed[begin : last + (0 if is_after_one and not is_after_two else 1)] = False
    return allowed


def _timestamps(p: Any) -> Adapter:
    def adapter(step: Step) -> Edit | None:
        rows, begin, latest = step.rows, p.timestamp_begin, p.max_initial_timestamp_index
        vocab_size, device = rows.vocab_size, rows.logits.device
        numbers = (begin, p.no_timestamps_token_id, p.eos_token_id, p.begin_index, 0 if latest is None else latest)
        # A Whisper may have several end tokens, or none.
        if not all(type(number) is int and 0 <= number < vocab_size for number in numbers):
            raise NotSparse("Whisper's timestamps are not in the vocabulary")
        allowed = np.stack([_may_follow(p, ids[p.begin_index :], vocab_size) for ids in step.input_ids.tolist()])
        if step.input_ids.shape[1] == p.begin_index:
            allowed[:, :begin] = False
            if latest is not None:
                allowed[:, begin + latest + 1 :] = False
        words = masks.of(allowed, device)
        if not p._detect_timestamp_from_logprob:
            return Ban(words)

        is_timestamp = masks.of(np.arange(vocab_size)[None] >= begin, device)
        text, timestamps = words & ~is_timestamp, words & is_timestamp
        best_text = best(rows, [*step.edits, Ban(text)], 1, step.are_log_probs).scores
        total = logsumexp(rows, [*step.edits, Ban(timestamps)], 1.0, step.are_log_probs)
        # With +inf in a row its probabilities are NaN, and nothing is greater.
        must_be_one = (total > best_text) & total.isfinite()
        return Ban(timestamps.where(must_be_one, words))

    return adapter


def _unchanged(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores


def _no_speech(p: Any) -> Adapter:
    def adapter(step: Step) -> Edit | None:
        # Once in a segment it looks at all of the scores. It never changes any.
        if step.input_ids.shape[1] == p.begin_index:
            if step.edits:
                raise NotSparse("Whisper's detection of speech behind other processors, once in a segment")
            scores = step.rows.logits.to(copy=True, dtype=torch.float32)
            p(step.input_ids, F.log_softmax(scores, dim=-1) if step.are_log_probs else scores)
            step.on_call(p)
            step.answered[id(p)] = _unchanged
        return None

    return adapter


ADAPTERS: Adapters = {
    stock.WhisperNoSpeechDetection: (
        _no_speech,
        frozenset(
            {
                "no_speech_token",
                "start_of_trans_offset",
                "begin_index",
                "_no_speech_prob",
                "is_scores_logprobs",
                "model",
                "inputs",
            }
        ),
    ),
    stock.WhisperTimeStampLogitsProcessor: (
        _timestamps,
        frozenset(
            {
                "no_timestamps_token_id",
                "timestamp_begin",
                "eos_token_id",
                "_detect_timestamp_from_logprob",
                "begin_index",
                "max_initial_timestamp_index",
            }
        ),
    ),
}
