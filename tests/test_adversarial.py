# SPDX-License-Identifier: Apache-2.0
"""Rows that break kernels: ties across the k-th place, infinities, NaNs, and the maximum in every place."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle import DTYPES, check, expected
from rows import INF, NAN, adversarial_rows, also, random_logits

ENTRIES = ("log_softmax_topk", "softmax_topk", "topk")
SHAPES = [
    (1, 1), (2, 1), (2, 2), (5, 3), (33, 5), (64, 64), (511, 7), (1000, 33), (1000, 1000), (1025, 1), (4097, 8),
    (4099, 65), (9001, 300), (20011, 2048), (50257, 5),
]  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "k"), SHAPES, ids=[f"V{v}-k{k}" for v, k in SHAPES])
def test_row_topk_adversarial_rows(backend, entry, dtype, vocab_size, k):
    """All of them in one batch: no row may disturb its neighbours."""
    rows = adversarial_rows(vocab_size, k, DTYPES[dtype])
    logits = torch.stack(list(rows.values())).to(backend.device)
    check(backend, entry, logits, k, row_names=list(rows))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "k"), [(100, 5), (3001, 20), (3001, 300), (20011, 8)])
def test_row_topk_adversarial_rows_alone(native, dtype, vocab_size, k):
    """One at a time, so that a row is split where it would be alone."""
    for name, row in adversarial_rows(vocab_size, k, DTYPES[dtype]).items():
        check(native, "log_softmax_topk", row.unsqueeze(0).to(native.device), k, row_names=[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "k"), [(33, 4), (1000, 8), (5000, 70), (60000, 5)])
def test_row_topk_ties_everywhere_across_k(native, dtype, vocab_size, k):
    """`above` tokens are distinct, `ties` equal at random places, the k-th place lies among these: smaller index first."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for above in {0, k // 2, k - 1}:
        for ties in {k - above, k - above + 1, 2 * k, vocab_size - above}:
            places = torch.randperm(vocab_size, generator=generator)
            row = torch.full((vocab_size,), -5.0)
            row[places[: above + ties]] = 1.0
            row[places[:above]] = 2.0 + torch.arange(above) / 64
            rows.append(row)
    check(native, "topk", torch.stack(rows).to(DTYPES[dtype]).to(native.device), k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [37, 300, 1030, 2500])
def test_row_topk_maximum_in_every_place(native, dtype, vocab_size):
    """No position of a row, its tail least of all, is left out of the top-k or of the sum."""
    logits = torch.full((vocab_size, vocab_size), -3.0)
    logits.fill_diagonal_(9.0)
    check(native, "log_softmax_topk", logits.to(DTYPES[dtype]).to(native.device), 2)


@pytest.mark.parametrize("vocab_size", [1, 31, 1000, 1025, 4096, 5001, 65536, 128256, 300007])
def test_row_topk_counts_every_token(native, vocab_size):
    """Of equal logits every one counts the same: a token left out or counted twice moves logsumexp far more than rounding."""
    for dtype in DTYPES.values():
        for common in (0.0, 1e4, -1e4):
            logits = torch.full((2, vocab_size), common, dtype=dtype, device=native.device)
            # One token of weight 1/2 of the row at each end: leaving it out halves d.
            logits[1, 0] = logits[1, -1] = common
            got = check(native, "softmax_topk", logits, min(3, vocab_size))
            torch.testing.assert_close(got.values * vocab_size, torch.ones_like(got.values), rtol=4e-6, atol=0)


@pytest.mark.parametrize("special", [NAN, -NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("vocab_size", [40, 1100, 5000])
def test_row_topk_special_value_in_every_place(native, special, vocab_size):
    """Every hundredth place, and the ends."""
    places = sorted({*range(0, vocab_size, max(vocab_size // 100, 1)), *range(vocab_size - 20, vocab_size)})
    logits = random_logits(1, vocab_size).repeat(len(places), 1)
    logits[torch.arange(len(places)), places] = special
    for dtype in DTYPES.values():
        check(native, "softmax_topk", logits.to(dtype).to(native.device), 5, row_names=[str(p) for p in places])


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 0.3, 7.0, 1e30])
@pytest.mark.parametrize("entry", ["softmax_topk", "log_softmax_topk"])
def test_row_topk_adversarial_rows_with_temperature(backend, entry, temperature):
    rows = adversarial_rows(3001, 20, torch.float32)
    # Their differences overflow float32 before the temperature divides them.
    for name in ("random_bits", "random_finite_bits", "lowest_and_negative_infinity"):
        del rows[name]
    logits = torch.stack(list(rows.values())).to(backend.device)
    check(backend, entry, logits, 20, temperature=temperature, row_names=list(rows))


@pytest.mark.parametrize("temperature", [2.0**-120, torch.finfo(torch.float32).tiny, 1e-40, 1e-45])
@pytest.mark.parametrize("vocab_size", [40, 3001])
def test_least_temperatures(backend, vocab_size, temperature):
    """0 / T is 0, not NaN, although 1 / T may overflow: the best token has everything. Where its values can be looked at, a
    tensor of lesser ones than 2^-120 is refused."""
    logits = (-torch.arange(vocab_size, device=backend.device) / 2).expand(2, -1)
    rows = torch.tensor([1.0, temperature], device=backend.device)
    if backend.device == "cpu" and temperature < 2.0**-120:
        with pytest.raises(ValueError, match="temperature"):
            backend("softmax_topk", logits, 3, temperature=rows)
        return
    chosen = backend("softmax_topk", logits, 3, temperature=rows)
    assert chosen.values[1].tolist() == [1, 0, 0] and chosen.logsumexp[1] == 0
    log_values = backend("log_softmax_topk", logits, 3, temperature=rows).values[1]
    assert log_values[0] == 0 and (log_values[1:] < -1e35).all()
    probs = backend("softmax", logits, temperature=rows)[1]
    assert probs[0] == 1 and not probs[1:].any()
    assert backend("logsumexp", logits, temperature=rows)[1] == 0


@pytest.mark.parametrize("normalize", ["all", "topk"])
@pytest.mark.parametrize("entry", ["softmax_topk", "log_softmax_topk"])
@pytest.mark.parametrize(("vocab_size", "k"), [(33, 33), (1000, 5), (5003, 65)])
def test_row_topk_adversarial_rows_normalize(backend, entry, normalize, vocab_size, k):
    rows = adversarial_rows(vocab_size, k, torch.float32)
    logits = torch.stack(list(rows.values())).to(backend.device)
    check(backend, entry, logits, k, normalize=normalize, row_names=list(rows))


# The plain tier has the flattest rows, whose sums have the most terms of one size.
@pytest.mark.parametrize("offset", [1e4, *also(0.0, -1e4)])
@pytest.mark.parametrize("spread", [1e-3, *also(4.0, 200.0)], ids=["flat", "normal", "peaked"])
def test_row_topk_accuracy_of_four_million(native, offset, spread):
    """The error bound holds on rows up to 4 million long."""
    logits = random_logits(1, 2**22, device=native.device) / 4 * spread + offset
    check(native, "log_softmax_topk", logits, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "k"), [(8, 3), (300, 5), (5000, 20)])
def test_denormals_that_torch_flushes(backend, dtype, vocab_size, k):
    """torch.set_flush_denormal changes how the CPU compares floats; the order of the tokens stays."""
    rows = adversarial_rows(vocab_size, k, DTYPES[dtype])
    logits = torch.stack([rows["denormals"], rows["denormals_and_zeros"], rows["zeros_of_both_signs"]])
    want = expected("topk", logits, k).indices
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine has no such mode")
    try:
        got = backend("topk", logits.to(backend.device), k).indices
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got.cpu(), want)


# Any row: the laws of the algebra, whatever the row, however it is cut or shuffled.


# A fixture that only names a backend may be shared by the examples.
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# Few distinct values make ties likely; the rest of the floats make everything else.
levels = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, 80.0, -80.0, 1e4, -1e4, INF, -INF, NAN, 1e-42, -1e-42])
numbers = st.floats(-100, 100, width=32) | levels
rows = st.lists(numbers, min_size=1, max_size=80) | st.lists(st.sampled_from([0.0, -0.0, 1.0]), min_size=1, max_size=80)
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
