# SPDX-License-Identifier: Apache-2.0
"""The operator of a step's attention, `step_attention`. It has no gradient, and is for GPUs alone."""

from __future__ import annotations

import torch

from ..backends import cuda_attention
from .operator import Operator

# :func:`cuda_attention.step_attention`, of which torch.compile sees one operation.
step_attention = Operator(
    "step_attention(Tensor query, Tensor key, Tensor value, Tensor table, float scale, float cap, int window, Tensor? sinks) -> Tensor",
    lambda *arguments: cuda_attention.step_attention(*arguments),
    lambda query, *_: torch.empty_like(query, memory_format=torch.contiguous_format),
)
