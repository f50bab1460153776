# SPDX-License-Identifier: Apache-2.0
"""sample(): the tokens that a uniform number draws, the distribution of the draws, and what a call promises besides.

The strictest test needs no statistics: the uniform number of every draw is known, and so is the token that the exact running
sum gives for it. A draw may be another one only if its number is within `NEAR` of a border between two tokens. What is left
to statistics is that the numbers are uniform and independent.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import fused_topk
from fused_topk.backends import philox
from fused_topk.functional import sampling
from rows import INF, NAN, packed, random_logits, random_mask

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
        weights = ((ranked - ranked[0]) / of("temperature", 1.0)).exp()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("vocab_size", [1, 5, 300, 9001])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_number_draws_the_token_of_the_exact_sums(backend, name, vocab_size, dtype):
    settings = SETTINGS[name]
    logits = rows_of(vocab_size, dtype)
    seed = torch.arange(len(logits)) + 17
    got = backend("sample", logits.to(backend.device), seed=seed.to(backend.device), num_samples=50, **settings)
    tokens = got.tokens.cpu()
    weights = kept_weights(logits, settings)
    check_draws(tokens, uniforms(seed, 50), weights)
    check_is_kept(tokens, weights, settings.get("top_p"))


@pytest.mark.parametrize(
    "name",
    [
        *("whole", "top_p"),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("top_p_of_almost_all", "min_p_of_little", "usual", "many")
        ),
    ],
)
def test_long_rows(backend, name):
    """What top-p keeps of flat rows is far longer than any list."""
    settings = SETTINGS[name]
    logits = rows_of(262144)[[0, 2, 3, 4, 7]]
    seed = torch.arange(len(logits)) - 5
    got = backend("sample", logits.to(backend.device), seed=seed.to(backend.device), num_samples=20, **settings)
    weights = kept_weights(logits, settings)
    check_draws(got.tokens.cpu(), uniforms(seed, 20), weights)
    check_is_kept(got.tokens.cpu(), weights, settings.get("top_p"))


@pytest.mark.parametrize("name", BROAD)
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (3000, torch.float32),
        (20_000, torch.bfloat16),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in ((9001, torch.float16), (128_256, torch.float32), (262_144, torch.bfloat16))
        ),
    ],
    ids=str,
)
def test_broad_rows(backend, vocab_size, dtype, name):
    """Whose kept tokens no list has."""
    settings = BROAD[name]
    logits = broad_rows(vocab_size, dtype)
    seed = torch.arange(len(logits)) + 17
    got = backend(
        "sample", logits.to(backend.device), seed=seed.to(backend.device), num_samples=20, kept=True, **settings
    )
    weights = kept_weights(logits, settings)
    check_draws(got.tokens.cpu(), uniforms(seed, 20), weights)
    check_is_kept(got.tokens.cpu(), weights, settings.get("top_p"))
    check_kept(got.kept, logits, settings)


def test_broad_rows_with_parameters_of_their_own_and_a_mask(backend):
    logits = broad_rows(5000).repeat(len(BROAD), 1)
    names = [name for name in BROAD for _ in range(len(logits) // len(BROAD))]
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    settings = {
        key: torch.tensor([BROAD[name].get(key, default) for name in names]) for key, default in defaults.items()
    }
    settings["top_p"] = torch.tensor([BROAD[name].get("top_p", 1.0) for name in names], dtype=torch.float64)
    mask = random_mask(*logits.shape, share=0.7)
    on_device = {key: x.to(backend.device) for key, x in settings.items()}
    seed = torch.arange(len(logits), device=backend.device)
    given = logits.to(backend.device), {"mask": mask.to(backend.device), "seed": seed, "kept": True}
    got = backend("sample", given[0], **given[1], **on_device)
    as_float64 = {key: x.double() if x.is_floating_point() else x for key, x in settings.items()}
    weights = kept_weights(logits, as_float64, mask)
    check_draws(got.tokens.cpu(), uniforms(torch.arange(len(logits)), 1), weights)
    for row in range(0, len(logits), 7):
        one = {key: x[row : row + 1].item() for key, x in as_float64.items()}
        part = slice(row, row + 1)
        check_kept(type(got.kept)(*(x[part] for x in got.kept)), logits[part], one, mask[part])
        alone = backend("sample", given[0][part], mask=given[1]["mask"][part], seed=seed[part], kept=True, **one)
        assert torch.equal(alone.tokens, got.tokens[part]) and torch.equal(alone.kept.counts, got.kept.counts[part])


def rows_cut_by_min_p(vocab_size: int) -> tuple[Tensor, dict]:
    """Broad rows, of whose tokens that top-p keeps min-p cuts the last one, and the settings."""
    logits = 2 * torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(0))
    weights = kept_weights(logits, {"top_p": 0.9}).sort(1, descending=True).values
    least = weights.gather(1, (weights > 0).sum(1, keepdim=True) - 1).squeeze(1)
    return logits, {"top_p": 0.9, "min_p": least * (1 + 1e-5)}


def test_min_p_cuts_near_the_border_of_top_p(backend):
    """Among the few tokens that a search for that border lists."""
    logits, settings = rows_cut_by_min_p(3000)
    on_device = {name: x.to(backend.device) if isinstance(x, Tensor) else x for name, x in settings.items()}
    got = backend("sample", logits.to(backend.device), seed=1, num_samples=20, kept=True, **on_device)
    weights = kept_weights(logits, settings)
    assert got.kept.counts.tolist() == (weights > 0).sum(1).tolist()
    assert bool((weights.gather(1, got.tokens.cpu()) > 0).all())
    torch.testing.assert_close(
        got.kept.logsumexp.cpu().double(), weights.sum(1).log() + logits.double().amax(1), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocab_size", [30, 3000])
def test_kept(backend, name, vocab_size):
    logits = rows_of(vocab_size)
    got = backend("sample", logits.to(backend.device), seed=1, kept=True, **SETTINGS[name])
    check_kept(got.kept, logits, SETTINGS[name])
    assert backend("sample", logits.to(backend.device), seed=1, **SETTINGS[name]).kept is None


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 3}], ids=str)
def test_kept_of_rows_without_a_choice(backend, settings):
    """Of temperature 0, of -inf alone, and with NaN or +inf."""
    logits = rows_of(700)[:4]
    logits[1], logits[2, 5], logits[3, 6] = -INF, NAN, INF
    for temperature, counts in ((0.0, [1, 0, 0, 0]), (1.0, [None, 0, 0, 0])):
        got = backend("sample", logits.to(backend.device), temperature=temperature, seed=1, kept=True, **settings).kept
        assert got.counts[1:].tolist() == counts[1:] and bool(got.logsumexp[1:].isnan().all())
        if temperature == 0:
            assert got.counts[0] == 1 and got.logsumexp[0] == logits[0].max()


@pytest.mark.parametrize("others", [{}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_minus_one_is_no_limit(backend, others):
    logits = rows_of(900).to(backend.device)
    for top_k in (-1, torch.full((10,), -1, device=backend.device)):
        got, expected = (backend("sample", logits, top_k=k, seed=1, kept=True, **others) for k in (top_k, top_k * 0))
        assert torch.equal(got.tokens, expected.tokens) and torch.equal(got.kept.counts, expected.kept.counts)


@pytest.mark.parametrize("vocab_size", [40, 5000])
def test_each_row_has_its_own_parameters(backend, vocab_size):
    base = rows_of(vocab_size)[:4]
    logits = base.repeat_interleave(len(SETTINGS), 0)
    names = list(SETTINGS) * 4
    settings = {
        name: torch.tensor([SETTINGS[each].get(name, default) for each in names], dtype=torch.float64)
        for name, default in (("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0))
    }
    settings["top_k"] = torch.tensor([SETTINGS[each].get("top_k", 0) for each in names])
    seed = torch.arange(len(logits))
    counter = torch.arange(len(logits)) * 2**40
    on_device = {name: x.to(backend.device) for name, x in {**settings, "seed": seed, "counter": counter}.items()}
    got = backend("sample", logits.to(backend.device), num_samples=9, logprobs="kept", **on_device)
    weights = kept_weights(logits, settings)
    check_draws(got.tokens.cpu(), uniforms(seed, 9, counter), weights)
    for row in range(0, len(logits), 5):
        one = {name: x[row].item() for name, x in settings.items()}
        rows = logits[row : row + 1].to(backend.device)
        alone = backend(
            "sample",
            rows,
            num_samples=9,
            logprobs="kept",
            seed=on_device["seed"][row : row + 1],
            counter=int(counter[row]),
            **one,
        )
        assert torch.equal(alone.tokens, got.tokens[row : row + 1])
        # A GPU has another kernel for rows without a filter, with another sum d. Twice the bound of oracle.py for a z of -10.
        torch.testing.assert_close(alone.logprobs, got.logprobs[row : row + 1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocab_size", [30, 3000])
def test_what_is_kept_is_what_transformers_keeps(backend, name, vocab_size):
    """By its mass, which the truncated log-probability of a token shows, in float32 rows without ties at the border of top-p."""
    process = pytest.importorskip("transformers.generation.logits_process")
    settings = SETTINGS[name]
    if settings.get("top_k", 0) > vocab_size:
        return
    warpers = [
        *([process.TemperatureLogitsWarper(settings["temperature"])] if "temperature" in settings else []),
        *([process.TopKLogitsWarper(settings["top_k"])] if "top_k" in settings else []),
        *([process.TopPLogitsWarper(settings["top_p"])] if "top_p" in settings else []),
        *([process.MinPLogitsWarper(settings["min_p"])] if "min_p" in settings else []),
    ]
    logits = torch.cat([rows_of(vocab_size)[:4], rows_of(vocab_size, torch.bfloat16)[:3].float()])
    stock = logits
    for warper in warpers:
        stock = warper(None, stock)
    got = backend("sample", logits.to(backend.device), num_samples=4, logprobs="kept", seed=1, **settings)
    tokens = got.tokens.cpu()
    # Of equal tokens at the border of top-p stock keeps as many, but arbitrary ones.
    scaled = logits.gather(1, tokens).double() / settings.get("temperature", 1.0)
    expected = scaled - stock.double().logsumexp(1, keepdim=True)
    # One token more or less shows, of any that weighs 1e-5 of what is kept; so little is within rounding of top-p.
    torch.testing.assert_close(got.logprobs.cpu().double(), expected, rtol=0, atol=2e-5)


def test_all_that_tie_with_the_kth_are_kept(backend):
    logits = torch.zeros(1, 4000)
    logits[0, 7] = 1.0
    logits[0, 100:200] = 0.5
    seed = torch.zeros(1, dtype=torch.int64, device=backend.device)
    for k, kept in ((1, 1), (2, 101), (101, 101), (102, 4000), (3999, 4000)):
        got = backend("sample", logits.to(backend.device), top_k=k, seed=seed, num_samples=1, logprobs="kept")
        weights = logits.double().exp().sort(descending=True).values[0, :kept]
        token = int(got.tokens)
        assert float(got.logprobs) == pytest.approx(float(logits[0, token] - weights.sum().log()), abs=1e-5)


def test_masks(backend):
    logits = rows_of(2000)[:4]
    mask = random_mask(4, 2000, share=0.1)
    mask[3] = False
    mask[3, 1234] = True
    seed = torch.arange(4)
    for name in ("whole", "top_p", "usual", "min_p"):
        expected = kept_weights(logits, SETTINGS[name], mask)
        for given in (mask, packed(mask)):
            got = backend(
                "sample",
                logits.to(backend.device),
                mask=given.to(backend.device),
                seed=seed.to(backend.device),
                num_samples=30,
                **SETTINGS[name],
            )
            check_draws(got.tokens.cpu(), uniforms(seed, 30), expected)
            own = logits.masked_fill(~mask, -INF).log_softmax(-1).gather(1, got.tokens.cpu())
            torch.testing.assert_close(got.logprobs.cpu(), own, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_log_probabilities(backend, name):
    settings = SETTINGS[name]
    logits = rows_of(700)[:8]
    on_device = logits.to(backend.device)
    got = backend("sample", on_device, seed=5, num_samples=6, topk=3, **settings)
    own = logits.double().log_softmax(-1).gather(1, got.tokens.cpu())
    torch.testing.assert_close(got.logprobs.cpu().double(), own, rtol=2e-6, atol=2e-6)
    listed = backend("log_softmax_topk", on_device, 3)
    assert torch.equal(got.topk.indices, listed.indices)
    torch.testing.assert_close(got.topk.values, listed.values, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(got.topk.logsumexp, listed.logsumexp, rtol=2e-6, atol=2e-6)
    truncated = backend("sample", on_device, seed=5, num_samples=6, logprobs="kept", **settings)
    assert torch.equal(got.tokens, truncated.tokens) and truncated.topk is None
    weights = kept_weights(logits, settings)
    expected = (weights.gather(1, got.tokens.cpu()) / weights.sum(1, keepdim=True)).log()
    torch.testing.assert_close(truncated.logprobs.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["whole", "temperature", "top_p", "usual", "min_p"])
@pytest.mark.parametrize("vocab_size", [6, 5000])
def test_rows_without_a_distribution(backend, name, vocab_size):
    rows = torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(1))
    rows[0, 3] = NAN
    rows[1, 4] = INF
    rows[2] = -INF
    rows[3, 2], rows[3, 5] = NAN, INF
    rows[4, 1] = rows[4, 4] = INF
    rows[5] = NAN
    mask = torch.ones(7, vocab_size, dtype=torch.bool)
    mask[6] = False
    got = backend(
        "sample", rows.to(backend.device), mask=mask.to(backend.device), seed=0, num_samples=2, **SETTINGS[name]
    )
    assert got.tokens[:, 0].tolist() == got.tokens[:, 1].tolist() == [3, 4, 0, 2, 1, 0, 0]
    assert bool(got.logprobs.isnan().all())
    for settings in (SETTINGS[name], {"temperature": 0.0}):
        again = backend(
            "sample",
            rows.to(backend.device),
            mask=mask.to(backend.device),
            seed=0,
            logprobs="kept",
            **settings,
        )
        assert again.tokens[:, 0].tolist() == [3, 4, 0, 2, 1, 0, 0] and bool(again.logprobs.isnan().all())


def test_greedy_rows(backend):
    logits = rows_of(800).to(backend.device)
    temperature = torch.ones(len(logits), dtype=torch.float32, device=backend.device)
    temperature[::2] = 0
    settings = {"temperature": temperature, "seed": 3, "num_samples": 4, "top_p": 0.95}
    got = backend("sample", logits, **settings)
    best = backend("log_softmax_topk", logits, 1)
    assert bool((got.tokens[::2] == best.indices[::2]).all())
    torch.testing.assert_close(got.logprobs[::2], best.values[::2].expand(-1, 4), rtol=2e-6, atol=2e-6)
    truncated = backend("sample", logits, logprobs="kept", **settings)
    assert bool((truncated.logprobs[::2] == 0).all())
    assert bool((got.tokens[1] != best.indices[1]).any())


def test_seeds_counters_and_streams(backend):
    logits = torch.zeros(3, 10_000, device=backend.device)
    same = backend("sample", logits, seed=torch.tensor([4, 4, 5], device=backend.device), num_samples=8).tokens
    assert torch.equal(same[0], same[1]) and not torch.equal(same[0], same[2])
    # Of one seed for all, the rows are told apart.
    one = backend("sample", logits, seed=4, num_samples=8).tokens
    assert torch.equal(one[0], same[0]) and not torch.equal(one[0], one[1])
    assert torch.equal(one, backend("sample", logits, seed=4, num_samples=8).tokens)
    later = backend("sample", logits, seed=4, counter=1, num_samples=8).tokens
    assert not torch.equal(one, later)
    each = backend("sample", logits, seed=4, counter=torch.tensor([0, 1, 0], device=backend.device)).tokens
    assert torch.equal(each[:, 0], torch.stack([one[0, 0], later[1, 0], one[2, 0]]))
    far = backend("sample", logits, seed=-(2**63), counter=2**63 - 1, num_samples=8).tokens
    assert not torch.equal(far, one)


def test_generators_are_advanced(backend):
    logits = torch.zeros(3, 10_000, device=backend.device)

    def draws(generator):
        return [backend("sample", logits, generator=generator, num_samples=2).tokens for _ in range(2)]

    first, second = draws(torch.Generator(backend.device).manual_seed(1))
    assert not torch.equal(first, second)
    again, _ = draws(torch.Generator(backend.device).manual_seed(1))
    assert torch.equal(first, again)
    torch.manual_seed(1)
    by_default, then = draws(None)
    assert torch.equal(first, by_default) and torch.equal(second, then)
    assert len(set(first.flatten().tolist())) == 6


def test_shapes_strides_and_empty_batches(backend):
    logits = random_logits(2, 3, 80).to(backend.device)
    seed = torch.arange(6, device=backend.device).view(2, 3)
    flat = backend("sample", logits.view(6, 80), seed=seed.view(6), num_samples=2, top_k=7, topk=2)
    for given in (logits, torch.cat([logits, logits], -1)[..., :80], logits.mT.contiguous().mT):
        got = backend("sample", given, seed=seed, num_samples=2, top_k=7, topk=2)
        assert got.tokens.shape == (2, 3, 2) and got.topk.values.shape == (2, 3, 2)
        assert torch.equal(got.tokens.view(6, 2), flat.tokens) and torch.equal(got.logprobs.view(6, 2), flat.logprobs)
        assert torch.equal(got.topk.indices.view(6, 2), flat.topk.indices) and got.topk.logsumexp.shape == (2, 3)
    one = backend("sample", logits[0, 0], seed=seed[0, 0], num_samples=2, top_k=7, topk=2)
    assert torch.equal(one.tokens, flat.tokens[0]) and one.tokens.shape == (2,)
    assert torch.equal(one.topk.indices, flat.topk.indices[0]) and one.topk.logsumexp.shape == ()
    none = backend("sample", logits[:0], topk=4)
    assert none.tokens.shape == (0, 3, 1) and none.topk.indices.shape == (0, 3, 4)


def test_float64_logits_have_float64_log_probabilities():
    logits = random_logits(2, 50).double().requires_grad_()
    got = fused_topk.sample(logits, seed=0, topk=2)
    assert got.logprobs.dtype == got.topk.values.dtype == torch.float64 and not got.logprobs.requires_grad


def test_a_graph_draws_anew_at_each_replay(cuda):
    """And nothing waits for the GPU, also where more is kept than is listed."""
    logits = rows_of(9001).cuda()
    seed = torch.arange(len(logits), device="cuda")
    temperature = torch.ones(len(logits), device="cuda")
    settings = {"temperature": temperature, "top_p": 0.99, "num_samples": 4}
    expected = cuda("sample", logits, seed=seed, **settings).tokens
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        drawn = cuda("sample", logits, **settings).tokens
        named = cuda("sample", logits, seed=seed, **settings).tokens
    replayed = []
    for _ in range(2):
        graph.replay()
        replayed.append(drawn.clone())
        assert torch.equal(named, expected)
    assert not torch.equal(*replayed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cuda("sample", logits, **settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_calls_by_a_plan_and_without_one_draw_the_same(backend, monkeypatch):
    """Numbers of all rows and of each row are planned alike. Logits that autograd watches are not served by a plan."""
    logits = random_logits(2, 3, 700).to(backend.device)
    seed = torch.arange(6, device=backend.device).view(2, 3)
    planned = []
    check = sampling._plan
    monkeypatch.setattr(sampling, "_plan", lambda *key: planned.append(key) or check(*key))
    for name in ("whole", "usual", "all"):
        settings = SETTINGS[name]
        as_tensors = {
            parameter: torch.tensor([[value]], device=backend.device).expand(2, 3)
            for parameter, value in settings.items()
        } or {"temperature": torch.ones(2, 3, device=backend.device)}
        for names in ({"seed": seed}, {"seed": 3}, {"seed": seed, "counter": 5}, {"seed": 3, "counter": seed}):
            for more in ({}, {"topk": 2, "num_samples": 3, "logprobs": "kept"}):
                count = len(planned)
                got = backend("sample", logits, **settings, **names, **more)
                assert len(planned) == count + 1
                of_tensors = backend("sample", logits, **as_tensors, **names, **more)
                assert len(planned) == count + 2
                for parameters in (settings, as_tensors):
                    expected = backend("sample", logits.clone().requires_grad_(), **parameters, **names, **more)
                    assert len(planned) == count + 2
                    for each in (got, of_tensors):
                        assert torch.equal(each.tokens, expected.tokens)
                        torch.testing.assert_close(each.logprobs, expected.logprobs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"seed": 1, "generator": torch.Generator()}, "leave one out"), ({"counter": 1}, "without a `seed`")],
)
def test_names_that_exclude_each_other(arguments, message):
    before = torch.random.get_rng_state()
    with pytest.raises(ValueError, match=message):
        fused_topk.sample(torch.zeros(2, 10), **arguments)
    assert torch.equal(before, torch.random.get_rng_state())


# The numbers themselves.


def test_philox_gives_the_published_answers():
    """The known answers of Random123 (kat_vectors, philox4x32 10)."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    ones = 0xFFFFFFFF
    for counter, key, answer in (
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        words = philox.words(tuple(map(torch.tensor, key)), tuple(map(torch.tensor, counter)))
        assert tuple(map(int, words)) == answer


def test_numbers_are_never_0_or_1(monkeypatch):
    for bits, expected in ((0, 2.0**-53), (0xFFFFFFFF, 1 - 2.0**-53)):
        word = torch.full((1, 1), bits)
        monkeypatch.setattr(philox, "words", lambda key, counter, word=word: (word,) * 4)
        assert float(philox.uniforms(word, word, word, 1, torch.float64)) == expected


def chi_square_tail(statistic: float, degrees: int) -> float:
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double()))


@pytest.mark.parametrize(
    "varied", ["seed", "counter", *(pytest.param(part, marks=pytest.mark.exhaustive) for part in ("sample", "stream"))]
)
def test_numbers_are_uniform_and_independent(varied):
    """Whatever part of the name is counted up: Kolmogorov-Smirnov, and pairs of neighbours in a grid (chi-square)."""
    n = 1 << 20
    count = torch.arange(n).unsqueeze(1)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    if varied == "sample":
        u = philox.uniforms(zero, zero, zero, n, torch.float64).flatten()
    else:
        name = {part: count if part == varied else zero for part in ("seed", "counter", "stream")}
        u = philox.uniforms(name["seed"], name["counter"], name["stream"], 1, torch.float64).flatten()
    assert len(u.unique()) == n
    # Exceeded by 1 in 10^5 uniform samples: 2 exp(-2 x^2) = 10^-5 at x = 2.47.
    distance = (u.sort().values - (torch.arange(n) + 0.5) / n).abs().max() + 0.5 / n
    assert float(distance) * math.sqrt(n) < 2.47
    for lag in (1, 2, 32):
        cell = (u * 32).long()
        pairs = (cell[:-lag] * 32 + cell[lag:]).bincount(minlength=1024).double()
        expected = (n - lag) / 1024
        assert chi_square_tail(float(((pairs - expected) ** 2 / expected).sum()), 1023) > 1e-5
        correlation = torch.corrcoef(torch.stack([u[:-lag], u[lag:]]))[0, 1]
        # Of n independent pairs: normal, of deviation 1 / sqrt(n).
        assert abs(float(correlation)) * math.sqrt(n) < 4.5


@pytest.mark.exhaustive
def test_names_of_many_tokens_do_not_repeat():
    """The counter has 64 bits, the sample 31 and the row's number 31: distinct names are distinct inputs of a bijection, so the
    128 bits of their output differ. Of 2^24 in a row, the first 64 bits are seen to."""
    zero = torch.zeros(1, 1, dtype=torch.int64)
    for start in (0, 2**32 - 2**23):
        counter = start + torch.arange(1 << 24).unsqueeze(1)
        assert len(philox.uniforms(zero, counter, zero, 1, torch.float64).unique()) == 1 << 24


# The draws as a whole.


@pytest.mark.parametrize("name", ["whole", "temperature", "usual", "top_p", "min_p", "all"])
def test_frequencies(backend, name):
    """Chi-square of many draws against the exact probabilities; tokens of fewer than 5 expected draws count together."""
    draws = 40_000
    logits = rows_of(400)[:6]
    weights = kept_weights(logits, SETTINGS[name])
    got = backend("sample", logits.to(backend.device), seed=11, num_samples=draws, **SETTINGS[name]).tokens.cpu()
    assert_likely(got, weights, draws)


def assert_likely(tokens: Tensor, weights: Tensor, draws: int) -> None:
    """False alarms: 1 in 10^5 rows."""
    for row in range(len(tokens)):
        expected = weights[row] / weights[row].sum() * draws
        counts = tokens[row].bincount(minlength=weights.shape[1]).double()
        assert counts[expected == 0].sum() == 0
        is_rare = expected < 5
        counts = torch.cat([counts[~is_rare], counts[is_rare].sum()[None]])
        expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
        counts, expected = counts[expected > 0], expected[expected > 0]
        if len(expected) > 1:
            statistic = float(((counts - expected) ** 2 / expected).sum())
            assert chi_square_tail(statistic, len(expected) - 1) > 1e-5, f"row {row}"


def test_top_p_of_nothing_keeps_one_of_many_equal_tokens(backend):
    """More tie with the k-th than a list holds."""
    logits = torch.zeros(2, 64, device=backend.device)
    for settings in ({"top_p": 0.0}, {"top_p": torch.zeros(2, device=backend.device, dtype=torch.float64)}):
        got = backend("sample", logits, top_k=1, seed=0, num_samples=8, logprobs="kept", **settings)
        assert not got.tokens.any() and not got.logprobs.any()


def test_numbers_of_numpy():
    logits = torch.zeros(2, 5)
    got = fused_topk.sample(logits, counter=np.int64(0), topk=np.int64(0), generator=torch.Generator().manual_seed(1))
    assert got.topk is None and torch.equal(
        got.tokens, fused_topk.sample(logits, generator=torch.Generator().manual_seed(1)).tokens
    )
