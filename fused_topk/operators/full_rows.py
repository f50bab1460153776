# SPDX-License-Identifier: Apache-2.0
"""The operator `torch.ops.fused_topk.full_rows`: softmax, log_softmax and logsumexp of whole rows.

Arguments are checked in full_rows.py; logits have the vocabulary last. With p the softmax of the row, the gradient for
g is (g - sum(g p)) p / T of softmax, (g - p sum(g)) / T of log_softmax and g p / T of logsumexp. Like torch's, the first
two take p from the result that was returned.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import cpu, cuda, cuda_full_rows, reference
from ..problem import FullRowProblem

RUN: dict[ModuleType, Callable[[FullRowProblem, Tensor], None]] = {
    cuda: cuda_full_rows.full_rows,
    cpu: cpu.full_rows,
    reference: reference.full_rows,
}

_library = torch.library.Library("fused_topk", "FRAGMENT")
_library.define(
    "full_rows(Tensor logits, float temperature, Tensor? row_temperature, str values, ScalarType dtype, str? backend)"
    " -> Tensor"
)


def full_rows(
    logits: Tensor,
    temperature: float,
    row_temperature: Tensor | None,
    values: str,
    dtype: torch.dtype,
    backend: str | None,
) -> Tensor:
    out = _empty(logits, temperature, row_temperature, values, dtype, backend)
    if logits.numel():
        run = RUN[backends.pick(logits.device, logits.dtype, 1, backend)]
        run(FullRowProblem(logits, temperature, row_temperature, values), out)
    return out


def prepare(
    logits: Tensor, values: str, device: torch.device, dtype: torch.dtype, backend: str | None
) -> Callable[[Tensor], Tensor]:
    """full_rows() of logits like this meta tensor, with everything done that is the same for all of them."""
    shape = logits.shape[:-1] if values == "logsumexp" else logits.shape
    problem = FullRowProblem(logits, 1.0, None, values)
    chosen = backends.pick(device, logits.dtype, 1, backend)
    start: Callable[[Tensor, Tensor], None]
    if logits.numel() == 0:
        start = lambda logits, out: None  # noqa: E731
    elif chosen is cpu:
        start = cpu.prepare_full_rows(problem, dtype)
    else:
        start = lambda logits, out: RUN[chosen](problem._replace(logits=logits), out)  # noqa: E731
    # Torch makes a tensor like another one in less time than one of a given shape.
    is_alike = shape == logits.shape and dtype is logits.dtype and logits.is_contiguous()

    def run(logits: Tensor) -> Tensor:
        # By keyword: torch takes a size given so without trying whether it is several arguments.
        out = torch.empty_like(logits) if is_alike else torch.empty(size=shape, dtype=dtype, device=device)
        start(logits, out)
        return out

    return run


def _empty(
    logits: Tensor,
    temperature: float,
    row_temperature: Tensor | None,
    values: str,
    dtype: torch.dtype,
    backend: str | None,
) -> Tensor:
    """Uninitialised memory for the result."""
    shape = logits.shape[:-1] if values == "logsumexp" else logits.shape
    return torch.empty(shape, dtype=dtype, device=logits.device)


_library.impl("full_rows", full_rows, "CompositeExplicitAutograd")
torch.library.register_fake("fused_topk::full_rows", _empty, lib=_library)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, ctx.temperature, row_temperature, ctx.values, _, ctx.backend = inputs
    ctx.logits_dtype = logits.dtype
    ctx.save_for_backward(logits if ctx.values == "logsumexp" else output, row_temperature)


def backward(
    ctx: Any, gradient: Tensor, run: Callable[..., Tensor] = torch.ops.fused_topk.full_rows.default
) -> tuple[Tensor | None, ...]:
    """Gradient with respect to the logits; `run` is the operator as the caller of the gradient calls it."""
    saved, row_temperature = ctx.saved_tensors
    temperature = ctx.temperature if row_temperature is None else row_temperature.unsqueeze(-1)
    dtype = backends.result_dtype(ctx.logits_dtype)
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


torch.library.register_autograd("fused_topk::full_rows", backward, setup_context=setup_context, lib=_library)
