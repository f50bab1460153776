# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: plans the launches of the kernels in csrc/, which cuda_driver.py compiles and runs.

A launch goes to torch's current stream on the logits' device, waits for nothing, and takes all its memory from torch's
caching allocator, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import sys
from functools import cache

import numpy as np
import torch
from torch import Tensor

from .. import env
from ..cuda_runtime import driver, tickets
from ..layout import topk_launch
from ..layout.topk_choice import MAX_K, KernelChoice, choose
from ..problem import Problem, Start, TopK

_PROBLEM_DTYPE = np.dtype(f"V{topk_launch.PROBLEM_BYTES}")
_FORMATS = topk_launch.FORMATS
_MAX_ROWS = topk_launch.MAX_ROWS
_SHARED_BYTES_UNASKED = 48 << 10  # what a kernel has without asking

unavailable = driver.unavailable


def supports(dtype: torch.dtype, k: int) -> bool:
    """Whether the kernels take logits of that dtype and that k."""
    return dtype in _FORMATS and k <= MAX_K


def row_topk(problem: Problem, out: TopK, choice: KernelChoice | None = None) -> None:
    """Launches the kernel on the rows of `problem` and writes `out`; with another layout than its own if one is given."""
    _launch(problem, None, out, choice)


def prepare(problem: Problem, device: torch.device, beam_scores: Tensor | None = None) -> Start:
    """row_topk(), or with beam_scores beam_topk(), of tensors like these, which may be meta tensors: all that does not change
    with their addresses."""
    shape, strides, itemsize = problem.logits.shape, problem.logits.stride(), problem.logits.element_size()
    rows, index = topk_launch.row_count(shape), device.index
    if rows == 0:
        return lambda logits, out, beam_scores=None, mask=None, row_temperature=None: None
    choice = _choice(rows, shape[-1], problem.k, itemsize, index, beam_scores is not None)
    unaligned, aligned = (
        topk_launch.plan(_layout(problem, is_aligned, beam_scores), choice) for is_aligned in (False, True)
    )
    has_adjacent = strides[-1] == 1 or shape[-1] == 1

    def run(
        logits: Tensor,
        out: TopK,
        beam_scores: Tensor | None = None,
        mask: Tensor | None = None,
        row_temperature: Tensor | None = None,
    ) -> None:
        address = logits.data_ptr()
        planned = unaligned if address % 16 else aligned
        if planned is None or not has_adjacent or address % itemsize:
            _launch(problem.at(logits, mask, row_temperature), beam_scores, out)
            return
        _start(
            planned,
            index,
            address,
            problem.temperature,
            0 if row_temperature is None else row_temperature.data_ptr(),
            0 if mask is None else mask.data_ptr(),
            0 if beam_scores is None else beam_scores.data_ptr(),
            out,
        )

    return run


def beam_topk(problem: Problem, beam_scores: Tensor, out: TopK) -> None:
    """The same, then the merge over the beams of each batch entry, in the same launch."""
    _launch(problem, beam_scores, out)


def read_rows(logits: Tensor) -> None:
    """Reads the tensor's bytes with 16-byte loads and writes nothing: the floor that a single pass is measured against.

    Args:
        logits: contiguous CUDA tensor whose data starts at a multiple of 16 bytes; a tail below 16 bytes is not read.
    """
    device = logits.get_device()
    vectors = logits.numel() * logits.element_size() // 16
    threads, per_thread = 256, 8
    blocks = max(1, min(-(-vectors // (threads * per_thread)), 2**31 - 1))
    function = driver.function(device, "fused_topk::read_rows_kernel")
    arguments = (np.uint64(logits.data_ptr()), np.int64(vectors), np.uint64(0))
    driver.call(function, (blocks,), threads, arguments, device)


def kernel_names() -> list[str]:
    """Every variant that a launch can ask for, as name expressions for NVRTC."""
    return ["fused_topk::read_rows_kernel", *topk_launch.kernel_names()]


def kernel_of(problem: Problem, device: int, beam_scores: Tensor | None = None) -> str:
    """The kernel that a launch asks for, on logits as torch allocates them: contiguous, from a multiple of 16 bytes on. The
    tensors may be meta tensors, and have at least one row."""
    logits = problem.logits
    rows, vocab_size = topk_launch.row_count(logits.shape), logits.shape[-1]
    choice = _choice(rows, vocab_size, problem.k, logits.element_size(), device, beam_scores is not None)
    planned = topk_launch.plan(_layout(problem, True, beam_scores), choice)
    assert planned is not None, "contiguous tensors have one stride"
    return planned.kernel


def choice_of(problem: Problem) -> KernelChoice:
    """The layout over the GPU that a launch of `problem` gets."""
    vocab_size = problem.logits.shape[-1]
    rows = problem.logits.numel() // vocab_size
    return _choice(
        rows,
        vocab_size,
        problem.k,
        problem.logits.element_size(),
        problem.logits.get_device(),
    )


def _launch(
    problem: Problem,
    beam_scores: Tensor | None,
    out: TopK,
    choice: KernelChoice | None = None,
) -> None:
    logits, mask, row_temperature = readable(problem.logits), problem.mask, problem.row_temperature
    shape, device, address = logits.shape, logits.get_device(), logits.data_ptr()
    rows = topk_launch.row_count(shape)
    if rows == 0:
        return
    if choice is None:
        choice = _choice(rows, shape[-1], problem.k, logits.element_size(), device, beam_scores is not None)
    planned = topk_launch.plan(_layout(problem._replace(logits=logits), address % 16 == 0, beam_scores), choice)
    if planned is None:
        # More unrelated strides than the kernel walks: the one case in which rows are copied.
        contiguous = problem._replace(
            logits=logits.contiguous(),
            mask=None if mask is None else mask.contiguous(),
            row_temperature=None if row_temperature is None else row_temperature.contiguous(),
        )
        return _launch(contiguous, beam_scores, out, choice)
    _start(
        planned,
        device,
        address,
        problem.temperature,
        0 if row_temperature is None else row_temperature.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        0 if beam_scores is None else beam_scores.data_ptr(),
        out,
    )


def _layout(problem: Problem, is_aligned: bool, beam_scores: Tensor | None) -> topk_launch.Layout:
    logits, mask, row_temperature = problem.logits, problem.mask, problem.row_temperature
    return topk_launch.Layout(
        logits.shape,
        logits.stride(),
        logits.dtype,
        is_aligned,
        problem.k,
        problem.values,
        problem.normalize,
        mask is not None and mask.dtype != torch.bool,
        None if mask is None else mask.stride(),
        None if row_temperature is None else row_temperature.stride(),
        None if beam_scores is None else beam_scores.stride(),
    )


def _start(
    planned: topk_launch.Launch,
    device: int,
    logits: int,
    temperature: float,
    row_temperature: int,
    mask: int,
    beam_scores: int,
    out: TopK,
) -> None:
    """Launches what is planned, with the addresses of this call."""
    function = driver.function(device, planned.kernel)
    scratch = first_ticket = 0
    if planned.scratch_words:
        workspace = torch.empty(planned.scratch_words, dtype=torch.int64, device=out.values.device)
        scratch = workspace.data_ptr()
        first_ticket = tickets.zeroed(device, planned.row_tickets + planned.beam_tickets)
    filled = planned.fill(
        logits,
        temperature,
        row_temperature,
        mask,
        beam_scores,
        scratch,
        first_ticket,
        out.values.data_ptr(),
        out.indices.data_ptr(),
        out.logsumexp.data_ptr(),
    )
    # One element of that many bytes: CuPy passes it by value.
    argument = np.frombuffer(filled, _PROBLEM_DTYPE)
    shared_bytes = planned.shared_bytes
    if shared_bytes > _SHARED_BYTES_UNASKED:
        # A kernel for hardware that has less than this needs less.
        shared_bytes = driver.affordable_shared_bytes(device, planned.kernel, shared_bytes)
    driver.call(function, planned.grid, planned.threads, (argument,), device, shared_bytes)


def readable(logits: Tensor) -> Tensor:
    """The logits themselves, unless their elements are not adjacent or not aligned to their own size."""
    if (logits.stride(-1) != 1 and logits.shape[-1] > 1) or logits.data_ptr() % logits.element_size():
        return logits.clone(memory_format=torch.contiguous_format)
    return logits


@cache
def _choice(rows: int, vocab_size: int, k: int, itemsize: int, device: int, has_beams: bool = False) -> KernelChoice:
    choice = choose(
        rows, vocab_size, k, itemsize, torch.cuda.get_device_properties(device).multi_processor_count, has_beams
    )
    if env.print_choice():
        print(
            f"fused_topk: {rows} x {vocab_size} of {itemsize} bytes, k={k}: {choice.regime}, {choice}",
            file=sys.stderr,
        )
    return choice
