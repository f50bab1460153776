# SPDX-License-Identifier: Apache-2.0
"""What a launch of csrc/sample_rows.cu looks like: a pure function of shapes and parameters. Needs no GPU."""

from __future__ import annotations

import torch

from .topk_launch import FORMATS

THREADS = 512
"""kThreads of csrc/sample_rows.cu."""
LONGEST_LIST = 1024
"""kLongestList of csrc/sample_rows.cu."""

# Where no top-k says how many are kept: what top-p keeps of a language model's rows is mostly less. A guess.
_LISTED = 128
# Besides an eighth of k, for tokens that tie with the k-th. A guess.
_ROOM_FOR_TIES = 16
_MOST_UNIT_BITS, _SUM_BITS = 44, 62


def list_length(vocab_size: int, top_k: int | None, has_other_filter: bool) -> int:
    """How many of a row's best to list. A list that is too short costs time, never a token.

    Args:
        top_k: of all rows, 0 for none; None where rows differ.
        has_other_filter: whether top-p or min-p may keep less than all.
    """
    if top_k is not None and 0 < top_k < vocab_size:
        length = top_k + _ROOM_FOR_TIES + top_k // 8
    else:
        length = _LISTED if top_k is None or has_other_filter else 1
    return min(length, vocab_size, LONGEST_LIST)


def unit(vocab_size: int) -> float:
    """The weight of the best token in integers: the sum over a row stays below 2^62."""
    return 2.0 ** min(_MOST_UNIT_BITS, _SUM_BITS - vocab_size.bit_length())


def kernel_name(dtype: torch.dtype) -> str:
    """The kernel for that dtype, as NVRTC wants it named."""
    return f"fused_topk::sampling::sample_rows_kernel<fused_topk::{FORMATS[dtype]}>"


def kernel_names() -> list[str]:
    """Every variant that a launch can ask for."""
    return [kernel_name(dtype) for dtype in FORMATS]
