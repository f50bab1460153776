# SPDX-License-Identifier: Apache-2.0
"""The ladder from three passes over the logits to one, as data, and how each rung is launched.

The rungs are csrc/ladder/ladder.cu and csrc/ladder/ladder.cpp. The package's own functions are faster than any of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fused_topk.backends import cpu
from fused_topk.cuda_runtime import driver
from fused_topk.operators import full_rows, row_topk
from fused_topk.problem import FullRowProblem, TopK, TopkProblem
from fused_topk.rows import LogitRows

GPU_K = (5, 10, 15, 30)
"""The k that the GPU's lists are compiled for."""
_HELD = 16384
_THREADS = 256
_MOST_PARTS = 256


class Rung(NamedTuple):
    """One step. Accesses are of the memory beyond the caches, for each logit; the k results are not counted."""

    number: str
    name: str
    title: str
    reads: int
    writes: int
    gives: str  # "softmax": (rows, V); "topk": values and indices (rows, k)
    largest: int = 2**31 - 1  # the longest row on a GPU

    @property
    def accesses(self) -> int:
        return self.reads + self.writes


RUNGS = (
    Rung("1", "naive", "naive softmax: nothing subtracted", 2, 1, "softmax"),
    Rung("2", "safe", "safe softmax: maximum, sum, write", 3, 1, "softmax"),
    Rung("3", "online", "online softmax: maximum and sum in one pass", 2, 1, "softmax"),
    Rung("4", "shuffle", "the same with warp shuffles", 2, 1, "softmax"),
    Rung("5", "registers", "16-byte loads, the row kept on the chip", 1, 1, "softmax", _HELD),
    Rung("6", "split", "a row over many blocks, (m, d) merged", 2, 1, "softmax"),
    Rung("7a", "safe_then_topk", "safe softmax, then top-k", 4, 1, "topk"),
    Rung("7b", "online_then_topk", "online softmax, then top-k", 3, 1, "topk"),
    Rung("7c", "safe_topk", "safe softmax + top-k fused", 2, 0, "topk"),
    Rung("7d", "online_topk", "online softmax + top-k fused (Algorithm 4)", 1, 0, "topk"),
    # A part of a row is read twice if all blocks together, or the CPU's cache, cannot hold the row.
    Rung("8a", "package_softmax", "this package: softmax", 1, 1, "softmax"),
    Rung("8b", "package_topk", "this package: softmax_topk", 1, 0, "topk"),
)
BY_NAME = {rung.name: rung for rung in RUNGS}

# enum Rung of csrc/ladder/ladder.h. On a CPU the rung with warp shuffles would be the rung before it.
_ON_CPU = {
    "naive": 0,
    "safe": 1,
    "online": 2,
    "registers": 3,
    "split": 4,
    "safe_then_topk": 5,
    "safe_topk": 6,
    "online_then_topk": 7,
    "online_topk": 8,
}


class Scratch(NamedTuple):
    """What a rung writes: allocated once, so that a rung's time has no allocation in it."""

    y: Tensor  # (rows, V)
    values: Tensor  # (rows, k)
    indices: Tensor  # (rows, k) int64
    logsumexp: Tensor  # (rows)
    partial: Tensor  # (rows, parts, 2)


def scratch_for(logits: Tensor, k: int = 0) -> Scratch:
    rows, _ = logits.shape
    return Scratch(
        torch.empty_like(logits),
        logits.new_empty(rows, k),
        logits.new_empty((rows, k), dtype=torch.int64),
        logits.new_empty(rows),
        logits.new_empty((rows, _MOST_PARTS, 2)),
    )


def unavailable(rung: Rung, device: torch.device, vocab_size: int, k: int) -> str | None:
    """None if the rung can run there, else why not."""
    if device.type == "cpu":
        return cpu.unavailable() or ("a CPU has no warps" if rung.name == "shuffle" else None)
    cause = driver.unavailable(device)
    if cause:
        return cause
    if vocab_size > rung.largest:
        return f"the registers of a block hold {rung.largest} elements"
    if rung.name == "registers" and vocab_size % 4:
        return "a row of 16-byte vectors has a multiple of 4 elements"
    if rung.number.startswith("7") and k not in GPU_K:
        return f"compiled for k of {', '.join(map(str, GPU_K))}"
    return None


def climb(rung: Rung, logits: Tensor, scratch: Scratch) -> None:
    """Runs a rung on contiguous float32 logits (rows, V); k is that of the scratch. Checks nothing."""
    device = logits.device
    if rung.name == "package_softmax":
        problem = FullRowProblem(LogitRows(logits), "softmax")
        full_rows.PREPARE[device.type](problem, device, logits.dtype)(problem.rows, scratch.y)
    elif rung.name == "package_topk":
        k = scratch.values.shape[-1]
        out = TopK(scratch.values, scratch.indices, scratch.logsumexp)
        of_rows = TopkProblem(LogitRows(logits), k, "softmax", "allowed")
        row_topk.PREPARE[device.type](of_rows, device)(of_rows.rows, out)
    elif logits.device.type == "cpu":
        _climb_on_cpu(rung, logits, scratch)
    else:
        _climb_on_gpu(rung, logits, scratch)


def kernel_names() -> list[str]:
    """Every kernel of csrc/ladder/ladder.cu, as NVRTC wants it named."""
    softmax = ("naive_softmax", "safe_softmax", "online_softmax", "shuffle_softmax", "register_softmax")
    names = [_kernel(name) for name in (*softmax, "partial_normalizer", "merged_softmax")]
    return names + [_kernel(n, k) for n in ("topk", "safe_softmax_topk", "online_softmax_topk") for k in GPU_K]


def _climb_on_cpu(rung: Rung, logits: Tensor, scratch: Scratch) -> None:
    rows, vocab_size = logits.shape
    cpu.native.ladder(
        _ON_CPU[rung.name],
        rows,
        vocab_size,
        scratch.values.shape[-1] if rung.gives == "topk" else 0,
        logits.data_ptr(),
        scratch.y.data_ptr(),
        scratch.values.data_ptr(),
        scratch.indices.data_ptr(),
        torch.get_num_threads(),
    )


def _climb_on_gpu(rung: Rung, logits: Tensor, scratch: Scratch) -> None:
    rows, vocab_size = logits.shape
    x, y = np.uint64(logits.data_ptr()), np.uint64(scratch.y.data_ptr())
    values, indices = np.uint64(scratch.values.data_ptr()), np.uint64(scratch.indices.data_ptr())
    length = np.uint32(vocab_size)
    k = scratch.values.shape[-1]

    def launch(
        kernel: str, arguments: tuple[np.generic, ...], blocks: tuple[int, ...] = (rows,), threads: int = _THREADS
    ) -> None:
        device = logits.get_device()
        driver.call(driver.function(device, kernel), blocks, threads, arguments, device)

    if rung.name in ("naive", "safe", "online", "shuffle"):
        launch(_kernel(f"{rung.name}_softmax"), (x, y, length))
    elif rung.name == "registers":
        # 8 vectors of 4 elements a thread, whole warps.
        launch(_kernel("register_softmax"), (x, y, length), threads=-(-vocab_size // (8 * 4 * 32)) * 32)
    elif rung.name == "split":
        # A part for every few thousand elements: small ones would leave the blocks with nothing but their merge.
        parts = min(_MOST_PARTS, -(-vocab_size // 4096))
        partial = np.uint64(scratch.partial.data_ptr())
        launch(_kernel("partial_normalizer"), (x, partial, length), (parts, rows))
        launch(_kernel("merged_softmax"), (x, partial, y, length), (parts, rows))
    elif rung.name in ("safe_then_topk", "online_then_topk"):
        launch(_kernel(f"{rung.name.split('_')[0]}_softmax"), (x, y, length))
        launch(_kernel("topk", k), (y, values, indices, length))
    else:
        launch(_kernel(f"{rung.name.split('_')[0]}_softmax_topk", k), (x, values, indices, length))


def _kernel(name: str, k: int | None = None) -> str:
    return f"fused_topk::ladder::{name}_kernel" + (f"<{k}>" if k else "")
