# SPDX-License-Identifier: Apache-2.0
"""transformers' logits processors as sparse edits (:mod:`selection`), one class for each kind of change.

A processor is taken only if its class is exactly one of the table `ADAPTERS` and it has exactly the attributes known
there: a subclass, or a later version with a further option, is left to the stock operations. Semantics are those of
`transformers/generation/logits_process.py`, equal from 4.57 to 5.23 for what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from . import packed
from .selection import Edit, Rows, best
from .warpers import NORMALIZE, Filter, filters_of


class Ban:
    """Tokens get -inf. `scanned` holds all others."""

    ids = None
    replaces_row = False

    def __init__(self, scanned: Tensor) -> None:
        self.scanned = scanned

    def apply(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores.where(packed.holds(self.scanned, ids), -torch.inf)


class Penalty:
    """The scores of some tokens of each row are multiplied where negative, else divided."""

    replaces_row = False

    def __init__(self, sorted_ids: Tensor, penalty: float, vocab_size: int) -> None:
        self.ids = sorted_ids
        self.scanned = packed.all_but_rows(sorted_ids, vocab_size)
        self._penalty = penalty

    def apply(self, ids: Tensor, scores: Tensor) -> Tensor:
        changed = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return scores.where(packed.holds(self.scanned, ids), changed)


class Force:
    """Every score becomes -inf but for the tokens `ids` [1, n], which get 0."""

    scanned = None
    replaces_row = True

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def apply(self, ids: Tensor, scores: Tensor) -> Tensor:
        is_forced = (ids.unsqueeze(-1) == self.ids.view(1, 1, -1)).any(-1)
        return torch.zeros_like(scores).where(is_forced, -torch.inf)


class Step(NamedTuple):
    """What an adapter may look at."""

    input_ids: Tensor  # int64 [R, length]
    rows: Rows  # the model's logits
    edits: Sequence[Edit]  # of the processors before
    are_log_probs: bool


class NotSparse(Exception):
    """A processor turned out to do more in this step than an edit can say; the stock operations must run."""


# Gives a processor's edit in a step, or None where it changes nothing.
Adapter = Callable[[Step], "Edit | None"]


class Plan:
    """How the processors of one generate() call are carried out.

    reason: why they cannot be fused, None where they can.
    filters: what the warpers at the end do to the best tokens of each row.
    reason_of_beams: why they cannot be fused in beam search.
    """

    def __init__(self, processors: Iterable[Any], is_sampling: bool) -> None:
        self.processors = list(processors)
        self.filters: list[Filter] = []
        self.reason: str | None = None
        self.reason_of_beams: str | None = None
        self._adapters: list[Adapter] = []
        for processor in self.processors:
            reason = f"logits processor {type(processor).__name__}"
            filters = filters_of(processor)
            if filters is not None and NORMALIZE not in self.filters:
                self.filters += filters
                if not is_sampling and filters != [NORMALIZE]:
                    self.reason_of_beams = self.reason_of_beams or reason
                continue
            adapter = _adapter_of(processor)
            if adapter is None or self.filters:
                self.reason = reason
                return
            self._adapters.append(adapter)

    def edits(self, input_ids: Tensor, rows: Rows, are_log_probs: bool) -> list[Edit]:
        """What the processors but for the final warpers do in a step.

        Raises:
            NotSparse: the stock operations must run in this step.
        """
        edits: list[Edit] = []
        for adapter in self._adapters:
            edit = adapter(Step(input_ids, rows, edits, are_log_probs))
            if edit is not None:
                if edit.replaces_row:
                    edits.clear()
                edits.append(edit)
        return edits


def _adapter_of(processor: Any) -> Adapter | None:
    make, known = ADAPTERS.get(type(processor), (None, frozenset()))
    # Optional attributes of single versions are in the table; the others must be there, and no more.
    if make is None or not vars(processor).keys() <= known:
        return None
    return make(processor)


def _suppress(tokens: Sequence[int] | Tensor, applies: Callable[[Step], bool]) -> Adapter:
    """The same tokens get -inf in all rows, in the steps where that applies."""
    listed = torch.as_tensor(tokens).flatten().tolist()
    made: dict[tuple[int, torch.device], Ban] = {}

    def adapter(step: Step) -> Edit | None:
        if not applies(step):
            return None
        key = (step.rows.vocab_size, step.rows.logits.device)
        if key not in made:
            made[key] = Ban(packed.all_but(listed, *key))
        return made[key]

    return adapter


def _min_length(p: Any) -> Adapter:
    return _suppress(p.eos_token_id, lambda step: step.input_ids.shape[-1] < p.min_length)


def _min_new_tokens(p: Any) -> Adapter:
    return _suppress(p.eos_token_id, lambda step: step.input_ids.shape[-1] - p.prompt_length_to_skip < p.min_new_tokens)


def _suppress_tokens(p: Any) -> Adapter:
    return _suppress(p.suppress_tokens, lambda step: True)


def _suppress_tokens_at_begin(p: Any) -> Adapter:
    # Whisper moves begin_index between segments.
    return _suppress(p.begin_suppress_tokens, lambda step: step.input_ids.shape[-1] == p.begin_index)


def _ban_rows(tokens: Tensor, vocab_size: int) -> Ban:
    """`tokens` [R, n]: what each row may not choose, vocab_size where there is nothing."""
    return Ban(packed.all_but_rows(tokens.sort(-1).values, vocab_size))


def _no_repeat_ngram(p: Any) -> Adapter:
    def adapter(step: Step) -> Edit | None:
        ids, size, vocab_size = step.input_ids, p.ngram_size, step.rows.vocab_size
        if ids.shape[1] < size:
            return None
        ngrams = ids.unfold(1, size, 1)
        # The last tokens begin an n-gram; what has completed it before is banned.
        begun = ids[:, ids.shape[1] + 1 - size :].unsqueeze(1)
        is_match = (ngrams[..., :-1] == begun).all(-1)
        return _ban_rows(ngrams[..., -1].where(is_match, vocab_size), vocab_size)

    return adapter


def _encoder_no_repeat_ngram(p: Any) -> Adapter:
    made: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def adapter(step: Step) -> Edit | None:
        ids, size, vocab_size = step.input_ids, p.ngram_size, step.rows.vocab_size
        if ids.shape[1] + 1 < size:
            return None
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
    table = torch.full((len(listed), max(1, *map(len, listed)), size), -1)
    for row, text in zip(table, listed, strict=True):
        if text:
            row[: len(text)] = torch.tensor(text)
    return table[..., :-1].to(device), table[..., -1].to(device)


def _repetition_penalty(p: Any) -> Adapter | None:
    def adapter(step: Step) -> Edit | None:
        ids, vocab_size = step.input_ids, step.rows.vocab_size
        ignored = p.prompt_ignore_length
        if isinstance(ignored, Tensor):
            positions = torch.arange(ids.shape[1], device=ids.device)
            ids = ids.masked_fill(positions < ignored.to(ids.device).unsqueeze(-1), vocab_size)
        elif ignored:
            ids = ids[:, ignored:]
        return Penalty(ids.sort(-1).values, p.penalty, vocab_size) if ids.shape[1] else None

    # These two belong to continuous batching.
    return adapter if p.logits_indices is None and p.cu_seq_lens_q is None else None


def _forced(tokens: Any, applies: Callable[[Step], bool]) -> Adapter:
    listed = torch.as_tensor(tokens).flatten().unsqueeze(0)
    made: dict[torch.device, Force] = {}

    def adapter(step: Step) -> Edit | None:
        if not applies(step):
            return None
        device = step.rows.logits.device
        if device not in made:
            made[device] = Force(listed.to(device))
        return made[device]

    return adapter


def _forced_bos(p: Any) -> Adapter:
    return _forced(p.bos_token_id, lambda step: step.input_ids.shape[-1] == 1)


def _forced_eos(p: Any) -> Adapter:
    return _forced(p.eos_token_id, lambda step: step.input_ids.shape[-1] == p.max_length - 1)


def _prefix_constrained(p: Any) -> Adapter:
    """Only the tokens that the user's function lists for a row. The function runs on the host, so this one waits for it."""

    def adapter(step: Step) -> Edit | None:
        vocab_size, beams = step.rows.vocab_size, p._num_beams
        listed = [p._prefix_allowed_tokens_fn(row // beams, ids) for row, ids in enumerate(step.input_ids)]
        listed = [ids.tolist() if isinstance(ids, Tensor) else list(ids) for ids in listed]
        if not all(ids and min(ids) >= 0 and max(ids) < vocab_size for ids in listed):
            raise NotSparse("no token or one outside the vocabulary is allowed")
        allowed = Ban(packed.only(listed, vocab_size, step.rows.logits.device))
        # Where no beam of a prompt has a token left, later versions force the allowed ones.
        of_each = best(step.rows, [*step.edits, allowed], 1, step.are_log_probs).scores
        if bool(of_each.isneginf().view(-1, beams).all(-1).any()):
            raise NotSparse("no allowed token has a finite score")
        return allowed

    return adapter


def _known(*names: str) -> frozenset[str]:
    return frozenset(names)


ADAPTERS: dict[type, tuple[Callable[[Any], Adapter | None], frozenset[str]]] = {
    stock.MinLengthLogitsProcessor: (_min_length, _known("min_length", "eos_token_id")),
    stock.MinNewTokensLengthLogitsProcessor: (
        _min_new_tokens,
        _known("prompt_length_to_skip", "min_new_tokens", "eos_token_id"),
    ),
    stock.SuppressTokensLogitsProcessor: (_suppress_tokens, _known("suppress_tokens")),
    stock.SuppressTokensAtBeginLogitsProcessor: (
        _suppress_tokens_at_begin,
        _known("begin_suppress_tokens", "begin_index"),
    ),
    stock.NoRepeatNGramLogitsProcessor: (_no_repeat_ngram, _known("ngram_size")),
    stock.EncoderNoRepeatNGramLogitsProcessor: (
        _encoder_no_repeat_ngram,
        _known("ngram_size", "batch_size", "generated_ngrams"),
    ),
    stock.RepetitionPenaltyLogitsProcessor: (
        _repetition_penalty,
        _known("penalty", "prompt_ignore_length", "logits_indices", "cu_seq_lens_q"),
    ),
    stock.ForcedBOSTokenLogitsProcessor: (_forced_bos, _known("bos_token_id")),
    stock.ForcedEOSTokenLogitsProcessor: (_forced_eos, _known("max_length", "eos_token_id")),
    stock.PrefixConstrainedLogitsProcessor: (
        _prefix_constrained,
        _known("_prefix_allowed_tokens_fn", "_num_beams"),
    ),
}
