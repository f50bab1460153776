# SPDX-License-Identifier: Apache-2.0
"""The operator of sampling, `sample`: what torch.compile, fake tensors and CUDA graphs see of it.

Its random numbers are named by its arguments, so it is a function of them. Nothing of it is differentiable.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..problem import Kept, Sample, SampleProblem, TopK, result_dtype
from ..rows import ROWS_SCHEMA, unflattened
from .dispatch import library

# The fields of SampleProblem after the rows, and what returns: of every operator that draws.
SCHEMA = (
    "SymInt top_k, Tensor? row_top_k, float top_p, Tensor? row_top_p, float min_p, Tensor? row_min_p, int seed, Tensor? row_seed, int counter, Tensor? row_counter, "
    "SymInt num_samples, SymInt logprobs, bool truncated, bool kept, str? backend) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.define(f"sample({ROWS_SCHEMA}, {SCHEMA}")


def draw(problem: SampleProblem, backend: str | None) -> Sample:
    """Draws into new tensors, of (R, num_samples) and (R, logprobs)."""
    logits = problem.rows.logits
    chosen = backends.pick(logits.device, logits.dtype, max(problem.logprobs, 1), backend)
    out = empty_result(problem)
    if logits.shape[0]:
        chosen.sample(problem, out)
    return out


def sample(*arguments: Any) -> tuple[Tensor, ...]:
    rows, (*parameters, backend) = unflattened(arguments)
    return flat(draw(SampleProblem(rows, *parameters), backend))


def _fake_sample(*arguments: Any) -> tuple[Tensor, ...]:
    rows, (*parameters, _) = unflattened(arguments)
    return flat(empty_result(SampleProblem(rows, *parameters)))


def empty_result(problem: SampleProblem) -> Sample:
    """New uninitialised tensors for the result. All dimensions of the logits but the last are those of the rows."""
    logits, num_samples, logprobs = problem.rows.logits, problem.num_samples, problem.logprobs
    rows, device, dtype = math.prod(logits.shape[:-1]), logits.device, result_dtype(logits.dtype)
    topk = None
    if logprobs:
        topk = TopK(
            torch.empty((rows, logprobs), dtype=dtype, device=device),
            torch.empty((rows, logprobs), dtype=torch.int64, device=device),
            torch.empty((rows,), dtype=dtype, device=device),
        )
    kept = None
    if problem.kept:
        kept = Kept(
            torch.empty((rows,), dtype=torch.int64, device=device), torch.empty((rows,), dtype=dtype, device=device)
        )
    return Sample(
        torch.empty((rows, num_samples), dtype=torch.int64, device=device),
        torch.empty((rows, num_samples), dtype=dtype, device=device),
        topk,
        kept,
    )


def flat(result: Sample) -> tuple[Tensor, ...]:
    """The tensors that the operator returns: an operator has a fixed number of results, so empty tensors stand for no TopK and no Kept."""
    tokens, log_probs, topk, kept, _ = result
    if topk is None:
        topk = TopK(log_probs.new_empty((0,)), tokens.new_empty((0,)), log_probs.new_empty((0,)))
    if kept is None:
        kept = Kept(tokens.new_empty((0,)), log_probs.new_empty((0,)))
    return tokens, log_probs, *topk, *kept


library.impl("sample", sample, "CompositeExplicitAutograd")
torch.library.register_fake("fused_topk::sample", _fake_sample, lib=library)
