# SPDX-License-Identifier: Apache-2.0
"""The operator of LM heads, and its gradient in closed form.

    linear_topk             linear_softmax_topk, linear_log_softmax_topk, linear_topk and linear_token_logprobs
    linear_topk_backward    its gradient: an operator too, so that torch.compile sees one call and not its pieces
    linear_logit_gradient_  the gradient of logits that were kept, in their place

With z = x / T the scaled logits and p their softmax, the gradient of logsumexp with respect to z is p, and that of the
log-probability of token j is 1[i = j] - p_i. So the gradient of a loss is c p plus what its k values and its target add at
their tokens; dz / T goes on to hidden (dz W), weight (dz^T h) and bias. An entropy and a tail add terms of linear_backward.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..problem import LinearProblem
from ..rows import ROWS_FIELDS, ROWS_SCHEMA, unflattened
from ..token_sums import TokenSums
from . import linear_backward, linear_pieces
from .dispatch import is_seen_by_torch
from .gradients import for_inputs, of_counted, save_rows, saved_rows
from .linear_pieces import LinearResult, Wanted
from .operator import Operator, mapped, take_turns

_HEAD = f"{ROWS_SCHEMA}, Tensor weight, Tensor? bias, Tensor? targets, str normalize"
# The fields of Incoming.
_INCOMING = (
    "Tensor indices, Tensor state, Tensor grad_chosen, Tensor? grad_target, Tensor grad_normalizer, Tensor? grad_entropy, "
    "Tensor? grad_tail"
)


def _head_of(arguments: Sequence[Any]) -> tuple[LinearProblem, list[Any]]:
    """The problem at the front of an operator's arguments, and the other arguments."""
    rows, (weight, bias, targets, normalize, *rest) = unflattened(arguments)
    return LinearProblem(rows, weight, bias, targets, normalize), rest


def _run(*arguments: Any) -> LinearResult:
    """Computes the operator. `arguments`: the operator's, in its order."""
    head, wanted = _head_of(arguments)
    return linear_pieces.forward(head, Wanted(*wanted))


def _fake(*arguments: Any) -> LinearResult:
    head, wanted = _head_of(arguments)
    return linear_pieces.empty_result(head, Wanted(*wanted))


def _run_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradient's operator. `arguments`: that operator's, in its order."""
    head, (*incoming, backend, wanted) = _head_of(arguments)
    return linear_backward.backward(head, linear_backward.Incoming(*incoming), backend, wanted)


def _run_logit_gradient(*arguments: Any) -> None:
    """Turns the logits that were kept into their gradient. `arguments`: the operator's, in its order."""
    head, (*incoming, backend, kept) = _head_of(arguments)
    linear_backward.turn_into_gradient(head, linear_backward.Incoming(*incoming), backend, kept)


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    head, (*_, wanted) = _head_of(arguments)
    hidden, weight, bias = head.hidden, head.weight, head.bias
    return tuple(
        torch.empty(like.shape if is_wanted else (0,), dtype=hidden.dtype, device=hidden.device)
        for like, is_wanted in zip((hidden, weight, weight[:, 0] if bias is None else bias), wanted, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    head, rest = _head_of(inputs)
    found = LinearResult(*output)
    ctx.wanted, ctx.normalize = Wanted(*rest), head.normalize
    # Whether the kept logits are still logits.
    ctx.has_logits = ctx.wanted.keeps_logits
    ctx.mark_non_differentiable(found.indices, found.target_ranks, found.state, found.logits)
    save_rows(
        ctx, head.rows, head.weight, head.bias, head.targets, found.values, found.indices, found.state, found.logits
    )


def _backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
    wanted: Wanted = ctx.wanted
    if wanted.keeps_logits and not ctx.has_logits:
        raise RuntimeError(
            "`recompute` must be True for a second backward pass through the same call, got False: the kept logits have become "
            "their gradient; pass recompute=True"
        )
    rows, (weight, bias, targets, values, indices, state, kept) = saved_rows(ctx)
    # Where the gradient may be differentiated, or is traced, the kept logits stay as they are.
    uses_kept = wanted.keeps_logits and not torch.is_grad_enabled() and not is_seen_by_torch(kept)
    if not state.numel() and rows.logits.numel():
        raise RuntimeError("`keeps_state` must be True where a gradient is wanted, got False; pass True")
    of_result = LinearResult(*gradients)
    # d p = p d(log p)
    grad_chosen = of_result.values * values if wanted.values == "softmax" else of_result.values
    grad_chosen = of_counted(rows, indices, grad_chosen.to(state.dtype))
    if wanted.values == "logits":
        grad_normalizer = state.new_zeros(state.shape[:-1])
    else:
        grad_normalizer = of_result.logsumexp
        if ctx.normalize == "topk":
            p = values if wanted.values == "softmax" else values.exp()
            grad_chosen = grad_chosen - p * grad_chosen.sum(-1, keepdim=True)
        else:
            grad_normalizer = grad_normalizer - grad_chosen.sum(-1)
    grad_target = grad_entropy = grad_tail = None
    if targets is not None:
        shown = of_result.target_logprobs.where(targets >= 0, 0.0)
        grad_target = of_counted(rows, targets.clamp(min=0), shown)
        grad_normalizer = grad_normalizer - grad_target.sum(-1)
        grad_entropy = of_result.entropy if wanted.entropy else None
        grad_tail = of_result.tail if wanted.tail else None
        grad_normalizer, grad_tail = with_spread(grad_normalizer, grad_entropy, grad_tail, TokenSums.of(state))
    places = (0, ROWS_FIELDS, ROWS_FIELDS + 1)
    needed = [bool(ctx.needs_input_grad[i]) for i in places]
    head = (*rows, weight, bias, targets, ctx.normalize)
    incoming = (indices, state, grad_chosen, grad_target, grad_normalizer, grad_entropy, grad_tail, wanted.backend)
    if uses_kept:
        ctx.has_logits = False
        _linear_logit_gradient(*head, *incoming, kept)
        found = linear_backward.products(rows.logits, weight, kept, needed)
    else:
        found = linear_topk_backward(*head, *incoming, needed)
    return for_inputs(*(x if is_wanted else None for x, is_wanted in zip(found, needed, strict=True)), count=12)


def with_spread(
    grad_normalizer: Tensor, grad_entropy: Tensor | None, grad_tail: Tensor | None, sums: TokenSums
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the normalizer with what the entropy and the tail add to it, and the tail's own.

    The gradient of the entropy, -p (log p + H), is p (s / d) - p z.
    """
    if grad_entropy is not None:
        grad_normalizer = grad_normalizer + grad_entropy * (sums.s / sums.d)
    if grad_tail is not None:
        # Where nothing is left the tail is the constant -inf.
        grad_tail = grad_tail.where(sums.rest_d != 0, 0.0)
        grad_normalizer = grad_normalizer - grad_tail
    return grad_normalizer, grad_tail


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
    wanted = Wanted(*arguments[-len(Wanted._fields) :])
    has_targets, has_spread = arguments[targets] is not None, wanted.values != "state"
    is_mapped = (
        True,
        True,
        wanted.values not in ("logits", "state"),
        has_targets,
        wanted.ties is not None,
        wanted.keeps_state,
        wanted.entropy and has_spread,
        wanted.tail and has_spread,
        wanted.keeps_logits,
    )
    return run(*of_rows), tuple(0 if x else None for x in is_mapped)


# The arguments of all are the fields of LinearProblem, with the hidden states in the place of the logits, then their own.
linear_topk = Operator(
    f"linear_topk({_HEAD}, SymInt k, str values, str? backend, str? ties, bool keeps_state, bool entropy, bool tail, "
    f"bool keeps_logits) -> ({', '.join(['Tensor'] * len(LinearResult._fields))})",
    _run,
    _fake,
    _setup_context,
    _backward,
    _map_heads,
)
linear_topk_backward = Operator(
    f"linear_topk_backward({_HEAD}, {_INCOMING}, str? backend, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    backward=_no_second_gradient,
    map_over=take_turns,
)
_linear_logit_gradient = Operator(
    f"linear_logit_gradient_({_HEAD}, {_INCOMING}, str? backend, Tensor(a!) kept) -> ()", _run_logit_gradient
)
