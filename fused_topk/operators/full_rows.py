# SPDX-License-Identifier: Apache-2.0
"""The operator of full rows, `full_rows`: softmax, log_softmax and logsumexp, as row_topk.py has those of top-k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import plans
from ..rows import ROWS_SCHEMA, unflattened
from . import gradients
from .dispatch import library

library.define(f"full_rows({ROWS_SCHEMA}, str values, ScalarType dtype, str? backend) -> Tensor")


def full_rows(*arguments: Any) -> Tensor:
    rows, request = unflattened(arguments)
    return plans.full_row_plan(rows.logits.device, rows.layout(), *request).run(rows)


def _fake_full_rows(*arguments: Any) -> Tensor:
    rows, (values, dtype, _) = unflattened(arguments)
    return torch.empty(plans.full_row_shape(rows.logits, values), dtype=dtype, device=rows.logits.device)


library.impl("full_rows", full_rows, "CompositeExplicitAutograd")
torch.library.register_fake("fused_topk::full_rows", _fake_full_rows, lib=library)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return gradients.full_rows_backward(ctx, gradient, torch.ops.fused_topk.full_rows.default)


torch.library.register_autograd(
    "fused_topk::full_rows", _backward, setup_context=gradients.full_rows_setup_context, lib=library
)
