# SPDX-License-Identifier: Apache-2.0
"""How many tokens whole steps and stock generate() have written, and why the latter."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import NamedTuple

logger = logging.getLogger("fused_topk.generation")


class Stats(NamedTuple):
    """The tokens that enabled models of this process have written since the start or the last reset.

    Attributes:
        whole: tokens of whole steps. One step of a call counts once, however many texts it writes.
        stock: tokens of calls that stock generate() served, as far as its results say how many.
        reasons: for each reason why a call was served by stock generate(), or its steps were not compiled or captured, the
            number of such calls.
    """

    whole: int
    stock: int
    reasons: dict[str, int]


_lock = threading.Lock()
_tokens: Counter[str] = Counter()
_reasons: Counter[str] = Counter()
_told: set[str] = set()


def stats(reset: bool = False) -> Stats:
    """The tokens so far.

    >>> import fused_topk.generation as fg
    >>> fg.stats(reset=True).reasons
    {}

    Args:
        reset: start again from zero after this call.
    """
    with _lock:
        result = Stats(_tokens["whole"], _tokens["stock"], dict(_reasons))
        if reset:
            _tokens.clear()
            _reasons.clear()
    return result


def tokens_by_way() -> dict[str, int]:
    """The tokens since the last reset as "whole" and "stock", and those of whole steps that were "compiled" and "captured"."""
    with _lock:
        return dict(_tokens)


def count_whole(tokens: int, are_compiled: bool, are_captured: bool) -> None:
    with _lock:
        _tokens.update(whole=tokens, compiled=tokens * are_compiled, captured=tokens * are_captured)


def count_stock(tokens: int) -> None:
    with _lock:
        _tokens.update(stock=tokens)


def count_reason(reason: str) -> None:
    with _lock:
        _reasons[reason] += 1


def tell_once(message: str) -> None:
    """A warning the first time, nothing afterwards."""
    with _lock:
        is_new = message not in _told
        _told.add(message)
    if is_new:
        logger.warning("fused_topk: %s", message)
