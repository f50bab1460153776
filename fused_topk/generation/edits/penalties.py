# SPDX-License-Identifier: Apache-2.0
"""Penalties as edits. Versions of transformers differ in them: small calls find out what the installed version does."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from ..choice import masks
from ..choice.edit import Edit, NotSparse
from .adapter import Adapter, Adapters, Step, text_check


class Penalty(Edit):
    """The scores of some tokens of each row are multiplied where negative, else divided."""

    scanned: Tensor

    def __init__(self, sorted_ids: Tensor, penalty: float, vocab_size: int) -> None:
        self.ids = sorted_ids
        self.scanned = masks.all_but_rows(sorted_ids, vocab_size)
        self._penalty = penalty

    def apply(self, ids: Tensor, scores: Tensor) -> Tensor:
        changed = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return scores.where(masks.holds(self.scanned, ids), changed)


class Growth(Edit):
    """The scores of the tokens `sorted_ids` [1, n] grow by a multiple of their absolute values."""

    scanned: Tensor

    def __init__(self, sorted_ids: Tensor, scanned: Tensor, factor: float, keeps_infinite: bool) -> None:
        self.ids = sorted_ids
        self.scanned = scanned
        self._factor = factor
        self._keeps_infinite = keeps_infinite

    def apply(self, ids: Tensor, scores: Tensor) -> Tensor:
        growth = scores.abs() * self._factor
        if self._keeps_infinite:
            growth = growth.where(scores.isfinite(), 0.0)
        return scores.where(masks.holds(self.scanned, ids), scores + growth)


class Cleaning(Edit):
    """NaN becomes 0, infinite scores the greatest and the lowest finite ones.

    The edit leaves scanned tokens as they are. That is right where all chosen tokens have finite scores: NaN and +inf would
    have been chosen first, and the new score of -inf still ranks last.
    """

    expects_finite_scores = True

    def apply(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores.nan_to_num(0.0)


@functools.cache
def _keeps_infinite() -> bool:
    """Whether the decay of the length penalty leaves -inf as it is, as from 5.20 on, or makes it NaN."""
    with torch.device("cpu"):
        decay = stock.ExponentialDecayLengthPenalty((0, 2.0), 0, 0)
        return bool(decay(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[-math.inf]])).isneginf())


@functools.cache
def _repeats_encoder_ids() -> bool:
    """Whether the encoder's penalty is for all beams of a text, as from 5.20 on, or for as many rows as there are texts."""
    with torch.device("cpu"):
        text: Any = torch.zeros(1, 1, dtype=torch.int64)
        scores = stock.EncoderRepetitionPenaltyLogitsProcessor(2.0, text)(text.expand(2, 1), torch.ones(2, 1))
        return bool(scores[1] != 1)


@functools.cache
def _takes_tensors() -> bool:
    """Whether the ignored length of a prompt may be a tensor, one length for each row."""
    try:
        stock.RepetitionPenaltyLogitsProcessor(2.0, torch.zeros(1, dtype=torch.int64))
    except (TypeError, ValueError):
        return False
    return True


def _repetition_penalty(p: Any) -> Adapter | None:
    ignored = p.prompt_ignore_length
    is_of_rows = isinstance(ignored, Tensor) and _takes_tensors() and ignored.dim() == 1
    # Some versions ignore a length that is neither an int nor a tensor. The last two attributes belong to continuous batching.
    if not (
        (ignored is None or isinstance(ignored, int) or is_of_rows)
        and isinstance(p.penalty, (int, float))
        and p.logits_indices is None
        and p.cu_seq_lens_q is None
    ):
        return None
    check = text_check(stock.RepetitionPenaltyLogitsProcessor, 2.0)

    def adapter(step: Step) -> Edit | None:
        ids, vocab_size = step.input_ids, step.rows.vocab_size
        check(step)
        if is_of_rows:
            if len(ignored) != len(ids):
                raise NotSparse("prompt_ignore_length for another number of rows")
            positions = torch.arange(ids.shape[1], device=ids.device)
            ids = ids.masked_fill(positions < ignored.to(ids.device).unsqueeze(-1), vocab_size)
        elif ignored is not None:
            ids = ids[:, ignored:]
        return Penalty(ids.sort(-1).values, p.penalty, vocab_size) if ids.shape[1] else None

    return adapter


def _inf_nan_remove(p: Any) -> Adapter:
    edit = Cleaning()

    def adapter(step: Step) -> Edit | None:
        if step.rows.logits.device.type != "cpu":
            # To look for infinite scores would wait for the device.
            raise NotSparse("remove_invalid_values on a device")
        return edit

    return adapter


def _exponential_decay(p: Any) -> Adapter:
    made: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def adapter(step: Step) -> Edit | None:
        steps = step.input_ids.shape[-1] - p.regulation_start
        if steps <= 0:
            return None
        key = (step.rows.vocab_size, step.rows.logits.device)
        if key not in made:
            ends = sorted(set(p.eos_token_id.flatten().tolist()))
            if not ends:
                return None
            if p.eos_token_id.dim() != 1 or not 0 <= ends[0] <= ends[-1] < key[0]:
                raise NotSparse("an end token outside the vocabulary")
            made[key] = torch.tensor([ends], device=key[1]), masks.all_but(ends, *key)
        if not _keeps_infinite() and not all(isinstance(edit, Penalty) for edit in step.edits):
            raise NotSparse("this version's decay of the length penalty makes NaN of -inf")
        return Growth(*made[key], pow(p.regulation_factor, steps) - 1, _keeps_infinite())

    return adapter


def _encoder_repetition_penalty(p: Any) -> Adapter:
    made: dict[tuple[int, int], Tensor] = {}

    def prepare(rows: int, vocab_size: int) -> Tensor:
        ids = p.encoder_input_ids
        if ids.dim() != 2 or len(ids) > rows or not bool(((ids >= 0) & (ids < vocab_size)).all()):
            raise NotSparse("the encoder's tokens are not in the decoder's vocabulary")
        if _repeats_encoder_ids():
            ids = ids.repeat_interleave(rows // len(ids), 0)
        # The rows after these are not touched.
        return torch.cat([ids.sort(-1).values, ids.new_full((rows - len(ids), ids.shape[1]), vocab_size)])

    def adapter(step: Step) -> Edit | None:
        # The tokens are looked at once in a call, which waits for the device as generate() has done for them before.
        key = (len(step.rows.logits), step.rows.vocab_size)
        if key not in made:
            made[key] = prepare(*key)
        return Penalty(made[key], p.penalty, step.rows.vocab_size) if made[key].shape[1] else None

    return adapter


ADAPTERS: Adapters = {
    stock.RepetitionPenaltyLogitsProcessor: (
        _repetition_penalty,
        frozenset({"penalty", "prompt_ignore_length", "logits_indices", "cu_seq_lens_q"}),
    ),
    stock.InfNanRemoveLogitsProcessor: (_inf_nan_remove, frozenset()),
    stock.ExponentialDecayLengthPenalty: (
        _exponential_decay,
        frozenset({"regulation_start", "regulation_factor", "eos_token_id"}),
    ),
    stock.EncoderRepetitionPenaltyLogitsProcessor: (
        _encoder_repetition_penalty,
        frozenset({"penalty", "encoder_input_ids"}),
    ),
}
