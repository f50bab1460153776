# SPDX-License-Identifier: Apache-2.0
"""The operator of LM heads, and its gradient in closed form.

    linear_topk             linear_softmax_topk, linear_log_softmax_topk, linear_topk and linear_token_logprobs
    linear_topk_backward    its gradient: an operator too, so that torch.compile sees one call and not its pieces

With z = x / T the scaled logits and p their softmax, the gradient of logsumexp with respect to z is p, and that of the
log-probability of token j is 1[i = j] - p_i. So the gradient of a loss is c p plus what its k values and its target add at
their tokens; dz / T goes on to hidden (dz W), weight (dz^T h) and bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..problem import LinearProblem
from ..rows import ROWS_FIELDS, ROWS_SCHEMA, unflattened
from . import linear_backward, linear_pieces
from .gradients import for_inputs, of_counted, save_rows, saved_rows
from .operator import Operator, mapped, take_turns

_HEAD = f"{ROWS_SCHEMA}, Tensor weight, Tensor? bias, Tensor? targets, str normalize"


def _head_of(arguments: Sequence[Any]) -> tuple[LinearProblem, list[Any]]:
    """The problem at the front of an operator's arguments, and the other arguments."""
    rows, (weight, bias, targets, normalize, *rest) = unflattened(arguments)
    return LinearProblem(rows, weight, bias, targets, normalize), rest


def _run(*arguments: Any) -> linear_pieces.LinearResult:
    """Computes the operator. `arguments`: the operator's, in its order."""
    head, rest = _head_of(arguments)
    return linear_pieces.forward(head, *rest)


def _fake(*arguments: Any) -> linear_pieces.LinearResult:
    head, (k, values, _, ties, keeps_state) = _head_of(arguments)
    return linear_pieces.empty_result(head.hidden, k, values, head.targets, ties is not None, keeps_state)


def _run_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradient's operator. `arguments`: that operator's, in its order."""
    head, rest = _head_of(arguments)
    return linear_backward.backward(head, *rest)


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    head, (*_, wanted) = _head_of(arguments)
    hidden, weight, bias = head.hidden, head.weight, head.bias
    return tuple(
        torch.empty(like.shape if is_wanted else (0,), dtype=hidden.dtype, device=hidden.device)
        for like, is_wanted in zip((hidden, weight, weight[:, 0] if bias is None else bias), wanted, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    head, (_, ctx.values, ctx.backend, *_) = _head_of(inputs)
    ctx.normalize = head.normalize
    values, indices, _, _, ranks, state = output
    ctx.mark_non_differentiable(indices, ranks, state)
    save_rows(ctx, head.rows, head.weight, head.bias, head.targets, values, indices, state)


def _backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
    grad_values, _, grad_logsumexp, grad_logprobs, _, _ = gradients
    rows, (weight, bias, targets, values, indices, state) = saved_rows(ctx)
    if not state.numel() and rows.logits.numel():
        raise RuntimeError("`keeps_state` must be True where a gradient is wanted, got False; pass True")
    # d p = p d(log p)
    grad_chosen = grad_values * values if ctx.values == "softmax" else grad_values
    grad_chosen = of_counted(rows, indices, grad_chosen.to(state.dtype))
    if ctx.values == "logits":
        grad_normalizer = state.new_zeros(state.shape[:-1])
    else:
        grad_normalizer = grad_logsumexp
        if ctx.normalize == "topk":
            p = values if ctx.values == "softmax" else values.exp()
            grad_chosen = grad_chosen - p * grad_chosen.sum(-1, keepdim=True)
        else:
            grad_normalizer = grad_normalizer - grad_chosen.sum(-1)
    grad_target = None
    if targets is not None:
        grad_target = of_counted(rows, targets.clamp(min=0), grad_logprobs.where(targets >= 0, 0.0))
        grad_normalizer = grad_normalizer - grad_target.sum(-1)
    weight_place = ROWS_FIELDS
    wanted = [bool(ctx.needs_input_grad[i]) for i in (0, weight_place, weight_place + 1)]
    head = (*rows, weight, bias, targets, ctx.normalize)
    found = linear_topk_backward(*head, indices, state, grad_chosen, grad_target, grad_normalizer, ctx.backend, wanted)
    of_hidden, of_weight, of_bias = (x if is_wanted else None for x, is_wanted in zip(found, wanted, strict=True))
    return for_inputs(of_hidden, of_weight, of_bias, count=9)


def _no_second_gradient(ctx: Any, *gradients: Tensor) -> None:
    raise RuntimeError(
        "the gradient of linear_topk must not be differentiated again, got create_graph=True; use "
        "torch.nn.functional.linear and softmax_topk, which keep the logits"
    )


def _map_heads(run: Any, info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    """Each weight or bias that vmap maps over is a head of its own."""
    weight, bias, targets = range(ROWS_FIELDS, ROWS_FIELDS + 3)
    if in_dims[weight] is not None or in_dims[bias] is not None:
        return take_turns(run, info, in_dims, *arguments)
    of_rows = mapped(info, in_dims, arguments)
    of_rows[weight], of_rows[bias] = arguments[weight], arguments[bias]
    # An empty tensor in the place of a result that nobody asked for is not mapped.
    has_targets, (values, _, ties, keeps_state) = arguments[targets] is not None, arguments[-4:]
    is_mapped = (True, True, values != "logits", has_targets, ties is not None, keeps_state)
    return run(*of_rows), tuple(0 if x else None for x in is_mapped)


# The arguments of both are the fields of LinearProblem, with the hidden states in the place of the logits, then their own.
linear_topk = Operator(
    f"linear_topk({_HEAD}, SymInt k, str values, str? backend, str? ties, bool keeps_state)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    _setup_context,
    _backward,
    _map_heads,
)
linear_topk_backward = Operator(
    f"linear_topk_backward({_HEAD}, Tensor indices, Tensor state, Tensor grad_chosen, Tensor? grad_target, "
    "Tensor grad_normalizer, str? backend, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    backward=_no_second_gradient,
    map_over=take_turns,
)
