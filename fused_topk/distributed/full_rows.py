# SPDX-License-Identifier: Apache-2.0
"""softmax, log_softmax and logsumexp of rows whose columns are spread over processes. Each gets the values of its columns."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..operators import merging
from ..problem import result_dtype
from ..rows import LogitRows
from .functions import gather_states


def full_rows(values: str, rows: LogitRows, dtype: torch.dtype, backend: str | None, group: Any) -> Tensor:
    """The result of the process's columns, which `rows` has, or for "logsumexp" the one of whole rows, the same on every process."""
    local_logits = rows.logits
    if values != "logsumexp":
        # The gradient does not go through the states, because those of other processes carry none to their columns.
        rows = rows.with_logits(local_logits.detach())
    call = gather_states(rows, 1, "allowed", backend, group)
    if values == "logsumexp":
        whole: Tensor = merging.merge_parts(*call.parts, 1, *rows.scale(), "softmax", "allowed", backend)[2]
        return whole
    _, _, normalizer = merging.merge_parts(*call.parts, 1, *rows.scale(), "state", "allowed", backend)
    result: Tensor = _OfColumns.apply(  # type: ignore[no-untyped-call]
        local_logits, normalizer, rows, values, dtype, group
    )
    return result


class _OfColumns(torch.autograd.Function):
    """The values of some columns, given m and d (2, ...) of their rows. The gradient sums over all processes."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        normalizer: Tensor,
        rows: LogitRows,
        values: str,
        dtype: torch.dtype,
        group: Any,
    ) -> Tensor:
        """logits: those of `rows`, which are detached there."""
        scale, hidden = rows.scale(), rows.uncounted()
        m, d = normalizer.unsqueeze(-1).unbind(0)
        if hidden is not None:
            logits = logits.masked_fill(hidden, -torch.inf)
        shifted = scale.log_weight(logits.to(normalizer.dtype), m)
        result = shifted.exp() / d if values == "softmax" else shifted - d.log()
        # A row without a finite normalizer has no probabilities, as in torch.softmax.
        result = result.where(m.isfinite() & d.log().isfinite(), torch.nan).to(dtype)
        ctx.scale, ctx.values, ctx.group, ctx.dtype = scale, values, group, logits.dtype
        ctx.save_for_backward(result, hidden)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        result, hidden = ctx.saved_tensors
        dtype = result_dtype(ctx.dtype)
        of_result, g = result.to(dtype), gradient.to(dtype)
        if hidden is not None:
            # The value of a hidden token is the constant 0 or -inf.
            g = g.masked_fill(hidden, 0.0)
        if ctx.values == "softmax":
            g = g * of_result
        p = of_result if ctx.values == "softmax" else of_result.exp()
        total = g.sum(-1, keepdim=True)
        dist.all_reduce(total, group=ctx.group)
        return ctx.scale.back(g - p * total).to(ctx.dtype), *(None,) * 5
