# SPDX-License-Identifier: Apache-2.0
"""When texts end: transformers' stopping criteria of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .facts import is_as_published
from .reasons import Declined

_KNOWN = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria, StopStringCriteria)


def with_stop_strings(kwargs: Mapping[str, Any], configs: Sequence[Any]) -> dict[str, Any]:
    """These keyword arguments of generate() with `stop_strings` as the criterion that generate() makes of it. Raises Declined where it is
    not known what generate() makes of them.

    Together with custom_generate, generate() drops `tokenizer`, which that criterion needs.
    """
    given = dict(kwargs)
    tokenizer, strings = given.pop("tokenizer", None), given.pop("stop_strings", None)
    if tokenizer is None and strings is None:
        return given
    if any(getattr(config, "stop_strings", None) is not None for config in configs):
        raise Declined("stop_strings of a configuration")
    own = given.get("stopping_criteria") or ()
    # If there were two such criteria, generate() would take only one.
    if tokenizer is None or strings is None or any(isinstance(each, StopStringCriteria) for each in own):
        raise Declined("tokenizer" if strings is None else "stop_strings")
    try:
        criterion = StopStringCriteria(tokenizer, strings)
    # As for strings that no token can make. Then generate() itself raises the error.
    except Exception:
        raise Declined("stop_strings") from None
    return {**given, "stopping_criteria": StoppingCriteriaList([*own, criterion])}


class Criteria:
    """The stopping criteria of one call.

    reason: why they cannot be served; None where they can.
    ask_host: whether some are of unknown classes. They are called once for each token, with what transformers' loops give them.
    read_text: whether some look at the tokens of texts.
    have_clocks: whether some end texts after a time.
    ends: the tokens that end a text.
    max_length: the greatest length of a text, with its prompt.
    """

    def __init__(self, criteria: Any) -> None:
        unknown = [each for each in criteria if type(each) not in _KNOWN or not is_as_published(type(each))]
        self.reason: str | None = None
        if type(criteria) is not StoppingCriteriaList:
            self.reason = f"stopping criteria in a {type(criteria).__name__}"
        elif any(isinstance(each, _KNOWN) for each in unknown):
            # Of a class that somebody has patched, or that is made of one of these.
            self.reason = f"stopping criterion {type(unknown[0]).__name__}"
        known = [each for each in criteria if each not in unknown]
        ends = [each.eos_token_id for each in known if isinstance(each, EosTokenCriteria)]
        self.ends = {token for each in ends for token in each.flatten().tolist()}
        lengths = (each.max_length for each in known if isinstance(each, MaxLengthCriteria))
        # Without a criterion of length there is a reason: somebody has patched it.
        self.max_length = min(lengths, default=0)
        self._clocks = [each for each in known if isinstance(each, MaxTimeCriteria)]
        self.have_clocks = bool(self._clocks)
        strings = [each for each in known if isinstance(each, StopStringCriteria)]
        self._of_text = StoppingCriteriaList([*strings, *unknown])
        self.read_text, self.ask_host = bool(self._of_text), bool(unknown)

    def end(self, text: Tensor, scores: Sequence[Tensor] | None) -> Tensor:
        """bool [R]: which of the texts [R, length] end because of what is in them. Known criteria wait for nothing. `scores` are those
        of the steps so far, where the user asks for them."""
        given: Any = None if scores is None else tuple(scores)
        found: Tensor = self._of_text(text, given)
        return found

    def end_all(self, ids: Tensor, length: int) -> bool:
        """Whether every text of that length ends. `ids` are any tokens on the call's device, where criteria give their answers."""
        return length >= self.max_length or any(bool(each(ids, None).any()) for each in self._clocks)
