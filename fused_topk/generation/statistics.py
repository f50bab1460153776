# SPDX-License-Identifier: Apache-2.0
"""How many decoding steps were fused, how many ran stock operations, and why."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import NamedTuple

import torch

logger = logging.getLogger("fused_topk.generation")


class Stats(NamedTuple):
    """Decoding steps of all models of this process since the start or the last reset.

    fused: steps whose tokens were chosen in one read of the logits.
    fallback: steps that ran stock operations, on the same values.
    reasons: for each reason of a fallback, the number of its steps.
    """

    fused: int
    fallback: int
    reasons: dict[str, int]


_lock = threading.Lock()
_fused = 0
_reasons: Counter[str] = Counter()
_told: set[str] = set()


def stats(reset: bool = False) -> Stats:
    """The decoding steps so far, fused and not.

    Args:
        reset: start again from zero after this call.

    Returns:
        Stats(fused, fallback, reasons).

    Example:
        >>> import fused_topk.generation as fg
        >>> fg.stats(reset=True).reasons
        {}
    """
    global _fused
    with _lock:
        result = Stats(_fused, _reasons.total(), dict(_reasons))
        if reset:
            _fused = 0
            _reasons.clear()
    return result


def count_fused() -> None:
    global _fused
    with _lock:
        _fused += 1


# A graph cannot count: its runs would not be seen, only its compilation.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def count_fallback(reason: str) -> None:
    with _lock:
        _reasons[reason] += 1
    tell_once(f"a decoding step runs stock operations: {reason}")


def tell_once(message: str) -> None:
    """A warning the first time, nothing afterwards."""
    with _lock:
        is_new = message not in _told
        _told.add(message)
    if is_new:
        logger.warning("fused_topk: %s", message)
