# SPDX-License-Identifier: Apache-2.0
"""When texts end: transformers' stopping criteria of a call, of the kinds that need no look at the whole text."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from ..edits.adapter import is_as_published

_KNOWN = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)


class Criteria:
    """The stopping criteria of one call.

    reason: why they cannot be served; None where they can.
    ends: the tokens that end a text.
    max_length: of a text with its prompt.
    """

    def __init__(self, criteria: Any) -> None:
        unknown = [each for each in criteria if type(each) not in _KNOWN or not is_as_published(type(each))]
        self.reason: str | None = None
        if type(criteria) is not StoppingCriteriaList:
            self.reason = f"stopping criteria in a {type(criteria).__name__}"
        elif unknown:
            self.reason = f"stopping criterion {type(unknown[0]).__name__}"
        known = [each for each in criteria if each not in unknown]
        self.ends = tuple(
            token
            for each in known
            if isinstance(each, EosTokenCriteria)
            for token in each.eos_token_id.flatten().tolist()
        )
        self.max_length = min(each.max_length for each in known if isinstance(each, MaxLengthCriteria))
        self._clocks = [each for each in known if isinstance(each, MaxTimeCriteria)]

    @property
    def have_clocks(self) -> bool:
        return bool(self._clocks)

    def end_all(self, ids: Tensor, length: int) -> bool:
        """Whether every text of that length ends.

        Args:
            ids: any tokens on the device of the call: a criterion answers there.
        """
        return length >= self.max_length or any(bool(each(ids, None).any()) for each in self._clocks)
