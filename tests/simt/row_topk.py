# SPDX-License-Identifier: Apache-2.0
"""The launches of fused_topk/operators/row_topk.py on the emulated machine, one function each: what memory each may touch."""

from typing import Any

import torch
from torch import Tensor

from fused_topk import TopK
from fused_topk.backends import cuda
from fused_topk.layout.topk_choice import KernelChoice
from fused_topk.problem import TopkProblem
from oracle import start

from .emulate import emulated
from .launch import Array, Outcome


def row_topk(
    problem: TopkProblem,
    choice: KernelChoice,
    *,
    beam_scores: Tensor | None = None,
    readable: int | None = None,
    **how: Any,
) -> tuple[TopK, Outcome]:
    """What the kernel of `choice` makes of CPU tensors. readable: how many tokens of each row it may read. how: see emulated()."""
    out = empty_result(problem, beam_scores)
    inputs = {**problem.rows._asdict(), "logits": problem.rows.logits[..., :readable], "beam_scores": beam_scores}
    arrays = [Array(name, x, "input") for name, x in inputs.items() if isinstance(x, Tensor) and x.numel()]
    arrays += [Array(name, tensor, "output") for name, tensor in out._asdict().items()]
    with emulated(arrays, **how) as outcomes:
        start(cuda, problem, out, beam_scores, choice=choice)
    return out, outcomes[0]


def empty_result(problem: TopkProblem, beam_scores: Tensor | None = None) -> TopK:
    """Memory for the result."""
    logits, k = problem.rows.logits, problem.k
    shape = (*(logits.shape[:-1] if beam_scores is None else logits.shape[:1]), k)
    values = logits.dtype if problem.values in ("logits", "state") else torch.float32
    rows = logits.shape[:-1]
    return TopK(
        torch.empty(shape, dtype=values, device=logits.device),
        torch.empty(shape, dtype=torch.int64, device=logits.device),
        torch.empty((2, *rows) if problem.values == "state" else rows, dtype=torch.float32, device=logits.device),
    )
