# SPDX-License-Identifier: Apache-2.0
"""How a row is laid over the GPU: a pure function of the problem's size and the machine's, testable without a GPU.

The kernel (csrc/softmax_topk.cu) is one algorithm; the choice is who owns a row:

=============== ======================================================= ====================================
regime          owner                                                   when
=============== ======================================================= ====================================
short rows      one warp, the row in registers (one tile)               V <= TILE, k <= 64
warp per row    one warp, tile by tile, four rows a block               rows fill the GPU, k <= 64
block per row   all warps of a block                                    rows fill the GPU, k > 64
split row       several blocks; the last to arrive merges               too few rows for that
=============== ======================================================= ====================================

How a row is cut into parts, and in which order their sums are added, follows from V and the dtype alone. So a row has
the same result, bit for bit, in whatever batch it comes and whichever regime is chosen.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_K = 2048
"""The largest k that the kernels take. Beyond, an automatic choice of backend falls back to torch operations."""

_MAX_PARTS = 1024
_PART = 1024
_VECTOR_BYTES = 16
_WARP = 32


class KernelChoice(NamedTuple):
    """Template parameters and launch arguments of one launch."""

    warps: int  # that own a row together; 1 packs four rows into a block
    vectors: int  # of 16 bytes that a lane holds at a time: a tile is 32 lanes of them
    splits: int  # blocks that share a row
    parts: int  # pieces of a row, each summed by one warp
    tiles_per_part: int  # a power of two
    capacity: int  # slots for candidates in shared memory
    trim_at: int  # how full they may get before they are cut back to the best k

    @property
    def rows_per_block(self) -> int:
        return 4 if self.warps == 1 else 1

    @property
    def threads(self) -> int:
        return _WARP * (4 if self.warps == 1 else self.warps)

    @property
    def shared_bytes(self) -> int:
        return 8 * self.capacity * self.rows_per_block

    @property
    def regime(self) -> str:
        if self.warps == 1:
            return "short rows" if self.parts * self.tiles_per_part == 1 else "warp per row"
        return "block per row" if self.splits == 1 else "split row"

    def blocks(self, rows: int) -> int:
        return -(-rows // self.rows_per_block) * self.splits


def choose(rows: int, vocab_size: int, k: int, itemsize: int, multiprocessors: int) -> KernelChoice:
    """The choice for `rows` rows of `vocab_size` logits of `itemsize` bytes on a GPU with so many multiprocessors."""
    vectors, parts, tiles_per_part = _cut(vocab_size, itemsize)
    if k <= 64 and (parts * tiles_per_part <= 2 or rows >= 16 * multiprocessors):
        return KernelChoice(1, vectors, 1, parts, tiles_per_part, *_buffer(1, k))
    warps = 8 if k <= 256 else 16
    splits = _splits(rows, parts, warps, multiprocessors)
    return KernelChoice(warps, max(vectors, _tile_vectors(itemsize)), splits, parts, tiles_per_part, *_buffer(warps, k))


def _tile_vectors(itemsize: int) -> int:
    return 4


def _cut(vocab_size: int, itemsize: int) -> tuple[int, int, int]:
    """(vectors of a tile, parts of a row, tiles of a part)."""
    per_vector = _VECTOR_BYTES // itemsize
    if vocab_size <= 256:
        return 256 // (_WARP * per_vector), 1, 1
    tile = 4 * _WARP * per_vector
    part = _PART
    while part * _MAX_PARTS < vocab_size:
        part *= 2
    if vocab_size <= tile:
        return 4, 1, 1
    return 4, -(-vocab_size // part), max(part // tile, 1)


def _buffer(warps: int, k: int) -> tuple[int, int]:
    """(capacity, trim_at), so that k < trim_at <= capacity - 32."""
    if warps == 1:
        return 128, 64 if k <= 32 else 96
    if k <= 64:
        return 256, 160
    capacity = min(4096, 1 << (4 * k - 1).bit_length())
    return capacity, capacity * 3 // 4


def _splits(rows: int, parts: int, warps: int, multiprocessors: int) -> int:
    """Enough blocks to fill the GPU, but none with less than one part for each of its warps."""
    resident = multiprocessors * (24 // warps)
    return max(1, min(resident // max(rows, 1), -(-parts // warps)))
