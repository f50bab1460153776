# SPDX-License-Identifier: Apache-2.0
"""What all launches share, and what the launches of the small kernels look like. Pure functions of shapes, strides and parameters.
Needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import MergeProblem
from .kernel_arguments import RowScale, States, writer
from .topk_choice import VARIANTS, KernelChoice, Method
from .tuning import least_resident_warps

FORMATS = {
    torch.float32: "Float32",
    torch.float16: "Float16",
    torch.bfloat16: "BFloat16",
}
"""The element types that the kernels read, by their names in csrc/rows/format.cuh."""

MAX_ROWS = 2**31 - 1

VALUE_KINDS = {"logits": 0, "softmax": 1, "log_softmax": 2, "state": 4}


def kernel(name: str, dtype: torch.dtype, *parameters: int | bool) -> str:
    """A kernel for elements of a dtype, as NVRTC wants it named. name: within the namespace fused_topk, without "_kernel"."""
    given = ", ".join((f"fused_topk::{FORMATS[dtype]}", *(str(x).lower() for x in parameters)))
    return f"fused_topk::{name}_kernel<{given}>"


def row_count(shape: Sequence[int]) -> int:
    return math.prod(shape[:-1])


def check_row_count(rows: int) -> None:
    """Raises a ValueError where a launch cannot take so many."""
    if rows > MAX_ROWS:
        raise ValueError(
            f"`logits` must have at most {MAX_ROWS} rows for the CUDA kernel, got {rows}; pass them in parts"
        )


def has_adjacent(logits: Tensor) -> bool:
    """Whether the elements of a row lie side by side."""
    return logits.stride(-1) == 1 or logits.shape[-1] == 1


def collapse(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Folds dimensions that every tensor crosses in one stride: (sizes, strides of each tensor), at least one dimension.

    shape: the leading dimensions that the tensors share; none of them 0. strides: for each tensor, along them. The row numbers
    stay those of the original shape.
    """
    sizes: list[int] = []
    folded: list[list[int]] = [[] for _ in strides]
    for d, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(f[-1] == s[d] * size for f, s in zip(folded, strides, strict=True)):
            sizes[-1] *= size
            for f, s in zip(folded, strides, strict=True):
                f[-1] = s[d]
        else:
            sizes.append(size)
            for f, s in zip(folded, strides, strict=True):
                f.append(s[d])
    if not sizes:
        return [1], [[0] for _ in strides]
    return sizes, folded


# csrc/topk/merge_states.cu

MERGE = "merging::merge_states"
MERGE_WARPS = (1, 8)
"""The warps that share a row."""

# Up to this many entries a warp has a row alone: one entry for each lane. More would take several turns, each a chain of
# searches. Measured in csrc/TUNING.md.
_MOST_ENTRIES_OF_WARP = 32

# The fields that change from call to call. A plan has all others.
_write_addresses, _ADDRESSES = writer(
    States, "logits", "indices", "m", "d", "part_lengths", "values", "result_indices", "logsumexp", "row_temperature"
)


class MergeLaunch(NamedTuple):
    """A launch but for its addresses."""

    kernel: str
    grid: tuple[int, ...]
    threads: int
    argument: bytes  # struct States with the addresses left zero

    def fill(self, *addresses: int) -> bytearray:
        """The struct with the addresses of a call, in the order of _write_addresses; 0 stands for a tensor that the call does not
        have."""
        filled = bytearray(self.argument)
        _write_addresses(filled, _ADDRESSES, *addresses)
        return filled


def plan_merge(problem: MergeProblem) -> MergeLaunch | None:
    """The launch for at least one row. None if the kernel cannot read the tensors: their rows must lie at one stride, and the
    entries of a row side by side. Tensors may be meta tensors."""
    p = problem
    parts, *leading, width = p.logits.shape
    # All are (parts, ...), the first two (parts, ..., width).
    logits, indices, m, d = (tensor.stride() for tensor in (p.logits, p.indices, p.m, p.d))
    per_row: list[Sequence[int]] = [logits[1:-1], indices[1:-1], m[1:], d[1:]]
    if p.scale.row_temperature is not None:
        per_row.append(p.scale.row_temperature.stride())
    (rows, *others), strides = collapse(leading, per_row)
    has_adjacent = width == 1 or logits[-1] == indices[-1] == 1
    # The kernel knows no stride of temperatures.
    if others or not has_adjacent or (len(strides) > 4 and rows > 1 and strides[4] != [1]):
        return None
    check_row_count(rows)
    if parts * width > 2**31 - 1:
        raise ValueError(
            f"`parts` must hold less than 2^31 candidates a row, got {parts * width}; merge fewer at a time"
        )
    argument = States(
        logits_part_stride=logits[0],
        logits_row_stride=strides[0][0],
        indices_part_stride=indices[0],
        indices_row_stride=strides[1][0],
        m_part_stride=m[0],
        m_row_stride=strides[2][0],
        d_part_stride=d[0],
        d_row_stride=strides[3][0],
        part_lengths_stride=0 if p.part_lengths is None else p.part_lengths.stride(0),
        rows=rows,
        parts=parts,
        width=width,
        k=p.k,
        value_kind=VALUE_KINDS[p.values],
        normalize_topk=p.normalize == "topk" and p.values != "state",
        scale=RowScale(temperature=p.scale.temperature),
    )
    warps = MERGE_WARPS[parts * width > _MOST_ENTRIES_OF_WARP]
    blocks = -(-rows // 4) if warps == 1 else rows
    return MergeLaunch(kernel(MERGE, p.logits.dtype, warps), (blocks,), max(32 * warps, 128), bytes(argument))


# csrc/linear/accumulate_piece.cu

MOST_K_OF_PIECES = 32
"""A lane of a warp has an entry."""
PIECE_ROWS_PER_BLOCK = 4
"""kRowsPerBlock of csrc/linear/accumulate_piece.cu."""
PIECE_THREADS = 32 * PIECE_ROWS_PER_BLOCK
"""A warp has a row."""


def piece_blocks(rows: int) -> int:
    """The blocks of the launch."""
    return -(-rows // PIECE_ROWS_PER_BLOCK)


def piece_shared_bytes(dtype: torch.dtype) -> int:
    """Dynamic shared memory: the tiles of a block's warps, as of those of csrc/topk/softmax_topk.cu that have a row alone."""
    warps, vectors = VARIANTS[dtype.itemsize][0]
    choice = KernelChoice(warps, vectors, 1, 0, 1)
    return choice.shared_bytes(Method.TILE_BY_TILE, is_aligned=True, is_unmasked=True)


# csrc/linear/logit_gradient.cu

GRADIENT_THREADS = 256
GRADIENT_SPAN_BYTES = GRADIENT_THREADS * 2 * 16
"""The bytes of a row that a block turns into gradients."""


# csrc/draws/sample_vocabulary.cu and csrc/draws/sample_rows.cu

SUMMING_THREADS, SEARCHING_THREADS = 256, 512
"""kSummingThreads of csrc/draws/sample_vocabulary.cu, and kThreads of sample_list.cuh there."""
LONGEST_LIST = 1024
"""kLongestList of csrc/draws/sample_list.cuh."""

# The length of a list where no top-k says how many tokens are kept. Of a language model's row, top-p mostly keeps fewer. A guess.
_LISTED = 128
# Places of a list, besides k / 8, for tokens that tie with the k-th. A guess.
_ROOM_FOR_TIES = 16
_MOST_UNIT_BITS, _SUM_BITS = 44, 62
_WARPS = SUMMING_THREADS // 32
# kMostParts of csrc/draws/sample_vocabulary.cu, and the least tokens of a part: one read of a warp.
_MOST_PARTS, _LEAST_PART_LOG2 = 1024, 10
_PART_WORDS = 2  # of PartState, in int64
SEARCHING_ROW_BYTES, SEARCHING_BLOCK_BYTES = 8192, 28720
"""Scratch and BlockScratch of csrc/draws/sample_row_sums.cuh."""
_COUNTERS = 3  # of a row
# The most blocks of a row, and the least tokens of the row for each block. Every block reads the counts of all others: both numbers
# are guesses. A row has at most as many blocks as a block has warps, each of which fetches one block's list (sum_pieces()).
_MOST_SEARCHING, _TOKENS_OF_SEARCHING = 16, 4096
_SEARCHING_WARPS = 16  # of a block: kWarps of csrc/draws/sample_list.cuh


def draws_from_vocabulary(vocab_size: int, top_k: int | None, has_other_filter: bool) -> bool:
    """Whether no row has a filter, so that no list is needed. For the arguments see :func:`sample_list_length`."""
    return top_k is not None and not 0 < top_k < vocab_size and not has_other_filter


def sample_list_length(vocab_size: int, top_k: int | None) -> int:
    """How many of a row's best to list, for the top-k of all rows: 0 for none, None where rows differ. A list that is too short costs
    time, never a token."""
    if top_k is not None and 0 < top_k < vocab_size:
        length = top_k + _ROOM_FOR_TIES + top_k // 8
    else:
        length = _LISTED
    return min(length, vocab_size, LONGEST_LIST)


def part_length_log2(vocab_size: int) -> int:
    """The length of the parts that csrc/draws/sample_vocabulary.cu cuts a row into."""
    length = _LEAST_PART_LOG2
    while vocab_size > _MOST_PARTS << length:
        length += 1
    return length


def summing_blocks(rows: int, vocab_size: int, multiprocessors: int) -> int:
    """How many blocks share a row of csrc/draws/sample_vocabulary.cu: a part for each warp, as long as two blocks a multiprocessor
    suffice for that. A guess."""
    parts = -(-vocab_size >> part_length_log2(vocab_size))
    return max(1, min(-(-parts // _WARPS), 2 * multiprocessors // rows))


def searching_blocks(rows: int, vocab_size: int, top_k: int | None, multiprocessors: int) -> int:
    """How many blocks share a row of csrc/draws/sample_rows.cu. All blocks of the launch run at the same time.

    A row that is not read again has one block: its list holds all that top-k keeps, unless many tokens tie.
    """
    if top_k is not None and 0 < top_k < vocab_size and top_k < LONGEST_LIST:
        return 1
    resident = least_resident_warps("kFilteredDraws") // _SEARCHING_WARPS
    return max(1, min(_MOST_SEARCHING, resident * multiprocessors // rows, vocab_size // _TOKENS_OF_SEARCHING))


def summing_scratch(rows: int, vocab_size: int, blocks: int, has_noise: bool) -> tuple[int, int]:
    """Words of 64 bits and zeroed counters that a launch of csrc/draws/sample_vocabulary.cu needs."""
    parts = -(-vocab_size >> part_length_log2(vocab_size))
    return (rows * parts * (_PART_WORDS + has_noise), rows) if blocks > 1 else (0, 0)


def searching_scratch(rows: int, blocks: int) -> tuple[int, int]:
    """Scratch words and tickets of csrc/draws/sample_rows.cu."""
    words = (SEARCHING_ROW_BYTES + blocks * SEARCHING_BLOCK_BYTES) // 8
    return (rows * words, rows * _COUNTERS) if blocks > 1 else (0, 0)


def sample_unit(vocab_size: int) -> float:
    """The weight of the best token in integers: the sum over a row stays below 2^62."""
    return 2.0 ** min(_MOST_UNIT_BITS, _SUM_BITS - vocab_size.bit_length())


def sample_kernel(dtype: torch.dtype, draws_from_vocabulary: bool, has_noise: bool) -> str:
    """The kernel that draws from whole rows, or from lists of their best tokens."""
    return kernel(f"sampling::sample_{'vocabulary' if draws_from_vocabulary else 'rows'}", dtype, has_noise)


# csrc/ranks/target_ranks.cu, where what is read is laid out as for top-k (topk_launch.py)

RANK_THREADS = 256
"""kThreads of csrc/ranks/target_ranks.cu."""
RANK_CHOICE = KernelChoice(1, 1, 1, 1, 1)
"""Only for topk_launch.plan(), which lays out what is read. The layout does not depend on the choice."""

# The tokens of a row for each block: 8 to 16 reads of a warp. A guess.
_TOKENS_OF_RANKING = 8192


def ranking_blocks(targets: int, vocab_size: int, multiprocessors: int) -> int:
    """How many blocks share a target: four a multiprocessor. A guess."""
    return max(1, min(-(-vocab_size // _TOKENS_OF_RANKING), 4 * multiprocessors // targets))


# csrc/tokens/token_sums.cu, where what is read is laid out likewise

_MOST_SUM_THREADS = 320  # kMostThreads of csrc/tokens/token_sums.cu
# Of more rows than a GPU takes at once. At a row's end small blocks leave fewer lanes without something to read. H200, bf16, µs
# with 128 and with 320 threads of 96 registers: 2048 x 11776 29.4 and 42.3, 2048 x 128256 174 and 178; 64 x 128256 28.9 and 27.0. With 128
# threads of 64 registers: 2048 x 11776 19.8.
_SUM_THREADS_OF_MANY_ROWS = 128
_MANY_ROWS = 1024


def sum_threads(rows: int) -> int:
    """The threads of a row's block."""
    return _SUM_THREADS_OF_MANY_ROWS if rows >= _MANY_ROWS else _MOST_SUM_THREADS
