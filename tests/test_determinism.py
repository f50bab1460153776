# SPDX-License-Identifier: Apache-2.0
"""The same row gives the same bits: run after run, in any batch, with any number of threads."""

from __future__ import annotations

import pytest
import torch

import fused_topk
from fused_topk import TopK
from oracle import DTYPES, assert_same, bits
from rows import adversarial_rows, random_logits, random_mask

SHAPES = [(40, 5), (1000, 8), (5003, 65), (32000, 300), (128256, 8), (300007, 50)]
IDS = [f"V{v}-k{k}" for v, k in SHAPES]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "k"), SHAPES, ids=IDS)
def test_row_topk_repeats(native, dtype, vocab_size, k):
    logits = random_logits(3, vocab_size, dtype=DTYPES[dtype], device=native.device)
    want = native("softmax_topk", logits, k)
    for _ in range(5):
        assert_same(native("softmax_topk", logits, k), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "k"), SHAPES, ids=IDS)
def test_row_topk_does_not_depend_on_the_batch(native, dtype, vocab_size, k):
    """A row alone, and in batches that give it more or fewer blocks or threads."""
    logits = random_logits(9, vocab_size, dtype=DTYPES[dtype], device=native.device)
    want = native("log_softmax_topk", logits, k)
    for size in (1, 2, 4):
        parts = [native("log_softmax_topk", part, k) for part in logits.split(size)]
        assert_same(TopK(*map(torch.cat, zip(*parts))), want)
    for repeats in (20, 100) if vocab_size <= 5003 or native.device == "cuda" else (4,):
        many = native("log_softmax_topk", logits.repeat(repeats, 1), k)
        assert_same(TopK(*(x[-9:] for x in many)), want)
        assert_same(TopK(*(x[:9] for x in many)), want)


def test_row_topk_adversarial_rows_do_not_depend_on_the_batch(native):
    logits = torch.stack(list(adversarial_rows(5003, 20, torch.float32).values())).to(native.device)
    want = native("softmax_topk", logits, 20)
    alone = [native("softmax_topk", row, 20) for row in logits]
    assert_same(TopK(*map(torch.stack, zip(*alone))), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_row_topk_does_not_depend_on_threads(cpu, threads, dtype, rows):
    for vocab_size, k in SHAPES:
        logits = random_logits(rows, vocab_size, dtype=DTYPES[dtype])
        mask = random_mask(rows, vocab_size)
        results = []
        for number in (1, 2, 3, 4, 7):
            threads(number)
            results.append(
                (cpu("softmax_topk", logits, k), cpu("softmax_topk", logits, k, mask=mask, normalize="topk"))
            )
        for plain, masked in results[1:]:
            assert_same(plain, results[0][0])
            assert_same(masked, results[0][1])


@pytest.mark.parametrize("vocab_size", [1000, 128256])
def test_beam_topk_does_not_depend_on_threads(cpu, threads, vocab_size):
    logits, scores = random_logits(3, 4, vocab_size), random_logits(3, 4)
    results = []
    for number in (1, 2, 3, 8):
        threads(number)
        results.append(cpu("beam_topk", logits, scores, 8))
    for got in results[1:]:
        assert_same(got, results[0])


def test_beam_topk_does_not_depend_on_the_batch(native):
    logits, scores = random_logits(5, 4, 5003, device=native.device), random_logits(5, 4, device=native.device)
    want = native("beam_topk", logits, scores, 8)
    alone = [native("beam_topk", *(x.unsqueeze(0) for x in pair), 8) for pair in zip(logits, scores)]
    assert_same(TopK(*map(torch.cat, zip(*alone))), want)


@pytest.mark.parametrize(("vocab_size", "k"), [(1000, 8), (40000, 20)])
def test_row_topk_indices_are_the_same_on_every_backend(native, vocab_size, k):
    """And so are the values of `topk`."""
    logits = random_logits(4, vocab_size, dtype=torch.bfloat16)
    want = native("topk", logits.to(native.device), k)
    got = fused_topk.topk(logits, k, backend="reference")
    assert torch.equal(got.indices, want.indices.cpu()) and torch.equal(bits(got.values), bits(want.values.cpu()))
