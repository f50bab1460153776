# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: what all families share of the launches that :mod:`fused_topk.layout` plans and
:mod:`fused_topk.cuda_runtime` makes.

A launch goes to torch's current stream on the logits' device, waits for nothing, and takes all its memory from torch's
caching allocator, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import sys
from functools import cache

import torch
from torch import Tensor

from .. import env
from ..cuda_runtime import driver, tickets
from ..layout.launch import FORMATS, has_adjacent
from ..layout.topk_choice import MAX_K, KernelChoice, choose
from ..rows import LogitRows

_SHARED_BYTES_UNASKED = 48 << 10  # what a kernel has without asking

unavailable = driver.unavailable


def supports(dtype: torch.dtype, k: int) -> bool:
    """Whether the kernels take logits of that dtype and that k."""
    return dtype in FORMATS and k <= MAX_K


@cache
def topk_choice(
    rows: int, vocab_size: int, k: int, itemsize: int, device: int, has_beams: bool = False
) -> KernelChoice:
    """How such rows are laid over that GPU."""
    choice = choose(rows, vocab_size, k, itemsize, multiprocessors(device), has_beams)
    if env.print_choice():
        print(
            f"fused_topk: {rows} x {vocab_size} of {itemsize} bytes, k={k}: {choice.regime}, {choice}",
            file=sys.stderr,
        )
    return choice


def multiprocessors(device: int) -> int:
    """How many multiprocessors that GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def cache_bytes(device: int) -> int:
    """The size of that GPU's L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def workspace(index: int, device: torch.device, words: int, counters: int) -> tuple[Tensor | None, int, int]:
    """Scratch memory of that many words of 8 bytes, its address, and that of zeroed counters. 0 for what is not needed."""
    if not words:
        return None, 0, 0
    scratch = torch.empty(words, dtype=torch.int64, device=device)
    return scratch, scratch.data_ptr(), tickets.zeroed(index, counters)


def launch(
    device: int,
    kernel: str,
    grid: tuple[int, ...],
    threads: int,
    *structs: bytes | bytearray,
    shared_bytes: int = 0,
    is_cooperative: bool = False,
) -> None:
    """Launches a kernel on its arguments. On a GPU that has less shared memory than what is wanted, the kernel needs less."""
    function = driver.function(device, kernel)
    if shared_bytes > _SHARED_BYTES_UNASKED:
        shared_bytes = driver.affordable_shared_bytes(device, kernel, shared_bytes)
    driver.call(function, grid, threads, tuple(map(driver.argument, structs)), device, shared_bytes, is_cooperative)


def copied(rows: LogitRows) -> LogitRows:
    """The same rows in a form that the kernels can read. The logits are copied if the kernels cannot read them in place. If they
    can, the tensors have more unrelated strides than a kernel walks, and all are copied."""
    logits = rows.logits
    if not has_adjacent(logits) or logits.data_ptr() % logits.element_size():
        return rows._replace(logits=logits.clone(memory_format=torch.contiguous_format))
    return rows.contiguous()
