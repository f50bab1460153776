# SPDX-License-Identifier: Apache-2.0
"""The operator of full rows, `full_rows`: softmax, log_softmax and logsumexp, as row_topk.py has those of top-k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import plans
from ..rows import ROWS_SCHEMA, unflattened
from . import gradients
from .dispatch import library, register

library.define(f"full_rows({ROWS_SCHEMA}, str values, ScalarType dtype, str? backend) -> Tensor")


def full_rows(*arguments: Any) -> Tensor:
    rows, request = unflattened(arguments)
    if rows.mask is not None:
        # The kernels of whole rows read no mask.
        rows = rows.with_logits(rows.counted())._replace(mask=None, lengths=None)
    return plans.full_row_plan(rows.logits.device, rows.layout(), *request).run(rows)


def _fake_full_rows(*arguments: Any) -> Tensor:
    rows, (values, dtype, _) = unflattened(arguments)
    return torch.empty(plans.full_row_shape(rows.logits, values), dtype=dtype, device=rows.logits.device)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return gradients.full_rows_backward(ctx, gradient, torch.ops.fused_topk.full_rows.default)


register("full_rows", full_rows, _fake_full_rows, gradients.full_rows_setup_context, _backward)
