# SPDX-License-Identifier: Apache-2.0
"""Where a full row waits between its read and its write: a pure function of its length and the GPU, testable without one.

======== ======================================================= =========================================
kernel   the row waits in                                        when
======== ======================================================= =========================================
warp     registers of a warp                                     V <= 1024 (2048 of 16-bit elements)
block    registers of a block, then its shared memory too        V <= 32768 (65536)
cluster  the same of 2, 4 or 8 blocks                            V <= 262144 (524288), compute capability 9.0
long     nowhere: it is read twice, the second time from the L2  longer rows
======== ======================================================= =========================================

The number of rows plays no part: how a row is cut, and in which order its sums are added, follows from V, the dtype and
the GPU. So a row has the same result, bit for bit, in whatever batch it comes.
"""

from __future__ import annotations

from typing import NamedTuple

_VECTOR_BYTES = 16
_WARP = 32
# Of a thread in registers, and again in shared memory: kVectorsInFlight of csrc/softmax_rows.cu.
_VECTORS = 8
_BLOCK_THREADS = 512
_LONG_THREADS = 256
_WARP_ROWS = 4
# For the kernel's own variables and the system's.
_STATIC_SHARED = 2048


class FullRowChoice(NamedTuple):
    """The kernel of a launch, and how it cuts a row."""

    kernel: str  # "warp", "block", "cluster" or "long"
    threads: int
    blocks_per_row: int  # of a cluster; chunks of a long row
    vectors_per_block: int  # of 16 bytes
    shared_bytes: int = 0

    def blocks(self, rows: int, is_written: bool = True) -> int:
        """The grid for that many rows, whose elements are written or only summed."""
        if self.kernel == "warp":
            return -(-rows // _WARP_ROWS)
        turns = 2 if self.kernel == "long" and is_written else 1
        return rows * self.blocks_per_row * turns


def choose_full_row(vocab_size: int, itemsize: int, compute_capability: int, shared_per_block: int) -> FullRowChoice:
    """The choice for rows of `vocab_size` logits of `itemsize` bytes.

    Args:
        compute_capability: times ten: 90 for 9.0.
        shared_per_block: bytes of shared memory that a block may have at the most.
    """
    vectors = -(-vocab_size * itemsize // _VECTOR_BYTES)
    if vectors <= _VECTORS * _WARP:
        return FullRowChoice("warp", _WARP * _WARP_ROWS, 1, vectors)
    in_registers = _VECTORS * _BLOCK_THREADS
    if vectors <= in_registers:
        # The shorter the row, the more its latency counts, which more threads shorten: 4 vectors each, then 8. A guess.
        per_thread = 4 if vectors <= 1024 else 8
        return FullRowChoice("block", _round_up(-(-vectors // per_thread), _WARP), 1, vectors)
    shared_bytes = in_registers * _VECTOR_BYTES
    if shared_bytes + _STATIC_SHARED <= shared_per_block:
        for blocks in (1, 2, 4, 8) if compute_capability >= 90 else (1,):
            share = -(-vectors // blocks)
            if share <= 2 * in_registers:
                return FullRowChoice("block" if blocks == 1 else "cluster", _BLOCK_THREADS, blocks, share, shared_bytes)
    share = _VECTORS * _LONG_THREADS
    return FullRowChoice("long", _LONG_THREADS, -(-vectors // share), share)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
