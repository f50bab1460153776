# SPDX-License-Identifier: Apache-2.0
"""How many decoding steps were fused, how many ran stock operations, and why."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any, NamedTuple

import torch

logger = logging.getLogger("fused_topk.generation")


class _Steps(NamedTuple):
    fused: int
    fallback: int
    reasons: dict[str, int]


class Stats(_Steps):
    """Decoding steps of all models of this process since the start or the last reset.

    Attributes:
        fused: steps whose tokens were chosen in one read of the logits.
        fallback: steps that ran stock operations, on the same values.
        reasons: for each reason of a fallback, the number of its steps.
        whole: how many of the fused steps were whole steps.
        not_whole: for each reason why a call ran without whole steps, unless whole_step=False, the number of such calls.
        compiled: how many of the whole steps ran their forward pass as compiled code.
        captured: how many of the whole steps ran their forward pass as the replay of a CUDA graph.
        not_compiled: for each reason why a call whose steps were to be compiled or captured ran without, the number of such calls.
        sharded: the number of steps of transformers' loop with a tensor-parallel model in which no process gathered the logits.
        gathered: for each reason why the logits of a tensor-parallel model were gathered, the number of times.

    A tuple of the first three. Printed, it shows `fused`, `fallback` and all other counts that are not zero.
    """

    whole: int
    not_whole: dict[str, int]
    compiled: int
    captured: int
    not_compiled: dict[str, int]
    sharded: int
    gathered: dict[str, int]

    def __repr__(self) -> str:
        counted = {**self._asdict(), **vars(self)}
        shown = (f"{name}={count!r}" for name, count in counted.items() if count or name in ("fused", "fallback"))
        return f"Stats({', '.join(shown)})"


# Attributes of Stats beside its first three: numbers of steps, and numbers for each reason.
_FURTHER = ("whole", "not_whole", "compiled", "captured", "not_compiled", "sharded", "gathered")
_REASONS = ("reasons", "not_whole", "not_compiled", "gathered")

_lock = threading.Lock()
_steps: Counter[str] = Counter()
_reasons: dict[str, Counter[str]] = {name: Counter() for name in _REASONS}
_told: set[str] = set()


def stats(reset: bool = False) -> Stats:
    """The decoding steps so far, fused and not.

    >>> import fused_topk.generation as fg
    >>> fg.stats(reset=True).reasons
    {}

    Args:
        reset: start again from zero after this call.

    Returns:
        Stats: a tuple of fused, fallback and reasons, with whole, not_whole, compiled, captured, not_compiled, sharded, gathered.
    """
    with _lock:
        result = Stats(_steps["fused"], _reasons["reasons"].total(), dict(_reasons["reasons"]))
        for name in _FURTHER:
            setattr(result, name, dict(_reasons[name]) if name in _reasons else _steps[name])
        if reset:
            for counter in (_steps, *_reasons.values()):
                counter.clear()
    return result


def count_fused(is_sharded: bool) -> None:
    _count(fused=1, sharded=int(is_sharded))


def count_whole(steps: int, are_compiled: bool, are_captured: bool) -> None:
    _count(fused=steps, whole=steps, compiled=steps * are_compiled, captured=steps * are_captured)


def _count(**steps: int) -> None:
    with _lock:
        _steps.update(steps)


# Not traced into a compiled graph, which would count once, when it is compiled.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def count_fallback(reason: str) -> None:
    _count_reason("reasons", reason, "a decoding step runs stock operations")


def count_gathered(reason: str) -> None:
    _count_reason("gathered", reason, "the logits of a tensor-parallel model are gathered")


def count_not_whole(reason: str, whole_step: bool | str | None) -> None:
    """Args: whole_step: the option of the call. With None there is no warning: the user has not asked for whole steps."""
    _count_reason("not_whole", reason, whole_step and f"a call with whole_step={whole_step!r} runs without")


def count_not_compiled(reason: str) -> None:
    _count_reason("not_compiled", reason, "whole steps run one operation after another")


def _count_reason(name: str, reason: str, what: Any) -> None:
    """Args: what: what the warning says before the reason; a false value for no warning."""
    with _lock:
        _reasons[name][reason] += 1
    if what:
        tell_once(f"{what}: {reason}")


def tell_once(message: str) -> None:
    """A warning the first time, nothing afterwards."""
    with _lock:
        is_new = message not in _told
        _told.add(message)
    if is_new:
        logger.warning("fused_topk: %s", message)
