# SPDX-License-Identifier: Apache-2.0
"""The gradients of the operators, in closed form: for torch.library's autograd and for the Functions of transforms.py.

With p the softmax of the row, the gradient of logsumexp is p / T, and that of the log-probability of token j is
(1[i = j] - p_i) / T. p is computed anew rather than as exp(x / T - logsumexp), which would lose the digits that a large
common offset takes.

Of full rows, for the gradient g: (g - sum(g p)) p / T of softmax, (g - p sum(g)) / T of log_softmax and g p / T of
logsumexp. Like torch's, the first two take p from the result that was returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..problem import TopK, result_dtype


def unpacked(mask: Tensor, vocab_size: int) -> Tensor:
    """A mask as bool, one a token."""
    if mask.dtype == torch.bool:
        return mask
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask.unsqueeze(-1) >> bits) & 1).flatten(-2)[..., :vocab_size].bool()


def _row_gradient(
    logits: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    normalize: str,
    indices: Tensor,
    grad_log_probabilities: Tensor,
    grad_logsumexp: Tensor,
) -> Tensor:
    """Gradient with respect to the logits, given those with respect to log-probabilities (..., k) and logsumexp (...)."""
    hidden = None if mask is None or normalize == "all" else ~unpacked(mask, logits.shape[-1])
    scaled = logits.to(grad_log_probabilities.dtype) / temperature
    p = (scaled if hidden is None else scaled.masked_fill(hidden, -torch.inf)).softmax(-1)
    gradient = p * (grad_logsumexp - grad_log_probabilities.sum(-1)).unsqueeze(-1)
    gradient = gradient.scatter_add(-1, indices, grad_log_probabilities) / temperature
    # A token that the mask hides counts as the constant -inf, even where it is among the k.
    return (gradient if hidden is None else gradient.masked_fill(hidden, 0.0)).to(logits.dtype)


def row_setup_context(ctx: Any, inputs: tuple[Any, ...], output: TopK) -> None:
    logits, _, ctx.temperature, row_temperature, mask, ctx.values, ctx.normalize, _ = inputs
    values, indices, _ = output
    ctx.mark_non_differentiable(indices)
    ctx.save_for_backward(logits, row_temperature, mask, values, indices)


def row_backward(
    ctx: Any, grad_values: Tensor, grad_indices: Tensor | None, grad_logsumexp: Tensor
) -> tuple[Tensor | None, ...]:
    logits, row_temperature, mask, values, indices = ctx.saved_tensors
    temperature = ctx.temperature if row_temperature is None else row_temperature.unsqueeze(-1)
    # d p = p d(log p)
    grad_log = grad_values * values if ctx.values == "softmax" else grad_values
    if mask is not None:
        # A token that is not allowed has the constant value -inf or 0, so it passes on no gradient.
        grad_log = grad_log.where(unpacked(mask, logits.shape[-1]).gather(-1, indices), 0.0)
    if ctx.values == "state":
        gradient = _state_gradient(logits, temperature, mask, ctx.normalize, indices, grad_values, grad_logsumexp)
        return gradient, *(None,) * 7
    if ctx.values == "logits":
        # The values are logits, so each gradient goes back to the logit that was chosen.
        from_values = torch.zeros_like(logits).scatter_add(-1, indices, grad_log)
        zero = torch.zeros_like(indices, dtype=grad_logsumexp.dtype)
        rest = _row_gradient(logits, 1.0, mask, "allowed", indices, zero, grad_logsumexp)
        return from_values + rest, *(None,) * 7
    if ctx.normalize == "topk":
        # Relative to the k chosen: (1[i = j] - p_i) over those k only.
        p = values if ctx.values == "softmax" else values.exp()
        grad_log = grad_log - p * grad_log.sum(-1, keepdim=True)
        zero = torch.zeros_like(grad_log)
        gradient = _row_gradient(logits, temperature, mask, "topk", indices, zero, grad_logsumexp)
        chosen = torch.zeros_like(gradient).scatter_add(-1, indices, (grad_log / temperature).to(gradient.dtype))
        if mask is not None:
            chosen = chosen.where(unpacked(mask, logits.shape[-1]), 0.0)
        return gradient + chosen, *(None,) * 7
    gradient = _row_gradient(logits, temperature, mask, ctx.normalize, indices, grad_log, grad_logsumexp)
    return gradient, *(None,) * 7


def _state_gradient(
    logits: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    normalize: str,
    indices: Tensor,
    grad_logits: Tensor,
    grad_normalizer: Tensor,
) -> Tensor:
    """Gradient with respect to the logits, given those with respect to the k best (..., k) and to m and d (2, ...).

    d m / d x_i is 1 for the first greatest logit j, and d d / d x_i = (e_i - d [i = j]) / T with e_i = exp((x_i - m) / T).
    """
    grad_m, grad_d = grad_normalizer.unsqueeze(-1).unbind(0)
    hidden = None if mask is None else ~unpacked(mask, logits.shape[-1])
    counted = logits.to(grad_normalizer.dtype)
    if hidden is not None and normalize != "all":
        counted = counted.masked_fill(hidden, -torch.inf)
    m, j = counted.max(-1, keepdim=True)
    e = ((counted - m.where(m != -torch.inf, 0.0)) / temperature).exp()
    d = e.sum(-1, keepdim=True)
    gradient = (grad_d * e / temperature).scatter_add(-1, j, grad_m - grad_d * d / temperature)
    if hidden is not None and normalize != "all":
        gradient = gradient.masked_fill(hidden, 0.0)
    return (gradient.scatter_add(-1, indices, grad_logits.to(gradient.dtype))).to(logits.dtype)


def beam_setup_context(ctx: Any, inputs: tuple[Any, ...], output: TopK) -> None:
    logits, beam_scores, _, ctx.temperature, row_temperature, mask, ctx.normalize, _ = inputs
    _, indices, _ = output
    ctx.mark_non_differentiable(indices)
    ctx.scores_dtype = beam_scores.dtype
    ctx.save_for_backward(logits, row_temperature, mask, indices)


def beam_backward(
    ctx: Any, grad_values: Tensor, grad_indices: Tensor | None, grad_logsumexp: Tensor
) -> tuple[Tensor | None, ...]:
    logits, row_temperature, mask, indices = ctx.saved_tensors
    batch, beams, vocab_size = logits.shape
    temperature = ctx.temperature if row_temperature is None else row_temperature.unsqueeze(-1)
    # Spread the k gradients over the beams that they came from: (batch, beams, k), zero for the others.
    is_of_beam = (indices // vocab_size).unsqueeze(1) == torch.arange(beams, device=indices.device).unsqueeze(-1)
    of_beam = grad_values.unsqueeze(1).where(is_of_beam, 0.0)
    tokens = (indices % vocab_size).unsqueeze(1).expand(batch, beams, -1)
    if mask is not None:
        # The value of a token that is not allowed is -inf, whatever the score of its beam.
        of_beam = of_beam.where(unpacked(mask, vocab_size).gather(-1, tokens), 0.0)
    grad_scores = of_beam.sum(-1).to(ctx.scores_dtype)
    gradient = _row_gradient(logits, temperature, mask, ctx.normalize, tokens, of_beam, grad_logsumexp)
    return gradient, grad_scores, *(None,) * 6


def full_rows_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, ctx.temperature, row_temperature, ctx.values, _, ctx.backend = inputs
    ctx.logits_dtype = logits.dtype
    ctx.save_for_backward(logits if ctx.values == "logsumexp" else output, row_temperature)


def full_rows_backward(ctx: Any, gradient: Tensor, run: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    """Gradient with respect to the logits; `run` is the operator as the caller of the gradient calls it."""
    saved, row_temperature = ctx.saved_tensors
    temperature = ctx.temperature if row_temperature is None else row_temperature.unsqueeze(-1)
    dtype = result_dtype(ctx.logits_dtype)
    g = gradient.to(dtype)
    if ctx.values == "logsumexp":
        p = run(saved, ctx.temperature, row_temperature, "softmax", dtype, ctx.backend)
        of_scaled = g.unsqueeze(-1) * p
    elif ctx.values == "softmax":
        p = saved.to(dtype)
        g_p = g * p
        of_scaled = g_p - p * g_p.sum(-1, keepdim=True)
    else:
        of_scaled = g - saved.to(dtype).exp() * g.sum(-1, keepdim=True)
    return (of_scaled / temperature).to(ctx.logits_dtype), *(None,) * 5
