# SPDX-License-Identifier: Apache-2.0
"""The device that is measured, and the floor there: what only reads the logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fused_topk import backends
from fused_topk.cuda_runtime import driver

from .timing import Function


def best_device() -> torch.device:
    """The first GPU if its kernels work, else the CPU."""
    gpu = torch.device("cuda", 0)
    return gpu if backends.available(gpu)["cuda"] is None else torch.device("cpu")


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
