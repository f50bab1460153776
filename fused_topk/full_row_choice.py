# SPDX-License-Identifier: Apache-2.0
"""Who owns a full row between its read and its write: a pure function of its length and the GPU, testable without one.

======== ================================================== ===========================================
kernel   the row waits in                                   when
======== ================================================== ===========================================
warp     registers of a warp                                up to 2 KiB
block    registers of a block, then its shared memory too   up to 256 KiB, or what shared memory allows
cluster  the same of 2, 4 or 8 blocks                       up to 2 MiB, compute capability 9.0
grid     the same of up to a block on each multiprocessor   longer rows; what does not fit is read twice
======== ================================================== ===========================================

The number of rows plays no part: how a row is cut, and in which order its sums are added, follows from V, the dtype and
the GPU. So a row has the same result, bit for bit, in whatever batch it comes.
"""

from __future__ import annotations

from typing import NamedTuple

VECTOR_BYTES = 16
_WARP = 32
_WARP_ROWS = 4
_GRID_THREADS = 512
# A thread's vectors, in registers and in all while there are blocks enough: 1 x 4194304 fp32 takes 12.7 µs on an H200, with
# all 16 in registers 13.3, and 14.8 where half as many blocks keep 32 each.
_GRID_REGISTERS = 8
_GRID_VECTORS = 16
# For the kernel's own variables and the system's.
_STATIC_SHARED = 2048


class FullRowChoice(NamedTuple):
    """The kernel of a launch, and how it cuts a row."""

    kernel: str  # "warp", "block", "cluster" or "grid"
    threads: int
    vectors: int  # of 16 bytes: of each thread, in registers
    shared_vectors: int = 0  # and in shared memory
    blocks_per_row: int = 1
    groups: int = 0  # of blocks that run at a time: of "grid"

    @property
    def shared_bytes(self) -> int:
        return self.shared_vectors * self.threads * VECTOR_BYTES

    def groups_for(self, rows: int) -> int:
        """How many groups of blocks share that many rows."""
        return min(rows, self.groups)

    def blocks(self, rows: int) -> int:
        """The grid for that many rows."""
        if self.kernel == "warp":
            return -(-rows // _WARP_ROWS)
        return (self.groups_for(rows) if self.kernel == "grid" else rows) * self.blocks_per_row


def kernel_variants(compute_capability: int) -> tuple[tuple[str, int, int], ...]:
    """What a choice can name: a kernel, a thread's vectors in registers, and the blocks of a cluster."""
    clusters = (("cluster", 4, 4), ("cluster", 4, 8)) if compute_capability >= 90 else ()
    return ("warp", 4, 1), ("block", 2, 1), ("block", 4, 1), ("grid", _GRID_REGISTERS, 1), *clusters


def choose_full_row(
    vocab_size: int, itemsize: int, compute_capability: int, shared_per_block: int, multiprocessors: int
) -> FullRowChoice:
    """The choice for rows of `vocab_size` logits of `itemsize` bytes.

    Args:
        compute_capability: times ten: 90 for 9.0.
        shared_per_block: bytes of shared memory that a block may have at the most.
        multiprocessors: how many the GPU has.
    """
    vectors = -(-vocab_size * itemsize // VECTOR_BYTES)
    if vectors <= 4 * _WARP:
        return FullRowChoice("warp", _WARP * _WARP_ROWS, 4)
    if vectors <= 512:
        # The shorter the row, the more its latency counts, which more threads shorten. A guess.
        return FullRowChoice("block", _round_up(-(-vectors // 2), _WARP), 2)
    if vectors <= 4096:
        return FullRowChoice("block", _round_up(-(-vectors // 4), _WARP), 4)
    most_shared = (shared_per_block - _STATIC_SHARED) // VECTOR_BYTES
    # (threads, blocks): as few threads as leave room for two blocks on a multiprocessor, but where one row fills it.
    cuts = [(1024, 1)]
    if compute_capability >= 90:
        cuts += [(512, 4), (512, 8), (1024, 8)]
    for threads, blocks in cuts:
        shared_vectors = _shared_vectors(-(-vectors // blocks), threads, 4)
        if shared_vectors * threads <= most_shared and shared_vectors <= 12:
            return FullRowChoice("block" if blocks == 1 else "cluster", threads, 4, shared_vectors, blocks)
    blocks = min(-(-vectors // (_GRID_THREADS * _GRID_VECTORS)), multiprocessors)
    shared_vectors = _shared_vectors(-(-vectors // blocks), _GRID_THREADS, _GRID_REGISTERS)
    shared_vectors = min(shared_vectors, most_shared // _GRID_THREADS // 4 * 4)
    return FullRowChoice(
        "grid", _GRID_THREADS, _GRID_REGISTERS, shared_vectors, blocks, groups=multiprocessors // blocks
    )


def alternatives(
    vocab_size: int, itemsize: int, compute_capability: int, shared_per_block: int, multiprocessors: int
) -> list[FullRowChoice]:
    """Every choice worth timing, for benchmark/sweep.py: the one of choose_full_row() first."""
    vectors = -(-vocab_size * itemsize // VECTOR_BYTES)
    most_shared = (shared_per_block - _STATIC_SHARED) // VECTOR_BYTES
    found = [choose_full_row(vocab_size, itemsize, compute_capability, shared_per_block, multiprocessors)]
    for kernel, registers, cluster in kernel_variants(compute_capability):
        if kernel == "warp":
            if vectors <= registers * _WARP:
                found.append(FullRowChoice(kernel, _WARP * _WARP_ROWS, registers))
            continue
        cuts = [(threads, cluster) for threads in (64, 128, 256, 512, 1024)]
        if kernel == "grid":
            cuts = [
                (_GRID_THREADS, blocks) for blocks in (16, 32, 64, 128, multiprocessors) if blocks <= multiprocessors
            ]
        for threads, blocks in cuts:
            shared_vectors = _shared_vectors(-(-vectors // blocks), threads, registers)
            # Neither threads without a vector, nor a row that does not fit.
            if vectors > (threads - _WARP) * blocks and shared_vectors * threads <= most_shared:
                groups = multiprocessors // blocks if kernel == "grid" else 0
                found.append(FullRowChoice(kernel, threads, registers, shared_vectors, blocks, groups))
    return list(dict.fromkeys(found))


def _shared_vectors(share: int, threads: int, in_registers: int) -> int:
    """How many vectors of shared memory a thread needs: a multiple of 4, as the kernel asks for them."""
    # A block's share is rounded up to whole warps' vectors.
    share = _round_up(share, _WARP)
    return _round_up(max(-(-share // threads) - in_registers, 0), 4)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
