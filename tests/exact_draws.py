# SPDX-License-Identifier: Apache-2.0
"""Rows and settings that draws are tested with, and what is kept and drawn of them by exact sums."""

import math

import torch
from torch import Tensor

from fused_topk.backends import philox
from rows import INF, random_logits

# Of the total, as the docstring of sample() promises.
NEAR = 2.0**-19


SETTINGS = {
    "whole": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 50},
    "top_k_of_one": {"top_k": 1},
    "top_k_of_more_than_all": {"top_k": 10**7},
    "many": {"top_k": 1500},
    "top_p": {"top_p": 0.9},
    "top_p_of_little": {"top_p": 0.02},
    "top_p_of_half": {"top_p": 0.5},
    "top_p_of_nothing": {"top_p": 0.0},
    "top_p_of_almost_all": {"top_p": 0.999, "temperature": 1.5},
    "min_p": {"min_p": 0.05},
    "min_p_of_much": {"min_p": 1.0},
    "min_p_of_little": {"min_p": 1e-6, "temperature": 2.0},
    "usual": {"top_k": 50, "top_p": 0.9},
    "all": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    "top_p_min_p": {"temperature": 1.3, "top_p": 0.97, "min_p": 0.001},
}


def rows_of(vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Peaked, flat, tied, equal, mostly -inf, sorted, far from 0, one token alone, and two equal ones."""
    normal = random_logits(vocab_size).float() / 2
    alone = torch.full((vocab_size,), -INF)
    alone[vocab_size // 3] = 1.0
    # The first has exactly half of all.
    pair = torch.full((vocab_size,), -INF)
    pair[vocab_size // 4] = pair[vocab_size // 2] = 1.0
    rows = [
        normal,
        normal * 4,
        normal / 8,
        (normal * 2).round() / 2,
        torch.zeros(vocab_size),
        normal.where(torch.arange(vocab_size) % 7 == 0, -INF),
        normal.sort().values,
        normal + 1e4,
        alone,
        pair,
    ]
    return torch.stack(rows).to(dtype)


def kept_weights(logits: Tensor, settings: dict, mask: Tensor | None = None) -> Tensor:
    """float64 (R, V): the weights e^((x - m) / T) of the tokens that are kept, written without regard to cost."""
    x = logits.double()
    if mask is not None:
        x = x.masked_fill(~mask, -INF)
    rows, vocab_size = x.shape
    result = torch.zeros_like(x)
    for row in range(rows):

        def of(name, default, row=row):
            value = settings.get(name, default)
            return value[row].item() if isinstance(value, Tensor) else value

        # Greater first, of equal ones the smaller index.
        order = x[row].argsort(descending=True, stable=True)
        ranked = x[row][order]
        weights = ((ranked - ranked[0]) / max(of("temperature", 1.0), 1e-9)).exp()
        k = of("top_k", 0)
        kept = ranked >= ranked[min(k or vocab_size, vocab_size) - 1]
        before = (weights * kept).cumsum(0).roll(1)
        before[0] = 0
        if of("top_p", 1.0) < 1:
            kept &= before < of("top_p", 1.0) * (weights * kept).sum()
        kept &= weights >= of("min_p", 0.0)
        kept[0] = True
        result[row, order] = weights * kept
    return result


def broad_rows(vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of which top-p keeps thousands of tokens: normal, nearly flat, of few different logits, equal, so near each other that all
    weigh the same, ascending, far from 0, with hidden ones, and one token that has all but 10^-7."""
    normal = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    alone = torch.zeros(vocab_size)
    alone[vocab_size // 2] = math.log(vocab_size) + 7 * math.log(10)
    rows = [
        normal * 2,
        normal / 4,
        (normal * 2).round() / 2,
        torch.zeros(vocab_size),
        normal * 1e-30,
        (normal * 2).sort().values,
        normal * 2 + 1e4,
        (normal * 3).where(torch.arange(vocab_size) % 9 != 0, -INF),
        alone,
    ]
    return torch.stack(rows).to(dtype)


BROAD = {
    "half": {"top_p": 0.5},
    "most": {"top_p": 0.9},
    "hot": {"top_p": 0.9, "temperature": 1.5},
    "nearly_all": {"top_p": 0.999},
    "all_but_the_least": {"top_p": 1 - 2.0**-20},
    "little": {"top_p": 0.02},
    "likely": {"min_p": 0.05},
    "hardly_likely": {"min_p": 1e-4, "temperature": 0.8},
    "both": {"top_p": 0.9, "min_p": 0.01},
    "of_many": {"top_k": 2000, "top_p": 0.8},
    "many": {"top_k": 1900},
}


def settings_of_rows(each: list[dict]) -> dict[str, Tensor]:
    """The settings of one row after another, as tensors."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
    of_rows = {
        name: torch.tensor([row.get(name, x) for row in each], dtype=torch.float64) for name, x in defaults.items()
    }
    return of_rows | {"top_k": torch.tensor([row.get("top_k", 0) for row in each])}


def check_kept(kept, logits: Tensor, settings: dict, mask: Tensor | None = None) -> None:
    """Counts and sums of what is kept are those of top_p, or of one that is as near as NEAR."""
    temperature, top_p = settings.get("temperature", 1.0), settings.get("top_p")
    shares = (0.0,) if top_p is None else (-NEAR, NEAR)
    bounds = [kept_weights(logits, {**settings, **({"top_p": top_p + x} if top_p else {})}, mask) for x in shares]
    least, most = bounds[0], bounds[-1]
    counts = kept.counts.cpu()
    assert bool(((least > 0).sum(1) <= counts).all()), ((least > 0).sum(1), counts)
    assert bool((counts <= (most > 0).sum(1)).all()), ((most > 0).sum(1), counts)
    x = logits.double() if mask is None else logits.double().masked_fill(~mask, -INF)
    best = x.amax(1) / temperature
    sums = kept.logsumexp.cpu().double() - best
    # float32 holds a logsumexp to half a unit.
    unit = 2.0**-23 * best.abs()
    assert bool((sums >= least.sum(1).log() - 2e-5 - unit).all()) and bool(
        (sums <= most.sum(1).log() + 2e-5 + unit).all()
    )


def uniforms(seed: Tensor, num_samples: int, counter: Tensor | int = 0) -> Tensor:
    counters = torch.as_tensor(counter).expand(len(seed)).unsqueeze(1)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    return philox.uniforms(seed.unsqueeze(1), counters, zero, num_samples, torch.float64)


def check_draws(tokens: Tensor, u: Tensor, weights: Tensor) -> None:
    """Each token is the one that the exact sums give for its number, or that of a number within NEAR."""
    ends = weights.cumsum(1) / weights.sum(1, keepdim=True)
    starts = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
    assert bool(((tokens >= 0) & (tokens < weights.shape[1])).all())
    start, end = starts.gather(1, tokens), ends.gather(1, tokens)
    far = torch.maximum(start - u, u - end).clamp(min=0)
    assert float(far.max()) <= NEAR, f"row {int(far.amax(1).argmax())}: off by {float(far.max()):.2e}"


def check_is_kept(tokens: Tensor, weights: Tensor, top_p: float | None) -> None:
    """No token outside of what is kept, but where it is within NEAR of the border of top-p."""
    is_kept = weights.gather(1, tokens) > 0
    assert top_p is not None or bool(is_kept.all())
    assert float((~is_kept).double().mean()) < 1e-2


def check_sample(got, seed: Tensor, logits: Tensor, settings: dict, mask: Tensor | None = None) -> None:
    """Tokens are those of the exact sums, and of what is kept; and so is what is said of that, if it is asked for."""
    tokens, weights = got.tokens.cpu(), kept_weights(logits, settings, mask)
    check_draws(tokens, uniforms(seed, tokens.shape[1]), weights)
    check_is_kept(tokens, weights, settings.get("top_p"))
    if got.kept is not None:
        check_kept(got.kept, logits, settings, mask)


def rows_cut_by_min_p(vocab_size: int) -> tuple[Tensor, dict]:
    """Broad rows, of whose tokens that top-p keeps min-p cuts the last one, and the settings."""
    logits = 2 * torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(0))
    weights = kept_weights(logits, {"top_p": 0.9}).sort(1, descending=True).values
    least = weights.gather(1, (weights > 0).sum(1, keepdim=True) - 1).squeeze(1)
    return logits, {"top_p": 0.9, "min_p": least * (1 + 1e-5)}
