# SPDX-License-Identifier: Apache-2.0
"""Exact agreement with the reference over types, vocabulary sizes, k and numbers of rows.

Both tiers together take, for every type, size and k, one number of rows and one function in turn, so that every pair of
settings meets somewhere. The plain tier takes a share of these cases. `-m all_shapes` takes the whole product.
"""

import functools
import itertools
from typing import NamedTuple

import pytest
from torch import Tensor

from fused_topk import TopK, TopKLogits
from oracle import DTYPES, assert_topk, expected
from rows import random_logits

ENTRIES = ("log_softmax_topk", "softmax_topk", "topk")
VOCABS = (1, 2, 31, 32, 33, 1000, 1023, 32000, 50257, 128256, 151936, 262144, 2**21 + 7)
KS = (1, 2, 5, 8, 31, 32, 33, 64, 128, 1000, "V")
ROWS = (0, 1, 3, 37, 199, 4096)


class Case(NamedTuple):
    entry: str
    dtype: str
    rows: int
    vocab_size: int
    k: int

    def __str__(self) -> str:
        return f"{self.entry}-{self.dtype}-rows{self.rows}-V{self.vocab_size}-k{self.k}"


def _shared(cases: list[Case], period: int) -> list:
    """Of each `period` cases one is in the plain tier, a step further in each."""
    return [
        case if (i + i // period) % period == 0 else pytest.param(case, marks=pytest.mark.exhaustive)
        for i, case in enumerate(cases)
    ]


def _rows_of(vocab_size: int, max_elements: int) -> list[int]:
    return [rows for rows in ROWS if rows * vocab_size <= max_elements]


def _ks_of(vocab_size: int) -> list[int]:
    return [vocab_size if k == "V" else k for k in KS if k == "V" or k < vocab_size]


def _covering() -> list[Case]:
    cases = []
    for dtype, vocab_size in itertools.product(DTYPES, VOCABS):
        rows = itertools.cycle(_rows_of(vocab_size, 2**20) or [1])
        # Starting elsewhere for every type and size makes other pairs of rows, k and entry meet.
        turn = len(cases)
        entry = itertools.cycle(ENTRIES)
        for _ in range(turn % 5):
            next(rows), next(entry)
        cases += [Case(next(entry), dtype, next(rows), vocab_size, k) for k in _ks_of(vocab_size)]
    return cases


# Around the boundaries between the kernels' regimes: capacities of lists, short rows, parts of a split row.
_K_BOUNDARIES = [
    Case(ENTRIES[k % 3], dtype, rows, vocab_size, k)
    for k in (16, 17, 31, 33, 63, 65, 127, 129, 255, 256, 257, 512, 513, 1024, 1025, 2047, 2048, 2049)
    for dtype, rows, vocab_size in (("fp32", 3, 4096), ("bf16", 2, 20011), ("fp16", 40, 2500))
]
_VOCAB_BOUNDARIES = [
    Case(ENTRIES[(vocab_size + k) % 3], dtype, rows, vocab_size, k)
    for size in (64, 128, 256, 512, 1024, 2048, 3072, 4096, 8192, 16384, 125 * 1024)
    for vocab_size in (size - 1, size, size + 1)
    for dtype, k in zip(itertools.cycle(DTYPES), (1, 4, 8, 16, 50))
    for rows in (2,)
]
# Batches that give every multiprocessor of a large GPU several rows, or a row several multiprocessors.
_BATCHES = [
    Case("log_softmax_topk", "bf16", 64, 128256, 8),
    Case("softmax_topk", "fp32", 64, 128256, 50),
    Case("softmax_topk", "fp16", 132, 32000, 5),
    Case("log_softmax_topk", "fp32", 133, 32000, 5),
    Case("topk", "bf16", 1000, 5000, 20),
    Case("log_softmax_topk", "fp16", 4096, 128, 8),
    Case("softmax_topk", "bf16", 70001, 64, 4),
    Case("topk", "fp32", 300000, 3, 2),
]


@functools.lru_cache(maxsize=3)
def _logits_and_ranking(entry: str, dtype: str, rows: int, vocab_size: int, device: str) -> tuple[Tensor, TopK]:
    """Logits and their whole ranking: the result for any k is a prefix of it."""
    logits = random_logits(rows, vocab_size, dtype=DTYPES[dtype], device=device, seed=vocab_size + rows)
    return logits, expected(entry, logits, vocab_size)


def _check(backend, case: Case) -> None:
    logits, ranking = _logits_and_ranking(case.entry, case.dtype, case.rows, case.vocab_size, backend.device)
    want = TopK(ranking.values[..., : case.k], ranking.indices[..., : case.k], ranking.logsumexp)
    assert_topk(backend(case.entry, logits, case.k), want, logits, case.entry)


_SHARED = [*_shared(_covering() + _K_BOUNDARIES, 3), *_shared(_VOCAB_BOUNDARIES, 5), *_shared(_BATCHES, 2)]


@pytest.mark.parametrize("case", _SHARED, ids=str)
def test_row_topk_shapes(native, case):
    _check(native, case)


@pytest.mark.all_shapes
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_row_topk_all_shapes(native, entry, dtype, vocab_size):
    for rows, k in itertools.product(_rows_of(vocab_size, 2**25), _ks_of(vocab_size)):
        _check(native, Case(entry, dtype, rows, vocab_size, k))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocab_size", "k"), [(3, 33, 5), (2, 1000, 8), (5, 5001, 5), (2, 40000, 40), (2, 9000, 700)]
)
def test_row_topk_small(backend, dtype, rows, vocab_size, k):
    """A little of every regime."""
    for entry in ENTRIES:
        _check(backend, Case(entry, dtype, rows, vocab_size, k))


@pytest.mark.parametrize("lead", [(), (1,), (0,), (2, 3), (2, 0, 3), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("entry", ENTRIES)
def test_row_topk_leading_dimensions(backend, entry, lead):
    logits = random_logits(*lead, 70, device=backend.device)
    got = backend(entry, logits, 6)
    assert type(got) is (TopKLogits if entry == "topk" else TopK)
    assert_topk(got, expected(entry, logits, 6), logits, entry)
