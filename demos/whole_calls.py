# SPDX-License-Identifier: Apache-2.0
"""Whole generate() calls, several ways in turns: the first token, each further one, memory, and whether the results agree.

The ways: stock; whole step, where beams share their prompt and nothing of the cache is copied (on a GPU one replay of a CUDA graph a
token); the same compiled; and transformers' static cache, whose forward pass it compiles on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fused_topk.generation import fused_decoding, stats

STOCK, WHOLE, COMPILED, STATIC = "stock", "whole step", "whole step, compiled", "static cache"


@dataclass
class Calls:
    """What the calls of one way took. Times in seconds, memory in bytes.

    Attributes:
        first_call: the first one, with all that is compiled or captured in it.
        first_token: the median of calls for one token.
        step: of each further token.
        peak_beyond_weights: None where a device does not tell.
        share_of_same: of the sequences those that are stock's.
        not_as_asked: for each reason, how many calls ran otherwise.
    """

    first_call: float
    first_token: float = 0.0
    step: float = 0.0
    peak_beyond_weights: int | None = None
    share_of_same: float = 0.0
    not_as_asked: dict[str, int] = field(default_factory=dict)


def way_of(model: Any, inputs: dict[str, Tensor], options: dict[str, Any], way: str) -> Callable[[int], Tensor]:
    """A function that generates that many tokens that way, of the same seed in each call."""
    more = {"cache_implementation": "static"} if way == STATIC else {}

    def generate(new_tokens: int) -> Tensor:
        is_ours = way in (WHOLE, COMPILED)
        torch.manual_seed(0)
        with fused_decoding(model, compile=way == COMPILED) if is_ours else nullcontext():
            lengths = {"max_new_tokens": new_tokens, "min_new_tokens": None}
            found: Tensor = model.generate(**inputs, **options, **lengths, **more)
            return found

    return generate


def measure(ways: dict[str, Callable[[int], Tensor]], new_tokens: int, rounds: int, model: Any) -> dict[str, Calls]:
    """The calls of each way, in turns. A way that raises is left out, but for stock."""
    found: dict[str, Calls] = {}
    sequences: dict[str, Tensor] = {}
    stats(reset=True)
    for way, generate in ways.items():
        try:
            seconds, sequences[way] = _timed(generate, new_tokens)
            _timed(generate, 1)
        # A way that this model, machine or version does not know.
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            # All others are compared with it.
            if way == STOCK:
                raise
            print(f"{way}: left out ({type(error).__name__}: {str(error).partition(chr(10))[0][:100]})", flush=True)
            continue
        found[way] = Calls(seconds)
        found[way].not_as_asked = stats(reset=True).reasons
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in found}
    for turn in range(rounds):
        # Which goes first alternates.
        for way in list(found)[:: 1 if turn % 2 else -1]:
            times[way].append((_timed(ways[way], 1)[0], _timed(ways[way], new_tokens)[0]))
    for way, calls in found.items():
        calls.first_token, whole = (statistics.median(each) for each in zip(*times[way], strict=True))
        calls.step = (whole - calls.first_token) / (new_tokens - 1)
        calls.share_of_same = share_of_same(sequences[way], sequences[STOCK])
        if torch.cuda.is_available() and model.device.type == "cuda":
            weights = sum(weight.nbytes for weight in {id(each): each for each in model.parameters()}.values())
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            ways[way](new_tokens)
            calls.peak_beyond_weights = torch.cuda.max_memory_allocated() - weights
    return found


def _timed(generate: Callable[[int], Tensor], new_tokens: int) -> tuple[float, Tensor]:
    started = time.perf_counter()
    found = generate(new_tokens)
    if found.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, found


def share_of_same(found: Tensor, expected: Tensor) -> float:
    """How many of the texts are equal, from 0 to 1."""
    return 0.0 if found.shape != expected.shape else float((found == expected).all(-1).float().mean())
