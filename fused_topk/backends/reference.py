# SPDX-License-Identifier: Apache-2.0
"""The operation written for reading, in torch operations and several passes.

It is the oracle that the fast backends are tested against, and what runs where they do not: on MPS and XPU, on meta
tensors, and for a k beyond the native limit. It never waits for the device, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import (
    FullRowProblem,
    MergeProblem,
    RankProblem,
    RouterProblem,
    Sample,
    SampleProblem,
    TokenSumsProblem,
    TopK,
    TopkProblem,
)
from ..rows import LogitRows
from ..scale import Scale
from ..token_sums import TokenSums, without
from . import reference_routing, reference_sampling
from .protocol import StartFullRows, StartMerge, StartRouter, StartSample, StartTopk
from .reference_rows import gather, order_keys, ranking, working_dtype


def unavailable(device: torch.device | None = None) -> str | None:
    """None: torch is all that it needs."""
    return None


def supports(dtype: torch.dtype, k: int) -> bool:
    """True: it takes every floating-point dtype and every k."""
    return True


def prepare_topk(problem: TopkProblem, device: torch.device, beam_scores: Tensor | None = None) -> StartTopk:
    """row_topk(), or with beam_scores beam_topk()."""

    def run(rows: LogitRows, out: TopK, beam_scores: Tensor | None = None) -> None:
        given = problem._replace(rows=problem.rows.at(rows))
        if beam_scores is None:
            row_topk(given, out)
        else:
            beam_topk(given, beam_scores, out)

    return run


def prepare_merge(problem: MergeProblem, device: torch.device) -> StartMerge:
    """merge()."""
    return merge


def prepare_full_rows(problem: FullRowProblem, device: torch.device, dtype: torch.dtype) -> StartFullRows:
    """full_rows()."""
    return lambda rows, out: full_rows(problem._replace(rows=problem.rows.at(rows)), out)


def prepare_router(problem: RouterProblem, device: torch.device) -> StartRouter:
    """reference_routing.route()."""
    return lambda rows, bias, out: reference_routing.route(problem._replace(rows=problem.rows.at(rows), bias=bias), out)


def prepare_sample(problem: SampleProblem, device: torch.device) -> StartSample:
    """sample()."""
    return sample


def sample(problem: SampleProblem, out: Sample) -> None:
    """Draws tokens, and lists the best of the model's own distribution."""
    if out.topk is not None:
        own = TopkProblem(problem.rows.unscaled(), problem.topk, "log_softmax", "allowed")
        row_topk(own, out.topk)
    reference_sampling.draw(problem, out)


def target_ranks(problem: RankProblem, out: Tensor) -> None:
    """The number of tokens that are not behind a target. Targets are counted one after another, so
    that memory does not grow with their number."""
    rows, targets, counts_ties = problem
    keys, places = order_keys(rows.counted()), torch.arange(rows.logits.shape[-1], device=targets.device)
    for i in range(targets.shape[-1]):
        target = targets[..., i : i + 1]
        token = target.clamp(0, rows.logits.shape[-1] - 1)
        key = keys.gather(-1, token)
        counts = keys >= key if counts_ties else (keys > key) | ((keys == key) & (places <= token))
        out[..., i].copy_(counts.sum(-1).where(target.squeeze(-1) >= 0, 0))


def token_sums(problem: TokenSumsProblem, sums: Tensor, token_logits: Tensor) -> None:
    """The sums of whole rows, merged with those that are there."""
    rows, tokens, normalize, has_tail = problem
    dtype = working_dtype(rows.logits)
    scale = rows.scale().with_nan(dtype)
    allowed = rows.counted()
    x = (allowed if normalize == "allowed" else rows.counted(normalize)).to(dtype)
    rest = without(allowed.to(dtype), tokens) if has_tail else x[..., :1]
    before = TokenSums.of(sums.to(dtype))
    sums.copy_(torch.stack(before.merged(TokenSums.of_logits(x, rest, scale), scale), -1))
    last = rows.logits.shape[-1] - 1
    is_here = (tokens >= 0) & (tokens <= last)
    token_logits.copy_(gather(allowed, tokens.clamp(0, last)).where(is_here, token_logits))


def row_topk(problem: TopkProblem, out: TopK) -> None:
    """The k best of every row, their values, and the row's logsumexp."""
    rows = problem.rows
    candidates = rows.counted()
    indices = ranking(candidates)[..., : problem.k]
    chosen = gather(candidates, indices)
    out.indices.copy_(indices)
    if problem.values == "logits":
        out.values.copy_(chosen)
        return

    dtype = working_dtype(rows.logits)
    scale = rows.scale().with_nan(dtype)
    x = rows.counted(problem.normalize).to(dtype)
    m, d = _normalizer(x, scale)
    if problem.values == "state":
        out.values.copy_(chosen)
        _write_state(x.amax(-1), d.squeeze(-1), out)
        return
    out.logsumexp.copy_(scale.logsumexp(m, d).squeeze(-1))
    values = _values(chosen.to(dtype), m, d, scale, problem)
    # A row without a finite normalizer has no probabilities at all, as in torch.softmax.
    out.values.copy_(values.where(d.log().isfinite(), torch.nan))


def beam_topk(problem: TopkProblem, beam_scores: Tensor, out: TopK) -> None:
    """The k best continuations of every batch entry over all of its beams: the top-k of each beam, then of those."""
    batch, beams, vocab_size = problem.rows.logits.shape
    dtype = out.values.dtype
    # No beam can contribute more than k, nor more than it has.
    k_of_beam = min(problem.k, vocab_size)
    of_beam = TopK(
        out.values.new_empty(batch, beams, k_of_beam),
        out.indices.new_empty(batch, beams, k_of_beam),
        out.logsumexp,
    )
    row_topk(problem._replace(k=k_of_beam), of_beam)

    accumulated = (of_beam.values + beam_scores.to(dtype).unsqueeze(-1)).flatten(1)
    first_of_beam = torch.arange(beams, device=out.indices.device).unsqueeze(-1) * vocab_size
    flat_indices = (of_beam.indices + first_of_beam).flatten(1)
    # A stable sort of the beams' lists one after another: equal values go to the smaller beam, then in the row's order.
    best = ranking(accumulated)[:, : problem.k]
    out.values.copy_(accumulated.gather(1, best))
    out.indices.copy_(flat_indices.gather(1, best))


def merge(problem: MergeProblem, out: TopK) -> None:
    """The k best of the parts' candidates, their values, and the normalizer of the whole."""
    candidates, indices = merge_candidates(problem.logits, problem.indices, problem.part_lengths)
    best = _merge_order(candidates, indices)[..., : problem.k]
    out.indices.copy_(indices.gather(-1, best))
    chosen = gather(candidates, best)

    dtype = working_dtype(problem.logits)
    scale = problem.scale.with_nan(dtype)
    of_parts = problem.m.to(dtype).movedim(0, -1)
    greatest = of_parts.amax(-1, keepdim=True)
    m = greatest.where(greatest.isfinite(), 0.0)
    d = (problem.d.to(dtype).movedim(0, -1) * scale.weight(of_parts, m)).sum(-1, keepdim=True)
    if problem.values == "state":
        out.values.copy_(chosen)
        _write_state(greatest.squeeze(-1), d.squeeze(-1), out)
        return
    logsumexp = scale.logsumexp(m, d).where(greatest.isfinite(), scale.scaled(greatest))
    out.logsumexp.copy_(logsumexp.squeeze(-1))
    if problem.values == "logits":
        out.values.copy_(chosen)
        return
    if problem.normalize == "topk":
        # The states may be relative to more than the allowed tokens, so the chosen have a maximum of their own.
        first = chosen[..., :1].to(dtype)
        m = m.where(~first.isfinite(), first)
    values = _values(chosen.to(dtype), m, d, scale, problem)
    out.values.copy_(values.where(greatest.isfinite() & d.log().isfinite(), torch.nan))


def merge_candidates(logits: Tensor, indices: Tensor, part_lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """The candidates of all parts side by side, (..., parts * k of a part): their logits, and their tokens in the whole
    vocabulary, -1 where there is no candidate."""
    is_none = indices < 0
    if part_lengths is not None:
        lengths = part_lengths.to(torch.int64)
        starts = lengths.cumsum(0) - lengths
        indices = (indices + starts.view(-1, *[1] * (indices.dim() - 1))).masked_fill(is_none, -1)
    return logits.masked_fill(is_none, -torch.inf).movedim(0, -2).flatten(-2), indices.movedim(0, -2).flatten(-2)


def _merge_order(candidates: Tensor, indices: Tensor) -> Tensor:
    """The places of the candidates from the best to the worst."""
    # First by token, then by logit: a stable sort leaves equal logits in the order of their tokens.
    by_token = indices.masked_fill(indices < 0, torch.iinfo(torch.int64).max).sort(dim=-1, stable=True).indices
    return by_token.gather(-1, ranking(gather(candidates, by_token)))


def full_rows(problem: FullRowProblem, out: Tensor) -> None:
    """Probabilities, log-probabilities or the logsumexp of every row."""
    x = problem.rows.counted().to(working_dtype(problem.rows.logits))
    scale = problem.rows.scale().with_nan(x.dtype)
    m, d = _normalizer(x, scale)
    if problem.values == "logsumexp":
        out.copy_(scale.logsumexp(m, d).squeeze(-1))
        return
    log_d = d.log()
    shifted = scale.log_weight(x, m)
    values = shifted.exp() / d if problem.values == "softmax" else shifted - log_d
    out.copy_(values.where(log_d.isfinite(), torch.nan))


def _values(chosen: Tensor, m: Tensor, d: Tensor, scale: Scale, problem: TopkProblem | MergeProblem) -> Tensor:
    """Probabilities or log-probabilities of the chosen logits."""
    # (x - m) - log d rather than x - logsumexp: a large common offset of the logits then costs no accuracy.
    shifted = scale.log_weight(chosen, m)
    total = shifted.exp().sum(-1, keepdim=True) if problem.normalize == "topk" else d
    return shifted.exp() / total if problem.values == "softmax" else shifted - total.log()


def _write_state(m: Tensor, d: Tensor, out: TopK) -> None:
    """m and d of every row, in place of the logsumexp. Relative to +inf there is no d."""
    out.logsumexp.copy_(torch.stack((m, d.where(m < torch.inf, torch.nan))))


def _normalizer(x: Tensor, scale: Scale) -> tuple[Tensor, Tensor]:
    """(m, d) of every row."""
    m = x.amax(-1, keepdim=True)
    # Against an infinite maximum every difference would be NaN; against 0, d becomes 0 or inf, and log d -inf or inf.
    m = m.where(m.isfinite(), 0.0)
    return m, scale.weight(x, m).sum(-1, keepdim=True)
