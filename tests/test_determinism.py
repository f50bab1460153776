# SPDX-License-Identifier: Apache-2.0
"""The same row gives the same bits: run after run, in any batch, with any number of threads, however it lies in memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from contract_results import flat
from oracle import DTYPES, assert_same, assert_topk, bits, expected
from rows import NAN, adversarial_rows, layouts, random_logits, random_mask, shifted

# Of the last ones several threads, or blocks, share a row.
VOCABS = (16, 40, 257, 1000, 5003, 32_000, 128_256, 300_007)
ROWS = 9


def calls_of(run: Callable[..., object], vocab_size: int) -> dict[str, Callable[[Tensor, Tensor], object]]:
    """A call of each family, given some rows and their numbers, by which a row has a mask, scores, a token and a seed of its own."""
    device = run.device
    mask = random_mask(ROWS, vocab_size, device=device)
    scores = random_logits(ROWS, 3, device=device)
    k, many = min(20, vocab_size), min(300, vocab_size)
    draws = {"num_samples": 5, "topk": 2}
    found = {
        "softmax_topk": lambda x, rows: run("softmax_topk", x, k),
        "many": lambda x, rows: run("log_softmax_topk", x, many),
        "masked": lambda x, rows: run("softmax_topk", x, k, mask=mask[rows], normalize="topk"),
        "beams": lambda x, rows: run("beam_topk", torch.stack([x, x.flip(-1), x / 2], 1), scores[rows], k),
        "states": lambda x, rows: run("topk_state", x, k, temperature=0.7),
        "tokens": lambda x, rows: run("token_logprobs", x, rows.unsqueeze(-1), k=1, ranks=True),
        "draws": lambda x, rows: run("sample", x, seed=rows, **draws),
        "filtered draws": lambda x, rows: run("sample", x, seed=rows, top_k=50, top_p=0.9, logprobs="kept"),
        "nucleus": lambda x, rows: run("sample", x, seed=rows, top_p=0.999, temperature=1.5, **draws),
        "min_p": lambda x, rows: run("sample", x, seed=rows, min_p=0.05, **draws),
        **{name: lambda x, rows, name=name: run(name, x) for name in ("softmax", "log_softmax", "logsumexp")},
    }
    if vocab_size <= 1024:
        found["routers"] = lambda x, rows: run("router_topk", x, 8, scoring="sigmoid", renormalize=True)
    return found


def bits_of(result: object) -> list[Tensor]:
    return [bits(x) if x.is_floating_point() else x for x in flat(result)]


def assert_equal(got: list[Tensor], want: list[Tensor], told: object) -> None:
    assert all(map(torch.equal, got, want)), told


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_any_batch(native, dtype, vocab_size):
    """A row alone, and in batches that give it more or fewer blocks or threads, wherever it lies."""
    logits = random_logits(ROWS, vocab_size, dtype=DTYPES[dtype], device=native.device)
    numbers = torch.arange(ROWS, device=native.device)
    is_short = vocab_size <= 5003 or native.device == "cuda"
    batches = [[0], [8], [3, 1], [6, 2, 0, 5], list(range(ROWS))[::-1] * (40 if is_short else 3)]
    for name, call in calls_of(native, vocab_size).items():
        whole = bits_of(call(logits, numbers))
        for rows in batches:
            got = bits_of(call(logits[rows], numbers[rows]))
            assert_equal(got, [x[rows] for x in whole], (name, rows[:4]))


def test_adversarial_rows_in_any_batch(native):
    logits = torch.stack(list(adversarial_rows(5003, 20, torch.float32).values())).to(native.device)
    for entry, k in (("softmax_topk", (20,)), ("softmax", ())):
        whole, alone = bits_of(native(entry, logits, *k)), [bits_of(native(entry, row, *k)) for row in logits]
        assert_equal([torch.stack(x) for x in zip(*alone, strict=True)], whole, entry)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, ROWS])
def test_any_number_of_threads(cpu, threads, dtype, rows):
    for vocab_size in VOCABS:
        logits = random_logits(ROWS, vocab_size, dtype=DTYPES[dtype])[:rows]
        logits[-1, vocab_size // 3] = torch.nan
        for name, call in calls_of(cpu, vocab_size).items():
            results = []
            for count in (1, 2, 3, 7):
                threads(count)
                results.append(bits_of(call(logits, torch.arange(rows))))
            for got in results[1:]:
                assert_equal(got, results[0], (name, vocab_size))


# However they lie in memory.


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
