# SPDX-License-Identifier: Apache-2.0
"""Beam search with tensors of one shape: what the beams hold, and what a choice of continuations makes of it.

Scores, and their order where they are equal, are those of transformers' beam search; equal ones by smaller index.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# The score of what does not count. It is added, as transformers does, so that what is left compares equal.
VOID = -1.0e9


class Rules(NamedTuple):
    """What a call asks for."""

    beams: int
    room: int  # tokens that can be new
    ends: tuple[int, ...]  # tokens that end a text
    length_penalty: float
    early_stopping: bool | str

    @property
    def kept(self) -> int:
        """Continuations that are looked at: were each beam to end with each end token, enough go on."""
        return max(2, 1 + len(self.ends)) * self.beams


class Hypotheses(NamedTuple):
    """Texts of each sequence."""

    scores: Tensor  # float32 [batch, n]
    tokens: Tensor  # int64 [batch, n, room]
    parents: Tensor  # int64 [batch, n, room], the beam that each token was added to, -1 where there is no token

    def pick(self, chosen: Tensor) -> Hypotheses:
        """Those at the places `chosen` [batch, m]."""
        return Hypotheses(self.scores.gather(1, chosen), *(_rows(each, chosen) for each in self[1:]))


class BeamSearch:
    """The state of one call."""

    def __init__(self, rules: Rules, batch: int, device: torch.device) -> None:
        self.rules = rules
        shape = (batch, rules.beams)
        scores = torch.full(shape, VOID, device=device)
        empty = torch.full((*shape, rules.room), -1, dtype=torch.int64, device=device)
        # Beams are one text at first; only the first of them counts.
        of_first = scores.index_fill(1, torch.zeros(1, dtype=torch.int64, device=device), 0.0)
        self.running = Hypotheses(of_first, empty, empty)
        self.ended = Hypotheses(scores, empty, empty)
        self.is_ended = torch.zeros(shape, dtype=torch.bool, device=device)
        self._may_improve = torch.ones(batch, 1, dtype=torch.bool, device=device)
        self._is_best = torch.arange(rules.kept, device=device) < rules.beams
        self._ends = torch.tensor(rules.ends, dtype=torch.int64, device=device)

    def choose(self, scores: Tensor, indices: Tensor, vocab_size: int, step: int, are_last: bool) -> Tensor:
        """Goes on with the best continuations.

        Args:
            scores: float32 [batch, rules.kept], best first.
            indices: int64 [batch, rules.kept], beam * V + token.
            step: which of the new tokens it is.
            are_last: whether every text ends with this token.

        Returns:
            bool []: whether the search is to go on.
        """
        rules = self.rules
        parent, token = indices // vocab_size, indices % vocab_size
        continued = Hypotheses(scores, _rows(self.running.tokens, parent), _rows(self.running.parents, parent))
        continued.tokens[:, :, step] = token
        continued.parents[:, :, step] = parent
        has_ended = torch.isin(token, self._ends) | are_last

        self.running = _best(continued._replace(scores=scores + has_ended * VOID), rules.beams)
        self._keep_ended(continued, has_ended, step)
        return self._goes_on(has_ended, step)

    def _keep_ended(self, continued: Hypotheses, has_ended: Tensor, step: int) -> None:
        """The best of the texts that had ended and of those that end now, if those are among the best continuations."""
        rules = self.rules
        ends_now = has_ended & self._is_best
        is_full = self.is_ended.all(1, keepdim=True) & (rules.early_stopping is True)
        scores = continued.scores / (step + 1) ** rules.length_penalty
        scores = scores + is_full * VOID + ~self._may_improve * VOID + ~ends_now * VOID
        both = Hypotheses(
            torch.cat([self.ended.scores, scores], 1),
            *(torch.cat(pair, 1) for pair in zip(self.ended[1:], continued[1:], strict=True)),
        )
        chosen = _order(both.scores)[:, : rules.beams]
        self.ended = both.pick(chosen)
        self.is_ended = torch.cat([self.is_ended, ends_now], 1).gather(1, chosen)

    def _goes_on(self, has_ended: Tensor, step: int) -> Tensor:
        rules = self.rules
        longest = rules.room if rules.early_stopping == "never" and rules.length_penalty > 0 else step + 1
        best_running = self.running.scores[:, :1] / longest**rules.length_penalty
        worst_ended = torch.where(self.is_ended, self.ended.scores.amin(1, keepdim=True), VOID)
        self._may_improve = self._may_improve & (best_running > worst_ended).any(1, keepdim=True)
        is_full = self.is_ended.all() & (rules.early_stopping is True)
        return self._may_improve.any() & ~is_full & ~has_ended.all()


def _best(of: Hypotheses, count: int) -> Hypotheses:
    return of.pick(_order(of.scores)[:, :count])


def _order(scores: Tensor) -> Tensor:
    return scores.sort(dim=1, descending=True, stable=True).indices


def _rows(table: Tensor, chosen: Tensor) -> Tensor:
    return table.gather(1, chosen.unsqueeze(-1).expand(-1, -1, table.shape[-1]))
