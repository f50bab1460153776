# SPDX-License-Identifier: Apache-2.0
"""What the launch of csrc/attention/step_attention.cu looks like. Pure functions of shapes. Needs no GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .launch import FORMATS

DIMS = (32, 64, 96, 128, 192, 256)
"""The sizes of a head that there are kernels for."""
DTYPES = (torch.bfloat16, torch.float16)
"""The element types that tensor cores multiply."""
OLDEST_ARCHITECTURE = 80
WARPS = 4
"""kWarps of csrc/attention/step_attention.cu."""
THREADS = 32 * WARPS
ROWS = 16
"""kRows there: of a product."""
WIDE = 64
"""Beyond so many rows of a key head several blocks read a key."""
# Up to so many places of a text, a part has so many keys, where a block has all rows of a key head, and where it has not. Measured on
# an H100 and an H200, bfloat16, us for parts of 128, 256, 512, 1024 keys. 4 beams, 8 key heads of 128, by places:
#     512      10.3  12.8  19.0  17.0        8192     32.0  25.0  26.3  34.6
#     2048     14.7  15.3  20.5  32.7        32768    124   83.7  68.2  59.7
# 512 beams, 2 key heads of 64, by prompt and 2048 places behind it:
#     512      16.4  15.8  19.5  18.7        4096     93.5  61.1  51.5  50.4
#     1024     24.9  20.0  24.5  31.3        8192     170   123   95.7  83.1
#     2048     46.7  33.0  30.1  39.3
_KEYS_OF_PART = ((4096, 128), (16384, 256), (2**31, 1024))
_KEYS_OF_WIDE_PART = ((3584, 256), (6144, 512), (2**31, 1024))


class AttentionLaunch(NamedTuple):
    """A launch but for its tensors.

    Attributes:
        grid: blocks of rows, heads of all sequences, blocks of parts.
        warps_in_rows: how many warps of a block have rows of their own.
        keys_of_part: how many keys a part has.
        parts: of a text.
        parts_of_block: how many of them a block has.
        state_words: float32 words of the states that parts leave to the last block; 0 for one part.
        tickets: how many there are.
    """

    grid: tuple[int, int, int]
    warps_in_rows: int
    keys_of_part: int
    parts: int
    parts_of_block: int
    state_words: int
    tickets: int


def plan(
    batch: int, beams: int, key_heads: int, groups: int, dim: int, places: int, multiprocessors: int
) -> AttentionLaunch:
    """The launch for such tensors.

    Args:
        groups: query heads to a key head.
        places: of the keys of a sequence. No row has more keys.
    """
    tiles = -(-beams * groups // ROWS)
    warps_in_rows = min(WARPS, 1 << (tiles - 1).bit_length())
    own = _own(dim)
    heads = batch * key_heads * (dim // own)
    rows_of_blocks = -(-tiles // warps_in_rows) * heads
    keys = _keys_of_part(places, beams * groups)
    parts = -(-places // keys)
    at_a_time = resident_blocks(dim) * multiprocessors
    if 2 * rows_of_blocks >= at_a_time:
        # There are enough texts and heads for the GPU: a block has all parts of its rows.
        parts_of_block = parts
    else:
        parts_of_block = 2 if beams * groups <= WIDE and rows_of_blocks * parts > at_a_time else 1
    return AttentionLaunch(
        grid=(-(-tiles // warps_in_rows), heads, -(-parts // parts_of_block)),
        warps_in_rows=warps_in_rows,
        keys_of_part=keys,
        parts=parts,
        parts_of_block=parts_of_block,
        state_words=rows_of_blocks * warps_in_rows * parts * (4 + own // 2) * 32 if parts > 1 else 0,
        tickets=rows_of_blocks if parts > 1 else 0,
    )


def resident_blocks(dim: int) -> int:
    """How many blocks run at a time on a multiprocessor of 8.0 or 9.0: kBlocks there."""
    return 4 if dim <= 64 else 2


def shared_bytes(dim: int) -> int:
    """Dynamic shared memory: the stages of a block."""
    return (1 if dim > 192 else 2) * 16 * WARPS * (2 * (dim + 8) + 2 * (_own(dim) + 8) + 4)


def _own(dim: int) -> int:
    """How many dimensions of the values a block has: kOwn there."""
    return dim if dim <= 128 else dim // 2


def _keys_of_part(places: int, rows: int) -> int:
    """How many keys a part has: it does not depend on the batch, so that a text has the same bits in every batch.

    Args:
        rows: of a key head, of all beams.
    """
    return next(keys for most, keys in (_KEYS_OF_WIDE_PART if rows > WIDE else _KEYS_OF_PART) if places <= most)


def kernel_name(dtype: torch.dtype, dim: int) -> str:
    """The kernel, as NVRTC wants it named."""
    return f"fused_topk::attention::step_attention_kernel<fused_topk::{FORMATS[dtype]}, {dim}>"
