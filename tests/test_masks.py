# SPDX-License-Identifier: Apache-2.0
"""Masks in both forms, and what the probabilities are relative to."""

import pytest
import torch

from oracle import DTYPES, assert_same, check
from rows import INF, NAN, adversarial_rows, packed, random_logits, random_mask

ENTRIES = ("log_softmax_topk", "softmax_topk", "topk")
NORMALIZE = ("allowed", "all", "topk")
FORMS = {"bool": lambda mask: mask, "packed": packed}


def _normalizes(entry: str) -> list[dict[str, str]]:
    return [{}] if entry == "topk" else [{"normalize": normalize} for normalize in NORMALIZE]


@pytest.mark.sanitize
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("vocab_size", "k"), [(1, 1), (31, 5), (32, 32), (33, 5), (1000, 8), (4099, 65), (40001, 5)])
def test_row_topk_mask(backend, entry, dtype, form, vocab_size, k):
    """Rows that allow nothing, one token, the last one, a few, half, all but one, and everything."""
    logits = random_logits(8, vocab_size, dtype=DTYPES[dtype], device=backend.device)
    mask = torch.zeros(8, vocab_size, dtype=torch.bool)
    mask[1, vocab_size // 2] = True
    mask[2, -1] = True
    for row, share in ((3, 0.01), (4, 0.5), (5, 0.99)):
        mask[row] = random_mask(vocab_size, share=share)
    mask[6] = torch.arange(vocab_size) != vocab_size // 3
    mask[7] = True
    mask = FORMS[form](mask).to(backend.device)
    for settings in _normalizes(entry):
        check(backend, entry, logits, k, mask=mask, **settings)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("entry", ENTRIES)
def test_row_topk_mask_of_adversarial_rows(backend, entry, form, share):
    vocab_size, k = 2051, 20
    rows = adversarial_rows(vocab_size, k, torch.float32)
    logits = torch.stack(list(rows.values())).to(backend.device)
    mask = FORMS[form](random_mask(*logits.shape, share=share)).to(backend.device)
    for settings in _normalizes(entry):
        check(backend, entry, logits, k, mask=mask, row_names=list(rows), **settings)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("special", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("vocab_size", [33, 5000])
def test_row_topk_special_value_that_is_not_allowed(backend, form, special, vocab_size):
    """It does not matter, except to a normalizer over the whole row."""
    logits = random_logits(2, vocab_size, device=backend.device)
    logits[:, 7] = special
    mask = random_mask(2, vocab_size)
    mask[:, 7] = False
    mask = FORMS[form](mask).to(backend.device)
    for normalize in NORMALIZE:
        got = check(backend, "softmax_topk", logits, 5, mask=mask, normalize=normalize)
        matters = normalize == "all" and special != -INF
        assert got.values.isnan().all() if matters else got.values.isfinite().all()
        assert 7 not in got.indices
    logits[:, 7] = 3.0
    without = backend("softmax_topk", logits, 5, mask=mask)
    logits[:, 7] = special
    assert_same(backend("softmax_topk", logits, 5, mask=mask), without)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000, 4099])
def test_row_topk_packed_mask_ignores_bits_beyond_the_vocabulary(backend, vocab_size):
    logits = random_logits(3, vocab_size, device=backend.device)
    mask = random_mask(3, vocab_size)
    clear = packed(mask)
    if vocab_size % 32:
        clear[:, -1] &= (1 << vocab_size % 32) - 1
    k = min(vocab_size, 40)
    with_set = backend("softmax_topk", logits, k, mask=packed(mask).to(backend.device))
    assert_same(backend("softmax_topk", logits, k, mask=clear.to(backend.device)), with_set)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("vocab_size", [40, 1001, 5003])
def test_row_topk_mask_strides(backend, form, vocab_size):
    """A mask may be a slice of a wider one, transposed, or start anywhere."""
    logits = random_logits(3, 2, vocab_size, device=backend.device)
    mask = FORMS[form](random_mask(3, 2, vocab_size)).to(backend.device)
    want = backend("softmax_topk", logits, 7, mask=mask)
    width = mask.shape[-1]
    for start in range(18):
        wide = torch.full((3, 2, width + 18), -1, device=backend.device).to(mask.dtype)
        wide[..., start : start + width] = mask
        assert_same(backend("softmax_topk", logits, 7, mask=wide[..., start : start + width]), want)
    for order in ((1, 0, 2), (2, 1, 0), (0, 2, 1)):
        inverse = [order.index(i) for i in range(3)]
        assert_same(backend("softmax_topk", logits, 7, mask=mask.permute(order).contiguous().permute(inverse)), want)
