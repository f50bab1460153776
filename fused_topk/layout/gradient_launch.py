# SPDX-License-Identifier: Apache-2.0
"""What a launch of csrc/linear/logit_gradient.cu looks like."""

from __future__ import annotations

import torch

from .topk_launch import FORMATS

THREADS = 256
SPAN_BYTES = THREADS * 4 * 16
"""The bytes of a row that a block turns into gradients."""


def grid(rows: int, tokens: int, itemsize: int) -> tuple[int, int]:
    """The blocks of a piece of logits."""
    return rows, -(-tokens * itemsize // SPAN_BYTES)


def kernel_name(dtype: torch.dtype) -> str:
    """A kernel of csrc/linear/logit_gradient.cu, as NVRTC wants it named."""
    return f"fused_topk::gradients::logit_gradient_kernel<fused_topk::{FORMATS[dtype]}>"


def kernel_names() -> list[str]:
    """Every variant that a launch can ask for."""
    return [kernel_name(dtype) for dtype in FORMATS]
