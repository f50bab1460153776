# SPDX-License-Identifier: Apache-2.0
"""The table of suites. A line has the shapes, our function, all that it is timed beside, how its answers are checked, and the bytes
that the call must move: with the bandwidth of the device they predict its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import cases, check, ours, rivals
from .cases import Case
from .timing import Function

Maker = Callable[[Case, torch.device], Function | None]
"""Makes the function of a case for a device; None where it has none."""


class Suite(NamedTuple):
    cases: tuple[Case, ...]
    ours: Callable[[Case, torch.device], Function]
    others: dict[str, Maker]  # the first one is the floor
    error: Callable[[Case, Tensor, Any], str | None]  # what is wrong with our answer
    bytes: Callable[[Case], int]
    device: str = ""  # "cuda" or "cpu": of that alone
    is_captured: bool = True  # by a CUDA graph


def read(case: Case) -> int:
    """Logits read once; float32 values, int64 indices and a float32 logsumexp written once."""
    logits = case.logit_bytes // 2 if case.kind == "ragged" else case.logit_bytes
    return logits + case.rows * case.k * 12 + case.num_rows * 4


def read_of_columns(case: Case) -> int:
    """The same of a process's columns."""
    return case.logit_bytes // dist.get_world_size() + case.rows * (case.k * 12 + 4)


def copied(case: Case) -> int:
    return 2 * case.logit_bytes


def drawn(case: Case) -> int:
    """A token and its log-probability."""
    return case.logit_bytes + case.rows * 12


def routed(case: Case) -> int:
    """Weights and experts."""
    return case.logit_bytes + case.rows * case.k * 12


def head(case: Case) -> int:
    """The weight and hidden states read once."""
    return (case.vocab + case.rows) * case.depth * case.itemsize + case.rows * (case.k * 12 + 4)


def three_products(case: Case) -> int:
    """The weight read by each of three products, its gradient and that of hidden states written."""
    return 4 * (case.vocab + case.rows) * case.depth * case.itemsize


TOPK, FLASHINFER = rivals.TOPK, rivals.TOPK | rivals.FLASHINFER_TOPK

# fmt: off
SUITES = {
    #                       shapes               ours             beside          checked by      bytes
    "decode":        Suite(cases.DECODE,        ours.topk,       TOPK,           check.topk,     read),
    "paper":         Suite(cases.PAPER,         ours.topk,       TOPK,           check.topk,     read),
    "routing":       Suite(cases.ROUTING,       ours.topk,       TOPK,           check.topk,     read),
    "long":          Suite(cases.LONG,          ours.topk,       TOPK,           check.topk,     read),
    "k":             Suite(cases.GROWING_K,     ours.topk,       TOPK,           check.topk,     read),
    "large k":       Suite(cases.LARGE_K,       ours.topk,       FLASHINFER,     check.topk,     read,   "cuda"),
    "ragged":        Suite(cases.RAGGED,        ours.topk,       FLASHINFER,     check.topk,     read,   "cuda"),
    "distributions": Suite(cases.DISTRIBUTIONS, ours.topk,       TOPK,           check.topk,     read),
    "unaligned":     Suite(cases.UNALIGNED,     ours.topk,       TOPK,           check.topk,     read),
    "beams":         Suite(cases.BEAMS,         ours.beams,      rivals.BEAMS,   check.beams,    read),
    "softmax":       Suite(cases.SOFTMAX,       ours.softmax,    rivals.SOFTMAX, check.softmax,  copied),
    "draws":         Suite(cases.DRAWS,         ours.draw,       rivals.DRAWS,   check.draws,    drawn),
    # Calls from Python, which takes longer than the GPU.
    "eager":         Suite(cases.EAGER,         ours.topk,       TOPK,           check.topk,     read,   "cuda", False),
    "routers":       Suite(cases.MODEL_ROUTERS, ours.route,      rivals.ROUTERS, check.routers,  routed),
    "heads":         Suite(cases.HEADS,         ours.head,       rivals.HEADS,   check.heads,    head,   "cuda"),
    "training":      Suite(cases.TRAINING,      ours.train,      rivals.LOSSES,  check.training, three_products, "cuda", False),
    # Under torchrun: a vocabulary over its processes.
    "distributed":   Suite(cases.SHARDED,       ours.sharded,    rivals.SHARDED, check.sharded,  read_of_columns),
    # Shapes of a CPU.
    "cpu":           Suite(cases.CPU_TOPK,      ours.topk,       TOPK,           check.topk,     read,   "cpu"),
    "cpu softmax":   Suite(cases.CPU_SOFTMAX,   ours.softmax,    rivals.SOFTMAX, check.softmax,  copied, "cpu"),
    "cpu heads":     Suite(cases.CPU_HEADS,     ours.head,       rivals.HEADS,   check.heads,    head,   "cpu"),
}
# fmt: on
