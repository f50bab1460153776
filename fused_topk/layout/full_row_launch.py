# SPDX-License-Identifier: Apache-2.0
"""What a launch of csrc/full_rows/softmax_rows.cu looks like: a pure function of shapes and strides, as topk_launch.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import FullRowProblem
from ..rows import LogitRows
from .full_row_choice import FullRowChoice
from .kernel_arguments import FullRows, rows_writer, writer
from .launch import FORMATS, check_row_count, collapse, row_count

_KINDS = {"softmax": 0, "log_softmax": 1, "logsumexp": 2}
_LEADING_DIMS = 2
# Results up to this part of the L2 cache stay in it, for the kernel that reads them next. The logits then leave the cache first.
_RESULT_OF_CACHE = 0.75

# The fields that change from call to call. A plan has all others.
_write_rows = rows_writer(FullRows)
_write_out, _OUT = writer(FullRows, "out")
_write_scratch, _SCRATCH = writer(FullRows, "parts", "counters")


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
    """The launch for at least one row, or None if the rows have more unrelated strides than the kernel walks.

    Tensors may be meta tensors. is_aligned: whether the logits, and the result unless it is a logsumexp, start at multiples of
    16 bytes. cache_bytes: of the GPU's L2 cache.
    """
    logits, values = problem.rows.logits, problem.values
    *leading, vocab_size = logits.shape
    rows = row_count(logits.shape)
    check_row_count(rows)
    sizes, (strides,) = collapse(leading, [logits.stride()[:-1]])
    if len(sizes) > _LEADING_DIMS:
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
