# SPDX-License-Identifier: Apache-2.0
"""How a row is laid over the GPU: a pure function of the problem's size and the machine's, testable without a GPU.

The choice is who owns a row; all but the first two (csrc/router_rows.cu, csrc/short_rows.cu) are one kernel,
csrc/softmax_topk.cu:

=============== ================================================== ==================================================
regime          owner                                              when
=============== ================================================== ==================================================
router rows     8 lanes of a warp, which merge what they sorted    k <= 8 and V <= 256
short rows      8, 16 or 32 lanes, the best come off their tops    k <= 32 and V <= 256
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

MAX_K = 2048
"""The largest k that the kernels take. Beyond, an automatic choice of backend falls back to torch operations."""

VARIANTS = {2: ((1, 4), (8, 4), (16, 4)), 4: ((1, 8), (8, 8), (16, 8))}
"""(warps, vectors) of csrc/softmax_topk.cu, for elements of 2 and of 4 bytes: tiles of 1024 elements."""

_MAX_PARTS = 1024
_TILE = 1024
# Of csrc/short_rows.cu and router_rows.cu: logits and k at the most, and logits of a lane, or at least so many.
_SHORT_ROW, _SHORT_K, _ROUTER_K, _SHORT_LANE = 256, 32, 8, 8
_ROUTER_LANES = 8
_WARP_BYTES = 512  # that a warp reads with one load of 16 bytes a lane
_MOST_K = {1: 64, 8: 256, 16: MAX_K}  # by warps: half of what Candidates of csrc/candidates.cuh has room for
_FEW_SPLITS, _RANKED_SPLITS = 4, 16  # blocks of a row; bound_of_lists() of csrc/merge.cuh ranks half a warp of them
# Of a row that a warp has alone, and of aligned float32 with k <= 8, which 8 warps read as fast as memory gives it.
_MOST_PARTS_OF_WARP, _MOST_FLOAT_PARTS_OF_WARP, _FLOAT_K = 60, 24, 8
_WARPS_PER_BLOCK = 4  # where a warp owns a row, or several
_PLACE_BYTES = 4096  # of its tiles that such a warp keeps in place, so that 32 warps fit on a multiprocessor


# Half of a warp's lanes: of more, their bests would prove too loose a bound (KthBound::needs_many() of csrc/bound.cuh).
_FEW_OF_WARP = 16
_LEAST_TILES_IN_WINDOWS = 3  # of a warp


class Method(IntEnum):
    """How a warp's tiles become candidates: enum Method of csrc/policy.cuh."""

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
        """Which best each warp of a block publishes, so that fewer of them than have a part to read prove a bound of k (KthBound
        of csrc/bound.cuh).

        Least logits pass the bound of three quarters of the warps; of more where k is large, for a warp knows few of its bests.
        In µs on an H200 at f1fb647, of all warps, three quarters or half of them: 8 x 50257 fp32 k = 50, 7 blocks of 8: 15.0,
        10.3, 10.6; 16 x 32000 k = 50, 4 blocks of 8: 11.3, 9.1, 9.4; 256 x 128256 bf16 k = 8: 23.8, 22.5, 22.5; 32 x 151936
        k = 50: 14.0, 14.0, 14.3. At 0757611, of all warps, 15 or 14 of 16: 64 x 128256 fp32 k = 200: 25.0, 23.6, 22.8,
        8 x 50257 k = 256: 18.7, 18.7, 14.3; of three quarters, all warps, 15 or 14 of 16: 64 x 128256 k = 128: 22.7, 22.2, 22.4,
        22.5.
        """
        readers = self._readers
        of_most = -(-k // (readers - readers // 4))
        return of_most if of_most <= _FEW_OF_WARP else -(-k // (readers - readers // (8 if k <= 256 else 16)))

    def k_of_split(self, k: int) -> int:
        """The same of the blocks of a row (bound_of_lists() of csrc/merge.cuh).

        In µs on an H200, of all blocks, or of three quarters: 8 x 262144 bf16 k = 50, 16 blocks: 11.0, 9.5; 16 x 128256 k = 50,
        8 blocks: 10.4, 9.9; but 8 x 50257 fp32 k = 50, 4 blocks: 9.7, 10.3. To rank more than 16 would take long.
        """
        spare = self.splits // 4 if _FEW_SPLITS < self.splits <= _RANKED_SPLITS else 0
        return -(-k // (self.splits - spare))

    @property
    def lead(self) -> int:
        """How many of the last tiles a group reads first (TileOrder of csrc/scan.cuh), so that its first tiles have the best of
        sorted logits, whichever way they are sorted: half as many as there are warps, and one more, because a row may end with
        few logits. None where each warp has one tile at most, or a part has several, which are read one after the other.
        Windows of tiles need no such order.

        Ascending logits, in µs on an H200, with none and with these first: 256 x 128256 fp32 k = 50: 157, 45 (normal ones 42),
        2048 x 32000 bf16 k = 50: 277, 49 (73), 1 x 32000 k = 8: 17.4, 11.2 (6.1), descending ones 10.7, 14.0. Of three quarters
        of the warps and half of them: 1 x 32000 descending 15.3, 14.0, 64 x 128256 fp32 k = 1024 ascending 47, 67 (30).
        """
        if self.lanes or self.tiles_per_part > 1 or self.parts // self.splits <= self.warps:
            return 0
        return max(self.warps // 2 + 1, 2)

    @property
    def _readers(self) -> int:
        """Warps that have a part to read, in the block that has the fewest parts."""
        return min(self.warps, self.parts // self.splits)

    def method(self, k: int, itemsize: int, is_plain: bool) -> Method:
        """How the kernel makes candidates of a warp's tiles. is_plain: aligned rows, no mask.

        In windows where that was measured to be quicker, in µs on an H200: 64 x 128256 bf16 k = 8, 16 warps: 14.3 tile by
        tile, 12.4 in windows; 256 x 128256: 30.1, 25.6; 32 x 262144 k = 20: 16.5, 16.0. Not with one tile a warp
        (1 x 128256: 6.8, 7.5) nor of float32 (64 x 128256 17.1, 16.0, but with spilled registers; 4000 x 25000 108, 120).
        """
        if self.lanes or self.warps == 1:
            return Method.TILE_BY_TILE
        if -(-k // self._readers) > _FEW_OF_WARP:
            return Method.FOR_MANY if self.warps > 8 else Method.TILE_BY_TILE
        has_tiles = self.parts > (_LEAST_TILES_IN_WINDOWS - 1) * self.warps * self.splits and self.tiles_per_part == 1
        return Method.IN_WINDOWS if itemsize == 2 and is_plain and has_tiles else Method.TILE_BY_TILE

    def shared_bytes(self, method: Method, is_plain: bool) -> int:
        """Dynamic shared memory: tiles of each warp, and 16 bytes each for the straddle of an unaligned row; what it keeps of
        a window; and the states of a row's parts, if one group has all of them. is_plain: aligned rows, no mask."""
        if self.lanes:
            return 0
        tile_bytes = self.vectors * _WARP_BYTES + (0 if is_plain else 16)
        tiles = self.threads // 32 * self._tiles_of_warp(method, is_plain) * tile_bytes
        windows = self.warps * _window_bytes(8 if self.warps <= 8 else 4) if method == Method.IN_WINDOWS else 0
        states = 8 * self.parts * self.rows_per_block if self.splits == 1 else 0
        return tiles + windows + states

    def _tiles_of_warp(self, method: Method, is_plain: bool) -> int:
        """That fit in its share of shared memory: policy_of() of csrc/policy.cuh, on hardware that has room for most."""
        if self.warps == 1 and is_plain:
            return _PLACE_BYTES // (self.vectors * _WARP_BYTES)
        return 2 if self.warps <= 8 or (method == Method.TILE_BY_TILE and is_plain) else 0

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

    What the limits rest on, in µs on an H200 (132 multiprocessors), choices timed beside each other, as `python -m
    fused_topk sweep` does. Routers at e074df7; float32 rows of 20000 logits and more as they are now (KernelChoice.lead); all
    else on the way from f1fb647 to 0757611, while blocks of 8 warps could still share a row:

    - 8 lanes that merge, or the best off the tops of more: 65536 x 256 bf16 k = 8: 15.6 or 40; 16384 x 128: 5.1 or 7.9;
      4096 x 64: 2.5 or 3.1;
    - a warp or 8 warps a row, k = 8: 264 x 2000 fp32: 6.5 or 5.4, 400 x 2000: 6.7 or 9.1, 528 x 4000: 10.2 or 10.3,
      800 x 4000: 11.0 or 14.3, 1000 x 8000: 17.8 or 16.2, 4000 x 20000: 82 or 87, 4000 x 25000: 104 or 103, k = 5: 102
      or 98, k = 16: 106 or 120, k = 64: 120 or 189, 4000 x 60000: 223 or 216, k = 16: 226 or 222, 1600 x 60000: 104 or 91,
      unaligned 4000 x 50257: 220 or 228; bf16: 1600 x 32000: 45 or 41, 2048 x 32000: 47 or 51, 1600 x 128256: 132 or 110,
      4096 x 128256: 254 or 262, but 4096 x 64000 k = 20: 166 or 155;
    - 8 or 16 warps, rows for more than one multiprocessor each: 200 x 128256 bf16 k = 8: 21 or 26; not so many: 64 x 12000
      fp32 k = 50: 9.3 or 6.4, 96 x 64000 bf16 k = 50: 15.6 or 11.3; with a part for each of 8: 64 x 8000 fp32 k = 8: 4.7 or
      5.2, k = 50: 6.3 or 6.2;
    - blocks of 16 warps, one of which a multiprocessor has room for: 1 x 128256 bf16 k = 20, 4, 6, 8: 9.0, 8.9, 7.4;
      16 x 262144, 4, 6, 8, 10: 12.2, 11.8, 11.1, 16.1; 64 x 128256 k = 8, 2 or 3: 12.1 or 17.0; 32 x 25000 fp32 k = 50, 1 or
      2: 9.0 or 10.4. Blocks of 8 warps: 1 x 128256 at best 8.5, 16 x 262144 12.4, 64 x 128256 12.5; 140 x 50257 fp32 k = 8, 1
      or 2: 18.0 or 23.8.
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


def alternatives(rows: int, vocab_size: int, k: int, itemsize: int, multiprocessors: int) -> list[KernelChoice]:
    """Every choice worth timing, for benchmark/sweep.py: the one of choose() first."""
    parts, tiles_per_part = _cut(vocab_size)
    found = [choose(rows, vocab_size, k, itemsize, multiprocessors)]
    if found[0].lanes:
        found.append(_short_rows(vocab_size, itemsize))
    for warps, vectors in VARIANTS[itemsize]:
        if k > _MOST_K[warps]:
            continue
        most = -(-parts // warps) if warps > 8 else 1
        for splits in sorted({1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32, most}):
            if splits <= most and (splits == 1 or rows * splits <= 16 * multiprocessors):
                found.append(KernelChoice(warps, vectors, splits, parts, tiles_per_part))
    return list(dict.fromkeys(found))


def list_length(k: int, splits: int) -> int:
    """Candidates that a block of a split row hands over at most. Too few, and there is a cut before (Candidates::shorten()
    of csrc/candidates.cuh); more than the last block can load at a time (gather() of csrc/merge.cuh), and it waits again.
    """
    helpers = 32 * 15  # all of a block but the warp that merges the states; each loads seven at a time
    most = 7 * helpers // splits
    if k > 64:
        return max(512, 5 * k // 4, min(2 * k, most))
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
    """WindowShared of csrc/windows.cuh."""
    return 4 * (tiles * (32 + 32 + 32 // tiles + 1) + 3 * 32)


def _cut(vocab_size: int) -> tuple[int, int]:
    """(parts of a row, tiles of a part)."""
    tiles_per_part = 1
    while _TILE * tiles_per_part * _MAX_PARTS < vocab_size:
        tiles_per_part *= 2
    return -(-vocab_size // (_TILE * tiles_per_part)), tiles_per_part
