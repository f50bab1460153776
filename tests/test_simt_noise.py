# SPDX-License-Identifier: Apache-2.0
"""Draws with noise by the kernels of csrc/draws/ on the emulated machine: the winners, and every read and write checked."""

from itertools import product

import pytest
import torch
from torch import Tensor

from exact_draws import BROAD, SETTINGS, broad_rows, kept_weights, rows_of
from fused_topk.layout import launch
from oracle import DTYPES
from rows import INF, NAN, also, packed, random_mask
from simt.launch import SCHEDULES
from test_sampling_noise import check_winners, exponential, ties_and_odd_noise
from test_simt_sampling import draw


def check(logits: Tensor, settings: dict, seed: int = 0, mask: Tensor | None = None, **how) -> None:
    noise = exponential(*logits.shape, seed=seed)
    got = draw(logits, settings, noise=noise, num_samples=1, mask=mask, **how)
    check_winners(got.tokens, noise, logits, settings, mask)


@pytest.mark.parametrize(("longest", "blocks"), [(None, 1), (5, 1), (5, 3)], ids=["listed", "searched", "by_blocks"])
@pytest.mark.parametrize("name", SETTINGS)
def test_draws(name, longest, blocks):
    """With a list of 5 nearly every filter keeps more than is listed."""
    turn = list(SETTINGS).index(name)
    dtype = list(DTYPES.values())[turn % 3]
    check(
        rows_of(777, dtype), SETTINGS[name], turn, longest=longest, blocks=blocks,
        schedule=SCHEDULES[turn % len(SCHEDULES)],
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("most", "likely") else pytest.mark.exhaustive) for name in BROAD],
)
def test_broad_rows(name):
    turn = list(BROAD).index(name)
    dtype, blocks = list(DTYPES.values())[turn % 3], 1 + turn % 2
    rows = slice(0, 4) if name in ("most", "likely") else slice(None)
    check(broad_rows(2100, dtype)[rows], BROAD[name], blocks=blocks, schedule=SCHEDULES[turn % len(SCHEDULES)])


@pytest.mark.parametrize("blocks", [1, 2])
def test_ties_at_the_border_of_top_p(blocks):
    """A few, which are listed, and more than a list has: the first of them are kept, and race."""
    for ties in (300, 3000):
        logits = torch.full((4, 4000), -9.0)
        logits[:, 3 : 3 + ties] = 1.0
        logits[:, 3500:3510] = 1.5
        for top_p in (0.3, 0.6):
            check(logits.bfloat16(), {"top_p": top_p}, longest=5, blocks=blocks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_of_blocks_that_share_a_row(schedule):
    for name, dtype in (("temperature", torch.bfloat16), ("top_p_min_p", torch.float32), ("top_p", torch.float16)):
        check(rows_of(3001, dtype), SETTINGS[name], longest=4, blocks=4, schedule=schedule, seed=5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("architecture", [75, 90])
@pytest.mark.parametrize("vocab_size", [1, 31, 9001])
def test_formats_and_lengths(vocab_size, architecture, dtype):
    for name in ("whole", "temperature", "usual", "top_p_min_p"):
        blocks = 2 if name == "temperature" else 1
        check(
            rows_of(vocab_size, dtype), SETTINGS[name], longest=7, blocks=blocks, schedule="random",
            architecture=architecture,
        )  # fmt: skip


def test_masks_lengths_and_strides():
    """Logits and noise that start at any multiple of their elements' size. What is behind a row's end is not read."""
    halves = rows_of(1500, torch.bfloat16).repeat(1, 2)
    for start in range(0, 8, 3):
        check(halves[:3, start : start + 1501], SETTINGS["temperature"], start)
    logits = rows_of(500)[:4]
    mask = random_mask(4, 500, share=0.2)
    lengths = torch.tensor([500, 333, 77, 2])
    mask[:, 0] = True
    allowed = mask & (torch.arange(500) < lengths.unsqueeze(1))
    noise = exponential(4, 500)
    for given, name in product((mask, packed(mask)), ("whole", "usual", "top_p")):
        got = draw(logits, SETTINGS[name], noise=noise, num_samples=1, mask=given, lengths=lengths, longest=9)
        check_winners(got.tokens, noise, logits, SETTINGS[name], allowed)


def test_blocks_do_not_change_the_winner():
    logits = rows_of(2500, torch.bfloat16)[[0, 2, 3]]
    noise = exponential(3, 2500)
    for name in ("temperature", "top_p_of_almost_all"):
        one, several = (
            draw(
                logits, SETTINGS[name], noise=noise, num_samples=1, longest=5, blocks=blocks, truncated=True, kept=True
            )
            for blocks in (1, 3)
        )
        assert torch.equal(one.tokens, several.tokens) and torch.equal(one.logprobs, several.logprobs)
        weights = kept_weights(logits, SETTINGS[name])
        own = (weights / weights.sum(1, keepdim=True)).log().gather(1, one.tokens)
        torch.testing.assert_close(one.logprobs.double(), own, rtol=0, atol=1e-4)


def test_long_parts(monkeypatch):
    """As of rows beyond a million tokens: a warp reads a part in several steps."""
    monkeypatch.setattr(launch, "_MOST_PARTS", 2)
    for blocks in (1, 2):
        check(rows_of(9001)[:4], SETTINGS["temperature"], blocks=blocks)


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 20}, *also({"top_p": 0.99}, {"min_p": 1e-4})],
    ids=str,
)
def test_ties_and_noise_that_no_distribution_gives(settings):
    for vocab_size, blocks in ((24, 1), (2100, 2)):
        logits, noise, expected = ties_and_odd_noise(vocab_size)
        for longest in (None, 1):
            given = {"noise": noise, "num_samples": 1, "blocks": blocks, "longest": longest}
            got = draw(logits, settings, **given)
            assert got.tokens.flatten().tolist() == expected
            got = draw(torch.ones_like(logits), settings, mask=logits != -INF, **given)
            assert got.tokens.flatten().tolist() == expected


def test_rows_without_a_draw():
    rows = torch.randn(5, 100, generator=torch.Generator().manual_seed(1))
    rows[0, 3], rows[1, 4], rows[2] = NAN, INF, -INF
    temperature = torch.tensor([1.0, 1.0, 1.0, 0.0, -1.0])
    for top_p, blocks in product((0.5, 1.0), (1, 2)):
        given = {"temperature": temperature, "top_p": top_p}
        got = draw(rows, given, noise=exponential(5, 100), num_samples=1, blocks=blocks)
        assert got.tokens[:, 0].tolist() == [3, 4, 0, int(rows[3].argmax()), int(rows[4].argmax())]
        assert got.logprobs[:3].isnan().all()
