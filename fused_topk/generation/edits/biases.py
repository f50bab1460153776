# SPDX-License-Identifier: Apache-2.0
"""Bad words and biases of sequences as an edit."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from ..choice import masks
from ..choice.edit import Edit
from .adapter import Adapter, Adapters, Step


class Bias(Edit):
    """Numbers [R, n] are added to the scores of the tokens `sorted_ids` [1, n], ascending and distinct."""

    ids: Tensor

    def __init__(self, sorted_ids: Tensor, scanned: Tensor, bias: Tensor) -> None:
        self.ids = sorted_ids
        self.scanned = scanned
        self._bias = bias

    def apply(self, ids: Tensor, scores: Tensor) -> Tensor:
        place = torch.searchsorted(self.ids[0], ids).clamp_(max=self.ids.shape[1] - 1)
        return scores + self._bias.gather(1, place).where(self.ids[0][place] == ids, 0.0)


class _Phrases(NamedTuple):
    """Sequences of one length, of two tokens or more."""

    prefixes: Tensor  # int64 [n, length - 1]
    last: Tensor  # int64 [n], what comes after them
    biases: Tensor  # float32 [n], what is added to the score of `last`


class _Prepared(NamedTuple):
    ids: Tensor  # int64 [1, n], ascending: the tokens that may get a bias
    scanned: Tensor  # words [1, W] of all others
    always: Tensor  # float32 [1, n], what is added in every row
    phrases: list[_Phrases]  # `last` are places among `ids`
    of: dict[Any, Any]  # the `sequence_bias` that all of this was made from


@functools.cache
def _least_length() -> int:
    """The least number of tokens of a text at which a phrase of two tokens counts: one in 5.23, two in 5.17."""
    with torch.device("cpu"):
        scores = torch.zeros(1, 2, dtype=torch.float32)
        text: Any = torch.ones(1, 1, dtype=torch.int64)
        return 2 - bool(stock.SequenceBiasLogitsProcessor([[[1, 1], 1.0]])(text, scores)[0, 1])


def _phrases(p: Any, device: torch.device) -> list[_Phrases]:
    prepared = getattr(p, "multi_token_biases", None)
    if prepared is not None:
        return [_Phrases(*each) for each in prepared]
    groups: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for tokens, bias in p.sequence_bias.items():
        if len(tokens) > 1:
            groups.setdefault(len(tokens), []).append((tokens, bias))
    return [
        _Phrases(
            torch.tensor([tokens[:-1] for tokens, _ in group], device=device),
            torch.tensor([tokens[-1] for tokens, _ in group], device=device),
            # These versions of transformers make the biases in torch's default dtype.
            torch.tensor([bias for _, bias in group], device=device).float(),
        )
        for group in groups.values()
    ]


def _prepare(p: Any, vocab_size: int, device: torch.device) -> _Prepared:
    # Called with an empty text, the processor itself gives what it adds in every row. If it raises, this call shows its error.
    text = torch.zeros(1, 0, dtype=torch.int64, device=device)
    row: Tensor = p(text, torch.zeros(1, vocab_size, dtype=torch.float32, device=device))
    phrases = _phrases(p, device)
    # Once in a call this waits for the device.
    listed = sorted(
        {*row[0].nonzero().flatten().tolist(), *(token for each in phrases for token in each.last.tolist())}
    )
    ids = torch.tensor([listed], dtype=torch.int64, device=device)
    placed = [each._replace(last=torch.searchsorted(ids[0], each.last)) for each in phrases]
    return _Prepared(ids, masks.all_but(listed, vocab_size, device), row[:, listed], placed, dict(p.sequence_bias))


def _sequence_bias(p: Any) -> Adapter:
    made: dict[tuple[int, torch.device], _Prepared] = {}

    def adapter(step: Step) -> Edit | None:
        text, key = step.input_ids, (step.rows.vocab_size, step.rows.logits.device)
        # Versions that prepare no phrases look at the attribute in every step.
        if key not in made or (not hasattr(p, "multi_token_biases") and made[key].of != p.sequence_bias):
            made[key] = _prepare(p, *key)
            step.on_call(p)
        prepared = made[key]
        if not prepared.ids.shape[1]:
            return None
        bias = prepared.always.repeat(len(text), 1)
        for prefixes, places, biases in prepared.phrases:
            length = prefixes.shape[1]
            if text.shape[1] >= length - 1 + _least_length():
                is_match = (text[:, None, -length:] == prefixes).all(-1)
                bias.index_add_(1, places, biases.where(is_match, 0.0))
        return Bias(prepared.ids, prepared.scanned, bias)

    return adapter


_KNOWN = frozenset({"sequence_bias", "length_1_bias", "multi_token_biases", "prepared_bias_variables"})
ADAPTERS: Adapters = {
    stock.SequenceBiasLogitsProcessor: (_sequence_bias, _KNOWN),
    stock.NoBadWordsLogitsProcessor: (_sequence_bias, _KNOWN | {"bad_word_ids"}),
}
