# SPDX-License-Identifier: Apache-2.0
"""Kernels of rows with lengths on the emulated machine: the bits of the same rows with -inf, and no read beyond a length."""

import pytest
import torch
from torch import Tensor

import test_simt
from fused_topk import TopK
from fused_topk.problem import FullRowProblem, TopkProblem
from fused_topk.rows import LogitRows
from oracle import DTYPES, assert_same
from rows import random_logits, random_mask
from simt.cases import Case
from simt.launch import SCHEDULES
from simt.row_topk import row_topk
from test_lengths import ragged, same
from test_simt_full_rows import run, small_choice


def topk(case: Case, problem: TopkProblem, beam_scores: Tensor | None = None, **how) -> TopK:
    """What the kernel of a case makes of rows. how: as of row_topk()."""
    found, outcome = row_topk(problem, case.choice(), beam_scores=beam_scores, **how)
    outcome.check()
    return found


CASES = {
    "8 lanes": Case(200, 5),
    "lanes": Case(129, 20, "bf16"),
    "a warp": Case(2500, 5, owner="many", padding=28),
    "a warp, unaligned": Case(2501, 40, "bf16", owner="many"),
    "8 warps": Case(9001, 40, owner="some"),
    "16 warps": Case(20_001, 8, owner="few", splits=1),
    "for many": Case(20_000, 400, "bf16", splits=1),
    "windows": Case(70_000, 20, "bf16", owner="some", padding=16),
    "splits": Case(40_008, 60, splits=3),
    "splits for many": Case(18_000, 700, "bf16", splits=2),
    "splits in windows": Case(110_000, 8, "bf16", splits=2, padding=16),
    "parts of two tiles": Case(9001, 5, tiles_per_part=2, splits=2),
}
EXHAUSTIVE = ("windows", "splits in windows", "splits for many", "16 warps", "8 warps", "lanes")
NAMED = [pytest.param(name, marks=pytest.mark.exhaustive) if name in EXHAUSTIVE else name for name in CASES]


def lengths_of(case: Case) -> Tensor:
    """At the borders of everything, and some that are clamped."""
    V = case.vocab_size
    border = min(1024, V)
    return torch.tensor([-3, 0, 1, case.k - 1, case.k, border - 1, border, border + 1, V // 2, V - 1, V, V + 7])


def request(case: Case, rows: LogitRows, values: str, normalize: str = "allowed") -> TopkProblem:
    return TopkProblem(rows, case.k, values, normalize)


def check_bits(name: str, values: str = "log_softmax", is_long: bool = True, **how) -> None:
    """Rows of all lengths against the same rows with -inf; `how`: of the former."""
    case = CASES[name]
    lengths = lengths_of(case)
    with_nan, hidden = map(case._placed, ragged(lengths, case.vocab_size, DTYPES[case.dtype]))
    rows = LogitRows(with_nan, temperature=0.7, lengths=lengths if is_long else lengths.int())
    got = topk(case, request(case, rows, values), **how)
    assert_same(got, topk(case, request(case, LogitRows(hidden, temperature=0.7), values)))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("is_long", [True, False], ids=["int64", "int32"])
def test_topk_is_that_of_rows_with_negative_infinity(name, is_long):
    for values in ("log_softmax", "state"):
        check_bits(name, values, is_long)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kernel", [kernel for kernel in test_simt.CASES if kernel.endswith(", 0>")], ids=test_simt.short
)
def test_every_kernel(kernel):
    """In the case that test_simt.py has of its kernel without lengths."""
    case = min(test_simt.CASES[kernel], key=lambda case: case.vocab_size)
    lengths = torch.tensor([0, case.k, case.vocab_size // 2, case.vocab_size - 1])
    with_nan, hidden = map(case._placed, ragged(lengths, case.vocab_size, DTYPES[case.dtype]))
    got = topk(case, request(case, LogitRows(with_nan, lengths=lengths), "log_softmax"))
    assert_same(got, topk(case, request(case, LogitRows(hidden), "log_softmax")))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("normalize", ["allowed", "all", "topk"])
def test_topk_with_masks(name, normalize):
    case = CASES[name]
    lengths = lengths_of(case)[1::2]
    with_nan, hidden = ragged(lengths, case.vocab_size, DTYPES[case.dtype])
    mask = random_mask(*hidden.shape, share=0.7)
    got = topk(case, request(case, LogitRows(with_nan, mask=mask, lengths=lengths), "softmax", normalize))
    assert_same(got, topk(case, request(case, LogitRows(hidden, mask=mask), "softmax", normalize)))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("length", [0, 1, 1000, 1025, 9000])
@pytest.mark.parametrize("masked", [False, True])
def test_topk_reads_nothing_beyond_a_length(name, length, masked):
    case = CASES[name]
    length = min(length, case.vocab_size - 1)
    logits = case._placed(random_logits(2, case.vocab_size, dtype=DTYPES[case.dtype]))
    mask = random_mask(2, case.vocab_size, share=0.9) if masked else None
    rows = LogitRows(logits, mask=mask, lengths=torch.tensor([length]).expand(2))
    topk(case, request(case, rows, "logits"), readable=length)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["a warp", "for many", "splits"])
def test_topk_under_schedules(name, schedule):
    check_bits(name, schedule=schedule)


@pytest.mark.parametrize("case", [Case(2500, 5, beams=3), Case(40_008, 60, beams=3, splits=2)], ids=["warps", "splits"])
def test_beams(case):
    # Whose strides are not those of the rows.
    lengths = torch.tensor([[case.vocab_size, 3], [1, case.k], [2000, case.vocab_size - 1]]).t()
    with_nan, hidden = ragged(lengths, case.vocab_size)
    scores = random_logits(2, 3, seed=1) - 20
    got = topk(case, request(case, LogitRows(with_nan, lengths=lengths), "log_softmax"), scores)
    assert_same(got, topk(case, request(case, LogitRows(hidden), "log_softmax"), scores))


FULL = [("warp", 1, 100), ("block", 1, 500), ("shared", 1, 1400), ("grid", 3, 3000), ("long", 2, 6100)]


@pytest.mark.parametrize(("kernel", "blocks", "vocab_size"), FULL)
@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_full_rows(kernel, blocks, vocab_size, offset, dtype):
    vocab_size = (vocab_size + offset) * (1 if dtype == "fp32" else 2)
    choice = small_choice(kernel, vocab_size, DTYPES[dtype].itemsize, blocks)
    lengths = torch.tensor([0, 1, vocab_size // 2, vocab_size - 1, vocab_size, vocab_size + 9, -1])
    with_nan, hidden = ragged(lengths, vocab_size, DTYPES[dtype])
    for values in ("softmax", "log_softmax", "logsumexp"):
        rows = LogitRows(with_nan, temperature=0.7, lengths=lengths)
        want = full(FullRowProblem(LogitRows(hidden, temperature=0.7), values), choice)
        same(full(FullRowProblem(rows, values), choice), want)


@pytest.mark.parametrize(("kernel", "blocks", "vocab_size"), FULL)
@pytest.mark.parametrize("length", [0, 3, 99])
def test_full_rows_read_nothing_beyond_a_length(kernel, blocks, vocab_size, length):
    choice = small_choice(kernel, vocab_size, 4, blocks)
    rows = LogitRows(random_logits(2, vocab_size), lengths=torch.full((2,), length, dtype=torch.int32))
    full(FullRowProblem(rows, "softmax"), choice, readable=length)


def full(problem: FullRowProblem, choice, **how) -> Tensor:
    return run(problem, choice, problem.rows.logits.dtype, **how)
