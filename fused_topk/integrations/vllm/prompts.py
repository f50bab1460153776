# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of prompts, from one read of their logits. It imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ... import functional
from .choice import of_best


class PromptScorer:
    """The part of a sampler that vLLM scores prompts with: it gives the log-probabilities of the best tokens and of the given ones."""

    def __init__(self, to_tensors: Callable[..., Any]) -> None:
        """Args: to_tensors: vLLM's LogprobsTensors."""
        self._to_tensors = to_tensors

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """The logits: :meth:`gather_logprobs`, the only reader of the result, normalises them."""
        return logits

    def gather_logprobs(self, logits: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        tokens = token_ids[:, None]
        found: Any = functional.token_logprobs(logits, tokens, k=num_logprobs, ranks=True, ties="last")
        own, ranks, best = found.logprobs, found.ranks[:, 0], found.topk
        if best is None:
            return self._to_tensors(tokens.int(), own, ranks)
        return self._to_tensors(*of_best(tokens, own, best.indices, best.values, ranks))


class RunnerView:
    """vLLM's model runner with another sampler, for one of its methods that only reads the runner's attributes."""

    def __init__(self, runner: Any, sampler: Any) -> None:
        self._runner = runner
        self.sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)
