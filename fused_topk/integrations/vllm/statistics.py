# SPDX-License-Identifier: Apache-2.0
"""How many steps of vLLM's sampler were chosen fused, and why others were not."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import NamedTuple

# A child of vLLM's logger, so that it has vLLM's handlers and format in each process.
logger = logging.getLogger("vllm.fused_topk")


class Stats(NamedTuple):
    """Steps of the samplers of this process since the start or the last reset. A step chooses a token for each of its requests.

    Attributes:
        fused: steps whose tokens, or whose log-probabilities, came from one read of the logits.
        argmax: steps of requests that are greedy and want no log-probabilities. vLLM's own argmax reads the logits once.
        prompts: calls for prompts' log-probabilities that were served.
        stock: steps, and calls for prompts' log-probabilities, that ran vLLM's own operations.
        reasons: for each reason, the number of these steps and calls.
    """

    fused: int
    argmax: int
    prompts: int
    stock: int
    reasons: dict[str, int]


_lock = threading.Lock()
_steps: Counter[str] = Counter()
_reasons: Counter[str] = Counter()


def stats(reset: bool = False) -> Stats:
    """The steps of vLLM's sampler so far in this process, fused and not.

    >>> from fused_topk.integrations import vllm
    >>> vllm.stats(reset=True).reasons
    {}

    vLLM's workers are processes of their own: `llm.collective_rpc("fused_topk_stats")` has the counters of each, as a dict.

    Args:
        reset: start again from zero after this call.

    Returns:
        Stats: a tuple of fused, argmax, prompts, stock and reasons.
    """
    with _lock:
        result = Stats(_steps["fused"], _steps["argmax"], _steps["prompts"], sum(_reasons.values()), dict(_reasons))
        if reset:
            _steps.clear()
            _reasons.clear()
    return result


def count(kind: str) -> None:
    """Args: kind: "fused", "argmax" or "prompts"."""
    with _lock:
        _steps[kind] += 1


def count_stock(reason: str) -> None:
    with _lock:
        _reasons[reason] += 1
        is_new = _reasons[reason] == 1
    if is_new:
        logger.warning("fused_topk: vLLM's own operations choose the tokens: %s", reason)
