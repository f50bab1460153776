# SPDX-License-Identifier: Apache-2.0
"""The reference against the contract, by an oracle in numpy (extended precision) that shares no code with it."""

import itertools

import numpy as np
import pytest
import torch

from fused_topk import TopK
from oracle import DTYPES, bits, expected, numpy_topk, problem_of
from rows import adversarial_rows, packed, random_logits, random_mask

NORMALIZE = ("allowed", "all", "topk")
ALL_DTYPES = {**DTYPES, "fp64": torch.float64}


def _assert_row(got: TopK, row: torch.Tensor, name: str, k: int, *, values: str, **settings) -> None:
    want_values, want_indices, want_logsumexp = numpy_topk(row.double().numpy(), k, values=values, **settings)
    np.testing.assert_array_equal(got.indices.numpy(), want_indices, err_msg=name)
    close = {"rtol": 1e-13, "atol": 1e-13}
    np.testing.assert_allclose(got.values.double().numpy(), want_values.astype(np.float64), err_msg=name, **close)
    if values != "logits":
        np.testing.assert_allclose(got.logsumexp.numpy(), np.float64(want_logsumexp), err_msg=name, **close)


@pytest.mark.parametrize("entry", ["softmax_topk", "log_softmax_topk", "topk"])
@pytest.mark.parametrize("dtype", ALL_DTYPES.values(), ids=ALL_DTYPES)
@pytest.mark.parametrize(("vocab_size", "k"), [(1, 1), (2, 2), (7, 3), (33, 33), (1000, 5), (1023, 200)])
def test_reference_adversarial_rows(entry, dtype, vocab_size, k):
    rows = adversarial_rows(vocab_size, k, dtype)
    for normalize in NORMALIZE if entry != "topk" else NORMALIZE[:1]:
        got = expected(entry, torch.stack(list(rows.values())), k, normalize=normalize)
        for i, (name, row) in enumerate(rows.items()):
            of_row = TopK(*(field[i] for field in got))
            _assert_row(
                of_row, row, f"{name} {normalize}", k, values=problem_of(entry, row, k).values, normalize=normalize
            )


# topk() has no `normalize`.
@pytest.mark.parametrize(
    ("normalize", "entry"), [*itertools.product(NORMALIZE, ["softmax_topk", "log_softmax_topk"]), ("allowed", "topk")]
)
@pytest.mark.parametrize("form", ["bool", "packed"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_reference_mask(entry, normalize, form, share):
    k, vocab_size = 6, 203
    rows = adversarial_rows(vocab_size, k, torch.float32)
    logits = torch.stack(list(rows.values()))
    mask = random_mask(*logits.shape, share=share)
    words = mask if form == "bool" else packed(mask)
    got = expected(entry, logits, k, mask=words, normalize=normalize)
    for i, (name, row) in enumerate(rows.items()):
        of_row = TopK(*(field[i] for field in got))
        values = problem_of(entry, row, k).values
        _assert_row(of_row, row, name, k, values=values, normalize=normalize, allowed=mask[i].numpy())


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_reference_row_temperature_not_positive(temperature):
    logits = random_logits(2, 50)
    want = expected("softmax_topk", logits, 4)
    got = expected("softmax_topk", logits, 4, temperature=torch.tensor([temperature, 1.0]))
    assert torch.equal(got.indices, want.indices)
    assert got.values[0].isnan().all() and got.logsumexp[0].isnan()
    assert torch.equal(got.values[1], want.values[1]) and got.logsumexp[1] == want.logsumexp[1]


@pytest.mark.parametrize("dtype", ALL_DTYPES.values(), ids=ALL_DTYPES)
def test_reference_topk_values_are_copies(dtype):
    k = 40
    logits = torch.stack(list(adversarial_rows(90, k, dtype).values()))
    got = expected("topk", logits, k)
    assert torch.equal(bits(got.values), bits(logits).gather(-1, got.indices))
