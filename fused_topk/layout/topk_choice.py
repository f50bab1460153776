# SPDX-License-Identifier: Apache-2.0
"""How a row is laid over the GPU: a pure function of the problem's size and the machine's, testable without a GPU.

The choice is who owns a row. The first two regimes have kernels of their own (csrc/routers/router_rows.cu, csrc/topk/short_rows.cu). All
others are one kernel, csrc/topk/softmax_topk.cu:

=============== ================================================== ==================================================
regime          owner                                              when
=============== ================================================== ==================================================
router rows     8 lanes of a warp, which merge what they sorted    k <= 8, V <= 256, no beams
short rows      8, 16 or 32 lanes; the best is taken k times       k <= 32, V <= 256, no beams
warp per row    one warp, tile by tile, four rows a block          many rows, V <= 61440 (aligned float32, k <= 8:
                                                                   24576), k <= 64; or V <= 1024, k <= 32
block per row   8 or 16 warps of a block                           fewer rows, but as many as multiprocessors; or short
split row       several blocks of 16; the last to arrive merges    fewer still
=============== ================================================== ==================================================

How a row is cut into parts, and in which order their sums are added, follows from V alone. So a row has the same result,
bit for bit, in whatever batch it comes and whichever regime is chosen.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from .tuning import most_slots, most_window

MAX_K = 2048
"""The largest k that the kernels take. Beyond, an automatic choice of backend falls back to torch operations."""

VARIANTS = {2: ((1, 4), (8, 4), (16, 4)), 4: ((1, 8), (8, 8), (16, 8))}
"""(warps, vectors) of csrc/topk/softmax_topk.cu, for elements of 2 and of 4 bytes: tiles of 1024 elements."""

_MAX_PARTS = 1024
_TILE = 1024
# csrc/topk/short_rows.cu and router_rows.cu: the longest row, and the largest k of each.
_SHORT_ROW, _SHORT_K, _ROUTER_K = 256, 32, 8
_SHORT_LANE = 8  # logits of a lane in short_rows.cu, and the least in router_rows.cu
_ROUTER_LANES = 8  # that have a row in router_rows.cu
_WARP_BYTES = 512  # that a warp reads with one load of 16 bytes a lane
# Blocks of a row: bound_of_lists() of csrc/topk/merge.cuh ranks half a warp of them.
_FEW_SPLITS, _RANKED_SPLITS = 4, 16
# The longest row of one warp, in parts. With k <= 8, 8 warps read longer rows of aligned float32 as fast as memory gives them.
_MOST_PARTS_OF_WARP, _MOST_FLOAT_PARTS_OF_WARP, _FLOAT_K = 60, 24, 8
_WARPS_PER_BLOCK = 4  # where a warp owns a row, or several
_STRADDLE_BYTES = 128  # behind a tile of an unaligned row: TileStream::kSlotStride of csrc/rows/row.cuh


# A warp's j-th best key comes from its lanes' best keys. For j above half of the lanes that bound would be too loose
# (KthBound::needs_many() of csrc/topk/bound.cuh).
_FEW_OF_WARP = 16
_LEAST_TILES_IN_WINDOWS = 3  # of a warp


class Method(IntEnum):
    """How a warp's tiles become candidates: enum Method of csrc/rows/tuning.cuh."""

    TILE_BY_TILE = 0
    FOR_MANY = 1
    IN_WINDOWS = 2


class KernelChoice(NamedTuple):
    """Template parameters and launch arguments of one launch."""

    warps: int  # that own a row together; 1 packs four warps into a block
    vectors: int  # of 16 bytes that a lane holds at a time: a tile is 32 lanes of them
    splits: int  # blocks that share a row, of 16 warps if more than one
    parts: int  # pieces of a row, each summed by one warp
    tiles_per_part: int  # a power of two
    lanes: int = 0  # of a warp that share a row; 0: all
    kernel: str = "softmax_topk"

    @property
    def rows_per_block(self) -> int:
        if self.lanes:
            return _WARPS_PER_BLOCK * 32 // self.lanes
        return _WARPS_PER_BLOCK if self.warps == 1 else 1

    @property
    def threads(self) -> int:
        return 32 * (_WARPS_PER_BLOCK if self.warps == 1 else self.warps)

    def k_of_warp(self, k: int) -> int:
        """j: each warp of a block publishes its j-th best key. The keys of enough warps prove a lower bound of the row's k-th
        best (KthBound of csrc/topk/bound.cuh).

        For a small k, three quarters of the warps are enough: that lets the fewest logits pass. For a large k, all warps but
        an eighth or a sixteenth are needed. One is spare in any case: a row's last tile may hold few logits. Measured in
        csrc/TUNING.md.
        """
        readers = self._readers
        of_most = -(-k // (readers - readers // 4))
        if of_most <= _FEW_OF_WARP or readers == 1:
            return of_most
        return -(-k // (readers - max(readers // (8 if k <= 256 else 16), 1)))

    def k_of_split(self, k: int) -> int:
        """j of the blocks of a row: each block leaves its j-th best key (bound_of_lists() of csrc/topk/merge.cuh).

        Of 5 to 16 blocks three quarters are enough. Of fewer, or more, all are needed: fewer have none to spare, and ranking
        more takes too long. Measured in csrc/TUNING.md.
        """
        spare = self.splits // 4 if _FEW_SPLITS < self.splits <= _RANKED_SPLITS else 0
        return -(-k // (self.splits - spare))

    @property
    def lead(self) -> int:
        """How many of a row's last tiles a group reads first (TileOrder of csrc/topk/scan.cuh).

        The group's first tiles then hold the best of sorted logits, ascending or descending, and its bound is good from the
        start. The lead is half as many tiles as there are warps, and one more, because a row may end with few logits. There is
        none where each warp has one tile at most, nor where a part has several tiles, which are read one after the other.
        Windows do not use it. Measured in csrc/TUNING.md.
        """
        if self.lanes or self.tiles_per_part > 1 or self.parts // self.splits <= self.warps:
            return 0
        return max(self.warps // 2 + 1, 2)

    @property
    def _readers(self) -> int:
        """Warps that have a part to read, in the block that has the fewest parts."""
        return min(self.warps, self.parts // self.splits)

    def method(self, k: int, itemsize: int, is_unmasked: bool) -> Method:
        """How the kernel makes candidates of a warp's tiles.

        Windows pay for 16-bit logits where a warp has several tiles. Measured in csrc/TUNING.md.
        """
        if self.lanes or self.warps == 1:
            return Method.TILE_BY_TILE
        if -(-k // self._readers) > _FEW_OF_WARP:
            return Method.FOR_MANY if self.warps > 8 else Method.TILE_BY_TILE
        has_tiles = self.parts > (_LEAST_TILES_IN_WINDOWS - 1) * self.warps * self.splits and self.tiles_per_part == 1
        return Method.IN_WINDOWS if itemsize == 2 and is_unmasked and has_tiles else Method.TILE_BY_TILE

    def shared_bytes(self, method: Method, is_aligned: bool, is_unmasked: bool) -> int:
        """Dynamic shared memory: the tiles of each warp, each with 128 bytes more if the row is unaligned; what a warp keeps of
        its window; and the states of a row's parts, if one group reads them all."""
        if self.lanes:
            return 0
        tile_bytes = self.vectors * _WARP_BYTES + (0 if is_aligned else _STRADDLE_BYTES)
        itemsize = self.vectors * _WARP_BYTES // _TILE
        slots = most_slots(self.warps, method, itemsize, not is_unmasked, is_aligned)
        tiles = self.threads // 32 * slots * tile_bytes
        windows = self.warps * _window_bytes(most_window(self.warps)) if method == Method.IN_WINDOWS else 0
        states = 8 * self.parts * self.rows_per_block if self.splits == 1 else 0
        return tiles + windows + states

    @property
    def regime(self) -> str:
        if self.lanes:
            return self.kernel.replace("_topk", "").replace("_", " ")
        if self.warps == 1:
            return "warp per row"
        return "block per row" if self.splits == 1 else "split row"

    def grid(self, rows: int) -> tuple[int, int]:
        """Blocks: over the rows, and over a row."""
        return -(-rows // self.rows_per_block), self.splits


def choose(
    rows: int, vocab_size: int, k: int, itemsize: int, multiprocessors: int, has_beams: bool = False
) -> KernelChoice:
    """The choice for `rows` rows of `vocab_size` logits of `itemsize` bytes on a GPU with so many multiprocessors.

    Each limit below rests on a row of csrc/TUNING.md ("Which kernel, and how a row is cut"): choices timed beside each other.
    """
    parts, tiles_per_part = _cut(vocab_size)
    vectors = _TILE * itemsize // _WARP_BYTES
    if vocab_size <= _SHORT_ROW and k <= _SHORT_K and not has_beams:
        return _router_rows(vocab_size, itemsize) if k <= _ROUTER_K else _short_rows(vocab_size, itemsize)
    suits_8_warps = itemsize == 4 and vocab_size % 4 == 0 and k <= _FLOAT_K
    is_short = parts <= (_MOST_FLOAT_PARTS_OF_WARP if suits_8_warps else _MOST_PARTS_OF_WARP)
    has_rows = rows >= multiprocessors * min(12, parts + k // 32)
    if (k <= 32 and parts == 1) or (k <= 64 and is_short and has_rows):
        return KernelChoice(1, vectors, 1, parts, tiles_per_part)
    if k <= 64 and (rows > multiprocessors or (k <= 32 and parts <= 8)):
        return KernelChoice(8, vectors, 1, parts, tiles_per_part)
    # One block of 16 warps fits on a multiprocessor. Two parts a warp are read sooner than merged.
    splits = min(multiprocessors // max(rows, 1), -(-parts // 16)) if parts > 32 else 1
    return KernelChoice(16, vectors, max(splits, 1), parts, tiles_per_part)


def list_length(k: int, splits: int) -> int:
    """The most candidates that a block of a split row hands over.

    If the list is too short, the block must cut first (Candidates::shorten() of csrc/topk/candidates.cuh). If the lists are longer
    than the last block can load at a time, it waits for memory again (gather() of csrc/topk/merge.cuh).
    """
    helpers = 32 * 15  # all of a block but the warp that merges the states; each loads seven at a time
    most = 7 * helpers // splits
    if k > 64:
        return max(512, 9 * k // 8, min(2 * k, most))
    least = 40 + 5 * k // 2
    if splits * least <= helpers:
        return least
    return max(least, min(4 * k + 64, most))


def _router_rows(vocab_size: int, itemsize: int) -> KernelChoice:
    per_lane = max(_SHORT_LANE, _power_of_two(-(-vocab_size // _ROUTER_LANES)))
    return KernelChoice(1, per_lane * itemsize // 16, 1, 1, 1, _ROUTER_LANES, "router_rows_topk")


def _short_rows(vocab_size: int, itemsize: int) -> KernelChoice:
    lanes = max(8, _power_of_two(-(-vocab_size // _SHORT_LANE)))
    return KernelChoice(1, _SHORT_LANE * itemsize // 16, 1, 1, 1, lanes, "short_rows_topk")


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _window_bytes(tiles: int) -> int:
    """WindowShared of csrc/topk/windows.cuh."""
    return 4 * (tiles * (32 + 32 + 32 // tiles + 1) + 3 * 32)


def _cut(vocab_size: int) -> tuple[int, int]:
    """(parts of a row, tiles of a part)."""
    tiles_per_part = 1
    while _TILE * tiles_per_part * _MAX_PARTS < vocab_size:
        tiles_per_part *= 2
    return -(-vocab_size // (_TILE * tiles_per_part)), tiles_per_part
