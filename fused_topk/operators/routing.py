# SPDX-License-Identifier: Apache-2.0
"""The operators of routers: what torch.compile, fake tensors, autograd and CUDA graphs see of :func:`router_topk`.

    router_topk        the choice of experts
    router_topk_out    the same into given tensors

The weights have gradients, of which the choice is no part: with g those of the chosen scores s, sigmoid passes on g s (1 - s),
sqrtsoftplus g sigmoid(x) / (2 s), and softmax g s at the chosen, less p times the sum of g s everywhere. The bias has zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .. import plans
from ..problem import RouterTopK, result_dtype
from ..rows import ROWS_SCHEMA, LogitRows, like_given, unflattened
from .dispatch import library, register
from .gradients import for_inputs, save_rows, saved_rows

_REQUEST = (
    f"{ROWS_SCHEMA}, Tensor? bias, SymInt k, str scoring, SymInt groups, SymInt topk_groups, str group_score, bool renormalize, "
    "float scale"
)
library.define(f"router_topk({_REQUEST}, ScalarType index_dtype, str? backend) -> (Tensor, Tensor)")
library.define(f"router_topk_out({_REQUEST}, str? backend, Tensor(a!) out_weights, Tensor(b!) out_experts) -> ()")
_INPUTS = 10  # of router_topk, behind the rows


def router_topk(*arguments: Any) -> RouterTopK:
    rows, (bias, *request, index_dtype, backend) = unflattened(arguments)
    return _plan(rows, bias, request, index_dtype, backend).run(rows, bias)


def router_topk_out(*arguments: Any) -> None:
    rows, (bias, *request, backend, weights, experts) = unflattened(arguments)
    plan = _plan(rows, bias, request, experts.dtype, backend)
    plan.run_into(RouterTopK(weights, experts), rows, bias)


def _plan(rows: LogitRows, bias: Tensor | None, request: list[Any], *others: Any) -> plans.RouterPlan:
    return plans.router_plan(rows.logits.device, rows.layout(), like_given(bias), tuple(request), *others)


def _fake_router_topk(*arguments: Any) -> RouterTopK:
    rows, (_, k, *_, index_dtype, _) = unflattened(arguments)
    return plans.router_result(rows.logits, k, index_dtype).empty(rows.logits.device)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: RouterTopK) -> None:
    rows, (bias, _, ctx.scoring, _, _, _, ctx.renormalize, ctx.scale, _, _) = unflattened(inputs)
    _, experts = output
    ctx.mark_non_differentiable(experts)
    save_rows(ctx, rows, bias, experts)


def backward(ctx: Any, grad_weights: Tensor, grad_experts: Tensor | None) -> tuple[Tensor | None, ...]:
    rows, (bias, experts) = saved_rows(ctx)
    of_logits = _logit_gradient(ctx, rows, experts.to(torch.int64), grad_weights * ctx.scale)
    of_bias = None if bias is None else torch.zeros_like(bias)
    return for_inputs(of_logits, of_bias, count=_INPUTS)


def _logit_gradient(ctx: Any, rows: LogitRows, experts: Tensor, g: Tensor) -> Tensor:
    x = rows.counted().to(result_dtype(rows.logits.dtype))
    hidden = rows.uncounted()
    chosen = x.gather(-1, experts)
    if ctx.scoring == "softmax":
        p = x.softmax(-1)
        scores = p.gather(-1, experts)
    else:
        scores = chosen.sigmoid() if ctx.scoring == "sigmoid" else softplus(chosen).sqrt()
    if ctx.renormalize:
        total = scores.sum(-1, keepdim=True) + 1e-20
        g = g / total
        g = g - (g * scores).sum(-1, keepdim=True) / total
    if ctx.scoring == "softmax":
        g = g * scores
        gradient = (-p * g.sum(-1, keepdim=True)).scatter_add(-1, experts, g)
    else:
        if ctx.scoring == "sigmoid":
            slope = scores * (1 - scores)
        else:
            slope = chosen.sigmoid() / (2 * scores.where(scores > 0, 1.0))
        gradient = torch.zeros_like(x).scatter_add(-1, experts, g * slope)
    return (gradient if hidden is None else gradient.masked_fill(hidden, 0.0)).to(rows.logits.dtype)


register("router_topk", router_topk, _fake_router_topk, setup_context, backward)
register("router_topk_out", router_topk_out)
