# SPDX-License-Identifier: Apache-2.0
"""The operator of entropies and tails, `token_spread`: both come from the sums of fused_topk/token_sums.py.

With p the softmax of the row, H its entropy, q the softmax of the tokens that are left, and T the temperature, the gradient of the
entropy is -p (log p + H) / T, and that of the tail (q - p) / T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..problem import TokenSumsProblem, result_dtype
from ..rows import ROWS_SCHEMA, LogitRows, unflattened
from ..token_sums import TokenSums, empty_sums, moment, reference_point, without
from .dispatch import library, register
from .gradients import for_inputs, save_rows, saved_rows, softmax

library.define(
    f"token_spread({ROWS_SCHEMA}, Tensor tokens, str normalize, bool tail, str? backend) -> (Tensor, Tensor)"
)


def token_spread(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The entropy and the tail of each row; without `tail` zeros in its place. `arguments`: the operator's, in its order."""
    rows, (tokens, normalize, has_tail, backend) = unflattened(arguments)
    logits = rows.logits
    chosen = backends.pick(logits.device, logits.dtype, 1, backend)
    sums = empty_sums(logits.shape[:-1], result_dtype(logits.dtype), logits.device)
    if sums.numel():
        found = torch.empty(tokens.shape, dtype=logits.dtype, device=logits.device)
        chosen.token_sums(TokenSumsProblem(rows, tokens.contiguous(), normalize, has_tail), sums, found)
    state, scale = TokenSums.of(sums), rows.scale().with_nan(sums.dtype)
    entropy = state.entropy()
    return entropy, state.tail(scale) if has_tail else torch.zeros_like(entropy)


def _fake_token_spread(*arguments: Any) -> tuple[Tensor, Tensor]:
    rows, _ = unflattened(arguments)
    lead, dtype = rows.logits.shape[:-1], result_dtype(rows.logits.dtype)
    return tuple(torch.empty(lead, dtype=dtype, device=rows.logits.device) for _ in range(2))  # type: ignore[return-value]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, (tokens, ctx.normalize, ctx.has_tail, _) = unflattened(inputs)
    save_rows(ctx, rows, tokens, output[1])


def backward(ctx: Any, grad_entropy: Tensor, grad_tail: Tensor) -> tuple[Tensor | None, ...]:
    rows, (tokens, tail) = saved_rows(ctx)
    gradient = _of_entropy(rows, ctx.normalize, grad_entropy)
    if ctx.has_tail:
        gradient = gradient + _of_tail(rows, ctx.normalize, tokens, grad_tail.where(tail != -torch.inf, 0.0))
    hidden = rows.uncounted(ctx.normalize)
    if hidden is not None:
        gradient = gradient.masked_fill(hidden, 0.0)
    return for_inputs(rows.scale().back(gradient).to(rows.logits.dtype), count=4)


def _of_entropy(rows: LogitRows, normalize: str, grad: Tensor) -> Tensor:
    """With respect to the scaled logits."""
    x = rows.counted(normalize).to(grad.dtype)
    z = rows.scale().log_weight(x, reference_point(x.detach().amax(-1, keepdim=True)))
    weight = z.exp()
    d, moments = weight.sum(-1, keepdim=True), moment(z, weight)
    # log p + H = z - s / d
    return -grad.unsqueeze(-1) * (moments - weight * (moments.sum(-1, keepdim=True) / d)) / d


def _of_tail(rows: LogitRows, normalize: str, tokens: Tensor, grad: Tensor) -> Tensor:
    scale = rows.scale()
    rest = without(rows.counted().to(grad.dtype), tokens)
    # In a row with nothing left the gradient is 0.
    is_left = rest.amax(-1, keepdim=True) != -torch.inf
    p = softmax(scale, rows.counted(normalize).to(grad.dtype))
    return grad.unsqueeze(-1) * (softmax(scale, rest.where(is_left, 0.0)) - p)


register("token_spread", token_spread, _fake_token_spread, setup_context, backward)
