# SPDX-License-Identifier: Apache-2.0
"""What a launch of csrc/ranks/target_ranks.cu looks like: a pure function of shapes and strides. Needs no GPU.

What is read is laid out as for top-k (topk_launch.py).
"""

from __future__ import annotations

import torch

from .launch import FORMATS
from .topk_choice import KernelChoice

THREADS = 256
"""kThreads of csrc/ranks/target_ranks.cu."""
CHOICE = KernelChoice(1, 1, 1, 1, 1)
"""For the layout of what is read, which it does not change."""

# Of a row, for each block: 8 to 16 reads of a warp. A guess.
_TOKENS_OF_BLOCK = 8192


def blocks_per_target(targets: int, vocab_size: int, multiprocessors: int) -> int:
    """How many blocks share a target: four a multiprocessor. A guess."""
    return max(1, min(-(-vocab_size // _TOKENS_OF_BLOCK), 4 * multiprocessors // targets))


def kernel_name(dtype: torch.dtype) -> str:
    """The kernel for that dtype, as NVRTC wants it named."""
    return f"fused_topk::ranks::target_ranks_kernel<fused_topk::{FORMATS[dtype]}>"
