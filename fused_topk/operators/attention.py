# SPDX-License-Identifier: Apache-2.0
"""The operator of a step's attention, `step_attention`. It has no gradient, and is for GPUs alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends import cuda_attention
from ..tracing import is_traced_by_dynamo
from .dispatch import library, register

library.define(
    "step_attention(Tensor query, Tensor key, Tensor value, Tensor table, float scale, float cap, int window, Tensor? sinks) -> Tensor"
)


def step_attention(*arguments: Any) -> Tensor:
    """:func:`cuda_attention.step_attention`, of which torch.compile sees one operation. `arguments`: the operator's, in its order."""
    run = torch.ops.fused_topk.step_attention if is_traced_by_dynamo() else cuda_attention.step_attention
    found: Tensor = run(*arguments)
    return found


def _fake(query: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


register("step_attention", cuda_attention.step_attention, _fake)
