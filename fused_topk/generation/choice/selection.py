# SPDX-License-Identifier: Apache-2.0
"""The choice of tokens from logits and sparse edits of them, in one scan of each row.

A few edits, in order, describe what processors do to a row's scores. Each edit knows the few tokens that it touches. Let S be the
tokens that any edit touches, and V the vocabulary. Then exactly

    best k of edited row  =  best k of ( best k of V \\ S as it was  +  S with its edited values ).

The scan leaves S out by its mask. Scores are the logits themselves (greedy decoding, sampling) or log-probabilities of
the whole row (beam search, where processors come after log_softmax). Greater scores come first, equal ones by smaller index.

A draw may need more of a row than its best. So :func:`sample` reads float32 logits in which S has its edited values.
Nothing here waits for the device or has a shape that depends on what a tensor holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ...backends import Backend
from ...problem import Sample, TopKState
from . import masks
from .edit import Edit
from .rows import Rows


class Candidates(NamedTuple):
    """Some tokens of each row, the best among them. No token that is missing has a greater score than a listed one."""

    scores: Tensor  # float32 [R, n]
    ids: Tensor  # int64 [R, n]


def best(rows: Rows, edits: Sequence[Edit], k: int, are_log_probs: bool) -> Candidates:
    """The k best tokens of each row, best first.

    Args:
        rows: the model's logits.
        edits: what the processors do, in order.
        k: how many, 1 <= k <= V.
        are_log_probs: whether scores are log-probabilities of the whole row, or the logits.
    """
    if not _must_merge(edits):
        found = rows.scan(k, _scanned_by(edits), are_log_probs)
        return Candidates(found.values, found.indices)
    merged = _merged(rows, edits, k, are_log_probs)
    return _best_of(rows.backend, merged.scores, merged.ids, merged.is_void, k)


def best_continuations(
    rows: Rows, edits: Sequence[Edit], beam_scores: Tensor, k: int, renormalizes: bool = False
) -> tuple[Tensor, Tensor]:
    """One step of beam search: the k best continuations of each sequence over all of its beams.

    Args:
        rows: the model's logits, of batch * beams rows.
        edits: what the processors do to log-probabilities, in order.
        beam_scores: float32 [batch, beams].
        k: 1 <= k <= beams * V.
        renormalizes: whether each row is made a distribution again after the edits.

    Returns:
        Accumulated log-probabilities float32 [batch, k], best first, and int64 [batch, k], beam * V + token.
    """
    # Without edits log-probabilities are a distribution.
    if not _must_merge(edits) and not (edits and renormalizes):
        values, indices, _ = rows.beam_topk(beam_scores, k, _scanned_by(edits))
        return values, indices
    batch, beams = beam_scores.shape
    merged = _merged(rows, edits, min(k, rows.vocab_size), True)
    scores = merged.scores
    if renormalizes:
        greatest = scores.amax(-1, keepdim=True)
        scores = (scores - greatest) - logsumexp(rows, edits, 1.0, True, greatest)
    total = scores.view(batch, beams, -1) + beam_scores.unsqueeze(-1)
    beam = torch.arange(beams, device=total.device).view(beams, 1)
    ids = merged.ids.view(batch, beams, -1) + beam * rows.vocab_size
    # They lie in the order of beam * V + token. So of equal scores the smaller index is taken.
    return _best_of(rows.backend, total.flatten(1), ids.flatten(1), merged.is_void.view(batch, -1), k)


def sample(
    rows: Rows,
    edits: Sequence[Edit],
    parameters: Mapping[str, float],
    generator: torch.Generator | None,
    noise: Tensor | None = None,
) -> Sample | None:
    """A token [R, 1] of each row, drawn from all of it; None where the rows do not draw with these parameters.

    Args:
        rows: the model's logits.
        edits: what the processors do, in order. A token that one of them bans has -inf after all of them.
        parameters, noise: as of :meth:`Rows.sample`.
    """
    if not rows.draws(parameters):
        return None
    if _must_merge(edits):
        rows = rows.edited(_touched(rows, edits), partial(_applied, edits), edits[0].replaces_row)
    # The other edits are applied already: the logits that are read have the new scores.
    return rows.sample(parameters, _scanned_by([edit for edit in edits if edit.ids is None]), generator, noise)


def logsumexp(
    rows: Rows, edits: Sequence[Edit], temperature: float, are_log_probs: bool, origin: Tensor | None = None
) -> Tensor:
    """float32 [R, 1]: the log of the sum of exp((score - origin) / temperature) over all tokens of each row.

    Args:
        origin: float32 [R, 1], such as the greatest scores, which leaves a number without their offset; None for zeros.
    """

    def scaled(scores: Tensor) -> Tensor:
        return (scores if origin is None else scores - origin) / temperature

    if edits and edits[0].replaces_row:
        return scaled(_merged(rows, edits, 1, are_log_probs).scores).logsumexp(-1, keepdim=True)
    mask = _scanned_by(edits)
    scanned = rows.state(1, mask, "allowed", temperature)
    greatest = scanned.m.float().unsqueeze(-1)
    if are_log_probs:
        greatest = _log_probs(greatest, rows.state(1))
    result = scaled(greatest) + scanned.d.log().float().unsqueeze(-1)
    if not _must_merge(edits):
        return result
    merged = _merged(rows, edits, 1, are_log_probs)
    # `merged` also has the best of the scanned tokens. The scan has counted its share already.
    touched = merged.scores if mask is None else merged.scores.masked_fill(masks.holds(mask, merged.ids), -torch.inf)
    return torch.logaddexp(result, scaled(touched).logsumexp(-1, keepdim=True))


def _must_merge(edits: Sequence[Edit]) -> bool:
    return any(edit.ids is not None for edit in edits)


def _touched(rows: Rows, edits: Sequence[Edit]) -> Tensor:
    """int64 [R, S]: the tokens whose scores the edits change, without tokens that are only banned."""
    touched = [edit.ids.expand(len(rows.logits), -1) for edit in edits if edit.ids is not None]
    if not touched:
        return torch.empty((len(rows.logits), 0), dtype=torch.int64, device=rows.logits.device)
    return torch.cat(touched, 1) if len(touched) > 1 else touched[0]


def _applied(edits: Sequence[Edit], ids: Tensor, scores: Tensor) -> Tensor:
    """The scores [R, S] of the tokens `ids` [R, S] after the edits, given those before."""
    for edit in edits:
        scores = edit.apply(ids, scores)
    return scores


def _scanned_by(edits: Sequence[Edit]) -> Tensor | None:
    """The words of the tokens that no edit touches."""
    if not edits:
        return None
    words = [edit.scanned for edit in edits if edit.scanned is not None]
    return reduce(torch.bitwise_and, words) if words else None


def _best_of(backend: Backend, scores: Tensor, ids: Tensor, is_void: Tensor, k: int) -> Candidates:
    """The k best that are not void, best first. Among equal scores, also of -inf, those listed first."""
    # Void places come last, so that they are the last among the scores of -inf.
    order = is_void.byte().sort(stable=True).indices
    chosen = Rows(scores.masked_fill(is_void, -torch.inf).gather(1, order), backend).topk(k)
    return Candidates(chosen.values, ids.gather(1, order.gather(1, chosen.indices)))


class _Merged(NamedTuple):
    """At least the k best tokens of each row, by ascending token. A place that repeats a token, or holds none, is void."""

    scores: Tensor  # float32 [R, n], -inf where void
    ids: Tensor  # int64 [R, n]
    is_void: Tensor  # bool [R, n]


def _merged(rows: Rows, edits: Sequence[Edit], k: int, are_log_probs: bool) -> _Merged:
    logits, vocab_size = rows.logits, rows.vocab_size
    ids = _touched(rows, edits)
    within = ids.clamp(max=vocab_size - 1)
    if edits[0].replaces_row:
        # No logit matters. The tokens of the smallest indices fill up, with -inf.
        scanned = torch.arange(min(vocab_size, k + ids.shape[1]), device=logits.device).expand(len(logits), -1)
        scores = torch.full_like(within, -torch.inf, dtype=torch.float32)
        fill = torch.full_like(scanned, -torch.inf, dtype=torch.float32)
    else:
        mask = _scanned_by(edits)
        state, scores = rows.state_and_logits(k, mask, within)
        scores, fill, scanned = scores.float(), state.logits.float(), state.indices
        if are_log_probs:
            # One formula serves touched and scanned tokens, so that equal logits stay equal.
            scores = _log_probs(scores, state)
            fill = _log_probs(fill, state)
            if mask is not None:
                # Also in a row without a distribution, where all other log-probabilities are NaN.
                fill = fill.where(masks.holds(mask, scanned), -torch.inf)
    scores = _applied(edits, within, scores)

    # Touched tokens come first. So the stable sort puts them before the same token of the scan, which becomes void.
    ids, order = torch.cat([ids, scanned], 1).sort(stable=True)
    scores = torch.cat([scores, fill], 1).gather(1, order)
    is_void = ids >= vocab_size
    is_void[:, 1:] |= ids[:, 1:] == ids[:, :-1]
    return _Merged(scores.masked_fill_(is_void, -torch.inf), ids.clamp_(max=vocab_size - 1), is_void)


def _log_probs(logits: Tensor, state: TopKState) -> Tensor:
    """The log-probabilities of any tokens with these float32 logits [R, S], given the states of their whole rows.

    Unlike logit - logsumexp, this loses no digits to a large common offset. All are NaN in a row with NaN or +inf, or of only -inf.
    """
    return (logits - state.m.float().unsqueeze(-1)) - state.d.log().float().unsqueeze(-1)
