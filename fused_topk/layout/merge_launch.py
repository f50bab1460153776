# SPDX-License-Identifier: Apache-2.0
"""What a launch of csrc/topk/merge_states.cu looks like: a pure function of shapes and strides, as topk_launch.py."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from .collapse import collapse
from .kernel_arguments import States, writer
from .topk_launch import FORMATS, VALUE_KINDS, check_rows

MERGE_WARPS = (1, 8)
"""The warps that share a row."""

# Up to this many entries a warp has a row alone: one entry for each lane. More would take several turns, each a chain of
# searches. Measured in csrc/TUNING.md.
_MOST_ENTRIES_OF_WARP = 32

# What changes from call to call; a plan has all else.
_write_addresses, _ADDRESSES = writer(
    States, "logits", "indices", "m", "d", "lengths", "row_temperature", "values", "result_indices", "logsumexp"
)
STATES_BYTES = ctypes.sizeof(States)


class MergeLayout(NamedTuple):
    """Everything about a request but addresses."""

    shape: Sequence[int]  # (parts, ..., width)
    dtype: torch.dtype
    logits_strides: Sequence[int]
    indices_strides: Sequence[int]
    m_strides: Sequence[int]  # (parts, ...)
    d_strides: Sequence[int]
    lengths_stride: int
    temperature_strides: Sequence[int] | None  # (...,); None without a tensor of them
    k: int
    temperature: float
    values: str
    normalize: str


class MergeLaunch(NamedTuple):
    """A launch but for its addresses."""

    kernel: str
    grid: tuple[int, ...]
    threads: int
    argument: bytes  # struct States with the addresses left zero

    def fill(self, *addresses: int) -> bytearray:
        """The struct with the addresses of a call, in the order of its fields; 0 stands for a tensor that the call does not have."""
        filled = bytearray(self.argument)
        _write_addresses(filled, _ADDRESSES, *addresses)
        return filled


@lru_cache(maxsize=4096)
def plan(layout: MergeLayout) -> MergeLaunch | None:
    """The launch for a layout of at least one row, or None if its rows do not lie at one stride, or its entries apart.

    Raises:
        ValueError: more rows or entries than a launch can take.
    """
    parts, *leading, width = layout.shape
    per_row = [layout.logits_strides[1:-1], layout.indices_strides[1:-1], layout.m_strides[1:], layout.d_strides[1:]]
    if layout.temperature_strides is not None:
        per_row.append(layout.temperature_strides)
    (rows, *others), strides = collapse(leading, per_row)
    has_adjacent = width == 1 or layout.logits_strides[-1] == layout.indices_strides[-1] == 1
    # The kernel knows no stride of temperatures.
    if others or not has_adjacent or (len(strides) > 4 and rows > 1 and strides[4] != [1]):
        return None
    check_rows(rows)
    if parts * width > 2**31 - 1:
        raise ValueError(
            f"`parts` must hold less than 2^31 candidates a row, got {parts * width}; merge fewer at a time"
        )
    argument = States(
        logits_part_stride=layout.logits_strides[0],
        logits_row_stride=strides[0][0],
        indices_part_stride=layout.indices_strides[0],
        indices_row_stride=strides[1][0],
        m_part_stride=layout.m_strides[0],
        m_row_stride=strides[2][0],
        d_part_stride=layout.d_strides[0],
        d_row_stride=strides[3][0],
        lengths_stride=layout.lengths_stride,
        rows=rows,
        parts=parts,
        width=width,
        k=layout.k,
        value_kind=VALUE_KINDS[layout.values],
        normalize_topk=layout.normalize == "topk" and layout.values != "state",
        temperature=layout.temperature,
    )
    warps = MERGE_WARPS[parts * width > _MOST_ENTRIES_OF_WARP]
    blocks = -(-rows // 4) if warps == 1 else rows
    return MergeLaunch(kernel_name(layout.dtype, warps), (blocks,), max(32 * warps, 128), bytes(argument))


def kernel_name(dtype: torch.dtype, warps: int) -> str:
    """A kernel of csrc/topk/merge_states.cu, as NVRTC wants it named."""
    return f"fused_topk::merging::merge_states_kernel<fused_topk::{FORMATS[dtype]}, {warps}>"


def kernel_names() -> list[str]:
    """Every variant that a launch can ask for."""
    return [kernel_name(dtype, warps) for dtype in FORMATS for warps in MERGE_WARPS]
