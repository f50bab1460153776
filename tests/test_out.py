# SPDX-License-Identifier: Apache-2.0
"""`out=`: what is written, and that nothing around it is."""

import gc
import itertools
import random

import pytest
import torch
from torch import Tensor

from fused_topk import TopK, TopKLogits
from fused_topk.functional import out as out_check
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


def guarded_out(entry: str, logits: Tensor, k: int, shift: int = 0) -> tuple[TopK | TopKLogits, tuple[Tensor, ...]]:
    floating = torch.float64 if logits.dtype == torch.float64 else torch.float32
    of_values = logits.dtype if entry == "topk" else floating
    lead = logits.shape[:-1]
    shapes = [((*lead, k), of_values), ((*lead, k), torch.int64), (lead, floating)]
    kind = TopKLogits if entry == "topk" else TopK
    shapes = shapes[: len(kind._fields)]
    fields, buffers = zip(*(guarded(*s, dtype=d, device=str(logits.device), shift=shift) for s, d in shapes))
    return kind(*fields), buffers


def assert_guards_intact(out: TopK | TopKLogits, buffers: tuple[Tensor, ...]) -> None:
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
    for lead, shift in (((1,), 0), ((3,), 1), ((5,), 3), ((), 0), ((0,), 0)):
        logits = random_logits(*lead, vocab_size, dtype=DTYPES[dtype], device=backend.device)
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


@pytest.mark.parametrize("indices", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_topk_out_that_a_gradient_needs(backend, dtype, indices):
    """A backward pass sees that it has been overwritten, by a plan, and after all checks."""
    logits = random_logits(3, 50, dtype=DTYPES[dtype], device=backend.device)
    for layout in ("contiguous", "strided"):
        out = backend("softmax_topk", logits, 4)
        out = out._replace(indices=out.indices.to(indices))
        if layout == "strided":
            out = TopK(*(x.movedim(0, -1).contiguous().movedim(-1, 0) for x in out))
        for _ in range(3):
            factor = torch.ones_like(out.values, requires_grad=True)
            for given in (out, list(out)):
                total = (factor * out.values).sum()
                backend("softmax_topk", -logits, 4, out=given)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    total.backward()


def test_row_topk_out_of_inference_mode(backend):
    logits = random_logits(3, 50, device=backend.device)
    with torch.inference_mode():
        out = backend("softmax_topk", logits, 4)
    for _ in range(2):
        with pytest.raises(ValueError, match="inference mode outside of it"):
            backend("softmax_topk", -logits, 4, out=out)
        with torch.inference_mode():
            backend("softmax_topk", -logits, 4, out=out)
        assert_same(TopK(*(x.clone() for x in out)), backend("softmax_topk", -logits, 4))


def test_row_topk_out_must_not_be_negative(backend):
    logits = random_logits(3, 50, device=backend.device)
    out = backend("softmax_topk", logits, 4)
    with pytest.raises(ValueError, match=r"`out.values` must not be a negative view"):
        backend("softmax_topk", logits, 4, out=out._replace(values=torch._neg_view(out.values)))


# Each makes a buffer of some shape, and the view of it that is a field of `out`.
OUT_LAYOUTS = {
    "contiguous": (lambda shape: shape, lambda buffer: buffer),
    "gaps between elements": (lambda shape: (*shape, 3), lambda buffer: buffer[..., 1]),
    "gaps between rows": (lambda shape: (shape[0], 2, *shape[1:]), lambda buffer: buffer[:, 1]),
    "last dimension first": (lambda shape: (*shape[-1:], *shape[:-1]), lambda buffer: buffer.movedim(0, -1)),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("indices", [torch.int64, torch.int32])
def test_row_topk_out_in_every_layout(backend, entry, indices):
    """Each field in each layout, whatever those of the others. Gaps stay as they are."""
    logits = random_logits(2, 3, 500, device=backend.device)
    want = backend(entry, logits, 4)
    for names in itertools.product(OUT_LAYOUTS, repeat=len(want)):
        fields, buffers = [], []
        for name, field in zip(names, want._replace(indices=want.indices.to(indices)), strict=True):
            shape_of, view = OUT_LAYOUTS[name]
            buffers.append(torch.full(shape_of(field.shape), SENTINEL, dtype=field.dtype, device=field.device))
            fields.append(view(buffers[-1]))
        for _ in range(2):
            got = backend(entry, logits, 4, out=type(want)(*fields))
            assert all(x is y for x, y in zip(got, fields, strict=True))
            for name, field, expected_field in zip(names, fields, want, strict=True):
                assert torch.equal(field.to(expected_field.dtype), expected_field), f"{names}: {name}"
                field.fill_(SENTINEL)
            assert all((buffer == SENTINEL).all() for buffer in buffers), names


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_topk_plain_out_takes_the_short_way(cpu, monkeypatch, dtype):
    """One look at each tensor, and values and logsumexp in place: the check of all that is accepted takes three times as long.

    Of int32 indices, the first call with a layout copies int64 ones. Native code narrows those of later calls.
    """
    copied = []
    copy_ = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda given, *args: copied.append(given) or copy_(given, *args))
    monkeypatch.setattr(out_check, "check_out", None)
    logits = random_logits(5, 64)
    out = TopK(torch.empty(5, 8), torch.empty(5, 8, dtype=dtype), torch.empty(5))
    cpu("softmax_topk", logits, 8, out=out)
    assert len(copied) <= (dtype is torch.int32) and all(given is out.indices for given in copied)


def test_row_topk_out_of_results_that_lie_between_each_other(backend):
    """Columns, and halves of the rows, of one buffer."""
    logits = [random_logits(3, 100, device=backend.device, seed=seed) for seed in range(2)]
    wants = [backend("softmax_topk", x, 4) for x in logits]
    for place in (lambda x, i: x[..., i::2], lambda x, i: x.unflatten(-1, (2, -1))[..., i, :]):
        buffers = [torch.full((*x.shape[:-1], 8), SENTINEL, dtype=x.dtype, device=x.device) for x in wants[0][:2]]
        for i in range(2):
            out = TopK(*(place(x, i) for x in buffers), torch.empty_like(wants[i].logsumexp))
            backend("softmax_topk", logits[i], 4, out=out)
        for i in range(2):
            assert_same(TopK(*(place(x, i).contiguous() for x in buffers), wants[i].logsumexp), wants[i])


def test_row_topk_out_between_the_columns_of_another_part(backend):
    logits = random_logits(3, 100, device=backend.device)
    want = backend("softmax_topk", logits, 4)
    buffer = torch.full((3, 4, 2), SENTINEL, dtype=torch.float32, device=backend.device)
    out = TopK(buffer[..., 0], torch.empty_like(want.indices), buffer[:, 0, 1])
    backend("softmax_topk", logits, 4, out=out)
    assert_same(TopK(*(x.contiguous() for x in out)), want)
    with pytest.raises(ValueError, match=r"`out\.logsumexp` must not overlap `out\.values`"):
        backend("softmax_topk", logits, 4, out=out._replace(logsumexp=buffer[:, 1, 0]))


def test_tensors_that_share_memory_are_found():
    """Never taken for apart where a byte is shared; taken for apart where one lies in the gaps of the other."""
    choice = random.Random(0)
    found_apart = 0
    for _ in range(3000):
        storage = torch.zeros(400, dtype=torch.uint8)
        tensors, bytes_of = [], []
        for _ in range(2):
            size = choice.choice((1, 4, 8))
            shape = [choice.randint(1, 4) for _ in range(choice.randint(0, 3))]
            strides = [choice.randint(1, 12) for _ in shape]
            reach = sum((n - 1) * s for n, s in zip(shape, strides))
            places = 400 // size - reach
            if places < 1:
                break
            dtype = {1: torch.uint8, 4: torch.float32, 8: torch.int64}[size]
            start = choice.randrange(places)
            tensors.append(storage.view(dtype).as_strided(shape, strides, start))
            numbers = (
                torch.arange(400)
                .view(-1, size)
                .as_strided((*shape, size), (*(s * size for s in strides), 1), start * size)
            )
            bytes_of.append(set(numbers.flatten().tolist()))
        if len(tensors) < 2:
            continue
        may_share = out_check._may_share_memory(*tensors)
        assert may_share or not bytes_of[0] & bytes_of[1]
        found_apart += not may_share
    assert found_apart > 300


def test_calls_of_many_shapes_keep_no_tensor(native):
    """A cache of plans holds no memory of a device."""
    kinds = []
    for size in range(40, 100):
        logits = random_logits(2, size, device=native.device)
        mask = torch.ones(2, size, dtype=torch.bool, device=native.device)
        native("softmax_topk", logits, 3)
        native("softmax_topk", logits, 3, mask=mask, temperature=torch.ones(2, device=native.device))
        if size in (40, 99):
            del logits, mask
            gc.collect()
            alive = [x for x in gc.get_objects() if type(x) is Tensor and x.device.type == native.device]
            kinds.append(sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}.values()))
    assert kinds[1] <= kinds[0]
