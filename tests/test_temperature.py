# SPDX-License-Identifier: Apache-2.0
"""Temperatures: one number, one per row, and those that are no temperatures."""

import pytest
import torch

from fused_topk.row_arguments import TEMPERATURES
from oracle import assert_same, check
from rows import INF, NAN, random_logits, random_mask

ENTRIES = ("softmax_topk", "log_softmax_topk")
NORMALIZE = ("allowed", "all", "topk")


@pytest.mark.sanitize
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize(("vocab_size", "k"), [(100, 5), (5003, 65)])
def test_row_topk_temperature_per_row(backend, entry, normalize, vocab_size, k):
    logits = random_logits(2, 3, vocab_size, device=backend.device)
    mask = random_mask(2, 3, vocab_size, device=backend.device)
    temperature = torch.tensor([[0.1, 0.7, 1.0], [1.5, 3.0, 50.0]], device=backend.device)
    check(backend, entry, logits, k, temperature=temperature, mask=mask, normalize=normalize)


def test_row_topk_temperature_of_one_is_none(backend):
    logits = random_logits(3, 3001, device=backend.device)
    want = backend("log_softmax_topk", logits, 9)
    ones = torch.ones(3, device=backend.device)
    for temperature in (1, 1.0, ones):
        assert_same(backend("log_softmax_topk", logits, 9, temperature=temperature), want)


@pytest.mark.parametrize("vocab_size", [200, 5000])
def test_row_topk_temperature_does_not_change_the_order(backend, vocab_size):
    """The selection is on the raw logits, whatever rounding makes of the values."""
    logits = random_logits(2, vocab_size, dtype=torch.bfloat16, device=backend.device)
    want = backend("topk", logits, 20).indices
    for temperature in (1e-20, 1e-3, 1e3, 1e20):
        assert torch.equal(backend("softmax_topk", logits, 20, temperature=temperature).indices, want)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("border", TEMPERATURES)
def test_row_topk_temperature_at_the_border(backend, entry, border):
    """The last one that is allowed has the values of all others, as a number and as one row of few and of many."""
    for rows in (1, 16, 17, 40):
        logits = random_logits(rows, 50, device=backend.device) / 64
        check(backend, entry, logits, 5, temperature=border)
        temperature = torch.ones(rows, device=backend.device)
        temperature[rows // 2] = border
        check(backend, entry, logits, 5, temperature=temperature)


@pytest.mark.parametrize("temperature", [TEMPERATURES[0] / 2, TEMPERATURES[1] * 2, 0.0, -1.0, -INF, INF, NAN])
def test_row_topk_temperature_beyond_the_border(cpu, temperature):
    """Of all rows, and in any one of few rows and of many."""
    for rows in (1, 2, 15, 16, 17, 18, 40):
        logits = random_logits(rows, 50)
        with pytest.raises(
            ValueError, match=r"`temperature` must satisfy .* <= temperature <= .*; for the best token use k=1"
        ):
            cpu("softmax_topk", logits, 4, temperature=temperature)
        for place in {0, rows // 2, rows - 1}:
            of_rows = torch.ones(rows)
            of_rows[place] = temperature
            for entry, k in (("softmax_topk", (4,)), ("log_softmax", ())):
                with pytest.raises(ValueError, match=r"`temperature` must satisfy .* in every row"):
                    cpu(entry, logits, *k, temperature=of_rows)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("vocab_size", [200, 5000])
def test_row_topk_row_temperature_not_positive(cuda, temperature, vocab_size):
    """Looking at the numbers would mean waiting: NaN in that row, and only there."""
    logits = random_logits(3, vocab_size, device="cuda")
    rows = torch.tensor([1.0, temperature, 2.0], device="cuda")
    got = check(cuda, "softmax_topk", logits, 4, temperature=rows)
    assert got.values[1].isnan().all() and got.logsumexp[1].isnan()
    assert got.values[::2].isfinite().all()
