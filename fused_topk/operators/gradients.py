# SPDX-License-Identifier: Apache-2.0
"""What the gradients of all operators share, and those of top-k and of beams, in closed form.

With p the softmax of the row, the gradient of logsumexp is p / T, and that of the log-probability of token j is
(1[i = j] - p_i) / T. p is computed anew rather than as exp(x / T - logsumexp), which would lose the digits that a large
common offset takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem import TopK
from ..rows import ROWS_FIELDS, LogitRows, unflattened
from ..scale import Scale
from ..token_sums import reference_point


def save_rows(ctx: Any, rows: LogitRows, *others: Tensor | None) -> None:
    """Keeps the rows for the backward pass, and other tensors."""
    ctx.rows = tuple(None if isinstance(x, Tensor) else x for x in rows)
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in rows), *others)


def saved_rows(ctx: Any) -> tuple[LogitRows, tuple[Any, ...]]:
    """What :func:`save_rows` has kept."""
    saved = ctx.saved_tensors
    rows = LogitRows(*(x if tensor is None else tensor for x, tensor in zip(ctx.rows, saved)))
    return rows, saved[ROWS_FIELDS:]


def for_inputs(of_logits: Tensor | None, *others: Tensor | None, count: int) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs of an operator, in their order. Behind the rows there are `count` inputs: those of `others` come
    first, and the rest has None."""
    return of_logits, *(None,) * (ROWS_FIELDS - 1), *others, *(None,) * (count - len(others))


def softmax(scale: Scale, x: Tensor) -> Tensor:
    """The softmax of the scaled logits. The greatest logit is subtracted before they are scaled, because the quotient of a large
    common offset is rounded."""
    m = x.detach().amax(-1, keepdim=True)
    return scale.log_weight(x, reference_point(m)).softmax(-1)


def _row_gradient(
    rows: LogitRows, normalize: str, indices: Tensor, grad_log_probabilities: Tensor, grad_logsumexp: Tensor
) -> Tensor:
    """Gradient with respect to the logits, given those with respect to log-probabilities (..., k) and logsumexp (...)."""
    hidden = rows.uncounted(normalize)
    p = softmax(rows.scale(), rows.counted(normalize).to(grad_log_probabilities.dtype))
    gradient = p * (grad_logsumexp - grad_log_probabilities.sum(-1)).unsqueeze(-1)
    gradient = rows.scale().back(gradient.scatter_add(-1, indices, grad_log_probabilities))
    # A hidden token counts as the constant -inf, even where it is among the k.
    return (gradient if hidden is None else gradient.masked_fill(hidden, 0.0)).to(rows.logits.dtype)


def of_counted(rows: LogitRows, tokens: Tensor, gradient: Tensor) -> Tensor:
    """The gradients at tokens (..., n), with 0 for hidden tokens: their value is the constant -inf or 0."""
    counted = rows.counted_at(tokens)
    return gradient if counted is None else gradient.where(counted, 0.0)


def row_setup_context(ctx: Any, inputs: tuple[Any, ...], output: TopK) -> None:
    rows, (_, ctx.values, ctx.normalize, _) = unflattened(inputs)
    values, indices, _ = output
    ctx.mark_non_differentiable(indices)
    save_rows(ctx, rows, values, indices)


def row_backward(
    ctx: Any, grad_values: Tensor, grad_indices: Tensor | None, grad_logsumexp: Tensor
) -> tuple[Tensor | None, ...]:
    rows, (values, indices) = saved_rows(ctx)
    return for_inputs(_of_topk(ctx, rows, values, indices, grad_values, grad_logsumexp), count=4)


def _of_topk(
    ctx: Any, rows: LogitRows, values: Tensor, indices: Tensor, grad_values: Tensor, grad_logsumexp: Tensor
) -> Tensor:
    # d p = p d(log p)
    grad_log = of_counted(rows, indices, grad_values * values if ctx.values == "softmax" else grad_values)
    if ctx.values == "state":
        return _state_gradient(rows, ctx.normalize, indices, grad_log, grad_logsumexp)
    if ctx.values == "logits":
        # The values are logits, so each gradient goes back to the logit that was chosen.
        return torch.zeros_like(rows.logits).scatter_add(-1, indices, grad_log)
    if ctx.normalize == "topk":
        # Relative to the k chosen: (1[i = j] - p_i) over those k only.
        p = values if ctx.values == "softmax" else values.exp()
        grad_log = grad_log - p * grad_log.sum(-1, keepdim=True)
        gradient = _row_gradient(rows, "topk", indices, torch.zeros_like(grad_log), grad_logsumexp)
        chosen = torch.zeros_like(gradient).scatter_add(-1, indices, rows.scale().back(grad_log).to(gradient.dtype))
        hidden = rows.uncounted()
        return gradient + (chosen if hidden is None else chosen.masked_fill(hidden, 0.0))
    return _row_gradient(rows, ctx.normalize, indices, grad_log, grad_logsumexp)


def _state_gradient(
    rows: LogitRows, normalize: str, indices: Tensor, grad_logits: Tensor, grad_normalizer: Tensor
) -> Tensor:
    """Gradient with respect to the logits, given those with respect to the k best (..., k) and to m and d (2, ...).

    d m / d x_i is 1 for the first greatest logit j, and d d / d x_i = (e_i - d [i = j]) / T with e_i = exp((x_i - m) / T).
    """
    grad_m, grad_d = grad_normalizer.unsqueeze(-1).unbind(0)
    hidden = rows.uncounted(normalize)
    counted = rows.counted(normalize).to(grad_normalizer.dtype)
    m, j = counted.max(-1, keepdim=True)
    scale = rows.scale()
    e = scale.weight(counted, m.where(m != -torch.inf, 0.0))
    d = e.sum(-1, keepdim=True)
    gradient = scale.back(grad_d * e).scatter_add(-1, j, grad_m - scale.back(grad_d * d))
    if hidden is not None:
        gradient = gradient.masked_fill(hidden, 0.0)
    return (gradient.scatter_add(-1, indices, grad_logits.to(gradient.dtype))).to(rows.logits.dtype)


def beam_setup_context(ctx: Any, inputs: tuple[Any, ...], output: TopK) -> None:
    rows, (beam_scores, _, ctx.normalize, _) = unflattened(inputs)
    _, indices, _ = output
    ctx.mark_non_differentiable(indices)
    ctx.scores_dtype = beam_scores.dtype
    save_rows(ctx, rows, indices)


def beam_backward(
    ctx: Any, grad_values: Tensor, grad_indices: Tensor | None, grad_logsumexp: Tensor
) -> tuple[Tensor | None, ...]:
    rows, (indices,) = saved_rows(ctx)
    batch, beams, vocab_size = rows.logits.shape
    # Spread the k gradients over the beams that they came from: (batch, beams, k), zero for the others.
    is_of_beam = (indices // vocab_size).unsqueeze(1) == torch.arange(beams, device=indices.device).unsqueeze(-1)
    tokens = (indices % vocab_size).unsqueeze(1).expand(batch, beams, -1)
    # The value of a hidden token is -inf, whatever the score of its beam.
    of_beam = of_counted(rows, tokens, grad_values.unsqueeze(1).where(is_of_beam, 0.0))
    grad_scores = of_beam.sum(-1).to(ctx.scores_dtype)
    gradient = _row_gradient(rows, ctx.normalize, tokens, of_beam, grad_logsumexp)
    return for_inputs(gradient, grad_scores, count=4)
