# SPDX-License-Identifier: Apache-2.0
"""Sampling written for reading: what each backend draws, in torch operations, several passes and float64.

Temperature, top-k, top-p and min-p only ever keep the best tokens of a row. So what they keep is a prefix of the row sorted
in the project's order. Its weights e^((x - m) / T) are then put back in the order of the tokens, and their running sum says
which token a uniform number u draws: the first whose sum exceeds u times the total. With noise of the caller's no sum is needed:
the token has the greatest quotient of its weight and its noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import Sample, SampleProblem
from ..scale import Scale
from . import philox
from .reference import gather, ranking, working_dtype


def draw(problem: SampleProblem, out: Sample) -> None:
    """Draws tokens, and writes them and their log-probabilities."""
    p = problem
    rows = p.rows
    vocab_size = rows.logits.shape[-1]
    # The logits of the model's own distribution, from which top-k, top-p and min-p keep a part.
    x = rows.counted()
    dtype = working_dtype(rows.logits)
    order = ranking(x)
    ranked = gather(x, order).to(dtype)
    best = ranked[:, :1]
    temperature = column(*rows.scale(), dtype, x.device)
    has_distribution = best.isfinite()
    is_drawn = has_distribution & (temperature > 0)
    m = best.where(has_distribution, 0.0)
    # At most the greatest that float32 can divide by: -inf stays -inf.
    scale = Scale(1.0, temperature.where(temperature > 0, 1.0).clamp(max=2.0**126).squeeze(1))

    weights = scale.weight(ranked, m)
    is_kept = _kept(p, ranked, weights)
    weights = weights * is_kept
    of_token = torch.zeros_like(weights).scatter(1, order, weights)
    sums = of_token.cumsum(1)
    total = sums[:, -1:]
    if p.noise is None:
        u = philox.uniforms(*_names(p, x.device), p.num_samples, dtype)
        # A product that is rounded up to the total would be beyond every token.
        aim = torch.minimum(u * total, total.nextafter(torch.zeros_like(total)))
        drawn = torch.searchsorted(sums, aim, right=True).clamp(max=vocab_size - 1)
    else:
        may_win = torch.zeros_like(is_kept).scatter(1, order, is_kept & (ranked != -torch.inf))
        drawn = _winner(scale.log_weight(x.to(dtype), m) - p.noise.to(dtype).log(), may_win)
    tokens = drawn.where(is_drawn, order[:, :1])
    out.tokens.copy_(tokens)

    of_drawn = x.to(dtype).gather(1, tokens)
    if p.truncated:
        logprobs = scale.log_weight(of_drawn, m) - total.log()
        logprobs = logprobs.where(temperature != 0, 0.0)
        has_distribution = has_distribution & (temperature >= 0)
    else:
        logprobs = of_drawn - m - (ranked - m).exp().sum(1, keepdim=True).log()
    out.logprobs.copy_(logprobs.where(has_distribution, torch.nan))
    if out.kept is not None:
        is_greedy = best.isfinite() & (temperature == 0)
        counts = (is_kept & (ranked != -torch.inf)).sum(1, keepdim=True).where(is_drawn, is_greedy.long())
        mass = scale.logsumexp(best, total.where(is_drawn, 1.0))
        out.kept.counts.copy_(counts.squeeze(1))
        out.kept.logsumexp.copy_(mass.where(is_drawn | is_greedy, torch.nan).squeeze(1))


def _winner(scores: Tensor, may_win: Tensor) -> Tensor:
    """The token (R, 1) with the greatest score of those that may win; of equal ones the smallest. NaN counts as -inf."""
    scores = scores.where(may_win & ~scores.isnan(), -torch.inf)
    # argmax gives the first of equal ones.
    return (may_win & (scores == scores.amax(1, keepdim=True))).byte().argmax(1, keepdim=True)


def _kept(p: SampleProblem, ranked: Tensor, weights: Tensor) -> Tensor:
    """bool (R, V): whether top-k, top-p and min-p keep the token of each rank, given the logits and weights of the ranks."""
    dtype, device, vocab_size = weights.dtype, weights.device, weights.shape[1]
    top_k = column(p.top_k, p.row_top_k, torch.int64, device)
    last = (top_k.where((top_k > 0) & (top_k < vocab_size), vocab_size) - 1).expand(len(ranked), 1)
    # All that tie with the k-th, as transformers keeps them.
    kept = ranked >= ranked.gather(1, last)

    top_p = column(p.top_p, p.row_top_p, dtype, device)
    sums = (weights * kept).cumsum(1)
    before = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], 1)
    # The shortest prefix with at least that share. Not `< top_p`: NaN and 1 and more keep all.
    is_within = ~(before >= top_p * sums[:, -1:]) | ~(top_p < 1)
    min_p = column(p.min_p, p.row_min_p, dtype, device)
    is_likely = ~(weights < min_p)
    kept = kept & is_within & is_likely
    kept[:, 0] = True
    return kept


def _names(p: SampleProblem, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The seed, the counter and the stream of each row (philox.uniforms)."""
    seed = column(p.seed, p.row_seed, torch.int64, device)
    counter = column(p.counter, p.row_counter, torch.int64, device)
    first, rows = (p.first_row, p.rows.logits.shape[0]) if p.row_seed is None else (0, 1)
    return seed, counter, torch.arange(first, first + rows, device=device).unsqueeze(1)


def column(number: float, of_rows: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A parameter in a form that broadcasts along rows."""
    if of_rows is None:
        return torch.full((1, 1), number, dtype=dtype, device=device)
    return of_rows.to(dtype).unsqueeze(1)
