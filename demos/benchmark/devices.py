# SPDX-License-Identifier: Apache-2.0
"""The device that is measured, and the floor there: what only reads the logits."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist
import typer
from torch import Tensor

from fused_topk import backends
from fused_topk.cuda_runtime import driver

from .timing import Function


def best_device() -> torch.device:
    """The first GPU if its kernels work, else the CPU."""
    gpu = torch.device("cuda", 0)
    return gpu if backends.available(gpu)["cuda"] is None else torch.device("cpu")


def device_of(name: str) -> torch.device:
    """The device that an option names, with an index for a GPU; without a name the best one. It must have kernels."""
    try:
        chosen = torch.device(name) if name else best_device()
    except RuntimeError as error:
        raise typer.BadParameter(f"--device must be cuda, cuda:N or cpu, got {name!r}") from error
    if chosen.type not in ("cuda", "cpu"):
        raise typer.BadParameter(f"--device must be cuda, cuda:N or cpu, got {name!r}")
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        chosen = torch.device("cuda", chosen.index or 0)
        if chosen.index >= count:
            raise typer.BadParameter(f"--device must be a GPU that torch sees (it sees {count}), got {name!r}")
    if cause := backends.available(chosen)[chosen.type]:
        raise typer.BadParameter(f"--device must have kernels, got {str(chosen)!r}: {cause}")
    if chosen.type == "cuda":
        # torch's own kernels and its counts of memory are of the current device.
        torch.cuda.set_device(chosen)
    return chosen


def join_processes(device: torch.device) -> torch.device:
    """This process's device, in the group of all processes of torchrun, which must have started this one."""
    if "RANK" not in os.environ:
        raise typer.BadParameter("--suite distributed needs torchrun --nproc-per-node 2 before demos/benchmark")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def reader(device: torch.device) -> Function:
    """Reads each logit once. On a CPU, torch's maximum of each row comes closest."""
    return read_rows if device.type == "cuda" else lambda logits: logits.amax(-1)


def read_rows(logits: Tensor) -> None:
    """Reads the tensor's bytes with 16-byte loads and writes nothing, by csrc/rows/read_rows.cu.

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
