# SPDX-License-Identifier: Apache-2.0
"""The operator that merges the states of a row's parts, and its gradient in closed form.

    merge_parts     merge_states and merge_topk; the parts are the first dimension of every tensor

With M = max m_p, e_p = exp((m_p - M) / T) and D = sum d_p e_p, the gradient of log D + M / T is d_p e_p / (D T) with respect
to m_p, and e_p / D with respect to d_p. A chosen logit has the gradient 1 / T of its log-probability.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import plans
from ..backends.reference import merge_candidates
from ..problem import MergeProblem, TopK
from ..scale import SCALE_SCHEMA, Scale
from .dispatch import library, register

library.define(
    f"merge_parts(Tensor logits, Tensor indices, Tensor m, Tensor d, Tensor? part_lengths, SymInt k, {SCALE_SCHEMA}, str values, "
    "str normalize, str? backend) -> (Tensor, Tensor, Tensor)"
)


def merge_parts(*arguments: Any) -> TopK:
    *fields, backend = arguments
    problem = MergeProblem.of(*fields)
    return plans.plan_of_merge(problem, backend).run(problem)


def _fake_merge_parts(
    logits: Tensor, indices: Tensor, m: Tensor, d: Tensor, part_lengths: Any, k: int, *rest: Any
) -> TopK:
    values = rest[2]
    return plans.merge_result(logits.select(0, 0), k, values).empty(logits.device)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: TopK) -> None:
    logits, indices, m, d, part_lengths, _, ctx.temperature, row_temperature, ctx.values, ctx.normalize, _ = inputs
    values, chosen, _ = output
    ctx.mark_non_differentiable(chosen)
    ctx.save_for_backward(logits, indices, m, d, part_lengths, row_temperature, values, chosen)


def backward(
    ctx: Any, grad_values: Tensor, grad_indices: Tensor | None, grad_normalizer: Tensor
) -> tuple[Tensor | None, ...]:
    logits, indices, m, d, part_lengths, row_temperature, values, chosen = ctx.saved_tensors
    scale = Scale(ctx.temperature, row_temperature)
    candidates, tokens = merge_candidates(logits, indices, part_lengths)
    # The places of the chosen candidates, found by their tokens: each token is there once. Sorting by logits, as the reference
    # does, needs a view of their bits, for which older versions of torch have no rule under vmap.
    ascending, by_token = tokens.sort(dim=-1)
    best = by_token.gather(-1, torch.searchsorted(ascending.contiguous(), chosen))
    of_parts, sums = m.movedim(0, -1), d.movedim(0, -1)
    greatest = of_parts.amax(-1, keepdim=True)
    base = greatest.where(greatest != -torch.inf, 0.0)
    e = scale.weight(of_parts, base)
    terms = sums * e
    total = terms.sum(-1, keepdim=True)

    if ctx.values == "state":
        grad_chosen = grad_values
        grad_m, grad_d = grad_normalizer.unsqueeze(-1).unbind(0)
        is_greatest = torch.zeros_like(of_parts).scatter(-1, of_parts.argmax(-1, keepdim=True), 1.0)
        grad_of_d = grad_d * e
        grad_of_m = is_greatest * (grad_m - scale.back(grad_d * total)) + scale.back(grad_d * terms)
    else:
        grad_logsumexp = grad_normalizer.unsqueeze(-1)
        grad_chosen = grad_values
        if ctx.values != "logits":
            # d p = p d(log p)
            grad_log = grad_values * values if ctx.values == "softmax" else grad_values
            # The probability of a logit of -inf is the constant 0.
            grad_log = grad_log.where(candidates.gather(-1, best) != -torch.inf, 0.0)
            if ctx.normalize == "topk":
                p = values if ctx.values == "softmax" else values.exp()
                grad_log = grad_log - p * grad_log.sum(-1, keepdim=True)
            else:
                grad_logsumexp = grad_logsumexp - grad_log.sum(-1, keepdim=True)
            grad_chosen = scale.back(grad_log)
        grad_of_d = grad_logsumexp * e / total
        grad_of_m = scale.back(grad_of_d * sums)
    # An entry that is no candidate is a constant.
    grad_chosen = grad_chosen.where(chosen >= 0, 0.0)
    scattered = torch.zeros_like(candidates).scatter(-1, best, grad_chosen.to(candidates.dtype))
    grad_logits = scattered.unflatten(-1, (logits.shape[0], logits.shape[-1])).movedim(-2, 0)
    of_m, of_d = grad_of_m.to(m.dtype).movedim(-1, 0), grad_of_d.to(d.dtype).movedim(-1, 0)
    return grad_logits, None, of_m, of_d, *(None,) * 7


register("merge_parts", merge_parts, _fake_merge_parts, setup_context, backward)
