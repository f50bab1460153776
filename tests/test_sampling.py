# SPDX-License-Identifier: Apache-2.0
"""sample(): the tokens that a uniform number draws, the distribution of the draws, and what a call promises besides.

The strictest test needs no statistics: the uniform number of every draw is known, and so is the token that the exact running
sum gives for it. A draw may be another one only if its number is within `NEAR` of a border between two tokens. What is left
to statistics is that the numbers are uniform and independent.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import fused_topk
from exact_draws import (
    BROAD,
    SETTINGS,
    broad_rows,
    check_draws,
    check_kept,
    check_sample,
    kept_weights,
    rows_cut_by_min_p,
    rows_of,
    settings_of_rows,
    uniforms,
)
from fused_topk.backends import philox
from fused_topk.functional import sampling
from rows import INF, NAN, also, packed, random_logits, random_mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("vocab_size", [1, 5, 300, 9001])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_number_draws_the_token_of_the_exact_sums(backend, name, vocab_size, dtype):
    settings = SETTINGS[name]
    logits = rows_of(vocab_size, dtype)
    seed = torch.arange(len(logits)) + 17
    got = backend("sample", logits.to(backend.device), seed=seed.to(backend.device), num_samples=50, **settings)
    check_sample(got, seed, logits, settings)
    again = backend("sample", logits.to(backend.device), seed=seed.to(backend.device), kept=True, **settings)
    assert got.kept is None and torch.equal(again.tokens, got.tokens[:, :1])
    check_kept(again.kept, logits, settings)


@pytest.mark.parametrize("name", ["whole", "top_p", *also("top_p_of_almost_all", "min_p_of_little", "usual", "many")])
def test_long_rows(backend, name):
    """What top-p keeps of flat rows is far longer than any list."""
    settings = SETTINGS[name]
    logits = rows_of(262144)[[0, 2, 3, 4, 7]]
    seed = torch.arange(len(logits)) - 5
    got = backend("sample", logits.to(backend.device), seed=seed.to(backend.device), num_samples=20, **settings)
    check_sample(got, seed, logits, settings)


@pytest.mark.parametrize("name", BROAD)
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (3000, torch.float32),
        (20_000, torch.bfloat16),
        *also((9001, torch.float16), (128_256, torch.float32), (262_144, torch.bfloat16)),
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
    check_sample(got, seed, logits, settings)


def test_broad_rows_with_parameters_of_their_own_and_a_mask(backend):
    logits = broad_rows(5000).repeat(len(BROAD), 1)
    settings = settings_of_rows([each for each in BROAD.values() for _ in range(len(logits) // len(BROAD))])
    mask = random_mask(*logits.shape, share=0.7)
    on_device = {key: x.to(backend.device) for key, x in settings.items()}
    seed = torch.arange(len(logits), device=backend.device)
    given = logits.to(backend.device), {"mask": mask.to(backend.device), "seed": seed, "kept": True}
    got = backend("sample", given[0], **given[1], **on_device)
    weights = kept_weights(logits, settings, mask)
    check_draws(got.tokens.cpu(), uniforms(torch.arange(len(logits)), 1), weights)
    for row in range(0, len(logits), 7):
        one = {key: x[row].item() for key, x in settings.items()}
        part = slice(row, row + 1)
        check_kept(type(got.kept)(*(x[part] for x in got.kept)), logits[part], one, mask[part])
        alone = backend("sample", given[0][part], mask=given[1]["mask"][part], seed=seed[part], kept=True, **one)
        assert torch.equal(alone.tokens, got.tokens[part]) and torch.equal(alone.kept.counts, got.kept.counts[part])


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


@pytest.mark.parametrize("others", [{}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_minus_one_is_no_limit(backend, others):
    logits = rows_of(900).to(backend.device)
    for top_k in (-1, torch.full((10,), -1, device=backend.device)):
        got, expected = (backend("sample", logits, top_k=k, seed=1, kept=True, **others) for k in (top_k, top_k * 0))
        assert torch.equal(got.tokens, expected.tokens) and torch.equal(got.kept.counts, expected.kept.counts)


@pytest.mark.parametrize("vocab_size", [40, 5000])
@pytest.mark.parametrize("form", ["none", "bool", "packed"])
def test_each_row_has_its_own_parameters(backend, vocab_size, form):
    logits = rows_of(vocab_size)[:4].repeat_interleave(len(SETTINGS), 0)
    settings = settings_of_rows([*SETTINGS.values()] * 4)
    mask = None if form == "none" else random_mask(*logits.shape, share=0.3)
    seed = torch.arange(len(logits))
    given = {**settings, "seed": seed, "counter": seed * 2**40}
    if mask is not None:
        given["mask"] = packed(mask) if form == "packed" else mask
    given = {name: x.to(backend.device) for name, x in given.items()}
    on_device, how = logits.to(backend.device), {"num_samples": 9, "logprobs": "kept"}
    got = backend("sample", on_device, **given, **how)
    check_draws(got.tokens.cpu(), uniforms(seed, 9, seed * 2**40), kept_weights(logits, settings, mask))
    for row in range(0, len(logits), 5):
        part = slice(row, row + 1)
        one = {name: x[row].item() for name, x in settings.items()} | {"counter": row * 2**40}
        alone = backend("sample", on_device[part], **{name: x[part] for name, x in given.items()} | one, **how)
        assert torch.equal(alone.tokens, got.tokens[part])
        # A GPU has another kernel for rows without a filter, with another sum d. Twice the bound of oracle.py for a z of -10.
        torch.testing.assert_close(alone.logprobs, got.logprobs[part], rtol=0, atol=2e-5)


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
    rows, given = rows.to(backend.device), {"mask": mask.to(backend.device), "seed": 0, "num_samples": 2}
    got = backend("sample", rows, **given, **SETTINGS[name])
    assert got.tokens[:, 0].tolist() == got.tokens[:, 1].tolist() == [3, 4, 0, 2, 1, 0, 0]
    assert bool(got.logprobs.isnan().all())
    for settings in (SETTINGS[name], {"temperature": 0.0}):
        again = backend("sample", rows, **given, logprobs="kept", kept=True, **settings)
        assert torch.equal(again.tokens, got.tokens) and bool(again.logprobs.isnan().all())
        assert not again.kept.counts.any() and bool(again.kept.logsumexp.isnan().all())


def test_greedy_rows(backend):
    logits = rows_of(800).to(backend.device)
    temperature = torch.ones(len(logits), dtype=torch.float32, device=backend.device)
    temperature[::2] = 0
    settings = {"temperature": temperature, "seed": 3, "num_samples": 4, "top_p": 0.95}
    got = backend("sample", logits, **settings)
    best = backend("log_softmax_topk", logits, 1)
    assert bool((got.tokens[::2] == best.indices[::2]).all())
    torch.testing.assert_close(got.logprobs[::2], best.values[::2].expand(-1, 4), rtol=2e-6, atol=2e-6)
    truncated = backend("sample", logits, logprobs="kept", kept=True, **settings)
    assert bool((truncated.logprobs[::2] == 0).all()) and bool((truncated.kept.counts[::2] == 1).all())
    assert torch.equal(truncated.kept.logsumexp[::2], logits[::2].amax(1))
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


def test_a_graph_draws_anew_at_each_replay(cuda):
    logits = rows_of(9001).cuda()
    settings = {"temperature": torch.ones(len(logits), device="cuda"), "top_p": 0.99, "num_samples": 4}
    check_graph(functools.partial(cuda, "sample", logits, **settings), torch.arange(len(logits), device="cuda"))


def check_graph(draw: Callable[..., fused_topk.Sample], seed: Tensor | int) -> None:
    """And nothing waits for the GPU, also where more is kept than is listed."""
    expected = draw(seed=seed).tokens
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        drawn = draw().tokens
        named = draw(seed=seed).tokens
    replayed = []
    for _ in range(2):
        graph.replay()
        replayed.append(drawn.clone())
        assert torch.equal(named, expected)
    assert not torch.equal(*replayed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        draw()
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
    [
        ({"seed": 1, "generator": torch.Generator()}, "leave one out"),
        ({"counter": 1}, "without a `seed`"),
        ({"counter": 0.0}, "without a `seed`"),
    ],
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


@pytest.mark.parametrize("varied", ["seed", "counter", *also("sample", "stream")])
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
