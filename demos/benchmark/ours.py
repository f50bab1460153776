# SPDX-License-Identifier: Apache-2.0
"""Our function for a case. The backend is asked for by name, so that no fallback is timed in its place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import fused_topk
from fused_topk import distributed

from .cases import SAMPLING, Case
from .inputs import beam_scores, lengths_of, router_settings, target_tokens, weight_of
from .timing import Function

ENTROPY_BONUS = 0.01  # in the losses of "entropy"


def topk(case: Case, device: torch.device) -> Function:
    lengths = lengths_of(case, device) if case.kind == "ragged" else None
    return lambda logits: fused_topk.log_softmax_topk(logits, case.k, lengths=lengths, backend=device.type)


def beams(case: Case, device: torch.device) -> Function:
    scores = beam_scores(case, device)
    return lambda logits: fused_topk.beam_topk(logits, scores, case.k, backend=device.type)


def softmax(case: Case, device: torch.device) -> Function:
    return lambda logits: fused_topk.softmax(logits, backend=device.type)


def draw(case: Case, device: torch.device, backend: str = "") -> Function:
    return partial(fused_topk.sample, seed=0, backend=backend or device.type, **SAMPLING[case.kind])


def route(case: Case, device: torch.device, backend: str = "") -> Function:
    settings = router_settings(case, device)
    return lambda logits: fused_topk.router_topk(logits, case.k, backend=backend or device.type, **settings)


def head(case: Case, device: torch.device) -> Function:
    weight = weight_of(case, device)
    return lambda hidden: fused_topk.linear_log_softmax_topk(hidden, weight, case.k)


def train(case: Case, device: torch.device, entropy: bool = False, recompute: bool = True) -> Function:
    def loss(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
        found = fused_topk.linear_token_logprobs(hidden, weight, tokens, entropy=entropy, recompute=recompute)
        return -(found.logprobs + ENTROPY_BONUS * found.entropy).mean() if entropy else -found.logprobs.mean()

    return step_of(case, device, loss)


def step_of(case: Case, device: torch.device, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Function:
    """A forward and a backward pass of a `loss` of (hidden, weight, tokens): (loss, gradient of hidden states)."""
    weight, tokens = weight_of(case, device).detach().requires_grad_(), target_tokens(case, device)

    def step(given: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, weight.grad = given.detach().requires_grad_(), None
        found = loss(hidden, weight, tokens)
        found.backward()
        return found.detach(), hidden.grad

    return step


def sharded(case: Case, device: torch.device) -> Function:
    return lambda own: distributed.log_softmax_topk(own, case.k)
