# SPDX-License-Identifier: Apache-2.0
"""Who owns a full row between its read and its write, and what a launch of csrc/full_rows/softmax_rows.cu looks like: pure functions
of the shape, the strides and the GPU, testable without one.

======= ============================================== ==========================================
kernel  the row waits in                               when
======= ============================================== ==========================================
warp    registers of a warp                            up to 2 KiB
block   registers of a block                           up to 32 KiB
shared  registers and shared memory of a block         up to 288 KiB, or what shared memory allows
grid    registers and shared memory of many blocks     as much as the GPU holds
long    as grid; what does not fit is read twice       longer rows
======= ============================================== ==========================================

The limits are measured in csrc/TUNING.md ("Which kernel, and how a row is cut").

The number of rows plays no part: how a row is cut, and in which order its sums are added, follows from V, the dtype and
the GPU. So a row has the same result, bit for bit, in whatever batch it comes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import FullRowProblem
from ..rows import LogitRows
from .kernel_arguments import FullRows, rows_writer, writer
from .launch import FORMATS, check_row_count, collapse, has_adjacent, row_count
from .tuning import resident_warps

VECTOR_BYTES = 16
_WARP = 32
WARP_ROWS = 4
GRID_THREADS = 512
_LONG_THREADS = 768
_REGISTERS = 4
_VECTORS = 16
# Bytes of shared memory for a block's variables and for the system.
_STATIC_SHARED = 2048


_KINDS = {"softmax": 0, "log_softmax": 1, "logsumexp": 2}
_LEADING_DIMS = 2
# Results up to this part of the L2 cache stay in it, for the kernel that reads them next. The logits then leave the cache first.
_RESULT_OF_CACHE = 0.75

# The fields that change from call to call. A plan has all others.
_write_rows = rows_writer(FullRows)
_write_out, _OUT = writer(FullRows, "out")
_write_scratch, _SCRATCH = writer(FullRows, "parts", "counters")


class FullRowChoice(NamedTuple):
    """The kernel of a launch, and how it cuts a row."""

    kernel: str  # "warp", "block", "shared", "grid" or "long"
    threads: int
    vectors: int  # vectors of 16 bytes that each thread keeps in registers
    shared_vectors: int = 0  # and in shared memory
    blocks_per_row: int = 1
    # "grid" and "long": how many groups of blocks_per_row blocks run at a time. Each group takes row after row.
    owners: int = 0

    @property
    def shared_bytes(self) -> int:
        return self.shared_vectors * self.threads * VECTOR_BYTES

    @property
    def is_cooperative(self) -> bool:
        """Whether blocks wait for each other through global memory, so that all must run at the same time."""
        return self.kernel in ("grid", "long")

    def owners_of(self, rows: int) -> int:
        """How many owners share that many rows."""
        return min(rows, self.owners or rows)

    def blocks(self, rows: int) -> int:
        """The grid for that many rows."""
        if self.kernel == "warp":
            return -(-rows // WARP_ROWS)
        return self.owners_of(rows) * self.blocks_per_row


class Machine(NamedTuple):
    """The limits of a GPU that a choice depends on."""

    shared_per_block: int
    multiprocessors: int
    capability: int

    def cut(self, kernel: str, vectors: int, most_threads: int, blocks: int = 1) -> FullRowChoice | None:
        """A row of that many vectors cut into so many blocks, if it fits there."""
        share = -(-vectors // blocks)
        shared_vectors = _round_up(max(-(-share // most_threads) - _REGISTERS, 0), 2)
        threads = _round_up(-(-share // (_REGISTERS + shared_vectors)), _WARP)
        shared_bytes = shared_vectors * threads * VECTOR_BYTES + _STATIC_SHARED
        if shared_bytes > self.shared_per_block:
            return None
        if kernel != "grid":
            return FullRowChoice(kernel, threads, _REGISTERS, shared_vectors, blocks)
        resident = min(self.grid_blocks, (self.shared_per_block + 1024) // shared_bytes)
        owners = self.multiprocessors * resident // blocks
        return FullRowChoice(kernel, threads, _REGISTERS, shared_vectors, blocks, owners) if owners else None

    @property
    def grid_blocks(self) -> int:
        """How many blocks of "grid" a multiprocessor holds: as many as the kernel is compiled for."""
        return resident_warps("kGridRows", self.capability) * _WARP // GRID_THREADS

    def grid(self, vectors: int) -> FullRowChoice | None:
        """A row of that many vectors cut into as few blocks as hold it."""
        most_shared = (self.shared_per_block + 1024) // self.grid_blocks - _STATIC_SHARED
        in_shared = min(most_shared // VECTOR_BYTES // GRID_THREADS // 2 * 2, _VECTORS - _REGISTERS)
        return self.cut("grid", vectors, GRID_THREADS, -(-vectors // ((in_shared + _REGISTERS) * GRID_THREADS)))

    def long(self, vectors: int) -> FullRowChoice:
        """A row of which every multiprocessor keeps what it can."""
        share = -(-vectors // self.multiprocessors)
        most = (self.shared_per_block - _STATIC_SHARED) // VECTOR_BYTES // _LONG_THREADS // 2 * 2
        shared_vectors = min(_round_up(max(-(-share // _LONG_THREADS) - _REGISTERS, 0), 2), most)
        return FullRowChoice("long", _LONG_THREADS, _REGISTERS, shared_vectors, self.multiprocessors, 1)


def choose_full_row(
    vocab_size: int, itemsize: int, shared_per_block: int, multiprocessors: int, capability: int
) -> FullRowChoice:
    """The choice for rows of `vocab_size` logits of `itemsize` bytes. shared_per_block: the most bytes of shared memory that a
    block may have. capability: the compute capability times ten."""
    machine = Machine(shared_per_block, multiprocessors, capability)
    vectors = -(-vocab_size * itemsize // VECTOR_BYTES)
    if vectors <= 4 * _WARP:
        return FullRowChoice("warp", _WARP * WARP_ROWS, 4)
    if vectors <= 2048:
        # The shorter the row, the more its latency counts, which more threads shorten.
        in_registers = 2 if vectors <= 512 else 4
        return FullRowChoice("block", _round_up(-(-vectors // in_registers), _WARP), in_registers)
    # Two blocks on a multiprocessor, or one with the threads of both.
    threads = 512 if vectors <= 512 * _VECTORS else 1024
    cuts = (machine.cut("shared", vectors, threads), machine.grid(vectors))
    return next((choice for choice in cuts if choice), machine.long(vectors))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class FullRowLaunch(NamedTuple):
    """A launch but for its addresses."""

    kernel: str
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    is_cooperative: bool
    argument: bytes  # struct FullRows with the addresses left zero
    scratch_words: int  # of 8 bytes: (m, d) of a row's blocks
    counters: int  # zeroed, of 4 bytes

    def fill(self, rows: LogitRows, scratch: int, counters: int, out: Tensor) -> bytearray:
        """The struct with the addresses of a call; `scratch` and `counters` are 0 where there are none."""
        filled = bytearray(self.argument)
        _write_rows(filled, rows)
        _write_out(filled, _OUT, out.data_ptr())
        if scratch:
            _write_scratch(filled, _SCRATCH, scratch, counters)
        return filled


def plan(
    problem: FullRowProblem, out_dtype: torch.dtype, is_aligned: bool, choice: FullRowChoice, cache_bytes: int
) -> FullRowLaunch | None:
    """The launch for at least one row, or None if the kernel cannot read the rows, as for topk_launch.plan(). Tensors may be meta tensors.
    is_aligned: whether the logits, and the result unless it is a logsumexp, start at multiples of 16 bytes. cache_bytes: of the L2
    cache."""
    logits, values = problem.rows.logits, problem.values
    *leading, vocab_size = logits.shape
    rows = row_count(logits.shape)
    check_row_count(rows)
    sizes, (strides,) = collapse(leading, [logits.stride()[:-1]])
    if len(sizes) > _LEADING_DIMS or not has_adjacent(logits):
        return None
    is_written = values != "logsumexp"
    dtype = logits.dtype
    out_dtype = out_dtype if is_written else dtype
    bytes_that_align = [stride * dtype.itemsize for stride in strides]
    bytes_that_align += [vocab_size * each.itemsize for each in (dtype, out_dtype)]
    # A row with a length may end within a vector.
    is_aligned = is_aligned and problem.rows.lengths is None and all(count % 16 == 0 for count in bytes_that_align)
    owners = choice.owners_of(rows) if choice.is_cooperative else 0
    argument = FullRows(
        inner_stride=strides[-1],
        inner_rows=sizes[-1],
        V=vocab_size,
        kind=_KINDS[values],
        result_stays=is_written and rows * vocab_size * out_dtype.itemsize <= cache_bytes * _RESULT_OF_CACHE,
        shared_vectors=choice.shared_vectors,
        outer_stride=strides[0] if len(sizes) == 2 else 0,
        rows=rows,
        blocks_per_row=choice.blocks_per_row,
    )
    return FullRowLaunch(
        kernel_name(choice, dtype, out_dtype, is_aligned),
        (choice.blocks(rows),),
        choice.threads,
        choice.shared_bytes,
        choice.is_cooperative,
        bytes(argument),
        scratch_words=owners * 2 * choice.blocks_per_row,
        counters=owners,
    )


def kernel_name(choice: FullRowChoice, dtype: torch.dtype, out_dtype: torch.dtype, is_aligned: bool) -> str:
    """A kernel of csrc/full_rows/softmax_rows.cu, as NVRTC wants it named."""
    formats = f"fused_topk::{FORMATS[dtype]}, fused_topk::{FORMATS[out_dtype]}"
    kernel = f"fused_topk::full_rows::softmax_{choice.kernel}_rows_kernel"
    return f"{kernel}<{formats}, {choice.vectors}, {str(is_aligned).lower()}>"
