# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend's full rows: chooses, packs and launches the kernels of csrc/softmax_rows.cu through cuda_driver.py."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from ..cuda_runtime import driver, tickets
from ..layout.collapse import collapse
from ..layout.full_row_choice import KERNEL_VARIANTS, FullRowChoice, choose_full_row
from ..layout.kernel_arguments import FullRows, fields
from ..problem import FullRowProblem
from . import cuda

_KINDS = {"softmax": 0, "log_softmax": 1, "logsumexp": 2}
_LAYOUT, _ = fields(
    FullRows,
    "logits",
    "out",
    "row_temperature",
    "inner_stride",
    "inner_rows",
    "V",
    "temperature",
    "kind",
    "result_stays",
    "shared_vectors",
    "outer_stride",
    "rows",
    "blocks_per_row",
    "parts",
    "counters",
)
_PROBLEM_DTYPE = np.dtype(f"V{_LAYOUT.size}")
_LEADING_DIMS = 2
# Results up to this part of the L2 cache stay in it, for whoever reads them next; the logits then leave it first.
_RESULT_OF_CACHE = 0.75


def full_rows(problem: FullRowProblem, out: Tensor, choice: FullRowChoice | None = None) -> None:
    """Launches the kernel on the rows of `problem` and writes `out`, which is contiguous; with another cut of the rows
    than its own if one is given."""
    logits = cuda.readable(problem.logits)
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
    if choice is None:
        choice = _choice(device, vocab_size, logits.element_size())
    out_dtype = out.dtype if is_written else logits.dtype
    bytes_that_align = [logits.data_ptr(), vocab_size * logits.element_size()]
    bytes_that_align += [stride * logits.element_size() for stride in strides]
    bytes_that_align += [out.data_ptr(), vocab_size * out_dtype.itemsize] if is_written else []
    is_aligned = all(count % 16 == 0 for count in bytes_that_align)

    parts = counters = 0
    owners = choice.owners_of(rows)
    if choice.is_cooperative:
        workspace = torch.empty(owners * 2 * choice.blocks_per_row, dtype=torch.int64, device=logits.device)
        parts = workspace.data_ptr()
        counters = tickets.zeroed(device, owners)
    packed = _LAYOUT.pack(
        logits.data_ptr(),
        out.data_ptr(),
        0 if temperature is None else temperature.data_ptr(),
        strides[-1],
        sizes[-1],
        vocab_size,
        problem.temperature,
        _KINDS[problem.values],
        is_written and out.numel() * out.element_size() <= _cache_bytes(device) * _RESULT_OF_CACHE,
        choice.shared_vectors,
        strides[0] if len(sizes) == 2 else 0,
        rows,
        choice.blocks_per_row,
        parts,
        counters,
    )
    driver.call(
        driver.function(device, kernel_name(choice, logits.dtype, out_dtype, is_aligned)),
        (choice.blocks(rows),),
        choice.threads,
        (np.frombuffer(packed, _PROBLEM_DTYPE),),
        device,
        choice.shared_bytes,
        is_cooperative=choice.is_cooperative,
    )


def kernel_of(vocab_size: int, dtype: torch.dtype, device: int) -> str:
    """The kernel that contiguous rows ask for, with results in their own dtype."""
    choice = _choice(device, vocab_size, dtype.itemsize)
    return kernel_name(choice, dtype, dtype, is_aligned=vocab_size * dtype.itemsize % 16 == 0)


def kernel_name(choice: FullRowChoice, dtype: torch.dtype, out_dtype: torch.dtype, is_aligned: bool) -> str:
    """A kernel of csrc/softmax_rows.cu, as NVRTC wants it named."""
    formats = f"fused_topk::{cuda._FORMATS[dtype]}, fused_topk::{cuda._FORMATS[out_dtype]}"
    kernel = f"fused_topk::full_rows::softmax_{choice.kernel}_rows_kernel"
    return f"{kernel}<{formats}, {choice.vectors}, {str(is_aligned).lower()}>"


def kernel_names() -> list[str]:
    """Every variant that a launch can ask for."""
    return [
        kernel_name(FullRowChoice(kernel, 0, vectors), dtype, out_dtype, is_aligned)
        for dtype in cuda._FORMATS
        for out_dtype in dict.fromkeys((dtype, torch.float32))
        for kernel, vectors in KERNEL_VARIANTS
        for is_aligned in (True, False)
    ]


@cache
def _cache_bytes(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


@cache
def _choice(device: int, vocab_size: int, itemsize: int) -> FullRowChoice:
    properties = torch.cuda.get_device_properties(device)
    return choose_full_row(
        vocab_size,
        itemsize,
        driver.max_shared_bytes_per_block(device),
        properties.multi_processor_count,
    )
