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

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial, reduce
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..backends import Backend
from ..functional.sampling import random_names
from ..plans import beam_result, row_result
from ..problem import Sample, SampleProblem, TopK, TopkProblem, TopKState, result_dtype
from ..rows import LogitRows
from . import masks
from .changed_scores import Change, edited


class Edit(Protocol):
    """What one processor does to the scores of one step.

    scanned: words [1 or R, W] of the tokens that the scan may choose; None for all.
    ids: int64 [1 or R, S], touched tokens that may still be chosen; those >= V are ignored. None if there are none.
    replaces_row: the scores before the edit do not matter, and all tokens but `ids` have -inf after it.
    """

    @property
    def scanned(self) -> Tensor | None: ...

    @property
    def ids(self) -> Tensor | None: ...

    @property
    def replaces_row(self) -> bool: ...

    def apply(self, ids: Tensor, scores: Tensor) -> Tensor:
        """The new scores [R, S] of tokens `ids` [R, S], whose scores are `scores` before the edit."""
        ...


# Up to this V, torch's argmax is as quick on a GPU as our kernel, and the host launches it in a third of the time.
_ARGMAX_VOCAB_SIZE = 1 << 16


class Candidates(NamedTuple):
    """Some tokens of each row, the best among them. No token that is missing has a greater score than a listed one."""

    scores: Tensor  # float32 [R, n]
    ids: Tensor  # int64 [R, n]


class Rows:
    """The last logits of a forward pass, and the backend whose kernels read them.

    Its methods are the package's functions without checks and operators, which cost more than the launch at every step. A decoding
    step's arguments are right by construction, and nothing needs a gradient.
    """

    __slots__ = ("backend", "generator", "logits")

    def __init__(
        self, logits: Tensor, backend: Backend, generator: Callable[[], torch.Generator] | None = None
    ) -> None:
        self.logits = logits  # [R, V], in the model's dtype
        self.backend = backend
        # Gives the random numbers to draw with; None for the caller's.
        self.generator = generator

    def maker(self) -> Callable[[Tensor], Rows]:
        """A function that makes rows like these of a model's logits [R, length, V]. It holds no logits."""
        # On the device where the loop had them: it may differ from the model's.
        device, backend, generator = self.logits.device, self.backend, self.generator
        return lambda logits: Rows(logits.select(1, -1).to(device), backend, generator)

    def gather(self, reason: str) -> None:
        """Has all columns on this process."""

    @property
    def is_sharded(self) -> bool:
        """Whether no process has all columns."""
        return False

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]

    def supports(self, k: int) -> bool:
        """Whether the kernels take this k."""
        return bool(self.backend.supports(self.logits.dtype, k))

    def greatest(self) -> Tensor:
        """int64 [R]: the token of the greatest logit of each row; of equal ones the smallest, NaN above +inf."""
        logits = self.logits
        rows, vocab_size = logits.shape
        if vocab_size <= _ARGMAX_VOCAB_SIZE and logits.is_cuda:
            # argmax gives the same answer, also in one read.
            return logits.argmax(-1)
        # The kernel writes [R, 1], which lies in memory as [R] does.
        ids = torch.empty(size=(rows,), dtype=torch.int64, device=logits.device)
        _prepared_greatest(self.backend, logits.dtype, logits.device, logits.shape, logits.stride())(logits, ids)
        return ids

    def topk(self, k: int, mask: Tensor | None = None) -> TopK:
        """The k greatest logits, in the model's dtype, and the logsumexp of the tokens in `mask` [1 or R, W]."""
        return self._scan(k, mask, "logits", "allowed", 1.0)

    def log_softmax_topk(self, k: int, mask: Tensor | None = None) -> TopK:
        """The k greatest log-probabilities of the tokens in `mask` [1 or R, W]."""
        return self._scan(k, mask, "log_softmax", "all", 1.0)

    def scan(self, k: int, mask: Tensor | None, are_log_probs: bool) -> TopK:
        """The k best scores of the tokens in `mask` [1 or R, W], float32: log-probabilities of the whole row, or logits."""
        if are_log_probs:
            return self.log_softmax_topk(k, mask)
        found = self.topk(k, mask)
        return found._replace(values=found.values.float())

    def state(self, k: int, mask: Tensor | None = None, normalize: str = "all", temperature: float = 1.0) -> TopKState:
        """The state of each row, whose candidates are tokens in `mask` [1 or R, W]. See :func:`fused_topk.topk_state`."""
        logits, indices, (m, d) = self._scan(k, mask, "state", normalize, temperature)
        return TopKState(logits, indices, m, d)

    def state_and_logits(self, k: int, mask: Tensor | None, ids: Tensor) -> tuple[TopKState, Tensor]:
        """The state of each whole row, and the logits of the tokens `ids` [R, S]."""
        return self.state(k, mask), self.logits.gather(1, ids)

    def beam_topk(self, beam_scores: Tensor, k: int, mask: Tensor | None = None) -> TopK:
        """The k best continuations over all beams of a sequence, of the tokens in `mask` [1 or R, W].

        Args:
            beam_scores: float32 [batch, beams], batch * beams = R.
        """
        batch, beams = beam_scores.shape
        logits = self.logits.view(batch, beams, -1)
        if mask is None:
            run = _prepared_beams(
                self.backend, logits.dtype, logits.device, logits.shape, logits.stride(), beam_scores.stride(), k
            )
            return run(logits, beam_scores)
        mask = mask.expand(batch * beams, -1).view(batch, beams, -1)
        out = beam_result(logits, k).empty(logits.device)
        problem = TopkProblem(LogitRows(logits, mask=mask), k, "log_softmax", "all")
        self.backend.prepare_topk(problem, logits.device, beam_scores)(problem.rows, out, beam_scores)
        return out

    def edited(self, ids: Tensor, change: Change, replaces_row: bool) -> Rows:
        """Rows of float32 logits in which the tokens `ids` [R, S] have other scores. See :func:`changed_scores.edited`."""
        return Rows(edited(self.logits, ids, change, replaces_row), self.backend, self.generator)

    def draws(self, parameters: Mapping[str, float]) -> bool:
        """Whether :meth:`sample` takes these parameters."""
        return True

    def sample(self, parameters: Mapping[str, float], mask: Tensor | None, generator: torch.Generator | None) -> Sample:
        """A token [R, 1] of each row, drawn from the tokens in `mask` [1 or R, W]. See :func:`fused_topk.sample`.

        Args:
            parameters: of temperature, top_k, top_p and min_p those that are set.
        """
        logits = self.logits
        if mask is not None:
            mask = mask.expand(len(logits), -1)
        rows, device = len(logits), logits.device
        seed, counter = random_names(rows, device, generator)
        temperature = float(parameters.get("temperature", 1.0))
        problem = SampleProblem(
            LogitRows(logits, temperature, mask=mask),
            int(parameters.get("top_k", 0)),
            None,
            float(parameters.get("top_p", 1.0)),
            None,
            float(parameters.get("min_p", 0.0)),
            None,
            *seed,
            *counter,
            1,
            0,
            False,
        )
        tokens = torch.empty((rows, 1), dtype=torch.int64, device=device)
        log_probs = torch.empty((rows, 1), dtype=result_dtype(logits.dtype), device=device)
        result = Sample(tokens, log_probs, None)
        if rows:
            self.backend.sample(problem, result)
        return result

    def _scan(self, k: int, mask: Tensor | None, values: str, normalize: str, temperature: float) -> TopK:
        logits = self.logits
        if mask is not None:
            mask = mask.expand(len(logits), -1)
        out = row_result(logits, k, values).empty(logits.device)
        problem = TopkProblem(LogitRows(logits, temperature, mask=mask), k, values, normalize)
        self.backend.prepare_topk(problem, logits.device)(problem.rows, out)
        return out


@lru_cache(maxsize=256)
def _prepared_greatest(
    backend: Backend, dtype: torch.dtype, device: torch.device, shape: torch.Size, strides: tuple[int, ...]
) -> Callable[[Tensor, Tensor], None]:
    """A function that writes the token of the greatest logit, for logits of that dtype, device and layout."""
    logits = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    run = backend.prepare_topk(TopkProblem(LogitRows(logits), 1, "logits", "allowed"), device)

    def run_new(logits: Tensor, ids: Tensor) -> None:
        # Nobody reads these two. Each call makes its own: tensors kept here could be freed while a CUDA graph still writes
        # to them.
        values = torch.empty(size=shape[:1], dtype=dtype, device=device)
        logsumexp = torch.empty(size=shape[:1], dtype=result_dtype(dtype), device=device)
        run(LogitRows(logits), TopK(values, ids, logsumexp))

    return run_new


@lru_cache(maxsize=256)
def _prepared_beams(
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
    shape: torch.Size,
    strides: tuple[int, ...],
    scores_strides: tuple[int, ...],
    k: int,
) -> Callable[[Tensor, Tensor], TopK]:
    """A function that returns the k best continuations, for logits and scores of that kind."""
    logits = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    beam_scores = torch.empty_strided(shape[:2], scores_strides, dtype=torch.float32, device="meta")
    run = backend.prepare_topk(TopkProblem(LogitRows(logits), k, "log_softmax", "all"), device, beam_scores)
    result = beam_result(logits, k)

    def run_new(logits: Tensor, beam_scores: Tensor) -> TopK:
        out = result.empty(device)
        run(LogitRows(logits), out, beam_scores)
        return out

    return run_new


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
        renormalizes: whether what the edits leave of a row becomes a distribution again.

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
    rows: Rows, edits: Sequence[Edit], parameters: Mapping[str, float], generator: torch.Generator | None
) -> Sample | None:
    """A token [R, 1] of each row, drawn from all of it; None where the rows do not draw with these parameters.

    Args:
        rows: the model's logits.
        edits: what the processors do, in order. A token that one of them bans has -inf after all of them.
        parameters: as of :meth:`Rows.sample`.
    """
    if not rows.draws(parameters):
        return None
    if _must_merge(edits):
        rows = rows.edited(_touched(rows, edits), partial(_applied, edits), edits[0].replaces_row)
    # The others have left a score in the place of each token that they touch.
    return rows.sample(parameters, _scanned_by([edit for edit in edits if edit.ids is None]), generator)


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
    """int64 [R, S]: the tokens whose scores the edits change, those that are only banned left out."""
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
                # In a row without a distribution too, where all others are NaN.
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
