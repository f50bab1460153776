# SPDX-License-Identifier: Apache-2.0
"""What each process of a group checks of draws from columns that they have between them (test_distributed.py)."""

import itertools

import torch

import fused_topk
from distributed_checks import columns, counted, frame
from exact_draws import (
    SETTINGS,
    check_draws,
    check_kept,
    check_sample,
    kept_weights,
    rows_of,
    settings_of_rows,
    uniforms,
)
from fused_topk import distributed
from processes import assert_equal_everywhere
from rows import random_mask

FOLDER = ""


def draws_of_exact_sums(rank: int, size: int) -> None:
    """Whole rows, lists, and rows of which more is kept than a list has."""
    for vocab_size in (5, 300, 9001):
        for dtype in (torch.float32, torch.bfloat16):
            logits = rows_of(vocab_size, dtype)
            seed = torch.arange(len(logits)) + 17
            own = columns(logits, rank, size)
            for name, settings in SETTINGS.items():
                got = distributed.sample(own, seed=seed, num_samples=50, **settings)
                try:
                    check_sample(got, seed, logits, settings)
                except AssertionError as error:
                    raise AssertionError(f"{name}, {vocab_size} x {dtype}") from error
                assert_equal_everywhere(got.tokens)


def what_is_kept(rank: int, size: int) -> None:
    """Of whole rows, of lists, and of rows of which more is kept than a list has."""
    for vocab_size in (300, 2500):
        logits = rows_of(vocab_size)
        mask = random_mask(*logits.shape, share=0.7)
        has_any = (logits.masked_fill(~mask, -torch.inf) > -torch.inf).any(1)
        seed = torch.arange(len(logits)) + 3
        for settings, allowed in itertools.product(SETTINGS.values(), (None, mask)):
            own_mask = None if allowed is None else columns(allowed, rank, size)
            got = distributed.sample(columns(logits, rank, size), mask=own_mask, seed=seed, kept=True, **settings)
            some = slice(None) if allowed is None else has_any
            of_some = logits[some], settings, None if allowed is None else allowed[some]
            check_kept(type(got.kept)(*(x[some] for x in got.kept)), *of_some)
            check_draws(got.tokens[some], uniforms(seed[some], 1), kept_weights(*of_some))
    got = distributed.sample(columns(logits.double(), rank, size), seed=0, kept=True)
    torch.testing.assert_close(got.kept.logsumexp, logits.double().logsumexp(-1), rtol=0, atol=1e-6)
    assert got.kept.logsumexp.dtype == torch.float64
    one = distributed.sample(columns(logits[0], rank, size), seed=3)
    assert one.tokens.shape == (1,) and torch.equal(one.tokens, fused_topk.sample(logits[0], seed=3).tokens)
    assert distributed.sample(columns(logits.view(2, 5, 2500)[:0], rank, size), seed=3).tokens.shape == (0, 5, 1)


def special_rows(rank: int, size: int) -> None:
    logits = torch.randn(7, 90, generator=torch.Generator().manual_seed(0))
    logits[0] = -torch.inf
    logits[1, 70] = torch.nan
    logits[2, 3] = torch.inf
    logits[3, 10:] = -torch.inf
    temperature = torch.tensor([1.0, 1.0, 0.5, 1.0, 0.0, 0.0, 2.0])
    for cuts in (None, [0] * (size - 1), [90] * (size - 1)):
        for settings in ({}, {"top_k": 5}, {"top_p": 0.8}):
            for is_truncated in (False, True):
                call = {
                    "temperature": temperature,
                    "seed": 1,
                    "logprobs": "kept" if is_truncated else "model",
                    "kept": True,
                    **settings,
                }
                got = distributed.sample(columns(logits, rank, size, cuts), **call)
                want = fused_topk.sample(logits, **call)
                assert torch.equal(got.tokens, want.tokens), settings
                torch.testing.assert_close(got.logprobs, want.logprobs, rtol=0, atol=5e-6, equal_nan=True)
                assert torch.equal(got.kept.counts, want.kept.counts), settings
                torch.testing.assert_close(got.kept.logsumexp, want.kept.logsumexp, rtol=0, atol=5e-6, equal_nan=True)


def parameters_of_each_row(rank: int, size: int) -> None:
    base = rows_of(3000)[:4]
    logits = base.repeat_interleave(len(SETTINGS), 0)
    settings = settings_of_rows([*SETTINGS.values()] * 4)
    seed = torch.arange(len(logits))
    got = distributed.sample(columns(logits, rank, size), num_samples=9, seed=seed, **settings)
    check_draws(got.tokens, uniforms(seed, 9), kept_weights(logits, settings))
    short = {"top_k": torch.tensor([3, 2000]), "top_p": 0.9}
    got = distributed.sample(columns(base[:2], rank, size), num_samples=30, seed=seed[:2], **short)
    short["top_p"] = torch.full((2,), 0.9, dtype=torch.float64)
    check_draws(got.tokens, uniforms(seed[:2], 30), kept_weights(base[:2], short))


def draws_of_the_first_generator(rank: int, size: int) -> None:
    logits = rows_of(300)[:4]
    own = columns(logits, rank, size)
    found = []
    for settings in ({}, {"top_k": 40}, {"top_p": 0.9999, "temperature": 4.0}):
        for seed in (0, 0, 1):
            generator = torch.Generator().manual_seed(100 * seed if rank == 0 else rank + 50 * len(found))
            found.append(distributed.sample(own, generator=generator, num_samples=20, **settings).tokens)
            assert_equal_everywhere(found[-1])
        assert torch.equal(found[-3], found[-2]) and not torch.equal(found[-3], found[-1])
        want = fused_topk.sample(logits, generator=torch.Generator().manual_seed(0), num_samples=20, **settings)
        assert torch.equal(found[-3], want.tokens)


def one_or_two_collectives(rank: int, size: int) -> None:
    """Of few bytes, where a call is as large as the last one."""
    rows, samples = 8, 2
    # Without ties.
    logits = rows_of(9000)[[0, 1, 2, 5, 6, 7, 0, 1]]
    own = columns(logits, rank, size)

    def given_by(**settings):
        distributed.sample(own, seed=0, num_samples=samples, **settings)
        with counted() as given:
            distributed.sample(own, seed=1, num_samples=samples, **settings)
        return given

    def of_state(k):
        # A header; m and d; tokens and logits; m and d at the temperature, and the names.
        return frame(16 + rows * (8 + 8 * k + 32) + -(-rows * k * 4 // 8) * 8)

    for settings in ({}, {"temperature": 0.5}):
        assert given_by(**settings) == [of_state(1), 2 * 8 * rows * samples]
    for settings, k in (({"top_k": 50}, 114), ({"top_k": 50, "top_p": 0.9, "min_p": 0.01}, 114)):
        assert given_by(**settings) == [of_state(k)]
    assert given_by(min_p=0.9) == [of_state(1024)]
    *first, last = given_by(top_p=0.999, temperature=5.0)
    assert first == [of_state(1024)] and last >= rows * 9000 * 4 // size
