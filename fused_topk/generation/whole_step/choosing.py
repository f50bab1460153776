# SPDX-License-Identifier: Apache-2.0
"""The choice of a step's tokens after a forward pass of its own: from logits and the call's processors, or from hidden states."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from ... import functional
from ...problem import TopK
from . import beams, draws, texts
from .beams import Beams, Rules
from .criteria import Criteria
from .head import Head, Logits, choose
from .parallel import of_first
from .plan import Plan, called
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
            step, place: which of the new tokens it is, as a number and on the device.
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
        scores = _Scores(self.plan, logits, text, are_log_probs=not is_greedy)
        if kept is not None:
            # With beams stock keeps copies, and a processor may write to what it has returned.
            kept.add(logits, scores.last if is_greedy else lambda: scores.last().clone())
        if is_greedy:
            chosen = of_first(self._drawn(scores) if self.config.do_sample else self._greatest(scores), self.group)
            if self.criteria.read_text:
                # Texts that have ended go on with padding.
                shown = torch.where(state.has_ended & constants.is_padded, constants.padding, chosen)
                are_last = are_last | self.criteria.end(
                    torch.cat([text, shown[:, None]], 1), None if kept is None else kept.scores
                )
            return texts.choose_tokens(state, constants, chosen, now, are_last)
        totals, indices = (of_first(each, self.group) for each in self._continuations(scores, state))
        # Processors may return fewer or more columns.
        width = logits.shape[-1] if scores.is_plain else scores.last().shape[-1]
        if self.criteria.read_text:
            are_last = are_last | self._ends(text, indices, width, kept)
        return beams.choose(state, constants, totals, indices, width, now, are_last)

    def by_head(
        self,
        head: Head,
        state: Any,
        constants: Any,
        hidden: Tensor,
        step: int,
        place: Place,
        mask: Tensor | None = None,
    ) -> Any:
        """The same from hidden states [rows, H], in a call in which nothing else reads logits. The mask is that of :func:`head.choose`."""
        if step == 0 and self.rules.beams > 1:
            hidden = hidden.repeat_interleave(self.rules.beams, 0)
        after = choose(head, state, constants, hidden, mask, *place)
        if self.rules.beams > 1 and _has_nan(after.running.scores):
            raise Declined("NaN among the scores")
        return after

    def _ends(self, text: Tensor, indices: Tensor, vocab_size: int, kept: KeptOutputs | None) -> Tensor:
        """bool [batch, kept]: which continuations [batch, kept] of the beams' texts end because of their text."""
        parent, token = indices // vocab_size, indices % vocab_size
        of_beams = text.view(len(indices), self.rules.beams, -1)
        continued = of_beams.gather(1, parent[..., None].expand(-1, -1, text.shape[1]))
        continued = torch.cat([continued, token[..., None]], 2)
        scores = None if kept is None else kept.scores
        return self.criteria.end(continued.flatten(0, 1), scores).view_as(indices)

    def _greatest(self, scores: _Scores) -> Tensor:
        if scores.is_plain:
            return Logits.greatest(scores.logits, scores.mask())
        return scores.last().argmax(-1)

    def _drawn(self, scores: _Scores) -> Tensor:
        logits, parameters = scores.logits if scores.is_plain else scores.called(), self.plan.parameters
        # A processor may return scores of another dtype, in which stock goes on.
        if parameters is None or not (scores.is_plain or logits.dtype is torch.float32):
            return draws.drawn(scores.last(), 1).squeeze(1)
        rows, columns = logits.shape
        if logits.is_cuda:
            noise = draws.noise(rows, columns, logits.device)
            return functional.sample(logits, **parameters, mask=scores.mask(), noise=noise).tokens.squeeze(1)
        state = torch.get_rng_state()
        best = draws.few_that_top_k_keeps(logits, parameters, scores.mask())
        places = None if best is None else best.indices
        noise = draws.noise(rows, columns, logits.device, places)
        if best is None:
            found = functional.sample(logits, **parameters, mask=scores.mask(), noise=noise)
        else:
            found = functional.sample(best.values, **parameters, noise=noise)
        if bool(found.logprobs.isnan().any()):
            # torch.multinomial says that there is no distribution, before it draws.
            torch.set_rng_state(state)
            return torch.multinomial(scores.last().softmax(-1), 1).squeeze(1)
        return (found.tokens if places is None else places.gather(1, found.tokens)).squeeze(1)

    def _continuations(self, scores: _Scores, state: Beams) -> tuple[Tensor, Tensor]:
        number, beam_scores = self.rules.kept, state.running.scores
        if self.config.do_sample:
            return _drawn_continuations(_total(scores.last(), beam_scores), number)
        if scores.is_plain:
            found = Logits.continuations(scores.logits, beam_scores, number, scores.mask())
        else:
            found = functional.topk(_total(scores.last(), beam_scores), number)[:2]
        if not _has_nan(found[0]):
            return found
        # torch.topk decides their order.
        if not (self.plan.asks_host or self.criteria.ask_host):
            raise Declined("NaN among the scores")
        values, indices = torch.topk(_total(scores.last(), beam_scores), number)
        return values, indices


def _total(scores: Tensor, beam_scores: Tensor) -> Tensor:
    """float32 [batch, beams * V]: the scores of all continuations of each sequence, given those of tokens and beams."""
    return (scores.view(*beam_scores.shape, -1) + beam_scores.unsqueeze(-1)).flatten(1)


def _drawn_continuations(total: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The scores and places [batch, count] of continuations that are drawn without replacement."""
    indices = draws.drawn(total, count)
    drawn = total.gather(1, indices)
    if not SORTS_DRAWN_BEAMS:
        return drawn, indices
    drawn, order = drawn.sort(dim=-1, descending=True, stable=True)
    return drawn, indices.gather(1, order)


class _Scores:
    """One step's logits, and the scores that processors make of them. Each processor is called once.

    logits: [R, V], float32 or of 16 bits.
    is_plain: whether a choice reads the logits themselves, because no processor is called.
    """

    def __init__(self, plan: Plan, logits: Tensor, text: Tensor, are_log_probs: bool) -> None:
        # Stock generate() chooses from float32.
        self.logits = logits.float() if logits.dtype is torch.float64 else logits
        self.is_plain = not plan.called
        self._plan, self._are_log_probs = plan, are_log_probs
        self._text: Any = text
        self._called: Tensor | None = None
        self._last: Tensor | None = None

    def mask(self) -> Tensor | None:
        """int32 [R, W]: the tokens that the plan's constraint allows; None for all."""
        constraint = self._plan.constraint
        if constraint is None:
            return None
        return constraint.allowed_mask(self._text, self.logits.device, self.logits.shape[1])

    def called(self) -> Tensor:
        """float32 [R, V]: the scores after the processors that are called."""
        if self._called is None:
            # A copy: a processor may write to it.
            of_beams = self._are_log_probs
            scores = self.logits.float().log_softmax(-1) if of_beams else self.logits.to(torch.float32, copy=True)
            self._called = called(self._plan.called, self._text, scores)
        return self._called

    def last(self) -> Tensor:
        """float32 [R, V]: the scores after all processors, as stock generate() has them."""
        if self._last is None:
            self._last = called(self._plan.rest, self._text, self.called())
        return self._last


def _has_nan(scores: Tensor) -> bool:
    """Whether the continuations of a sequence have no order: their scores are NaN. On a GPU a look would wait for the device."""
    return not scores.is_cuda and bool(scores[:, 0].isnan().any())
