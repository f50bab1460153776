# SPDX-License-Identifier: Apache-2.0
"""Tokens that may not be chosen, and tokens that must be, as edits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from ..choice import masks
from ..choice.edit import Edit, NotSparse
from .adapter import Adapter, Adapters, Step, text_check


class Ban(Edit):
    """Some tokens get the score -inf. `scanned` holds all others."""

    scanned: Tensor

    def __init__(self, scanned: Tensor) -> None:
        self.scanned = scanned

    def apply(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores.where(masks.holds(self.scanned, ids), -torch.inf)


class Force(Edit):
    """The tokens `ids` [1, n] get the score 0, all others -inf."""

    ids: Tensor
    replaces_row = True

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def apply(self, ids: Tensor, scores: Tensor) -> Tensor:
        is_forced = (ids.unsqueeze(-1) == self.ids.view(1, 1, -1)).any(-1)
        return torch.zeros_like(scores).where(is_forced, -torch.inf)


def _tokens(value: Any) -> list[int] | None:
    """The tokens that an attribute names. None if it is neither an integer nor a list of integers."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    # An empty list becomes float32.
    is_known = not tensor.numel() or tensor.dtype in (torch.int64, torch.int32)
    return tensor.flatten().tolist() if is_known else None


def _suppress(tokens: Any, applies: Callable[[Step], bool]) -> Adapter | None:
    """The same tokens get -inf in all rows, in the steps where that applies."""
    listed = _tokens(tokens)
    if listed is None:
        return None
    if not listed:
        return lambda step: None
    made: dict[tuple[int, torch.device], Ban] = {}

    def adapter(step: Step) -> Edit | None:
        if not applies(step):
            return None
        key = (step.rows.vocab_size, step.rows.logits.device)
        if key not in made:
            made[key] = Ban(masks.all_but(listed, *key))
        return made[key]

    return adapter


def _min_length(p: Any) -> Adapter | None:
    return _suppress(p.eos_token_id, lambda step: step.input_ids.shape[-1] < p.min_length)


def _min_new_tokens(p: Any) -> Adapter | None:
    return _suppress(p.eos_token_id, lambda step: step.input_ids.shape[-1] - p.prompt_length_to_skip < p.min_new_tokens)


def _suppress_tokens(p: Any) -> Adapter | None:
    return _suppress(p.suppress_tokens, lambda step: True)


def _suppress_tokens_at_begin(p: Any) -> Adapter | None:
    # Whisper moves begin_index between segments.
    return _suppress(p.begin_suppress_tokens, lambda step: step.input_ids.shape[-1] == p.begin_index)


def _ban_rows(tokens: Tensor, vocab_size: int) -> Ban:
    """`tokens` [R, n]: the tokens that each row may not choose, vocab_size for none."""
    return Ban(masks.all_but_rows(tokens.sort(-1).values, vocab_size))


def _no_repeat_ngram(p: Any) -> Adapter | None:
    if not isinstance(p.ngram_size, int) or p.ngram_size < 1:
        return None
    check = text_check(stock.NoRepeatNGramLogitsProcessor, 1)

    def adapter(step: Step) -> Edit | None:
        ids, size, vocab_size = step.input_ids, p.ngram_size, step.rows.vocab_size
        if ids.shape[1] < size:
            return None
        check(step)
        ngrams = ids.unfold(1, size, 1)
        # The last tokens are the beginning of an n-gram. Tokens that have completed it before are banned.
        begun = ids[:, ids.shape[1] + 1 - size :].unsqueeze(1)
        is_match = (ngrams[..., :-1] == begun).all(-1)
        return _ban_rows(ngrams[..., -1].where(is_match, vocab_size), vocab_size)

    return adapter


def _encoder_no_repeat_ngram(p: Any) -> Adapter | None:
    if not isinstance(p.ngram_size, int) or p.ngram_size < 1:
        return None
    ends = [end for text in p.generated_ngrams for ends in text.values() for end in ends]
    made: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def adapter(step: Step) -> Edit | None:
        ids, size, vocab_size = step.input_ids, p.ngram_size, step.rows.vocab_size
        if len(ids) % p.batch_size:
            raise NotSparse("an encoder's texts for another number of rows")
        if ids.shape[1] + 1 < size or not ends:
            return None
        if not 0 <= min(ends) <= max(ends) < vocab_size:
            raise NotSparse("a text with tokens outside the vocabulary")
        if ids.device not in made:
            made[ids.device] = _ngram_tables(p.generated_ngrams, size, ids.device)
        prefixes, last = (table.repeat_interleave(len(ids) // p.batch_size, 0) for table in made[ids.device])
        begun = ids[:, ids.shape[1] + 1 - size :].unsqueeze(1)
        is_match = (prefixes == begun).all(-1)
        return _ban_rows(last.where(is_match & (last >= 0), vocab_size), vocab_size)

    return adapter


def _ngram_tables(
    ngrams: list[dict[tuple[int, ...], list[int]]], size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The n-grams of each text: beginnings [batch, n, size - 1] and ends [batch, n], -1 where there are fewer."""
    listed = [[(*begin, end) for begin, ends in text.items() for end in ends] for text in ngrams]
    table = torch.full((len(listed), max(1, *map(len, listed)), size), -1, device="cpu")
    for row, text in zip(table, listed, strict=True):
        if text:
            row[: len(text)] = torch.tensor(text, device="cpu")
    return table[..., :-1].to(device), table[..., -1].to(device)


def _forced(tokens: Any, applies: Callable[[Step], bool]) -> Adapter | None:
    listed = _tokens(tokens)
    if not listed:
        return None
    made: dict[torch.device, Force] = {}

    def adapter(step: Step) -> Edit | None:
        if not applies(step):
            return None
        if not 0 <= min(listed) <= max(listed) < step.rows.vocab_size:
            raise NotSparse("a forced token outside the vocabulary")
        device = step.rows.logits.device
        if device not in made:
            made[device] = Force(torch.tensor([listed], device=device))
        return made[device]

    return adapter


def _forced_bos(p: Any) -> Adapter | None:
    return _forced(p.bos_token_id, lambda step: step.input_ids.shape[-1] == 1)


def _forced_eos(p: Any) -> Adapter | None:
    return _forced(p.eos_token_id, lambda step: step.input_ids.shape[-1] == p.max_length - 1)


ADAPTERS: Adapters = {
    stock.MinLengthLogitsProcessor: (_min_length, frozenset({"min_length", "eos_token_id"})),
    stock.MinNewTokensLengthLogitsProcessor: (
        _min_new_tokens,
        frozenset({"prompt_length_to_skip", "min_new_tokens", "eos_token_id"}),
    ),
    stock.SuppressTokensLogitsProcessor: (_suppress_tokens, frozenset({"suppress_tokens"})),
    stock.SuppressTokensAtBeginLogitsProcessor: (
        _suppress_tokens_at_begin,
        frozenset({"begin_suppress_tokens", "begin_index"}),
    ),
    stock.NoRepeatNGramLogitsProcessor: (_no_repeat_ngram, frozenset({"ngram_size"})),
    stock.EncoderNoRepeatNGramLogitsProcessor: (
        _encoder_no_repeat_ngram,
        frozenset({"ngram_size", "batch_size", "generated_ngrams"}),
    ),
    stock.ForcedBOSTokenLogitsProcessor: (_forced_bos, frozenset({"bos_token_id"})),
    stock.ForcedEOSTokenLogitsProcessor: (_forced_eos, frozenset({"max_length", "eos_token_id"})),
}
