# SPDX-License-Identifier: Apache-2.0
"""The same rows give the same bits however they lie in memory, and reading them changes nothing."""

import pytest
import torch

from oracle import DTYPES, assert_same, assert_topk, expected
from rows import NAN, layouts, random_logits, random_mask, shifted

ENTRIES = ("log_softmax_topk", "softmax_topk", "topk")


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "k"), [(1, 1), (33, 5), (1000, 8), (1001, 33), (5003, 5), (40007, 100)])
def test_row_topk_strides(backend, entry, dtype, vocab_size, k):
    logits = random_logits(5, vocab_size, dtype=DTYPES[dtype], device=backend.device)
    want = backend(entry, logits, k)
    assert_topk(want, expected(entry, logits, k), logits, entry)
    for name, view in layouts(logits):
        try:
            assert_same(backend(entry, view, k), want)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "k"), [(7, 2), (64, 5), (1000, 8), (4099, 5), (50257, 40)])
def test_row_topk_start_addresses(native, dtype, vocab_size, k):
    """The start of a view slides one element at a time over two 16-byte vectors."""
    logits = random_logits(3, vocab_size, dtype=DTYPES[dtype], device=native.device)
    want = native("log_softmax_topk", logits, k)
    assert_topk(want, expected("log_softmax_topk", logits, k), logits, "log_softmax_topk")
    for elements in range(32 // logits.element_size()):
        view = shifted(logits, elements)
        assert view.data_ptr() % 16 == elements * logits.element_size() % 16
        try:
            assert_same(native("log_softmax_topk", view, k), want)
        except AssertionError as error:
            raise AssertionError(f"{elements} elements after the boundary: {error}") from error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [7, 1000, 5003])
def test_row_topk_start_address_between_elements(cpu, dtype, vocab_size):
    """A view of bytes may start off the alignment of its own elements."""
    logits = random_logits(3, vocab_size, dtype=DTYPES[dtype])
    want = cpu("softmax_topk", logits, 5)
    content = bytes(logits.flatten().view(torch.uint8).tolist())
    for offset in (1, 2, 3, 5):
        buffer = bytearray(offset) + bytearray(content)
        view = torch.frombuffer(buffer, dtype=logits.dtype, offset=offset).view(logits.shape)
        assert_same(cpu("softmax_topk", view, 5), want)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_topk_transposed_leading_dimensions(backend, entry, dtype):
    logits = random_logits(3, 4, 2, 517, dtype=DTYPES[dtype], device=backend.device)
    for order in ((1, 0, 2, 3), (2, 1, 0, 3), (1, 2, 0, 3)):
        view = logits.permute(order)
        assert_same(backend(entry, view, 9), backend(entry, view.contiguous(), 9))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("vocab_size", [40, 3000])
def test_row_topk_expanded(backend, entry, vocab_size):
    row = random_logits(1, vocab_size, device=backend.device)
    assert_same(backend(entry, row.expand(6, -1), 7), backend(entry, row.repeat(6, 1), 7))
    column = random_logits(6, 1, device=backend.device)
    assert_same(backend(entry, column.expand(-1, vocab_size), 7), backend(entry, column.repeat(1, vocab_size), 7))
    number = random_logits(1, 1, 1, device=backend.device)
    assert_same(backend(entry, number.expand(2, 3, vocab_size), 7), backend(entry, number.repeat(2, 3, vocab_size), 7))


@pytest.mark.parametrize("normalize", ["allowed", "all"])
def test_beam_topk_layouts(backend, normalize):
    logits = random_logits(3, 4, 1003, device=backend.device)
    scores = random_logits(3, 4, device=backend.device)
    mask = random_mask(3, 4, 1003, device=backend.device)
    want = backend("beam_topk", logits, scores, 9, mask=mask, normalize=normalize)
    layouts_of_logits = [view.unflatten(0, (3, 4)) for _, view in layouts(logits.flatten(0, 1))]
    layouts_of_logits.append(logits.transpose(0, 1).contiguous().transpose(0, 1))
    for view in layouts_of_logits:
        assert_same(backend("beam_topk", view, scores, 9, mask=mask, normalize=normalize), want)
    assert_same(backend("beam_topk", logits, scores.t().contiguous().t(), 9, mask=mask, normalize=normalize), want)
    wide = torch.full((3, 4, 2), NAN, device=backend.device)
    wide[..., 1] = scores
    assert_same(backend("beam_topk", logits, wide[..., 1], 9, mask=mask, normalize=normalize), want)
