# SPDX-License-Identifier: Apache-2.0
"""The public function that draws tokens from an LM head's logits: hidden states in, and no tensor of all logits in between."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ..arguments import check_head, check_hidden, check_no_transform, logits_of_head
from ..gone import refuse
from ..operators import linear_sampling
from ..problem import Sample
from . import autocast, sampling


def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seed: int | Tensor | None = None,
    counter: int | Tensor = 0,
    generator: torch.Generator | None = None,
    num_samples: int = 1,
    topk: int = 0,
    logprobs: str = "model",
    kept: bool = False,
    backend: str | None = None,
    **gone: NoReturn,
) -> Sample:
    """Tokens drawn from the logits `hidden @ weight.T + bias`, which are never all in memory.

    >>> linear_sample(torch.tensor([[2.0, 3.0]]), torch.eye(2), temperature=0).tokens
    tensor([[1]])

    It draws what `sample(torch.nn.functional.linear(hidden, weight, bias))` draws and returns, without ranks.

    The other arguments, and the errors, are those of :func:`linear_softmax_topk` and, for the logits (..., V), of :func:`sample`.

    Args:
        backend: None, "cuda", "cpu" or "reference": what draws. The product is always the library's.

    Returns:
        Sample, as :func:`sample` returns it. float64 hidden states have float64 logprobs.

    Contract:
        Logits: those of :func:`linear_softmax_topk`, by the library's product.
        Random numbers, tokens, ties, special rows: those of :func:`sample` for these logits. The random numbers are the same bit
        for bit. The token may differ only where the rounding of a logit decides it: where the random number is that near to a
        border between two tokens, or a token that near to the border of what is kept.
        Memory: at most 64 MB beyond the result, or what one row takes where V is in the millions. If the logits of all rows need
        more, the call takes the rows in blocks, one after another. Each block reads the weight.
        torch.autocast: as for :func:`linear_softmax_topk`.
        Deterministic as the library's product is. Not differentiable.
    """
    if gone:
        refuse("linear_sample", gone)
    check_hidden(hidden)
    hidden, weight, bias = autocast.as_multiplied(hidden, weight, bias)
    check_head(weight, bias, hidden, of_shards="hidden @ weight.to_local().T to fused_topk.distributed.sample")
    logits = logits_of_head(hidden, weight)
    numbers = (temperature, top_k, top_p, min_p)
    request = (num_samples, topk, logprobs, kept, backend)
    rows, checked = sampling.check_parameters(logits, hidden.device.type, numbers, mask, None, request)
    check_no_transform("linear_sample")
    of_seed, of_counter = sampling.names_of(seed, counter, generator, logits)
    hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    problem = sampling.problem_of(rows.with_logits(hidden), checked, of_seed, of_counter, request)
    result = linear_sampling.linear_sample(problem, weight, bias, backend)
    return result if hidden.dim() == 2 else sampling.shaped(result, hidden.shape[:-1])
