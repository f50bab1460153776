# SPDX-License-Identifier: Apache-2.0
"""The laws of the algebra, seen through the public functions: whatever the row, however it is cut or shuffled."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle import DTYPES, check
from rows import INF, NAN

# A fixture that only names a backend may be shared by the examples.
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# Few distinct values make ties likely; the rest of the floats make everything else.
levels = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, 80.0, -80.0, 1e4, -1e4, INF, -INF, NAN, 1e-42, -1e-42])
numbers = st.floats(-100, 100, width=32) | levels
rows = st.lists(numbers, min_size=1, max_size=80) | st.lists(st.sampled_from([0.0, -0.0, 1.0]), min_size=1, max_size=80)
finite_rows = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=80, unique=True)
dtypes = st.sampled_from(list(DTYPES.values()))


@st.composite
def problems(draw) -> tuple[Tensor, int]:
    """A row of any type, possibly long because it is repeated, and a k for it."""
    row = torch.tensor(draw(rows)).repeat(draw(st.sampled_from([1, 1, 1, 7, 60]))).to(draw(dtypes))
    return row, draw(st.integers(1, len(row)))


@SETTINGS
@given(problem=problems(), entry=st.sampled_from(["softmax_topk", "log_softmax_topk", "topk"]), data=st.data())
def test_row_topk_of_any_row(backend, problem, entry, data):
    row, k = problem
    arguments = {}
    if data.draw(st.booleans(), "masked"):
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), "seed of the mask"))
        arguments["mask"] = (torch.rand(len(row), generator=generator) < 0.6).to(backend.device)
    if entry != "topk":
        arguments["normalize"] = data.draw(st.sampled_from(["allowed", "all", "topk"]), "normalize")
        arguments["temperature"] = data.draw(st.sampled_from([1.0, 0.5, 2.0]), "temperature")
    check(backend, entry, row.to(backend.device), k, **arguments)


@SETTINGS
@given(
    row=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=200),
    dtype=st.sampled_from(["fp16", "bf16"]),
    data=st.data(),
)
def test_topk_of_any_bits(backend, row, dtype, data):
    row = torch.tensor(row).to(torch.int16).view(DTYPES[dtype])
    check(backend, "topk", row.to(backend.device), data.draw(st.integers(1, len(row))))


@SETTINGS
@given(row=finite_rows, data=st.data())
def test_row_topk_permutation_permutes_only_the_indices(backend, row, data):
    order = torch.tensor(data.draw(st.permutations(range(len(row))))).to(backend.device)
    x = torch.tensor(row, device=backend.device)
    # Unique as numbers: -0 and +0 would tie.
    x = (x + 0.0).unique()
    order = order[order < len(x)]
    k = data.draw(st.integers(1, len(x)))
    got, want = backend("softmax_topk", x[order], k), backend("softmax_topk", x, k)
    assert torch.equal(order[got.indices], want.indices)
    torch.testing.assert_close(got.values, want.values, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.logsumexp, want.logsumexp, rtol=1e-5, atol=1e-5)


@SETTINGS
@given(problem=problems(), where=st.integers(0, 10**6), length=st.integers(1, 100))
def test_row_topk_negative_infinities_change_nothing(backend, problem, where, length):
    """A part of the row that is all -inf only shifts the indices after it."""
    row, k = problem
    row = row.where(row != -INF, torch.zeros((), dtype=row.dtype)).to(backend.device)
    where %= len(row) + 1
    padding = torch.full((length,), -INF, dtype=row.dtype, device=row.device)
    got = backend("log_softmax_topk", torch.cat([row[:where], padding, row[where:]]), k)
    want = backend("log_softmax_topk", row, k)
    assert torch.equal(got.indices, want.indices + length * (want.indices >= where))
    torch.testing.assert_close(got.values, want.values, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(got.logsumexp, want.logsumexp, rtol=1e-5, atol=1e-5, equal_nan=True)


@SETTINGS
@given(row=finite_rows, offset=st.sampled_from([-8192.0, 8192.0]), k=st.integers(1, 2))
def test_row_topk_common_offset_costs_nothing(backend, row, offset, k):
    # Multiples of 1/256 below 100 keep all their bits when 8192 is added.
    x = (torch.tensor(row, device=backend.device) * 256).round() / 256
    got, want = backend("log_softmax_topk", x + offset, k), backend("log_softmax_topk", x, k)
    assert torch.equal(got.indices, want.indices)
    torch.testing.assert_close(got.values, want.values, rtol=1e-6, atol=1e-6)
