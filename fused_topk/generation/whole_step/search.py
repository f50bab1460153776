# SPDX-License-Identifier: Apache-2.0
"""The loops: greedy search and beam search, a forward pass and a choice for each new token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from ... import backends
from ...backends import Backend, reference
from ..edits import NotSparse, Plan
from ..penalties import holds_for
from ..selection import Rows, best, best_continuations
from ..statistics import count_not_compiled, count_whole
from .beams import Constants, Rules, at_first, choose
from .compiled import NotCompiled, Shape, Store, first_beams, first_texts
from .criteria import Criteria
from .decoder import Decoder, Prompt
from .results import Kept, of_beams, of_greedy


class Declined(Exception):
    """The call is to run on the fused path, for the reason that this names."""


class Search(NamedTuple):
    """One call, which is served as far as can be known before it runs."""

    twin: Any
    prompt: Prompt
    rules: Rules
    plan: Plan
    criteria: Criteria
    config: GenerationConfig
    # What stands after the end of a text; None where no text ends before the others.
    padding: int | None
    # Of compiled steps; None where they are not asked for.
    store: Store | None = None

    def run(self) -> Any:
        """What generate() returns.

        Raises:
            Declined: a step turned out to need the stock operations.
        """
        try:
            if self.store is not None:
                reason = self._reason_against_compiling()
                if reason is not None:
                    raise NotCompiled(reason)
                return self._run_compiled(self.store)
        except NotCompiled as error:
            count_not_compiled(str(error))
        try:
            return self._greedy() if self.rules.beams == 1 else self._beams()
        except NotSparse as error:
            raise Declined(str(error)) from error

    def _greedy(self) -> Any:
        ids, room = self.prompt.ids, self.rules.room
        batch, length = ids.shape
        decoder = self._decoder()
        kept = Kept.asked_for(self.config)
        tokens = ids.new_empty(batch, room)
        parents = ids.new_zeros(batch, 1, room)
        ends = torch.tensor(self.rules.ends, dtype=torch.int64, device=ids.device)
        has_ended = torch.zeros(batch, dtype=torch.bool, device=ids.device)
        logits = decoder.read_prompt(self.prompt)
        for step in range(room):
            kept.add(logits, are_log_probs=False)
            chosen = self._greatest(logits, torch.cat([ids, tokens[:, :step]], 1))
            if self.rules.ends and self.padding is not None:
                chosen = chosen.masked_fill(has_ended, self.padding)
            tokens[:, step] = chosen
            has_ended |= torch.isin(chosen, ends)
            if self.criteria.end_all(ids, length + step + 1) or bool(has_ended.all()):
                break
            logits = decoder.read(chosen, parents, torch.tensor([step], device=ids.device), step + 1)
        count_whole(step + 1)
        return of_greedy(ids, tokens[:, : step + 1], kept, self.config, self._has_source)

    def _beams(self) -> Any:
        rules, ids = self.rules, self.prompt.ids
        batch, length = ids.shape
        decoder = self._decoder()
        kept = Kept.asked_for(self.config)
        beams, constants = at_first(rules, batch, ids.device), Constants.of(rules, rules.room, ids.device)
        # All beams are one text at first.
        logits = decoder.read_prompt(self.prompt).repeat_interleave(rules.beams, 0)
        for step in range(rules.room):
            kept.add(logits, are_log_probs=True)
            texts = torch.cat([ids.repeat_interleave(rules.beams, 0), beams.running.tokens.flatten(0, 1)[:, :step]], 1)
            scores, indices = self._continuations(logits, texts, beams.running.scores)
            now = torch.tensor([step], device=ids.device)
            are_last = torch.tensor([self.criteria.end_all(ids, length + step + 1)], device=ids.device)
            beams = choose(beams, rules, constants, scores, indices, logits.shape[-1], now, are_last)
            if not beams.goes_on:
                break
            logits = decoder.read(beams.running.tokens[:, :, step], beams.running.parents, now, step + 1)
        count_whole(step + 1)
        return of_beams(
            ids, beams.ended, -1 if self.padding is None else self.padding, kept, self.config, self._has_source
        )

    def _reason_against_compiling(self) -> str | None:
        if self.plan.processors:
            return f"logits processor {type(self.plan.processors[0]).__name__}"
        if any(each is not None for each in Kept.asked_for(self.config)):
            return "output_scores or output_logits"
        return None

    def _run_compiled(self, store: Store) -> Any:
        ids, rules, prompt = self.prompt.ids, self.rules, self.prompt
        length, is_greedy = ids.shape[1], rules.beams == 1
        not_last, last = (torch.tensor([value], device=ids.device) for value in (False, True))
        state: Any
        constants: Any
        with store.step(self.twin, Shape.of(prompt, rules)) as advance:
            if is_greedy:
                state, constants = first_texts(advance, prompt, self.padding)
            else:
                state, constants = first_beams(advance, prompt, rules.room)
            step, ends_now = 0, self.criteria.end_all(ids, length + 1)
            while not ends_now and bool(~state.has_ended.all() if is_greedy else state.goes_on):
                step += 1
                ends_now = self.criteria.end_all(ids, length + step + 1)
                state = advance(
                    state, constants, torch.tensor([step], device=ids.device), last if ends_now else not_last
                )
        count_whole(step + 1, are_compiled=True)
        kept = Kept.asked_for(self.config)
        if is_greedy:
            return of_greedy(ids, state.tokens[:, : step + 1], kept, self.config, self._has_source)
        return of_beams(
            ids, state.ended, -1 if self.padding is None else self.padding, kept, self.config, self._has_source
        )

    def _decoder(self) -> Decoder:
        # The last of the new tokens is not read.
        (batch, length), source = self.prompt.ids.shape, self.prompt.source
        places = None if source is None else source.hidden.shape[1]
        return Decoder(self.twin, batch, length, self.rules.beams, self.rules.room - 1, self.prompt.ids.device, places)

    @property
    def _has_source(self) -> bool:
        return self.prompt.source is not None

    def _greatest(self, logits: Tensor, texts: Tensor) -> Tensor:
        rows = Rows(logits, backend_for(logits))
        edits = self.plan.edits(texts, rows, False)
        if not edits:
            return rows.greatest()
        found = best(rows, edits, 1, False)
        self._check(rows, edits, found.scores, False)
        return found.ids[:, 0]

    def _continuations(self, logits: Tensor, texts: Tensor, beam_scores: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.rules.kept
        rows = Rows(logits, backend_for(logits))
        if not rows.supports(kept):
            raise Declined("more continuations than the kernels list")
        edits = self.plan.edits(texts, rows, True)
        scores, indices = best_continuations(rows, edits, beam_scores, kept)
        self._check(rows, edits, scores, True)
        return scores, indices

    def _check(self, rows: Rows, edits: Any, scores: Tensor, are_log_probs: bool) -> None:
        if not holds_for(rows, edits, scores, are_log_probs):
            raise Declined("remove_invalid_values with values to be removed")
        if are_log_probs and not scores.is_cuda and bool(scores[:, 0].isnan().any()):
            # All of such a row are NaN, and their order is torch.topk's. On a GPU nothing waits for it.
            raise Declined("NaN among the scores")


def backend_for(logits: Tensor) -> Backend:
    backend = backends.pick(logits.device, logits.dtype, 1, None)
    if backend is reference:
        raise Declined(f"no kernels for {logits.dtype} on {logits.device.type}")
    return backend
