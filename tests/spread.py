# SPDX-License-Identifier: Apache-2.0
"""What log-probabilities, entropy and tail of given tokens must be, from whole logits in float64, and differentiable."""

from typing import NamedTuple

import torch
from torch import Tensor


class Exact(NamedTuple):
    logprobs: Tensor  # (..., n)
    logsumexp: Tensor
    entropy: Tensor
    tail: Tensor
    scale: Tensor  # (...): the greatest distance of a logit that counts from the best one, over the temperature


def exact_spread(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
) -> Exact:
    """tokens: (..., n). mask: bool."""
    vocab_size = logits.shape[-1]
    places = torch.arange(vocab_size, device=logits.device)
    x = logits.double() / (temperature.double().unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    there = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    if lengths is not None:
        there = there & (places < lengths.unsqueeze(-1))
    allowed = there if mask is None else there & mask
    over = there if normalize == "all" else allowed
    over_x = x.masked_fill(~over, -torch.inf)
    logsumexp = over_x.logsumexp(-1)
    logp = x - logsumexp.unsqueeze(-1)
    p = logp.exp()
    counts = over & (p > 0)
    entropy = -(p * logp).where(counts, 0.0).sum(-1).where(logsumexp.isfinite(), torch.nan)
    is_given = (places == tokens.unsqueeze(-1)).any(-2)
    rest = logp.masked_fill(~allowed | is_given, -torch.inf)
    tail = rest.logsumexp(-1).where(logsumexp.isfinite(), torch.nan)
    logprobs = logp.masked_fill(~allowed, -torch.inf).gather(-1, tokens.clamp(min=0)).where(tokens >= 0, torch.nan)
    finite = over_x.detach().where(over_x.detach().isfinite(), over_x.detach().amax(-1, keepdim=True))
    return Exact(logprobs, logsumexp, entropy, tail, finite.amax(-1) - finite.amin(-1))


def loss_of(*results: Tensor) -> Tensor:
    """A share of its own for every finite number."""
    total = torch.zeros((), dtype=torch.float64, device=results[0].device)
    for i, x in enumerate(results):
        share = torch.linspace(-1.0 + i, 2.0, x.numel(), dtype=torch.float64, device=x.device).view(x.shape)
        total = total + (x.where(x.detach().isfinite(), 0.0).double() * share).sum()
    return total
