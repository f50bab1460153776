# SPDX-License-Identifier: Apache-2.0
"""The choice of a step's tokens after a forward pass of its own: from logits and the call's processors, or from hidden states."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from ... import backends, functional
from ...backends import reference
from ...problem import TopK
from ..choice import selection, tokens, warping
from ..choice.edit import Edit, NotSparse
from ..choice.rows import Rows
from ..edits.plan import Plan
from ..tensor_parallel.group import of_first
from . import beams, draws, texts
from .beams import Beams, Rules
from .criteria import Criteria
from .head import Head
from .reasons import SORTS_DRAWN_BEAMS, Declined
from .results import KeptOutputs


class Place(NamedTuple):
    """Which of the new tokens is chosen, as choices take it."""

    step: Tensor  # int64 [1]
    are_last: Tensor  # bool [1]: whether every text ends with it

    @staticmethod
    def of(step: int, ends_now: bool, device: torch.device) -> Place:
        return Place(*(torch.full((1,), each, device=device) for each in (step, ends_now)))


class TopKRecord(NamedTuple):
    """The record of a call's steps: see :class:`fused_topk.generation.FusedDecoding`."""

    k: int
    steps: list[TopK]


class Choices(NamedTuple):
    """The choices of a call."""

    rules: Rules
    plan: Plan
    criteria: Criteria
    config: GenerationConfig
    # The processes of a tensor-parallel model, which all go on with the choices of the first; None for any other model.
    group: Any
    # Gets the best tokens of each step; None where nobody asks for them.
    topk: TopKRecord | None = None

    def after(
        self,
        state: Any,
        constants: Any,
        logits: Tensor,
        ids: Tensor,
        step: int,
        place: Place,
        kept: KeptOutputs | None = None,
    ) -> Any:
        """The state after the choice of one more token.

        Args:
            logits: [rows, V] of the last tokens. After the prompt there is a row for each sequence, later for each beam.
            ids: the prompts.
            step: which of the new tokens it is.
            place: the same number on the device.
            kept: gets the scores and logits of the step that the user has asked for.
        """
        rules = self.rules
        if step == 0 and rules.beams > 1:
            # All beams are the same text at first.
            logits = logits.repeat_interleave(rules.beams, 0)
        now, are_last = place
        is_greedy = rules.beams == 1
        written = state.tokens[:, :step] if is_greedy else state.running.tokens.flatten(0, 1)[:, :step]
        # Only processors and criteria look at the text.
        text = (
            torch.cat([ids.repeat_interleave(rules.beams, 0), written.clamp(min=0)], 1)
            if self.plan.processors or self.criteria.read_text
            else ids
        )
        if self.topk is not None:
            self.topk.steps.append(functional.log_softmax_topk(logits, min(self.topk.k, logits.shape[-1])))
        never_declines = bool(self.config.do_sample) or self.plan.is_called_once
        scan = _Scan(self.plan, logits, text, are_log_probs=not is_greedy, never_declines=never_declines)
        if kept is not None:
            kept.add(logits, scan.dense)
        if is_greedy:
            chosen = of_first(self._drawn(scan) if self.config.do_sample else self._greatest(scan), self.group)
            if self.criteria.read_text:
                # Texts that have ended go on with padding.
                shown = torch.where(state.has_ended & constants.is_padded, constants.padding, chosen)
                are_last = are_last | self.criteria.end(
                    torch.cat([text, shown[:, None]], 1), None if kept is None else kept.scores
                )
            return texts.choose_tokens(state, constants, chosen, now, are_last)
        scores, indices = (of_first(each, self.group) for each in self._continuations(scan, state))
        if not never_declines:
            _refuse_nan(scores)
        if self.criteria.read_text:
            are_last = are_last | self._ends(text, indices, logits.shape[-1], kept)
        return beams.choose(state, constants, scores, indices, logits.shape[-1], now, are_last)

    def by_head(self, head: Head, state: Any, constants: Any, hidden: Tensor, step: int, place: Place) -> Any:
        """The same from hidden states [rows, H], in a call in which nothing else reads logits."""
        now, are_last = place
        if step == 0 and self.rules.beams > 1:
            hidden = hidden.repeat_interleave(self.rules.beams, 0)
        if self.rules.beams == 1:
            return texts.choose_tokens(state, constants, head.greatest(hidden, None), now, are_last)
        scores, indices = head.continuations(hidden, state.running.scores, self.rules.kept, None)
        _refuse_nan(scores)
        return beams.choose(state, constants, scores, indices, head.vocab_size, now, are_last)

    def _ends(self, text: Tensor, indices: Tensor, vocab_size: int, kept: KeptOutputs | None) -> Tensor:
        """bool [batch, kept]: which continuations [batch, kept] of the beams' texts end because of their text."""
        parent, token = indices // vocab_size, indices % vocab_size
        of_beams = text.view(len(indices), self.rules.beams, -1)
        continued = of_beams.gather(1, parent[..., None].expand(-1, -1, text.shape[1]))
        continued = torch.cat([continued, token[..., None]], 2)
        scores = None if kept is None else kept.scores
        return self.criteria.end(continued.flatten(0, 1), scores).view_as(indices)

    def _greatest(self, scan: _Scan) -> Tensor:
        found = None
        if not scan.is_dense:
            try:
                found = tokens.greatest(scan.rows, scan.edits, self.plan.filters)
            except NotSparse:
                if not self.plan.is_called_once:
                    raise
        return scan.dense().argmax(-1) if found is None else found

    def _drawn(self, scan: _Scan) -> Tensor:
        parameters = warping.parameters(self.plan.filters)
        if scan.is_dense or parameters is None or tokens.must_be_checked(scan.edits):
            return draws.drawn(scan.dense().softmax(-1), 1).squeeze(1)
        logits = scan.rows.logits
        noise = draws.noise(len(logits), logits.shape[1], logits.device)
        found = selection.sample(scan.rows, scan.edits, parameters, None, noise)
        assert found is not None  # only columns of a tensor-parallel model may be none
        if tokens.has_no_distribution(found):
            # torch.multinomial says so.
            return torch.multinomial(scan.dense().softmax(-1), 1).squeeze(1)
        return found.tokens.squeeze(1)

    def _continuations(self, scan: _Scan, state: Beams) -> tuple[Tensor, Tensor]:
        number, beam_scores = self.rules.kept, state.running.scores
        if self.config.do_sample or scan.is_dense:
            return self._dense_continuations(scan, beam_scores)
        found = tokens.continuations(scan.rows, scan.edits, self.plan.filters, beam_scores, number)
        return self._dense_continuations(scan, beam_scores) if found is None else found

    def _dense_continuations(self, scan: _Scan, beam_scores: Tensor) -> tuple[Tensor, Tensor]:
        number = self.rules.kept
        total = (scan.dense().view(*beam_scores.shape, -1) + beam_scores.unsqueeze(-1)).flatten(1)
        if not self.config.do_sample:
            found = functional.topk(total, number)
            return found.values, found.indices
        indices = draws.drawn(total.softmax(-1), number)
        scores = total.gather(1, indices)
        if not SORTS_DRAWN_BEAMS:
            return scores, indices
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        return scores, indices.gather(1, order)


class _Scan:
    """One step's logits, and what its processors do to them.

    is_dense: whether the processors change too many tokens for a list of edits.
    """

    def __init__(self, plan: Plan, logits: Tensor, text: Tensor, are_log_probs: bool, never_declines: bool) -> None:
        backend = backends.pick(logits.device, logits.dtype, 1, None)
        self.rows = Rows(logits, backend)
        # Without kernels, as for float64, and with processors that are not known.
        self.is_dense = backend is reference or not plan.is_known
        self.edits: list[Edit] = []
        self._plan = plan
        self._text = text
        self._are_log_probs = are_log_probs
        self._dense: Tensor | None = None
        # See `Step.answered`.
        self._answered: dict[int, Any] = {}
        if self.is_dense:
            return
        try:
            self.edits = plan.edits(text, self.rows, are_log_probs, self._answered)
        except NotSparse:
            # A call that samples must not begin anew: that would prefer draws after which no step declines.
            if not never_declines:
                raise
            self.is_dense = True

    def dense(self) -> Tensor:
        """float32 [R, V]: the scores as the stock processors give them."""
        if self._dense is None:
            scores = self.rows.logits.to(torch.float32, copy=True)
            scores = scores.log_softmax(-1) if self._are_log_probs else scores
            self._dense = self._plan.run_stock(self._text, scores, self._answered)
        return self._dense


def _refuse_nan(scores: Tensor) -> None:
    """Raises Declined where the continuations of a sequence have no order: their scores are NaN."""
    if not scores.is_cuda and bool(scores[:, 0].isnan().any()):
        # All scores of such a row are NaN, and torch.topk decides their order. On a GPU a look would wait for the device.
        raise Declined("NaN among the scores")
