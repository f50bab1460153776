# SPDX-License-Identifier: Apache-2.0
"""What the gradients of all operators share, and those of top-k and of beams, in closed form.

With p the softmax of the row, the gradient of logsumexp is p / T, and that of the log-probability of token j is
(1[i = j] - p_i) / T. p is computed anew rather than as exp(x / T - logsumexp), which would lose the digits that a large
common offset takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import cpu
from ..layout.kernel_arguments import address
from ..problem import TopK
from ..row_arguments import check_layout
from ..rows import ROWS_FIELDS, LogitRows, RowsLayout, unflattened
from ..scale import Scale
from ..token_sums import reference_point
from .dispatch import is_seen_by_torch
from .results import empty


def save_rows(ctx: Any, rows: LogitRows, *others: Tensor | None) -> None:
    """Keeps the rows for the backward pass, and other tensors."""
    ctx.rows = [None if isinstance(x, Tensor) else x for x in rows]
    ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in rows], *others)


def saved_rows(ctx: Any) -> tuple[LogitRows, tuple[Any, ...]]:
    """What :func:`save_rows` has kept."""
    saved = ctx.saved_tensors
    rows = LogitRows(*[x if tensor is None else tensor for x, tensor in zip(ctx.rows, saved)])
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
    rows: LogitRows,
    kind: str,
    normalize: str,
    values: Tensor,
    indices: Tensor,
    grad_values: Tensor | None,
    grad_logsumexp: Tensor | None,
    backend: str | None,
) -> Tensor:
    """The gradient of the logits, given those of values (..., k), which are those of `kind` ("softmax" or "log_softmax"), and of the
    logsumexp (...)."""
    found = native_gradient(rows, kind, normalize, values, indices, grad_values, grad_logsumexp, backend)
    if found is not None:
        return found
    rows = rows.broadcast()
    if grad_values is None:
        grad_values = torch.zeros_like(values)
    # d p = p d(log p)
    grad_log = of_counted(rows, indices, grad_values * values if kind == "softmax" else grad_values)
    coefficient = values.new_zeros(rows.logits.shape[:-1]) if grad_logsumexp is None else grad_logsumexp
    if normalize == "topk":
        # Relative to the k chosen: (1[i = j] - p_i) over those k only.
        p = values if kind == "softmax" else values.exp()
        grad_log = of_counted(rows, indices, grad_log - p * grad_log.sum(-1, keepdim=True))
    else:
        coefficient = coefficient - grad_log.sum(-1)
    hidden = rows.uncounted(normalize)
    p = softmax(rows.scale(), rows.counted(normalize).to(grad_log.dtype))
    gradient = rows.scale().back((p * coefficient.unsqueeze(-1)).scatter_add(-1, indices, grad_log))
    # A hidden token counts as the constant -inf, even where it is among the k.
    return (gradient if hidden is None else gradient.masked_fill(hidden, 0.0)).to(rows.logits.dtype)


def native_gradient(
    rows: LogitRows,
    kind: str,
    normalize: str,
    values: Tensor,
    indices: Tensor,
    grad_values: Tensor | None,
    grad_logsumexp: Tensor | None,
    backend: str | None,
) -> Tensor | None:
    """_row_gradient() by the CPU's kernel. None where that does not serve the call, or torch must see it."""
    if torch.is_grad_enabled() or is_seen_by_torch(rows.logits, grad_values, grad_logsumexp):
        return None
    run = _native(rows.logits.device, rows.layout(), kind, normalize, backend)
    return None if run is None else run(rows, values, indices, grad_values, grad_logsumexp)


@functools.lru_cache(maxsize=4096)
def _native(
    device: torch.device, layout: RowsLayout, kind: str, normalize: str, backend: str | None
) -> Callable[..., Tensor] | None:
    """What computes native_gradient() of such rows."""
    rows = check_layout(layout)
    shape, dtype = rows.logits.shape, rows.logits.dtype
    # The kernel takes the normalizer from the tokens that may be chosen.
    is_one_row = rows.mask is None or normalize != "all"
    if backends.pick(device, dtype, 1, backend) != "cpu" or not is_one_row or not shape.numel():
        return None
    softmax = cpu.native.FullRows(cpu.layout_of(rows), cpu.FULL_ROW_KINDS["softmax"], cpu.DTYPES[dtype])
    of_kind, over = cpu.VALUE_KINDS[kind], cpu.NORMALIZE_OVER[normalize]

    def run(
        rows: LogitRows, values: Tensor, indices: Tensor, grad_values: Tensor | None, grad_logsumexp: Tensor | None
    ) -> Tensor:
        given = [None if x is None else x.contiguous() for x in (values, indices, grad_values, grad_logsumexp)]
        gradient = empty(size=shape, dtype=dtype, device=device)
        softmax.gradient(
            cpu.addresses_of(rows),
            indices.shape[-1],
            of_kind,
            over,
            *map(address, given),
            gradient.data_ptr(),
            cpu.num_threads(),
        )
        return gradient

    return run


def of_counted(rows: LogitRows, tokens: Tensor, gradient: Tensor) -> Tensor:
    """The gradients at tokens (..., n), with 0 for hidden tokens: their value is the constant -inf or 0."""
    counted = rows.counted_at(tokens)
    return gradient if counted is None else gradient.where(counted, 0.0)


def row_setup_context(ctx: Any, inputs: tuple[Any, ...], output: TopK) -> None:
    rows, (_, ctx.values, ctx.normalize, ctx.backend) = unflattened(inputs)
    values, indices, _ = output
    ctx.mark_non_differentiable(indices)
    # The gradient of a result that no loss reads is None, but zeros for the two kinds that are rarely learned.
    ctx.set_materialize_grads(ctx.values in ("state", "logits"))
    save_rows(ctx, rows, values, indices)


def row_backward(ctx: Any, grad_values: Any, grad_indices: Any, grad_logsumexp: Any) -> tuple[Tensor | None, ...]:
    rows, (values, indices) = saved_rows(ctx)
    if ctx.values in ("softmax", "log_softmax"):
        request = ctx.values, ctx.normalize, values, indices, grad_values, grad_logsumexp, ctx.backend
        return for_inputs(_row_gradient(rows, *request), count=4)
    rows = rows.broadcast()
    grad_logits = of_counted(rows, indices, grad_values)
    if ctx.values == "state":
        return for_inputs(_state_gradient(rows, ctx.normalize, indices, grad_logits, grad_logsumexp), count=4)
    # Each gradient goes back to the logit that was chosen.
    return for_inputs(torch.zeros_like(rows.logits).scatter_add(-1, indices, grad_logits), count=4)


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
    rows, (beam_scores, _, ctx.normalize, ctx.backend) = unflattened(inputs)
    _, indices, _ = output
    ctx.mark_non_differentiable(indices)
    ctx.scores_dtype = beam_scores.dtype
    save_rows(ctx, rows, indices)


def beam_backward(
    ctx: Any, grad_values: Tensor, grad_indices: Tensor | None, grad_logsumexp: Tensor
) -> tuple[Tensor | None, ...]:
    rows, (indices,) = saved_rows(ctx)
    rows = rows.broadcast()
    batch, beams, vocab_size = rows.logits.shape
    # Spread the k gradients over the beams that they came from: (batch, beams, k), zero for the others.
    is_of_beam = (indices // vocab_size).unsqueeze(1) == torch.arange(beams, device=indices.device).unsqueeze(-1)
    tokens = (indices % vocab_size).unsqueeze(1).expand(batch, beams, -1)
    # The value of a hidden token is -inf, whatever the score of its beam.
    of_beam = of_counted(rows, tokens, grad_values.unsqueeze(1).where(is_of_beam, 0.0))
    grad_scores = of_beam.sum(-1).to(ctx.scores_dtype)
    # The values of a beam are log-probabilities, whose gradient does not take their numbers.
    request = "log_softmax", ctx.normalize, of_beam, tokens, of_beam, grad_logsumexp, ctx.backend
    gradient = _row_gradient(rows, *request)
    return for_inputs(gradient, grad_scores, count=4)
