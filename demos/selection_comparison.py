# SPDX-License-Identifier: Apache-2.0
"""Runs both selections on the same logits at every step of a beam search: times each, and checks that they agree."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from beam_search import Selection

# An accumulated log-probability may be off by this times max(1, |value|): 16 times the spacing of float32 above 1.
TOLERANCE = 2e-6

# A moment: seconds of the wall clock, or an event in a GPU's stream.
Mark = float | torch.cuda.Event


class StepTimes(NamedTuple):
    """Seconds of one step: both selections, and all else (the model, moving its cache, the beams' bookkeeping)."""

    torch: float
    fused: float
    rest: float


class Agreement(NamedTuple):
    """How the two selections compare, judged by float64 arithmetic on the same logits and beam scores.

    A choice is one prompt at one step: `k` continuations in order. The fused one is right if its continuations are
    distinct, worth as much as the best ones in float64, rank for rank, and reported with their worth; all within
    `TOLERANCE`. Torch is held to less, as its float32 log_softmax is less exact: on a CPU it was seen off by 2e-5
    where one token has nearly all the probability.

    Attributes:
        identical: right choices with the same indices from torch, in the same order.
        tied: right choices with other indices from torch that are worth the same, rank for rank. Torch.topk promises
            no order among equals, so torch is right too.
        torch_worse: right choices where torch, for its rounding, chose what is worth less or ordered it wrongly.
        wrong: choices where the fused selection is not right.
        torch_error: largest error of torch's accumulated log-probabilities, relative to max(1, |value|).
        fused_error: the same of the fused selection.
    """

    identical: int
    tied: int
    torch_worse: int
    wrong: int
    torch_error: float
    fused_error: float

    @property
    def choices(self) -> int:
        return self.identical + self.tied + self.torch_worse + self.wrong

    def __or__(self, other: Agreement) -> Agreement:
        """Both together: the sum of the choices, the greater of the errors."""
        return Agreement(
            self.identical + other.identical,
            self.tied + other.tied,
            self.torch_worse + other.torch_worse,
            self.wrong + other.wrong,
            max(self.torch_error, other.torch_error),
            max(self.fused_error, other.fused_error),
        )


class Comparison:
    """A selection for `beam_search` that runs both, follows one, and keeps times and checks of every step.

    On a GPU the times come from events in the stream, so they count what the GPU waits for: launches from Python
    included, as in eager decoding. Which selection runs first alternates, as the second one finds the logits in cache.
    """

    def __init__(
        self,
        selections: dict[str, Selection],
        follow: str,
        device: torch.device,
        on_step: Callable[[], object] = lambda: None,
    ) -> None:
        self._selections = selections
        self._follow = follow
        self._clock = _Clock(device)
        self._on_step = on_step
        self._steps: list[_StepMarks] = []
        self._checks: list[Tensor] = []

    def __call__(self, logits: Tensor, beam_scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        arrival = self._clock.mark()
        spans: dict[str, tuple[Mark, Mark]] = {}
        chosen: dict[str, tuple[Tensor, Tensor]] = {}
        for name in ("torch", "fused") if len(self._steps) % 2 == 0 else ("fused", "torch"):
            start = self._clock.mark()
            chosen[name] = self._selections[name](logits, beam_scores, k)
            spans[name] = (start, self._clock.mark())

        self._checks.append(_check(logits, beam_scores, chosen["torch"], chosen["fused"]))
        self._on_step()
        # Or Python would launch the model's kernels while the GPU is still checking, and the model would look faster.
        self._clock.synchronize()
        self._steps.append(_StepMarks(arrival, spans["torch"], spans["fused"], self._clock.mark()))
        return chosen[self._follow]

    def times(self) -> list[StepTimes]:
        """Times of all steps but the last, which no model call follows."""
        self._clock.synchronize()
        seconds = self._clock.seconds
        return [
            StepTimes(seconds(*step.torch), seconds(*step.fused), seconds(step.departure, following.arrival))
            for step, following in zip(self._steps, self._steps[1:], strict=False)
        ]

    def agreement(self) -> Agreement:
        counts, errors = torch.stack(self._checks).cpu().tensor_split([4], dim=1)
        identical, tied, torch_worse, wrong = (int(count) for count in counts.sum(0))
        torch_error, fused_error = (float(error) for error in errors.amax(0))
        return Agreement(identical, tied, torch_worse, wrong, torch_error, fused_error)


class _StepMarks(NamedTuple):
    """When a step's logits arrived, when each selection began and ended, and when the search went on."""

    arrival: Mark
    torch: tuple[Mark, Mark]
    fused: tuple[Mark, Mark]
    departure: Mark


def _check(
    logits: Tensor, beam_scores: Tensor, with_torch: tuple[Tensor, Tensor], fused: tuple[Tensor, Tensor]
) -> Tensor:
    """Float64 [6]: the fields of `Agreement` for one step."""
    exact = (torch.log_softmax(logits.double(), -1) + beam_scores.double()[:, :, None]).flatten(1)
    values, indices = with_torch
    fused_values, fused_indices = fused
    best = torch.topk(exact, indices.shape[1]).values
    worth = exact.gather(1, indices)
    fused_worth = exact.gather(1, fused_indices)
    torch_error = _relative_error(values, worth).amax()
    fused_error = _relative_error(fused_values, fused_worth)

    are_distinct = (fused_indices.sort(1).values.diff(dim=1) > 0).all(1)
    is_as_good = (_relative_error(fused_worth, best) <= TOLERANCE).all(1)
    is_right = are_distinct & is_as_good & (fused_error <= TOLERANCE).all(1)
    is_same = (indices == fused_indices).all(1)
    is_tied = (_relative_error(worth, best) <= TOLERANCE).all(1)
    kinds = (is_same, ~is_same & is_tied, ~is_same & ~is_tied)
    counts = [(is_right & kind).sum() for kind in kinds] + [(~is_right).sum()]
    return torch.stack([*(count.double() for count in counts), torch_error, fused_error.amax()])


def _relative_error(found: Tensor, exact: Tensor) -> Tensor:
    """|found - exact| / max(1, |exact|), in float64; 0 where both are the same infinity."""
    error = (found.double() - exact).abs() / exact.abs().clamp_min(1)
    return torch.where(found == exact, 0.0, error)


class _Clock:
    """Marks moments: on a GPU in its stream, without waiting for it; on a CPU by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @staticmethod
    def seconds(start: Any, end: Any) -> float:
        """Between two marks of one clock; on a GPU only after `synchronize`."""
        return float(start.elapsed_time(end) / 1e3 if isinstance(start, torch.cuda.Event) else end - start)
