# SPDX-License-Identifier: Apache-2.0
"""What a launch of csrc/routers/route_experts.cu looks like: a pure function of shapes and strides. Needs no GPU.

What is read is laid out as for top-k (topk_launch.py), and so is where results go.
"""

from __future__ import annotations

import torch

from .kernel_arguments import Routing, writer
from .launch import kernel
from .topk_choice import KernelChoice

MOST_EXPERTS = 1024
"""kMostExperts of csrc/routers/scores.h: a lane of a warp has up to 32."""
MOST_CHOSEN = 32
"""kMostChosen there: a lane of a warp has one."""
BIAS_ALIGNMENT = 16
"""Bytes: a bias starts at a multiple."""
CHOICE = KernelChoice(1, 1, 1, 1, 1, 32, "route_experts")
"""A warp has a token, and a block four."""

SCORINGS = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}
"""Scoring of csrc/routers/scores.h."""

_write_bias, _BIAS = writer(Routing, "bias")
_write_are_short, _ARE_SHORT = writer(Routing, "are_short")


def argument(experts: int, groups: int, topk_groups: int, group_score: str, renormalize: bool, scale: float) -> bytes:
    """struct Routing for a checked request, with the address left zero."""
    size = experts // groups
    # The groups share the lanes of a warp evenly. Each has a power of two of them.
    log2_lanes = (32 // groups).bit_length() - 1 if groups <= 32 else 0
    return bytes(
        Routing(
            groups=groups,
            topk_groups=topk_groups,
            group_size=size,
            log2_group_lanes=log2_lanes,
            group_turns=-(-size >> log2_lanes),
            sums_two=group_score == "top2",
            normalizes=renormalize,
            scale=scale,
        )
    )


def filled(argument: bytes, bias: int, are_short: bool) -> bytearray:
    """The struct with what a call has: the bias's address, 0 for none, and whether experts are int32."""
    result = bytearray(argument)
    _write_bias(result, _BIAS, bias)
    _write_are_short(result, _ARE_SHORT, are_short)
    return result


def per_lane(experts: int, itemsize: int) -> int:
    """How many experts a lane has: whole vectors of 16 bytes, and a power of two."""
    return max(16 // itemsize, 1 << (-(-experts // 32) - 1).bit_length())


def shared_bytes(experts: int, itemsize: int, groups: int) -> int:
    """Dynamic shared memory of a block: the keys of its tokens' experts, and of their groups."""
    return CHOICE.rows_per_block * 32 * per_lane(experts, itemsize) * 8 if groups > 1 else 0


def kernel_name(dtype: torch.dtype, experts: int, scoring: str) -> str:
    """The kernel, as NVRTC wants it named."""
    return kernel("routers::route_experts", dtype, per_lane(experts, dtype.itemsize), SCORINGS[scoring])
