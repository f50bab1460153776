# SPDX-License-Identifier: Apache-2.0
"""How a row is laid over the GPU: a pure function of the problem's size and the machine's, testable without a GPU.

The choice is who owns a row; all but the first two (csrc/router_rows.cu, csrc/short_rows.cu) are one kernel,
csrc/softmax_topk.cu:

=============== ======================================================= ====================================
regime          owner                                                   when
=============== ======================================================= ====================================
router rows     8 lanes of a warp, which merge what they have sorted    k <= 8 and V <= 256
short rows      8, 16 or 32 lanes, the best come off their tops         k <= 32 and V <= 256
warp per row    one warp, tile by tile, four rows a block               many rows, k <= 64; or V <= 1024, k <= 32
block per row   all warps of a block                                    as many rows as blocks fit, or few parts
split row       several blocks; the last to arrive merges               too few rows for that
=============== ======================================================= ====================================

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
_FEW_PARTS = 64  # of a row: 8 warps merge sooner than 16
# Of a row that a warp has alone, by bytes of a logit: parts, beyond which a block is quicker for small k, and, for any k, their
# states leave room for fewer rows.
_MOST_PARTS_OF_WARP, _MOST_PARTS_FOR_LARGE_K = {2: 160, 4: 36}, 256
_WARPS_PER_BLOCK = 4  # where a warp owns a row, or several
_PLACE_BYTES = 4096  # of its tiles that such a warp keeps in place, so that 32 warps fit on a multiprocessor


# Half of a warp's lanes: of more, their bests would prove too loose a bound (KthBound::needs_many() of csrc/bound.cuh).
_FEW_OF_WARP = 16
_LEAST_TILES_IN_WINDOWS = 3  # of a warp


class Method(IntEnum):
    """How a warp's tiles become candidates: enum Method of csrc/softmax_topk.cu."""

    TILE_BY_TILE = 0
    FOR_MANY = 1
    IN_WINDOWS = 2


class KernelChoice(NamedTuple):
    """Template parameters and launch arguments of one launch."""

    warps: int  # that own a row together; 1 packs four warps into a block
    vectors: int  # of 16 bytes that a lane holds at a time: a tile is 32 lanes of them
    splits: int  # blocks that share a row
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

        Least logits pass the bound of three quarters of the warps; of many more, for then a warp knows too few of its bests.
        In µs on an H200, of all warps, or without that which has a row's last few logits (these have not been timed yet):
        8 x 50257 fp32 k = 50, 7 blocks: 14.6, 10.1; 16 x 128256 bf16 k = 50: 13.1, 10.9.
        """
        readers = self._readers
        of_most = -(-k // (readers - readers // 4))
        return of_most if of_most <= _FEW_OF_WARP else -(-k // (readers - readers // 16))

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
        """That fit in its share of shared memory: tiles_ahead() of csrc/softmax_topk.cu, on hardware that has room for most."""
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
    fused_topk sweep` does: a warp's limits with the tiles in place (907e46a); routers e074df7; the others by the last sweep of
    all 51 shapes (b9ad44b: the choice was the best or at most 7 % behind it):

    - 8 lanes that merge, or the best off the tops of more: 65536 x 256 bf16 k = 8: 15.6 or 40; 16384 x 128: 5.1 or 7.9;
      4096 x 64: 2.5 or 3.1;
    - a warp or 8 warps a row: 4000 x 4000 fp32 k = 5: 21 or 47; 4000 x 25000 k = 5: 104 or 104, k = 64: 120 or 181;
      4000 x 50000 k = 5: 193 or 187; 4096 x 151936 bf16 k = 8: 295 or 349, 4096 x 262144: 669 or 534;
    - the same with fewer rows, k = 8: 400 x 2000 fp32: 6.5 or 9.0, 528 x 4000: 9.9 or 10.3, 800 x 8000: 17.3 or 16.2,
      1320 x 25000: 47 or 46, 1320 x 32000 bf16: 42 or 43, 1584 x 128256: 122 or 121; k = 50: 1056 x 8000 fp32: 26 or 24;
    - 8 or 16 warps: 16 x 128256 bf16 k = 8: 9.5 or 7.9, 16 x 262144 bf16 k = 64: 17.9 or 14.6, 64 x 128256 fp32
      k = 128: 29.6 or 23.4; but 64 x 128256 fp32 k = 32: 18.5 or 20.8, 32 x 262144 bf16 k = 20: 16.5 or 18.7, and with few
      parts 8 x 50257 fp32 k = 50: 12.4 or 13.3; 256 x 128256 fp32 k = 8: 38 or 41;
    - 4, 6 or 8 blocks of 16 warps: 1 x 128256 bf16 k = 8: 8.7, 8.0 or 6.8; but one or two: 1 x 32000: 6.6 or 7.1;
      8 or 12 blocks of 8 warps: 32 x 262144 bf16 k = 20: 16.5 or 17.6; 3, 4, 5 or 6: 8 x 50257 fp32 k = 50: 14.1, 12.7, 12.4
      or 15.1, and 7 10.1 since its last tile, of 81 logits, has no say (k_of_warp()).
    """
    parts, tiles_per_part = _cut(vocab_size)
    vectors = _TILE * itemsize // _WARP_BYTES
    if vocab_size <= _SHORT_ROW and k <= _SHORT_K and not has_beams:
        return _router_rows(vocab_size, itemsize) if k <= _ROUTER_K else _short_rows(vocab_size, itemsize)
    is_short = parts <= (_MOST_PARTS_FOR_LARGE_K if k > 16 else _MOST_PARTS_OF_WARP[itemsize])
    if (k <= 32 and parts == 1) or (k <= 64 and is_short and rows >= multiprocessors * _least_rows_of_warps(parts, k)):
        return KernelChoice(1, vectors, 1, parts, tiles_per_part)
    suits_8_warps = rows > multiprocessors or 16 < k <= 32 or (k > 32 and parts <= _FEW_PARTS)
    warps = 8 if k <= 64 and suits_8_warps else 16
    alone = KernelChoice(warps, vectors, 1, parts, tiles_per_part)
    return _split(alone, rows, k, itemsize, vocab_size * itemsize % 16 == 0, multiprocessors)


def alternatives(rows: int, vocab_size: int, k: int, itemsize: int, multiprocessors: int) -> list[KernelChoice]:
    """Every choice worth timing, for benchmark/sweep.py: the one of choose() first."""
    parts, tiles_per_part = _cut(vocab_size)
    found = [choose(rows, vocab_size, k, itemsize, multiprocessors)]
    if found[0].lanes:
        found.append(_short_rows(vocab_size, itemsize))
    for warps, vectors in VARIANTS[itemsize]:
        if k > _MOST_K[warps]:
            continue
        most = 1 if warps == 1 else -(-parts // warps)
        for splits in sorted({1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32, most}):
            if splits <= most and (splits == 1 or rows * splits <= 16 * multiprocessors):
                found.append(KernelChoice(warps, vectors, splits, parts, tiles_per_part))
    return list(dict.fromkeys(found))


def list_length(k: int, splits: int, warps: int) -> int:
    """Candidates that a block of a split row hands over at most. Too few, and there is a cut before (Candidates::shorten()
    of csrc/candidates.cuh); more than the last block can load at a time (gather() of csrc/merge.cuh), and it waits again.
    """
    helpers = 32 * (warps - 1)
    if k > 64:
        return max(512, 5 * k // 4, min(2 * k, helpers * (7 if warps > 8 else 3) // splits))
    least = 40 + 5 * k // 2
    if splits * least <= helpers:
        return least
    return max(least, min(4 * k + 64, helpers * (7 if warps > 8 else 3) // splits))


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


def _least_rows_of_warps(parts: int, k: int) -> int:
    """Rows for each multiprocessor from which a warp a row is quicker than a block: the longer its row, and its row's list, the
    more other warps it takes to keep the multiprocessor busy."""
    return min(12, 4 + parts // 4 + k // 16)


def _split(
    alone: KernelChoice, rows: int, k: int, itemsize: int, is_aligned: bool, multiprocessors: int
) -> KernelChoice:
    """Enough blocks to fill the GPU, but none with less than about a part for each of its warps; and no more than it takes for
    a warp's number of parts. Two parts a warp are read sooner than merged.

    Registers leave room for 24 warps a multiprocessor, but for 16 that read windows, or unaligned float32. In µs on an H200, of 16
    or of 24, k = 20: 96 x 50257 bf16: 15.9, 13.1, fp32: 17.4, 19.6; 64000 bf16: 96 rows 15.1, 13.2, 128 rows 15.8, 21.4. Where
    parts are many and k is 17 to 32, 16 are quicker in any case: 64 x 128256 fp32 k = 32: 18.4, 19.8.
    """
    parts, warps = alone.parts, alone.warps
    if parts <= 2 * warps:
        return alone

    def filling(resident_warps: int) -> KernelChoice:
        resident = multiprocessors * (resident_warps // warps)
        most = max(1, min(resident // max(rows, 1), -(-parts // warps)))
        parts_per_warp = -(-parts // (most * warps))
        return alone._replace(splits=-(-parts // (warps * parts_per_warp)))

    is_few = parts <= _FEW_PARTS
    if k <= 16 or (k > 32 and not is_few):
        return filling(24)
    if not is_few or (itemsize == 4 and not is_aligned):
        return filling(16)
    full = filling(24)
    return filling(16) if full.method(k, itemsize, is_aligned) == Method.IN_WINDOWS else full
