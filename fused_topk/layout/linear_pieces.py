# SPDX-License-Identifier: Apache-2.0
"""How the logits of an LM head are cut into pieces, none of which outlives its turn: pure functions of sizes."""

from __future__ import annotations

from typing import NamedTuple

from .launch import MOST_K_OF_PIECES

# The most memory beyond the result, whatever the rows and the vocabulary: the promise of functional/linear.py.
SCRATCH_BYTES = 64 << 20
# A piece's logits where the states of several pieces are merged. On a GPU the largest pieces are the quickest: 2048 x 2048 ->
# 128256 bf16 on an H200, as a multiple of the product's time, 24 MB 1.32, 32 MB 1.28, 48 MB 1.22. On a CPU a piece is 256 x 8192
# float32, which stays in a last-level cache beside the weight's piece.
_GPU_PIECE_BYTES = 48 << 20
_CPU_PIECE_BYTES = 8 << 20
# Where there is nothing to merge but sums, a CPU's piece stays in the caches of its cores.
_CPU_SUMMED_BYTES = 1 << 20
_SUMMED_MULTIPLE = 256  # of such a piece's tokens
# More rows read the weight fewer times, and leave fewer tokens to a piece.
_GPU_ROWS = 2048
_CPU_ROWS = 256
# The most and the least bytes of a piece that a GPU takes into the one state of its rows, and how far torch rounds allocations up.
_ACCUMULATED_BYTES = 60 << 20
_LEAST_ACCUMULATED_BYTES = 24 << 20
_ROUNDED_BYTES = 2 << 20
_ACCUMULATED_TOKENS = 2**31 - 1  # the most tokens of such a vocabulary
# A warp has a row, so a GPU needs this many rows for each multiprocessor: with fewer, a row needs several warps. H200, 2048 x 14336
# bf16, k = 8, µs: 25.1 for a first piece, 16.6 for a later one, a read 13.9, the states by csrc/topk/softmax_topk.cu 27.6;
# 1024 x 14336: 18.5, 8.7, 4.7, 17.7.
_WARPS_OF_MULTIPROCESSOR = 7
# A tile of the library's product, cuBLAS's most common one: tokens and rows.
_PRODUCT_TOKENS, _PRODUCT_ROWS = 256, 128
# The pieces' states: those that are merged at once, their stacked copy, and the result.
_STATES_BYTES = 12 << 20
_INDEX_BYTES = 8
# An entry of a row's list in the backward pass: kept, and while the list is sorted. torch.sort() takes more memory for lists of
# more than 4096 entries.
_LISTED_BYTES = 8
_SORTED_BYTES = 40
_LONG_SORTED_BYTES = 64
_LONG_LIST = 4096
# A row's m, coefficient, temperature, and the gap behind its logits.
_GRADIENT_ROW_BYTES = 64
# These, and the lists, of several blocks of rows together.
_TOGETHER_BYTES = 2 << 20
# A piece has a multiple of so many tokens. So its rows are aligned, and it has whole words of a packed mask.
_TOKEN_MULTIPLE = 1024

# The native CPU kernel reads the weight once for as many rows as this: kMostLinearRows of csrc/cpu/linear_kernels.h.
_NATIVE_ROWS = 32
# Adding up the lanes of a sum takes as long as a short sum. Times of product + softmax_topk over ours, 2 threads of a quiet
# Xeon (model 207, AVX-512), 2026-11-25: 128 -> 32000 float32, 8 rows 1.5, 16 rows 1.3, 25 rows 1.07, 28 rows 1.01, 32 rows 0.95,
# where the library's product in pieces has 0.91; bfloat16 1.2 at 16 to 32 rows; 512 -> 50257 float32 2.7 at 8 rows, 2.5 at 16,
# 1.9 at 24, 1.5 at 32; bfloat16 1.7 at 16 to 32.
# The most candidates of all rows, rows times k: each of its threads has a list for every row.
_NATIVE_CANDIDATES = 4096


class Pieces(NamedTuple):
    """The greatest piece, and how many pieces of the same rows are merged at once."""

    rows: int
    tokens: int  # the whole vocabulary, or a multiple of 256
    states: int  # 0: each piece is taken into the one state of its rows (csrc/linear/accumulate_piece.cu)
    # What comes before and after the pieces of some rows is done for so many blocks of rows together: these are small operations,
    # each of which takes a GPU as long for one row as for thousands.
    blocks: int = 1


def is_for_the_native_kernel(rows: int, k: int) -> bool:
    """Whether the CPU's own kernel is to multiply: it is quicker for so few rows, and its scratch memory stays small."""
    return rows <= _NATIVE_ROWS and rows * k <= _NATIVE_CANDIDATES


def forward_pieces(
    rows: int, vocab_size: int, k: int, itemsize: int, logit_bytes: int, row_bytes: int, is_cpu: bool
) -> Pieces:
    """The pieces of the forward pass. logit_bytes: what a logit of a piece takes, with what is computed from it. row_bytes: what a row
    takes besides its logits and its candidates."""
    if k == 0:
        # Only sums, into which each piece is taken.
        piece = (_CPU_SUMMED_BYTES if is_cpu else _GPU_PIECE_BYTES) // logit_bytes
        most = max(1, min(_GPU_ROWS, SCRATCH_BYTES // 4 // max(row_bytes, 1)))
        block = -(-rows // -(-rows // most))
        together = max(1, SCRATCH_BYTES // 4 // max(row_bytes, 1) // block)
        return Pieces(block, _even_share(vocab_size, piece // block, _SUMMED_MULTIPLE), 1, together)
    state_bytes = k * (itemsize + _INDEX_BYTES) + 2 * _INDEX_BYTES
    # A state, its copy and the result.
    if rows * (vocab_size * logit_bytes + 3 * state_bytes + row_bytes) <= SCRATCH_BYTES:
        return Pieces(rows, vocab_size, 1)
    piece = (_CPU_PIECE_BYTES if is_cpu else _GPU_PIECE_BYTES) // logit_bytes
    block = min(rows, _CPU_ROWS if is_cpu else _GPU_ROWS, max(1, piece // _TOKEN_MULTIPLE))
    block = max(1, min(block, _STATES_BYTES // 3 // max(row_bytes, 1)))
    # Two states, their copy and the result, at the least.
    if 5 * block * state_bytes > 2 * _STATES_BYTES // 3:
        # Many candidates: whole rows, so that there is nothing to merge.
        of_row = vocab_size * logit_bytes + 3 * state_bytes + row_bytes
        return Pieces(max(1, min(rows, SCRATCH_BYTES // of_row)), vocab_size, 1)
    tokens = _even_share(vocab_size, piece // block)
    return Pieces(block, tokens, max(2, 2 * _STATES_BYTES // 3 // (3 * block * state_bytes)))


def accumulated_pieces(
    rows: int, vocab_size: int, k: int, itemsize: int, row_bytes: int, other_bytes: int, multiprocessors: int
) -> Pieces | None:
    """The pieces of the forward pass where a GPU takes each piece into the one state of its rows. None where that is not possible, or
    merging the pieces' states is quicker. other_bytes: what is in memory besides, whatever the rows."""
    block = -(-rows // -(-rows // _GPU_ROWS))
    # The state, what is made of it, and targets.
    of_rows = block * (3 * (k * (itemsize + _INDEX_BYTES) + 2 * _INDEX_BYTES) + row_bytes)
    room = min(_ACCUMULATED_BYTES, SCRATCH_BYTES - _ROUNDED_BYTES - of_rows - other_bytes)
    has_rows = block >= _WARPS_OF_MULTIPROCESSOR * multiprocessors
    if k > MOST_K_OF_PIECES or room < _LEAST_ACCUMULATED_BYTES or not has_rows or vocab_size > _ACCUMULATED_TOKENS:
        return None
    tokens = _whole_turns(block, room // (block * itemsize), multiprocessors)
    return None if tokens >= vocab_size else Pieces(block, tokens, 0)


def whole_rows(rows: int, vocab_size: int, logit_bytes: int, row_bytes: int, other_bytes: int = 0) -> int:
    """How many rows of whole logits to have at once: equal shares of all rows that fit into the scratch memory, at least one row.
    other_bytes: the memory that all rows take together, whatever their number."""
    most = max(1, (SCRATCH_BYTES - other_bytes) // (vocab_size * logit_bytes + row_bytes))
    return -(-rows // -(-rows // most))


def backward_pieces(rows: int, vocab_size: int, depth: int, itemsize: int, is_cpu: bool) -> Pieces:
    """The pieces of the backward pass, of hidden states of `depth` elements. All rows that fit are together, because a weight's
    gradient is rounded once for each block of rows."""
    # The logits; float32 (float64) numbers: the gradient, its exponentials, and those of the tail; and masks.
    logit_bytes = itemsize + 4 * max(itemsize, 4) + 2
    # The hidden states' gradient is summed in float32, from products in their own dtype; the states may be copied.
    row_bytes = depth * (2 * itemsize + max(itemsize, 4)) + _GRADIENT_ROW_BYTES
    piece_bytes = 4 * _CPU_SUMMED_BYTES if is_cpu else SCRATCH_BYTES // 2
    most = max(1, min(SCRATCH_BYTES // 3 // row_bytes, piece_bytes // (_SUMMED_MULTIPLE * logit_bytes)))
    block = -(-rows // -(-rows // most))
    return Pieces(block, _even_share(vocab_size, piece_bytes // (block * logit_bytes), _SUMMED_MULTIPLE), 1)


def in_place_pieces(
    rows: int,
    vocab_size: int,
    depth: int,
    itemsize: int,
    listed: int,
    has_bias: bool,
    has_mask: bool,
    is_copied: bool,
    adds_in_place: bool,
    multiprocessors: int,
) -> Pieces:
    """The pieces of the backward pass on a GPU, where the logits' gradient takes their own place (csrc/linear/logit_gradient.cu).

    listed: the number of a row's tokens at which something is added. has_bias: whether the bias has a gradient. has_mask: whether
    there is a mask, of which a piece may need a copy. is_copied: whether the hidden states of a block may be a copy. adds_in_place:
    whether a product is added to the float32 sum of the hidden states' gradient as it is computed.
    """
    logit_bytes = itemsize + has_mask
    # First a row's list is sorted. Then the hidden states' gradient is summed.
    summed = depth * (4 if adds_in_place else itemsize + 4) + listed * _LISTED_BYTES
    made = listed * (_SORTED_BYTES if listed <= _LONG_LIST else _LONG_SORTED_BYTES)
    row_bytes = is_copied * depth * itemsize + max(summed, made) + _GRADIENT_ROW_BYTES
    # The gradient of a bias is summed in float32.
    room = max(SCRATCH_BYTES - _TOGETHER_BYTES - 8 * vocab_size * has_bias, SCRATCH_BYTES // 4)
    of_rows = room * 5 // 8
    most = max(1, min(_GPU_ROWS, of_rows // row_bytes, (room - of_rows) // (_TOKEN_MULTIPLE * logit_bytes)))
    multiple = _PRODUCT_ROWS if most >= _PRODUCT_ROWS else 1
    block = min(rows, _even_share(rows, most, multiple))
    most = (room - block * row_bytes) // (block * logit_bytes)
    tokens = vocab_size if most >= vocab_size else _whole_turns(block, most, multiprocessors)
    return Pieces(block, min(tokens, vocab_size), 1, max(1, _TOGETHER_BYTES // (made + _GRADIENT_ROW_BYTES) // block))


def _whole_turns(block: int, most: int, multiprocessors: int) -> int:
    """Tokens of a piece of `block` rows, at most about `most`: as many of the product's tiles as keep every multiprocessor busy to
    the end."""
    most = max(_TOKEN_MULTIPLE, most) // _PRODUCT_TOKENS
    across = -(-block // _PRODUCT_ROWS)
    turns = across * most // multiprocessors
    return (turns * multiprocessors // across or most) * _PRODUCT_TOKENS


def _even_share(vocab_size: int, most: int, multiple: int = _TOKEN_MULTIPLE) -> int:
    """Tokens of a piece, at most about `most`, so that the last piece is not much smaller than the others."""
    most = max(multiple, most // multiple * multiple)
    if most >= vocab_size:
        return vocab_size
    pieces = -(-vocab_size // most)
    share = -(-vocab_size // pieces)
    return -(-share // multiple) * multiple
