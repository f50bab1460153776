# SPDX-License-Identifier: Apache-2.0
"""One step's logits, and what the processors of the call do to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...backends import Backend, reference
from ..choice import tokens
from ..choice.edit import Edit, NotSparse
from ..choice.rows import Rows
from ..choice.selection import Candidates
from ..edits.plan import Plan
from .reasons import Declined


class Scan:
    """One step's logits, and what its processors do to them.

    is_dense: whether the processors change too many tokens for a list of edits.
    """

    def __init__(self, plan: Plan, logits: Tensor, text: Tensor, are_log_probs: bool, never_declines: bool) -> None:
        self.rows = Rows(logits, backend_for(logits))
        self.is_dense = False
        self.edits: list[Edit] = []
        self._plan = plan
        self._text = text
        self._are_log_probs = are_log_probs
        self._dense: Tensor | None = None
        # See `Step.answered`.
        self._answered: dict[int, Any] = {}
        try:
            self.edits = plan.edits(text, self.rows, are_log_probs, self._answered)
        except NotSparse:
            # A call that samples must not begin anew: that would prefer draws after which no step declines.
            if not never_declines:
                raise
            self.is_dense = True

    def left_over(self, at_least: int) -> Candidates | None:
        """The tokens that the warpers leave, from a list of each row's best; None where the list may be too short."""
        if self.is_dense:
            return None
        try:
            return tokens.left_over(self.rows, self.edits, self._plan.filters, at_least, self._are_log_probs)
        except NotSparse:
            return None

    def dense(self) -> Tensor:
        """float32 [R, V]: the scores as the stock processors give them."""
        if self._dense is None:
            scores = self.rows.logits.to(torch.float32, copy=True)
            scores = scores.log_softmax(-1) if self._are_log_probs else scores
            self._dense = self._plan.run_stock(self._text, scores, self._answered)
        return self._dense


def backend_for(logits: Tensor) -> Backend:
    backend = backends.pick(logits.device, logits.dtype, 1, None)
    if backend is reference:
        raise Declined(f"no kernels for {logits.dtype} on {logits.device.type}")
    return backend
