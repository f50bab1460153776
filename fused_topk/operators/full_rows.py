# SPDX-License-Identifier: Apache-2.0
"""The operator of full rows, `full_rows`: softmax, log_softmax and logsumexp, as row_topk.py has those of top-k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import plans
from ..plans import Like
from . import gradients
from .dispatch import library

library.define(
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
    like = Like(logits.dtype, logits.shape, logits.stride())
    plan = plans.full_row_plan(logits.device, like, temperature, Like.of(row_temperature), values, dtype, backend)
    return plan.run(logits, row_temperature)


def _fake_full_rows(
    logits: Tensor,
    temperature: float,
    row_temperature: Tensor | None,
    values: str,
    dtype: torch.dtype,
    backend: str | None,
) -> Tensor:
    return torch.empty(plans.full_row_shape(logits, values), dtype=dtype, device=logits.device)


library.impl("full_rows", full_rows, "CompositeExplicitAutograd")
torch.library.register_fake("fused_topk::full_rows", _fake_full_rows, lib=library)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return gradients.full_rows_backward(ctx, gradient, torch.ops.fused_topk.full_rows.default)


torch.library.register_autograd(
    "fused_topk::full_rows", _backward, setup_context=gradients.full_rows_setup_context, lib=library
)
