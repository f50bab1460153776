# SPDX-License-Identifier: Apache-2.0
"""The operator of sampling, `sample`: what torch.compile, fake tensors and CUDA graphs see of it.

Its arguments name its random numbers, or have them, so equal arguments give equal results. It has no gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import plans
from ..problem import Kept, Sample, SampleProblem, TopK
from ..rows import ROWS_SCHEMA, unflattened
from .dispatch import library, register

# The arguments behind the rows, which are fields of SampleProblem, and the results: the same for every operator that draws.
SCHEMA = (
    "SymInt top_k, Tensor? row_top_k, float top_p, Tensor? row_top_p, float min_p, Tensor? row_min_p, "
    "int seed, Tensor? row_seed, int counter, Tensor? row_counter, SymInt num_samples, SymInt topk, "
    "bool truncated, bool kept, str? backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.define(f"sample({ROWS_SCHEMA}, Tensor? noise, {SCHEMA}")


def draw(problem: SampleProblem, backend: str | None) -> Sample:
    """Draws into new tensors, of (R, num_samples) and (R, topk)."""
    return plans.plan_of_sample(problem, backend).run(problem)


def sample(*arguments: Any) -> tuple[Tensor, ...]:
    rows, (noise, *parameters, backend) = unflattened(arguments)
    fields: Any = (rows, *parameters, 0, noise)
    return flat(draw(SampleProblem(*fields), backend))


def _fake_sample(*arguments: Any) -> tuple[Tensor, ...]:
    rows, (_, *parameters, _) = unflattened(arguments)
    return flat(plans.sample_result(SampleProblem(rows, *parameters)))


def flat(result: Sample) -> tuple[Tensor, ...]:
    """The tensors that the operator returns. Their number is fixed, so empty tensors stand for no TopK and no Kept."""
    tokens, logprobs, topk, kept, _ = result
    if topk is None:
        topk = TopK(logprobs.new_empty((0,)), tokens.new_empty((0,)), logprobs.new_empty((0,)))
    if kept is None:
        kept = Kept(tokens.new_empty((0,)), logprobs.new_empty((0,)))
    return tokens, logprobs, *topk, *kept


register("sample", sample, _fake_sample)
