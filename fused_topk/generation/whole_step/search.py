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
from ..statistics import count_whole
from .beams import BeamSearch, Rules
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

    def run(self) -> Any:
        """What generate() returns.

        Raises:
            Declined: a step turned out to need the stock operations.
        """
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
        logits = decoder.read_prompt()
        for step in range(room):
            kept.add(logits, are_log_probs=False)
            chosen = self._greatest(logits, torch.cat([ids, tokens[:, :step]], 1))
            if self.rules.ends and self.padding is not None:
                chosen = chosen.masked_fill(has_ended, self.padding)
            tokens[:, step] = chosen
            has_ended |= torch.isin(chosen, ends)
            if self.criteria.end_all(ids, length + step + 1) or bool(has_ended.all()):
                break
            logits = decoder.read(chosen, parents, step)
        count_whole(step + 1)
        return of_greedy(ids, tokens[:, : step + 1], kept, self.config)

    def _beams(self) -> Any:
        rules, ids = self.rules, self.prompt.ids
        batch, length = ids.shape
        decoder = self._decoder()
        kept = Kept.asked_for(self.config)
        search = BeamSearch(rules, batch, ids.device)
        # All beams are one text at first.
        logits = decoder.read_prompt().repeat_interleave(rules.beams, 0)
        for step in range(rules.room):
            kept.add(logits, are_log_probs=True)
            texts = torch.cat([ids.repeat_interleave(rules.beams, 0), search.running.tokens.flatten(0, 1)[:, :step]], 1)
            scores, indices = self._continuations(logits, texts, search.running.scores)
            are_last = self.criteria.end_all(ids, length + step + 1)
            goes_on = search.choose(scores, indices, logits.shape[-1], step, are_last)
            if not goes_on:
                break
            logits = decoder.read(search.running.tokens[:, :, step], search.running.parents, step)
        count_whole(step + 1)
        return of_beams(ids, search.ended, -1 if self.padding is None else self.padding, kept, self.config)

    def _decoder(self) -> Decoder:
        # The last of the new tokens is not read.
        return Decoder(self.twin, self.prompt, self.rules.beams, self.rules.room - 1)

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
