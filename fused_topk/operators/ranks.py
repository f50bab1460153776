# SPDX-License-Identifier: Apache-2.0
"""The ranks of given tokens in their rows: the operator `target_ranks`, and each backend's code. It has no gradient."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import cpu, cuda
from ..backends.reference import order_keys
from ..layout import launch, topk_launch
from ..layout.kernel_arguments import TargetRanks
from ..layout.topk_launch import Launch
from ..problem import RankProblem, TopK, TopkProblem
from ..rows import ROWS_SCHEMA, LogitRows, RowsLayout, unflattened
from .operator import Operator, map_rows


def reference(problem: RankProblem, out: Tensor) -> None:
    """The number of tokens that are not behind a target, in torch operations. Targets are counted one after another, so
    that memory does not grow with their number."""
    rows, targets, counts_ties = problem
    keys, places = order_keys(rows.counted()), torch.arange(rows.logits.shape[-1], device=targets.device)
    for i in range(targets.shape[-1]):
        target = targets[..., i : i + 1]
        token = target.clamp(0, rows.logits.shape[-1] - 1)
        key = keys.gather(-1, token)
        counts = keys >= key if counts_ties else (keys > key) | ((keys == key) & (places <= token))
        out[..., i].copy_(counts.sum(-1).where(target.squeeze(-1) >= 0, 0))


def on_cpu(problem: RankProblem, out: Tensor, instruction_set: str = "") -> None:
    """instruction_set: one of cpu.instruction_sets() instead of the best, for tests."""
    rows, targets, counts_ties = problem
    cpu.native.target_ranks(
        cpu.layout_of(rows, instruction_set),
        cpu.addresses_of(rows),
        targets.data_ptr(),
        targets.shape[-1],
        counts_ties,
        out.data_ptr(),
        cpu.num_threads(),
    )


def readable(rows: LogitRows) -> tuple[LogitRows, bytearray]:
    """The rows, copied if the kernels cannot read them, and the struct that says how they lie."""
    logits, planned = rows.logits, _launch_of(rows.layout())
    if planned is None or logits.data_ptr() % logits.element_size():
        return readable(cuda.copied(rows))
    # No kernel that is given this struct writes a result of top-k.
    return rows, planned.fill(rows, None, 0, 0, TopK(logits, logits, logits))


@lru_cache(maxsize=4096)
def _launch_of(layout: RowsLayout) -> Launch | None:
    """The launch for such rows. Only its struct is used, which says what is read."""
    # With values that are logits there would be no temperature.
    of_rows = TopkProblem(layout.meta(), 1, "softmax", "allowed")
    return topk_launch.plan(of_rows, is_aligned=False, choice=launch.RANK_CHOICE)


def on_cuda(problem: RankProblem, out: Tensor) -> None:
    rows, targets, counts_ties = problem
    rows, read = readable(rows)
    logits, index = rows.logits, rows.logits.get_device()
    count = targets.numel()
    launch.check_row_count(count)
    blocks = launch.ranking_blocks(count, logits.shape[-1], cuda.multiprocessors(index))
    words = -(-count * blocks // 2) if blocks > 1 else 0
    workspace, counts, counters = cuda.workspace(index, logits.device, words, count)
    wanted = TargetRanks(
        targets=targets.data_ptr(),
        ranks=out.data_ptr(),
        counts=counts,
        tickets=counters,
        num_targets=targets.shape[-1],
        blocks_per_target=blocks,
        counts_ties=counts_ties,
    )
    kernel = launch.kernel("ranks::target_ranks", logits.dtype)
    cuda.launch(index, kernel, (count, blocks), launch.RANK_THREADS, read, bytes(wanted))


_ON = {"reference": reference, "cpu": on_cpu, "cuda": on_cuda}


def _run(*arguments: Any) -> Tensor:
    rows, (targets, counts_ties, backend) = unflattened(arguments)
    chosen = backends.pick(rows.logits.device, rows.logits.dtype, 1, backend)
    out = torch.empty_like(targets, memory_format=torch.contiguous_format)
    if out.numel():
        _ON[chosen](RankProblem(rows.unscaled(), targets.contiguous(), counts_ties), out)
    return out


def _fake(*arguments: Any) -> Tensor:
    _, (targets, *_) = unflattened(arguments)
    return torch.empty_like(targets, memory_format=torch.contiguous_format)


_target_ranks = Operator(
    f"target_ranks({ROWS_SCHEMA}, Tensor targets, bool counts_ties, str? backend) -> Tensor",
    _run,
    _fake,
    map_over=map_rows,
)


def target_ranks(rows: LogitRows, targets: Tensor, counts_ties: bool, backend: str | None) -> Tensor:
    """The ranks of targets (..., n) in checked rows. See :class:`RankProblem`."""
    found: Tensor = _target_ranks(*rows, targets, counts_ties, backend)
    return found
