# SPDX-License-Identifier: Apache-2.0
"""softmax, log_softmax and logsumexp of rows whose columns are spread over processes. Each gets the values of its columns."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..operators import calls
from ..problem import result_dtype
from ..scale import Scale
from .functions import gather_states


def full_rows(
    values: str,
    local_logits: Tensor,
    group: Any,
    temperature: float | Tensor,
    dtype: torch.dtype,
    backend: str | None,
) -> Tensor:
    """The result of the process's columns, or for "logsumexp" the one of whole rows, the same on every process."""
    # The gradient does not go through the states, because those of other processes carry none to their columns.
    logits = local_logits if values == "logsumexp" else local_logits.detach()
    call = gather_states(logits, 1, group, temperature, None, "allowed", backend)
    if values == "logsumexp":
        whole: Tensor = calls.merge_parts(*call.parts, 1, *call.scale, "softmax", "allowed", backend)[2]
        return whole
    _, _, normalizer = calls.merge_parts(*call.parts, 1, *call.scale, "state", "allowed", backend)
    result: Tensor = _OfColumns.apply(  # type: ignore[no-untyped-call]
        local_logits, normalizer, call.scale, values, dtype, group
    )
    return result


class _OfColumns(torch.autograd.Function):
    """The values of some columns, given m and d (2, ...) of their rows. The gradient sums over all processes."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        normalizer: Tensor,
        scale: Scale,
        values: str,
        dtype: torch.dtype,
        group: Any,
    ) -> Tensor:
        m, d = normalizer.unsqueeze(-1).unbind(0)
        shifted = scale.log_weight(logits.to(normalizer.dtype), m)
        result = shifted.exp() / d if values == "softmax" else shifted - d.log()
        # A row without a finite normalizer has no probabilities, as in torch.softmax.
        result = result.where(m.isfinite() & d.log().isfinite(), torch.nan).to(dtype)
        ctx.scale, ctx.values, ctx.group, ctx.dtype = scale, values, group, logits.dtype
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (result,) = ctx.saved_tensors
        dtype = result_dtype(ctx.dtype)
        of_result, g = result.to(dtype), gradient.to(dtype)
        if ctx.values == "softmax":
            g = g * of_result
        p = of_result if ctx.values == "softmax" else of_result.exp()
        total = g.sum(-1, keepdim=True)
        dist.all_reduce(total, group=ctx.group)
        return ctx.scale.back(g - p * total).to(ctx.dtype), *(None,) * 5
