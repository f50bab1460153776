# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend's full rows: chooses, packs and launches the kernels of csrc/softmax_rows.cu through cuda.py."""

from __future__ import annotations

import struct
from functools import cache

import numpy as np
import torch
from torch import Tensor

from . import cuda
from .full_row_choice import FullRowChoice, choose_full_row
from .layout import collapse
from .problem import FullRowProblem

_KINDS = {"softmax": 0, "log_softmax": 1, "logsumexp": 2}
# struct FullRows of csrc/full_row.cuh, field by field.
_PROBLEM = struct.Struct("<3Q2q3If2I2Q")
_PROBLEM_DTYPE = np.dtype(f"V{_PROBLEM.size}")
_LEADING_DIMS = 2
# cudaDevAttrMaxSharedMemoryPerBlockOptin
_MAX_SHARED_PER_BLOCK = 97


def full_rows(problem: FullRowProblem, out: Tensor) -> None:
    """Launches the kernel on the rows of `problem` and writes `out`, which is contiguous."""
    logits = cuda._readable(problem.logits, None)
    *leading, vocab_size = logits.shape
    sizes, (strides,) = collapse(leading, [logits.stride()[:-1]])
    if len(sizes) > _LEADING_DIMS:
        # More unrelated strides than the kernel walks: the one case in which rows are copied.
        logits = logits.contiguous()
        sizes, (strides,) = collapse(leading, [logits.stride()[:-1]])
    rows = logits.numel() // vocab_size
    if rows > cuda._MAX_ROWS:
        raise ValueError(
            f"`logits` must have at most {cuda._MAX_ROWS} rows for the CUDA kernel, got {rows}; pass them in parts"
        )
    # One number a row; a temperature for each row seldom has other strides.
    temperature = None if problem.row_temperature is None else problem.row_temperature.contiguous()

    device = logits.get_device()
    is_written = problem.values != "logsumexp"
    choice = _choice(device, vocab_size, logits.element_size())
    out_dtype = out.dtype if is_written else logits.dtype
    bytes_that_align = [logits.data_ptr(), vocab_size * logits.element_size()]
    bytes_that_align += [stride * logits.element_size() for stride in strides]
    bytes_that_align += [out.data_ptr(), vocab_size * out_dtype.itemsize] if is_written else []
    is_aligned = all(count % 16 == 0 for count in bytes_that_align)
    name = kernel_name(choice.kernel, choice.blocks_per_row, logits.dtype, out_dtype, is_aligned)

    parts = counters = 0
    if choice.kernel == "long":
        # (m, d) of each chunk, then of each row.
        workspace = torch.empty(rows * (choice.blocks_per_row + 1), dtype=torch.int64, device=logits.device)
        parts = workspace.data_ptr()
        counters = cuda._tickets(device, 1 + 3 * rows)
    packed = _PROBLEM.pack(
        logits.data_ptr(),
        out.data_ptr(),
        0 if temperature is None else temperature.data_ptr(),
        strides[-1],
        strides[0] if len(sizes) == 2 else 0,
        sizes[-1],
        rows,
        vocab_size,
        problem.temperature,
        _KINDS[problem.values],
        choice.vectors_per_block,
        parts,
        counters,
    )
    cuda._call(
        cuda._function(device, name),
        (choice.blocks(rows, is_written),),
        choice.threads,
        (np.frombuffer(packed, _PROBLEM_DTYPE),),
        device,
        choice.shared_bytes,
    )


def kernel_name(kernel: str, blocks: int, dtype: torch.dtype, out_dtype: torch.dtype, is_aligned: bool) -> str:
    """A kernel of csrc/softmax_rows.cu, as NVRTC wants it named."""
    formats = f"fused_topk::{cuda._FORMATS[dtype]}, fused_topk::{cuda._FORMATS[out_dtype]}"
    cluster = f"{blocks}, " if kernel == "cluster" else ""
    return f"fused_topk::full_rows::softmax_{kernel}_rows_kernel<{formats}, {cluster}{str(is_aligned).lower()}>"


def kernel_names(compute_capability: int) -> list[str]:
    """Every variant that a launch can ask for on a GPU of that compute capability (times ten)."""
    kernels = [("warp", 1), ("block", 1), ("long", 1)]
    if compute_capability >= 90:
        kernels += [("cluster", blocks) for blocks in (2, 4, 8)]
    return [
        kernel_name(kernel, blocks, dtype, out_dtype, is_aligned)
        for dtype in cuda._FORMATS
        for out_dtype in dict.fromkeys((dtype, torch.float32))
        for kernel, blocks in kernels
        for is_aligned in (True, False)
    ]


@cache
def _choice(device: int, vocab_size: int, itemsize: int) -> FullRowChoice:
    from cupy.cuda import runtime

    major, minor = torch.cuda.get_device_capability(device)
    shared_per_block = runtime.deviceGetAttribute(_MAX_SHARED_PER_BLOCK, device)
    return choose_full_row(vocab_size, itemsize, 10 * major + minor, shared_per_block)
