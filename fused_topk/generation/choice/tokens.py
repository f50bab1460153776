# SPDX-License-Identifier: Apache-2.0
"""The choice of a step's tokens from its logits, its processors' edits and its warpers: greedy, of beams, and by chance.

A choice may need the scores of the whole vocabulary. Then the function says so before anything is drawn: it returns None, or
raises NotSparse where processors turn out to do more than their edits express.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...problem import Sample
from . import selection, warping
from .edit import Edit, NotSparse
from .rows import Rows
from .selection import Candidates
from .warping import Filter

# The most categories that torch.multinomial takes.
CATEGORIES = 1 << 24
# Beyond that, this many places at a time take part in a race.
_RACERS = 1 << 22


class Drawn(NamedTuple):
    """Continuations of beams that have been drawn."""

    scores: Tensor  # float32 [batch, n], accumulated
    indices: Tensor  # int64 [batch, n], beam * V + token


def greatest(rows: Rows, edits: Sequence[Edit], filters: Sequence[Filter]) -> Tensor | None:
    """int64 [R]: the token of the greatest score of each row."""
    if not filters and not edits:
        return rows.greatest()
    length = min(rows.vocab_size, warping.GREEDY_LENGTH) if filters else 1
    if not warping.keep_the_best(filters) or not rows.supports(length):
        return None
    found = selection.best(rows, edits, length, False)
    _check(rows, edits, found.scores[:, :1], False)
    if not filters:
        return found.ids[:, 0]
    return warping.greatest(filters, *found, _log_total(rows, edits, found.scores, False))


def continuations(
    rows: Rows, edits: Sequence[Edit], filters: Sequence[Filter], beam_scores: Tensor, k: int
) -> tuple[Tensor, Tensor] | None:
    """The k best continuations of each sequence: see :func:`selection.best_continuations`.

    Args:
        filters: none, or the one that renormalises.
    """
    if (filters and list(filters) != [warping.NORMALIZE]) or not rows.supports(k):
        return None
    found = selection.best_continuations(rows, edits, beam_scores, k, renormalizes=bool(filters))
    _check(rows, edits, found[0], True)
    return found


def sampled(rows: Rows, edits: Sequence[Edit], filters: Sequence[Filter], generator: Any = None) -> Sample | None:
    """A token [R, 1] of each row, drawn from the whole vocabulary by the kernel of :func:`fused_topk.sample`. It waits for nothing.

    None where the distribution may differ from that of the processors, where the rows do not draw with these parameters, and where
    there is no such kernel, so that stock operations are quicker.
    """
    parameters = warping.parameters(filters)
    if parameters is None or rows.backend is backends.reference or must_be_checked(edits):
        return None
    return selection.sample(rows, edits, parameters, generator)


def has_no_distribution(drawn: Sample) -> bool:
    """Whether a row has no distribution, as with NaN. Always False on a GPU, where a look would wait for the device."""
    return not drawn.log_probs.is_cuda and bool(drawn.log_probs.isnan().any())


def can_list(rows: Rows, filters: Sequence[Filter], at_least: int) -> bool:
    """Whether :func:`left_over` can be asked."""
    length = _length(rows, filters, at_least)
    return length is not None and rows.supports(length)


def _length(rows: Rows, filters: Sequence[Filter], at_least: int) -> int | None:
    length = warping.list_length(filters, rows.vocab_size)
    return None if length is None else min(rows.vocab_size, max(length, at_least))


def left_over(
    rows: Rows, edits: Sequence[Edit], filters: Sequence[Filter], at_least: int, are_log_probs: bool
) -> Candidates | None:
    """The tokens of each row that the warpers leave, with -inf for others that are listed.

    Args:
        at_least: how many to list, if need be with -inf.
    """
    length = _length(rows, filters, at_least)
    if length is None or not rows.supports(length):
        return None
    best = selection.best(rows, edits, length, are_log_probs)
    _check(rows, edits, best.scores, are_log_probs)
    log_total = _log_total(rows, edits, best.scores, are_log_probs)
    scores, was_enough = warping.apply(filters, best.scores, rows.vocab_size, log_total)
    if was_enough is not None and (_is_capturing(scores) or not bool(was_enough.all())):
        return None
    return Candidates(scores, best.ids)


def drawn(left: Candidates, num_samples: int = 1, generator: Any = None) -> Tensor:
    """int64 [R, num_samples]: tokens that are drawn by their probabilities among the tokens that are left."""
    chosen = drawn_from(left.scores.softmax(-1), num_samples, generator)
    return left.ids.gather(1, chosen)


def drawn_continuations(
    left: Candidates, beam_scores: Tensor, vocab_size: int, num_samples: int, generator: Any = None
) -> Drawn:
    """Continuations of each sequence's beams by their probabilities, in the order in which they are drawn."""
    batch, num_beams = beam_scores.shape
    total = (left.scores.view(batch, num_beams, -1) + beam_scores.unsqueeze(-1)).flatten(1)
    chosen = drawn_from(total.softmax(-1), num_samples, generator)
    tokens = left.ids.view(batch, -1).gather(1, chosen)
    indices = chosen.div(left.ids.shape[1], rounding_mode="floor").mul_(vocab_size).add_(tokens)
    return Drawn(total.gather(1, chosen), indices)


def drawn_from(probs: Tensor, num_samples: int, generator: Any = None) -> Tensor:
    """int64 [R, num_samples]: places of `probs` [R, n], drawn without replacement, as torch.multinomial does for any n.

    Beyond the limit of torch.multinomial each probability is divided by an exponential random number, and the greatest quotients
    win. That is done in float64: float32 has too few different numbers for so many places.
    """
    if probs.shape[-1] <= CATEGORIES:
        return torch.multinomial(probs, num_samples, generator=generator)
    if not probs.is_cuda and not bool(probs.isfinite().all()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    values, places = [], []
    for start in range(0, probs.shape[-1], _RACERS):
        part = probs[:, start : start + _RACERS].double()
        won = (part / torch.empty_like(part).exponential_(generator=generator)).topk(min(num_samples, part.shape[-1]))
        values.append(won.values)
        places.append(won.indices + start)
    return torch.cat(places, 1).gather(1, torch.cat(values, 1).topk(num_samples).indices)


def _log_total(
    rows: Rows, edits: Sequence[Edit], best_scores: Tensor, are_log_probs: bool
) -> Callable[[float], Tensor]:
    """The argument `log_total` of :func:`warping.apply`."""
    return lambda temperature: selection.logsumexp(rows, edits, temperature, are_log_probs, best_scores[:, :1])


def must_be_checked(edits: Sequence[Edit]) -> bool:
    return any(edit.expects_finite_scores for edit in edits)


def _check(rows: Rows, edits: Sequence[Edit], chosen: Tensor, are_log_probs: bool) -> None:
    """Raises NotSparse where an edit expects finite scores, and the choice, with the scores `chosen`, may be wrong because they are not."""
    if not must_be_checked(edits):
        return
    # Log-probabilities of a row with NaN or +inf are all NaN, and then nothing of it may have been chosen.
    is_right = not are_log_probs or bool(rows.topk(1).logsumexp.isfinite().all())
    if not (is_right and bool((chosen.abs() < torch.finfo(torch.float32).max).all())):
        raise NotSparse("invalid values to remove")


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
