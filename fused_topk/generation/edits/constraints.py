# SPDX-License-Identifier: Apache-2.0
"""`prefix_allowed_tokens_fn` as an edit."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from ..choice import masks
from ..choice.edit import Edit, NotSparse
from ..choice.selection import best
from .adapter import Adapter, Adapters, Step
from .bans import Ban


class _Answered(stock.LogitsProcessor):
    """The stock processor with the answers that the user's function has already given in this step.

    A function may count or remember its calls: it is called as often as in stock generate(), whatever runs.
    """

    def __init__(self, processor: Any, answers: list[Any]) -> None:
        self._processor = processor
        self._answers = answers

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        calls = itertools.count()

        def answer(batch: int, ids: Tensor) -> Any:
            call = next(calls)
            if call == len(self._answers):
                self._answers.append(self._processor._prefix_allowed_tokens_fn(batch, ids))
            return self._answers[call]

        return stock.PrefixConstrainedLogitsProcessor(answer, self._processor._num_beams)(input_ids, scores)


def _prefix_constrained(p: Any) -> Adapter | None:
    """Only the tokens that the user's function names for a row. It runs on the host, so this waits for the device."""
    beams = p._num_beams
    if not isinstance(beams, int) or beams < 1:
        return None

    def adapter(step: Step) -> Edit | None:
        rows = step.rows
        if len(step.input_ids) % beams:
            raise NotSparse("prefix_allowed_tokens_fn for another number of beams")
        allowed = torch.zeros(rows.logits.shape, dtype=torch.bool, device="cpu")
        answers: list[Any] = []
        step.answered[id(p)] = _Answered(p, answers)
        for row, ids in enumerate(step.input_ids):
            answer = p._prefix_allowed_tokens_fn(row // beams, ids)
            answers.append(answer)
            try:
                # The answer may be any index: tokens in a list, a tensor or an array, of any shape, or a mask.
                allowed[row, answer.cpu() if isinstance(answer, Tensor) else answer] = True
                is_empty = len(answer) == 0
            except Exception:
                raise NotSparse("prefix_allowed_tokens_fn gives something that is no index of the vocabulary") from None
            if is_empty:
                raise NotSparse("prefix_allowed_tokens_fn gives no token")
            # A copy of the answer, which the function may change later.
            answers[row] = allowed[row]
        ban = Ban(masks.of(allowed.numpy(), rows.logits.device))
        # The stock processor adds -inf to the other scores: NaN stays, and +inf becomes NaN. Where no beam of a prompt has a
        # token left, later versions force the allowed ones. An edit does neither.
        before = best(rows, step.edits, 1, step.are_log_probs).scores
        after = best(rows, [*step.edits, ban], 1, step.are_log_probs).scores
        is_dead = after.isneginf().view(-1, beams).all(-1).any()
        if bool(is_dead | ~(before < torch.inf).all()):
            raise NotSparse("no allowed token has a finite score")
        return ban

    return adapter


ADAPTERS: Adapters = {
    stock.PrefixConstrainedLogitsProcessor: (
        _prefix_constrained,
        frozenset({"_prefix_allowed_tokens_fn", "_num_beams"}),
    )
}
