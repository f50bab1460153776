# SPDX-License-Identifier: Apache-2.0
"""The list of a loop's logits processors. It turns lazy scores into lazy scores if all of them can be fused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import LogitsProcessorList

from ..edits.adapter import is_as_published
from ..edits.plan import Plan
from .lazy_scores import LazyScores
from .recorded import Recorded

if TYPE_CHECKING:
    from .session import Session


def reason_against(processors: Any) -> str | None:
    """Why a loop's processors cannot be replaced by :class:`Processors`; None if they can."""
    if type(processors) is LogitsProcessorList and is_as_published(LogitsProcessorList):
        return None
    return f"logits processors in a {type(processors).__name__}"


class Processors(LogitsProcessorList):
    """A loop's processors. Loops may add some of their own, and change them."""

    def __init__(self, session: Session, processors: LogitsProcessorList, is_sampling: bool) -> None:
        super().__init__(processors)
        self._session = session
        self._is_sampling = is_sampling
        self._plan: Plan | None = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self._session.end_step()
        if type(scores) is Recorded:
            scores = scores.end()
        if not isinstance(scores, LazyScores):
            return super().__call__(input_ids, scores, **kwargs)
        if self._plan is None or not self._plan.is_for(self):
            self._plan = Plan(self, self._is_sampling)

        def run_stock(scores: Tensor, answered: dict[int, Any]) -> Any:
            processors = LogitsProcessorList(answered.get(id(each), each) for each in self)
            return processors(input_ids, scores, **kwargs)

        result = scores.processed(self._plan, input_ids, run_stock)
        is_kept = self._session.records_scores and isinstance(result, LazyScores)
        return self._session.record(result) if is_kept else result
