# SPDX-License-Identifier: Apache-2.0
"""What a launch of csrc/linear/accumulate_piece.cu looks like: a pure function of shapes. Needs no GPU."""

from __future__ import annotations

import torch

from .topk_choice import VARIANTS, KernelChoice, Method
from .topk_launch import FORMATS

MOST_K = 32
"""A lane of a warp has an entry."""
ROWS_PER_BLOCK = 4
"""kRowsPerBlock of csrc/linear/accumulate_piece.cu."""
THREADS = 32 * ROWS_PER_BLOCK
"""A warp has a row."""


def blocks(rows: int) -> int:
    """The blocks of the launch."""
    return -(-rows // ROWS_PER_BLOCK)


def shared_bytes(dtype: torch.dtype) -> int:
    """Dynamic shared memory: the tiles of a block's warps, as of those of csrc/topk/softmax_topk.cu that have a row alone."""
    warps, vectors = VARIANTS[dtype.itemsize][0]
    choice = KernelChoice(warps, vectors, 1, 0, 1)
    return choice.shared_bytes(Method.TILE_BY_TILE, is_aligned=True, is_unmasked=True)


def kernel_name(dtype: torch.dtype, counts_ranks: bool) -> str:
    """The kernel for that dtype, as NVRTC wants it named."""
    return f"fused_topk::pieces::accumulate_piece_kernel<fused_topk::{FORMATS[dtype]}, {str(counts_ranks).lower()}>"


def kernel_names() -> list[str]:
    """Every variant that a launch can ask for."""
    return [kernel_name(dtype, counts_ranks) for dtype in FORMATS for counts_ranks in (False, True)]
