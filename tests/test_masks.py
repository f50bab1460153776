# SPDX-License-Identifier: Apache-2.0
"""Masks in both forms, and what the probabilities are relative to."""

import pytest
import torch

from oracle import DTYPES, check
from rows import adversarial_rows, packed, random_logits, random_mask

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
