# SPDX-License-Identifier: Apache-2.0
"""`out=`: what is written, and that nothing around it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_topk import TopK
from oracle import DTYPES, assert_same, assert_topk, expected
from rows import adversarial_rows, random_logits

ENTRIES = ("log_softmax_topk", "softmax_topk", "topk")
SENTINEL = -12345
GUARD = 64


def guarded(*shape: int, dtype: torch.dtype, device: str, shift: int = 0) -> tuple[Tensor, Tensor]:
    """(tensor, buffer): the tensor lies `shift` elements off the middle of a buffer of sentinels."""
    size = torch.Size(shape).numel()
    buffer = torch.full((size + 2 * GUARD + shift,), SENTINEL, dtype=dtype, device=device)
    return buffer[GUARD + shift : GUARD + shift + size].view(shape), buffer


def guarded_out(entry: str, logits: Tensor, k: int, shift: int = 0) -> tuple[TopK, tuple[Tensor, ...]]:
    floating = torch.float64 if logits.dtype == torch.float64 else torch.float32
    of_values = logits.dtype if entry == "topk" else floating
    lead = logits.shape[:-1]
    shapes = ((*lead, k), of_values), ((*lead, k), torch.int64), (lead, floating)
    fields, buffers = zip(*(guarded(*s, dtype=d, device=str(logits.device), shift=shift) for s, d in shapes))
    return TopK(*fields), buffers


def assert_guards_intact(out: TopK, buffers: tuple[Tensor, ...]) -> None:
    for name, field, buffer in zip(TopK._fields, out, buffers):
        around = buffer.clone()
        start = field.storage_offset()
        around[start : start + field.numel()] = SENTINEL
        assert (around == SENTINEL).all(), (
            f"written around {name}, first at {(around != SENTINEL).nonzero()[0].item() - start}"
        )


@pytest.mark.sanitize
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab_size", "k"), [(1, 1), (33, 5), (33, 33), (1000, 8), (4099, 65), (4099, 4099), (30011, 5)]
)
def test_row_topk_writes_out_and_nothing_else(backend, entry, dtype, vocab_size, k):
    for rows, shift in ((1, 0), (3, 1), (5, 3)):
        logits = random_logits(rows, vocab_size, dtype=DTYPES[dtype], device=backend.device)
        out, buffers = guarded_out(entry, logits, k, shift)
        got = backend(entry, logits, k, out=out)
        assert_guards_intact(out, buffers)
        assert all(x is y for x, y in zip(got, out))
        assert_topk(got, expected(entry, logits, k), logits, entry)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "k"), [(5, 5), (1000, 40), (5003, 2048)])
def test_row_topk_adversarial_rows_write_nothing_else(backend, dtype, vocab_size, k):
    rows = adversarial_rows(vocab_size, k, DTYPES[dtype])
    logits = torch.stack(list(rows.values())).to(backend.device)
    out, buffers = guarded_out("softmax_topk", logits, k)
    backend("softmax_topk", logits, k, out=out)
    assert_guards_intact(out, buffers)
    # In range and unique, whatever the input.
    assert ((out.indices >= 0) & (out.indices < vocab_size)).all()
    assert (out.indices.sort(-1).values.diff(dim=-1) > 0).all()


def test_row_topk_out_is_a_plain_tuple_too(backend):
    logits = random_logits(3, 100, device=backend.device)
    out, _ = guarded_out("softmax_topk", logits, 4)
    backend("softmax_topk", logits, 4, out=tuple(out))
    assert_topk(out, expected("softmax_topk", logits, 4), logits, "softmax_topk")


def test_row_topk_out_of_an_empty_batch(backend):
    logits = torch.empty(0, 100, device=backend.device)
    out, buffers = guarded_out("softmax_topk", logits, 4)
    backend("softmax_topk", logits, 4, out=out)
    assert_guards_intact(out, buffers)


def test_row_topk_out_without_leading_dimensions(backend):
    logits = random_logits(100, device=backend.device)
    out, buffers = guarded_out("topk", logits, 4)
    backend("topk", logits, 4, out=out)
    assert_guards_intact(out, buffers)
    assert_topk(out, expected("topk", logits, 4), logits, "topk")


def test_row_topk_out_is_reused(backend):
    """What an earlier call left in `out` does not matter."""
    out = None
    for seed in range(3):
        logits = random_logits(3, 4099, device=backend.device, seed=seed)
        out = backend("softmax_topk", logits, 8, out=out) if out else backend("softmax_topk", logits, 8)
        assert_topk(out, expected("softmax_topk", logits, 8), logits, "softmax_topk")


@pytest.mark.parametrize("entry", ENTRIES)
def test_row_topk_out_with_strides(backend, entry):
    """Fields that are views with gaps: these stay as they are."""
    logits = random_logits(3, 500, device=backend.device)
    want = backend(entry, logits, 4)
    wide = [torch.full((*x.shape, 3), SENTINEL, dtype=x.dtype, device=x.device) for x in want]
    out = TopK(*(x[..., 1] for x in wide))
    backend(entry, logits, 4, out=out)
    assert_same(TopK(*(x.contiguous() for x in out)), want)
    assert all((x[..., ::2] == SENTINEL).all() for x in wide)


@pytest.mark.parametrize("dim", [0, 1])
def test_row_topk_out_with_dim(backend, dim):
    logits = random_logits(6, 7, 5, device=backend.device)
    want = backend("softmax_topk", logits, 4, dim=dim)
    out, buffers = [], []
    for x in want:
        field, buffer = guarded(*x.shape, dtype=x.dtype, device=backend.device)
        out.append(field)
        buffers.append(buffer)
    backend("softmax_topk", logits, 4, dim=dim, out=tuple(out))
    assert_guards_intact(TopK(*out), tuple(buffers))
    assert_same(TopK(*out), TopK(*(x.contiguous() for x in want)))
