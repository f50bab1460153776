# SPDX-License-Identifier: Apache-2.0
"""Beam search on tensors whose shapes do not change: the state of the beams, and what a choice of tokens makes of it.

Scores are those of transformers' beam search. Of equal scores the smaller index comes first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import graphs

# The score of what does not count. As in transformers it is added to other scores, so that sums compare as they do there.
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
        """How many continuations are looked at: if each beam ends with each end token, enough others go on."""
        return (1 + max(1, len(self.ends))) * self.beams

    def end_tokens(self, device: torch.device) -> Tensor:
        """int64 [n]: what a new token is compared with. Without end tokens it is -1, which no token is."""
        return torch.tensor(self.ends or (-1,), dtype=torch.int64, device=device)


class Hypotheses(NamedTuple):
    """Texts of each sequence."""

    scores: Tensor  # float32 [batch, n]
    tokens: Tensor  # int64 [batch, n, room]
    parents: Tensor  # int64 [batch, n, room], the beam that each token was added to, -1 where there is no token

    def with_room(self, room: int) -> Hypotheses:
        more = (0, room - self.tokens.shape[2])
        return Hypotheses(self.scores, *(F.pad(each, more, value=-1) for each in (self.tokens, self.parents)))

    def pick(self, chosen: Tensor) -> Hypotheses:
        """The hypotheses at the places `chosen` [batch, m]."""
        return Hypotheses(self.scores.gather(1, chosen), *(_rows(each, chosen) for each in self[1:]))


class Beams(NamedTuple):
    """The state of a call between two tokens."""

    running: Hypotheses
    ended: Hypotheses
    is_ended: Tensor  # bool [batch, beams]: whether there is one at this place of `ended`
    may_improve: Tensor  # bool [batch, 1]
    goes_on: Tensor  # bool []

    def with_room(self, room: int) -> Beams:
        return self._replace(running=self.running.with_room(room), ended=self.ended.with_room(room))


class BeamConstants(NamedTuple):
    """What the choices of a call need on its device. In tensors, so that compiled and captured steps serve calls with other values."""

    ends: Tensor  # of Rules.end_tokens()
    is_best: Tensor  # bool [rules.kept]
    length_penalty: Tensor  # float64 [1]
    longest: Tensor  # float32 [1]: what the score of the longest text that there can be is divided by
    stops_early: Tensor  # bool []: whether a sequence is done once all its beams have ended
    expects_longest: Tensor  # bool []: whether a text that goes on is scored as if it were as long as it can be

    @staticmethod
    def of(rules: Rules, longest: int, device: torch.device) -> BeamConstants:
        """Args: longest: how many new tokens there can be."""
        penalty = torch.full((1,), rules.length_penalty, dtype=torch.float64, device=device)
        expects_longest = rules.early_stopping == "never" and rules.length_penalty > 0
        return BeamConstants(
            rules.end_tokens(device),
            torch.arange(rules.kept, device=device) < rules.beams,
            penalty,
            _divisor(torch.full((1,), longest, device=device), penalty),
            torch.full((), rules.early_stopping is True, device=device),
            torch.full((), expects_longest, device=device),
        )


def _divisor(length: Tensor, penalty: Tensor) -> Tensor:
    """float32: what the score of a text of that many new tokens is divided by."""
    return (length.double() ** penalty).float()


def at_first(rules: Rules, batch: int, room: int, device: torch.device) -> Beams:
    """Before the first token: all beams are the same text, and only the first beam counts. There is room for `room` tokens."""
    shape = (batch, rules.beams)
    scores = torch.full(shape, VOID, dtype=torch.float32, device=device)
    empty = torch.full((*shape, room), -1, dtype=torch.int64, device=device)
    of_first = scores.clone()
    of_first[:, 0] = 0.0
    return Beams(
        Hypotheses(of_first, empty, empty),
        Hypotheses(scores, empty, empty),
        torch.zeros(shape, dtype=torch.bool, device=device),
        torch.ones(batch, 1, dtype=torch.bool, device=device),
        torch.ones((), dtype=torch.bool, device=device),
    )


def choose(
    beams: Beams,
    constants: BeamConstants,
    scores: Tensor,
    indices: Tensor,
    vocab_size: int,
    step: Tensor,
    are_last: Tensor,
) -> Beams:
    """Goes on with the best continuations.

    Args:
        scores: float32 [batch, kept], best first; as many as the rules say.
        indices: int64 [batch, kept], beam * V + token.
        step: int64 [1], which of the new tokens it is.
        are_last: bool [1] or [batch, kept], which continuations end with this token, whatever it is.
    """
    count = beams.running.scores.shape[1]
    parent, token = indices // vocab_size, indices % vocab_size
    # Not torch.isin, which for many end tokens waits for the device.
    has_ended = (token.unsqueeze(-1) == constants.ends).any(-1) | are_last
    length = _divisor(step + 1, constants.length_penalty)
    # Most steps end no text, and need half of the operations. On a GPU a look would wait for the device.
    if not graphs.is_cuda(has_ended.device) and not bool(has_ended.any()):
        order = _order(scores)[:, :count]
        running = _continued(beams, scores.gather(1, order), parent.gather(1, order), token.gather(1, order), step)
        ended, is_ended = beams.ended, beams.is_ended
    else:
        continued = _continued(beams, scores, parent, token, step)
        going_on = continued._replace(scores=scores + _void(has_ended))
        running = going_on.pick(_order(going_on.scores)[:, :count])
        # The best of the texts that had ended, and of those that end now and are among the best continuations.
        ends_now = has_ended & constants.is_best
        is_full = beams.is_ended.all(1, keepdim=True) & constants.stops_early
        final = scores / length + _void(is_full) + _void(~beams.may_improve) + _void(~ends_now)
        ending = continued._replace(scores=final)
        both = Hypotheses(*(torch.cat(pair, 1) for pair in zip(beams.ended, ending, strict=True)))
        chosen = _order(both.scores)[:, :count]
        ended = both.pick(chosen)
        is_ended = torch.cat([beams.is_ended, ends_now], 1).gather(1, chosen)

    hoped = torch.where(constants.expects_longest, constants.longest, length)
    worst_ended = torch.where(is_ended, ended.scores.amin(1, keepdim=True), VOID)
    may_improve = beams.may_improve & (running.scores[:, :1] / hoped > worst_ended).any(1, keepdim=True)
    is_done = constants.stops_early & is_ended.all()
    goes_on = may_improve.any() & ~has_ended.all() & ~is_done
    return Beams(running, ended, is_ended, may_improve, goes_on)


def _continued(beams: Beams, scores: Tensor, parent: Tensor, token: Tensor, step: Tensor) -> Hypotheses:
    """The running texts [batch, n], each with a token more."""
    tokens, parents = (_rows(each, parent) for each in beams.running[1:])
    tokens.index_copy_(2, step, token[..., None])
    return Hypotheses(scores, tokens, parents.index_copy_(2, step, parent[..., None]))


def _void(does_not_count: Tensor) -> Tensor:
    """float32: what is added to a score. bool times number would have the user's default dtype."""
    return does_not_count.float() * VOID


def _order(scores: Tensor) -> Tensor:
    return scores.sort(dim=1, descending=True, stable=True).indices


def _rows(table: Tensor, chosen: Tensor) -> Tensor:
    return table.gather(1, chosen.unsqueeze(-1).expand(-1, -1, table.shape[-1]))
