# SPDX-License-Identifier: Apache-2.0
"""What launches of csrc/sample_vocabulary.cu and csrc/sample_rows.cu look like: pure functions of shapes and parameters. Needs
no GPU."""

from __future__ import annotations

import torch

from .topk_launch import FORMATS

THREADS = 256
"""kThreads of csrc/sample_request.cuh."""
LONGEST_LIST = 1024
"""kLongestList of csrc/sample_list.cuh."""

# Where no top-k says how many are kept: what top-p keeps of a language model's rows is mostly less. A guess.
_LISTED = 128
# Besides an eighth of k, for tokens that tie with the k-th. A guess.
_ROOM_FOR_TIES = 16
_MOST_UNIT_BITS, _SUM_BITS = 44, 62
_WARPS = THREADS // 32
# kMostParts of csrc/sample_vocabulary.cu, and the least tokens of a part: one read of a warp.
_MOST_PARTS, _LEAST_PART_LOG2 = 1024, 10
_PART_WORDS = 2  # of PartState, in int64
# Scratch and BlockScratch of csrc/sample_row_sums.cuh, in int64, and the counters of a row.
_ROW_WORDS, _BLOCK_WORDS = 20480 // 8, 32784 // 8
_COUNTERS = 4
# Blocks of a row, and tokens of the row for each of them. Every block reads what the others have counted. A guess.
_MOST_SEARCHING, _TOKENS_OF_SEARCHING = 16, 4096
# On a multiprocessor: what __launch_bounds__ of the kernel promises.
_RESIDENT = 2


def draws_from_vocabulary(vocab_size: int, top_k: int | None, has_other_filter: bool) -> bool:
    """Whether no row has a filter, so that no list is needed. For the arguments see :func:`list_length`."""
    return top_k is not None and not 0 < top_k < vocab_size and not has_other_filter


def list_length(vocab_size: int, top_k: int | None) -> int:
    """How many of a row's best to list. A list that is too short costs time, never a token.

    Args:
        top_k: of all rows, 0 for none; None where rows differ.
    """
    if top_k is not None and 0 < top_k < vocab_size:
        length = top_k + _ROOM_FOR_TIES + top_k // 8
    else:
        length = _LISTED
    return min(length, vocab_size, LONGEST_LIST)


def part_length_log2(vocab_size: int) -> int:
    """The length of the parts that csrc/sample_vocabulary.cu cuts a row into."""
    length = _LEAST_PART_LOG2
    while vocab_size > _MOST_PARTS << length:
        length += 1
    return length


def summing_blocks(rows: int, vocab_size: int, multiprocessors: int) -> int:
    """How many blocks share a row of csrc/sample_vocabulary.cu: a part for each warp, as long as two blocks a multiprocessor
    suffice for that. A guess."""
    parts = -(-vocab_size >> part_length_log2(vocab_size))
    return max(1, min(-(-parts // _WARPS), 2 * multiprocessors // rows))


def searching_blocks(rows: int, vocab_size: int, top_k: int | None, multiprocessors: int) -> int:
    """How many blocks share a row of csrc/sample_rows.cu. All of the launch run at the same time.

    One, where the row is not read again: where top-k keeps less than is listed, but for ties.
    """
    if top_k is not None and 0 < top_k < vocab_size and top_k < LONGEST_LIST:
        return 1
    return max(1, min(_MOST_SEARCHING, _RESIDENT * multiprocessors // rows, vocab_size // _TOKENS_OF_SEARCHING))


def summing_scratch(rows: int, vocab_size: int, blocks: int) -> tuple[int, int]:
    """Words of 64 bits and zeroed counters that a launch of csrc/sample_vocabulary.cu needs."""
    parts = -(-vocab_size >> part_length_log2(vocab_size))
    return (rows * parts * _PART_WORDS, rows) if blocks > 1 else (0, 0)


def searching_scratch(rows: int, blocks: int) -> tuple[int, int]:
    """Scratch words and tickets of csrc/sample_rows.cu."""
    return (rows * (_ROW_WORDS + blocks * _BLOCK_WORDS), rows * _COUNTERS) if blocks > 1 else (0, 0)


def unit(vocab_size: int) -> float:
    """The weight of the best token in integers: the sum over a row stays below 2^62."""
    return 2.0 ** min(_MOST_UNIT_BITS, _SUM_BITS - vocab_size.bit_length())


def kernel_name(dtype: torch.dtype, draws_from_vocabulary: bool) -> str:
    """The kernel for that dtype, as NVRTC wants it named."""
    name = "sample_vocabulary_kernel" if draws_from_vocabulary else "sample_rows_kernel"
    return f"fused_topk::sampling::{name}<fused_topk::{FORMATS[dtype]}>"


def kernel_names() -> list[str]:
    """Every variant that a launch can ask for."""
    return [kernel_name(dtype, is_whole) for is_whole in (True, False) for dtype in FORMATS]
