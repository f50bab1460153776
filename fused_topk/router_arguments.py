# SPDX-License-Identifier: Apache-2.0
"""The checks of what a router is asked for. row_arguments.py checks its logits and its mask."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from .arguments import check_choice, check_flags, check_k, check_same_device, check_tensor
from .layout.router_launch import SCORINGS
from .problem import result_dtype

GROUP_SCORES = ("top2", "max")
INDEX_DTYPES = (torch.int64, torch.int32)


def check_router(
    experts: int,
    index_dtype: Any,
    k: Any,
    scoring: Any,
    groups: Any,
    topk_groups: Any,
    group_score: Any,
    renormalize: Any,
    scale: Any,
) -> None:
    """Checks all arguments that are no tensors."""
    check_k(k, experts, "the number of experts")
    check_choice("scoring", scoring, tuple(SCORINGS))
    check_choice("group_score", group_score, GROUP_SCORES)
    check_k(groups, experts, "the number of experts", "groups")
    if experts % groups:
        raise ValueError(
            f"`groups` must divide the number of experts, {experts}, got groups={groups}; use 1 for no groups"
        )
    check_k(topk_groups, groups, "the number of groups", "topk_groups")
    if topk_groups * (experts // groups) < k:
        raise ValueError(
            f"`topk_groups` groups must have at least k={k} experts, got topk_groups={topk_groups} with {experts // groups} "
            "experts each; keep more groups"
        )
    check_flags(renormalize=renormalize)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"`scale` must be a number, got {type(scale).__name__}; use float(scale)")
    if isinstance(scale, int) and abs(scale) > sys.float_info.max:
        raise ValueError(
            f"`scale` must be at most {sys.float_info.max:.3g}, got {str(scale)[:20]}...; scale the weights"
        )
    if not isinstance(index_dtype, torch.dtype) or index_dtype not in INDEX_DTYPES:
        raise TypeError(
            f"`index_dtype` must be torch.int64 or torch.int32, got {index_dtype}; convert the experts with .to()"
        )


def check_bias(bias: Any, logits: Tensor) -> Tensor | None:
    """The bias in the dtype of the scores, contiguous."""
    if bias is None:
        return None
    check_tensor("bias", bias)
    if not bias.is_floating_point():
        raise TypeError(f"`bias` must be a floating-point tensor, got {bias.dtype}; use .float()")
    check_same_device("bias", bias, logits)
    experts = logits.shape[-1]
    if bias.shape != (experts,):
        raise ValueError(
            f"`bias` must have shape ({experts},), one number an expert, got {tuple(bias.shape)}; use .squeeze() or .view(-1)"
        )
    checked: Tensor = bias.to(result_dtype(logits.dtype)).contiguous()
    return checked
