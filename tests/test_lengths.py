# SPDX-License-Identifier: Apache-2.0
"""Rows with lengths: what the same rows give with -inf from their lengths on, whatever lies there."""

import functools

import pytest
import torch
from torch import Tensor

import fused_topk
from fused_topk import TopK
from oracle import DTYPES, assert_same, bits
from rows import NAN, packed, random_logits, random_mask
from test_cpu import INSTRUCTION_SETS, full_rows
from test_cpu import run as on_cpu

FULL = ("softmax", "log_softmax", "logsumexp")


def ragged(lengths: Tensor, vocab_size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits with NaN from the lengths on, and with -inf there."""
    logits = random_logits(*lengths.shape, vocab_size, dtype=dtype, device=lengths.device)
    beyond = torch.arange(vocab_size, device=lengths.device) >= lengths.unsqueeze(-1)
    return logits.masked_fill(beyond, NAN), logits.masked_fill(beyond, -torch.inf)


def borders(vocab_size: int, device: str = "cpu") -> Tensor:
    """Lengths at the ends of tiles and blocks, and 0, 1 and V."""
    found = {0, 1, vocab_size // 2, vocab_size - 1, vocab_size, *(n + d for n in (32, 1024, 4096) for d in (-1, 0, 1))}
    return torch.tensor(sorted(n for n in found if 0 <= n <= vocab_size), device=device)


def same(got: Tensor, want: Tensor) -> None:
    """Bit for bit, but for NaNs."""
    assert got.dtype == want.dtype and torch.equal(got.isnan(), want.isnan())
    assert torch.equal(bits(got.nan_to_num(7.0)), bits(want.nan_to_num(7.0)))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_long", [True, False], ids=["int64", "int32"])
@pytest.mark.parametrize("temperature", ["none", "rows"])
@pytest.mark.parametrize(
    ("vocab_size", "k"), [(1, 1), (33, 5), (200, 20), (300, 300), (4099, 65), (5000, 4500), (40_001, 5)]
)
def test_topk(backend, dtype, is_long, temperature, vocab_size, k):
    lengths = borders(vocab_size, backend.device)
    with_nan, hidden = ragged(lengths, vocab_size, DTYPES[dtype])
    lengths = lengths if is_long else lengths.int()
    mask = random_mask(*hidden.shape, device=backend.device, share=0.7)
    scaled = {} if temperature == "none" else {"temperature": torch.linspace(0.3, 3.0, len(lengths)).to(backend.device)}
    masks = ({}, {"mask": mask}, {"mask": packed(mask)})
    # The reference sorts whole rows, whichever mask they have.
    for settings in masks[1:2] if backend.name == "reference" and vocab_size > 4000 else masks:
        assert_same(backend("topk", with_nan, k, lengths=lengths, **settings), backend("topk", hidden, k, **settings))
        for normalize in ("allowed", "all", "topk"):
            how = {**settings, **scaled, "normalize": normalize}
            got = backend("log_softmax_topk", with_nan, k, lengths=lengths, **how)
            assert_same(got, backend("log_softmax_topk", hidden, k, **how))
            state = backend("topk_state", with_nan, k, lengths=lengths, **how)
            for of_got, of_want in zip(state, backend("topk_state", hidden, k, **how)):
                same(of_got, of_want) if of_got.is_floating_point() else None
            assert torch.equal(state.indices, got.indices)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", FULL)
@pytest.mark.parametrize("vocab_size", [1, 33, 256, 300, 4099, 40_001, 140_000])
def test_full_rows(backend, dtype, entry, vocab_size):
    lengths = borders(vocab_size, backend.device)
    with_nan, hidden = ragged(lengths, vocab_size, DTYPES[dtype])
    run = functools.partial(getattr(fused_topk, entry), backend=backend.name, temperature=0.7)
    same(run(with_nan, lengths=lengths.int()), run(hidden))
    if entry != "logsumexp":
        same(run(with_nan, lengths=lengths, dtype=torch.float32), run(hidden, dtype=torch.float32))


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 50, "top_p": 0.9, "min_p": 0.05}], ids=str
)
@pytest.mark.parametrize("temperature", [1.0, 0.0, 0.7])
@pytest.mark.parametrize("vocab_size", [33, 9001])
@pytest.mark.parametrize("masked", [False, True])
def test_draws(backend, filters, temperature, vocab_size, masked):
    lengths = borders(vocab_size, backend.device)
    with_nan, hidden = ragged(lengths, vocab_size)
    mask = random_mask(*hidden.shape, device=backend.device, share=0.7) if masked else None
    run = functools.partial(fused_topk.sample, backend=backend.name, temperature=temperature, mask=mask, **filters)
    got = run(with_nan, lengths=lengths, seed=3, num_samples=4, topk=9)
    want = run(hidden, seed=3, num_samples=4, topk=9)
    assert torch.equal(got.tokens, want.tokens)
    same(got.logprobs, want.logprobs)
    assert_same(got.topk, want.topk)
    assert (got.tokens < lengths.clamp(min=1).unsqueeze(-1)).all() or masked


def test_out(backend):
    """test_contract.py has strides of lengths, and other dimensions."""
    lengths = torch.tensor([3, 500, 0], device=backend.device)
    with_nan, hidden = ragged(lengths, 500)
    want = backend("softmax_topk", hidden, 9)
    out = TopK(*map(torch.empty_like, want))
    assert_same(backend("softmax_topk", with_nan, 9, lengths=lengths, out=out), want)
    with pytest.raises(ValueError, match=r"`out\.indices` must not overlap `lengths`"):
        backend("softmax_topk", with_nan, 9, lengths=out.indices[:, 0].zero_(), out=out)


def test_gradient_of_a_row_of_length_zero_is_zero_in_its_logits():
    for entry, k in (("softmax", ()), ("log_softmax", ()), ("logsumexp", ()), ("topk", (3,))):
        x = torch.full((1, 12), NAN, requires_grad=True)
        found = getattr(fused_topk, entry)(x, *k, lengths=torch.tensor([0]))
        (found.values if k else found).sum().backward()
        assert (x.grad == 0).all()


def test_compiled_draws_and_clamped_lengths():
    """Of what is traced the values are not checked: they are clamped."""
    with_nan, hidden = ragged(torch.tensor([4, 0, 12]), 12)
    run = torch.compile(
        lambda x, n: fused_topk.sample(x, lengths=n, seed=1).tokens, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(run(with_nan, torch.tensor([4, -5, 99])), fused_topk.sample(hidden, seed=1).tokens)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_instruction_sets_agree(cpu, name):
    """Every one of the CPU's, over the borders of blocks."""
    for vocab_size, k in ((200, 5), (9001, 40)):
        lengths = borders(vocab_size)
        with_nan, hidden = ragged(lengths, vocab_size)
        got = on_cpu("log_softmax_topk", with_nan, k, name, lengths=lengths)
        assert_same(got, on_cpu("log_softmax_topk", hidden, k, name))
        got = full_rows("softmax", with_nan, torch.float32, name, lengths=lengths)
        same(got, full_rows("softmax", hidden, torch.float32, name))


def test_graph_of_changing_lengths(cuda):
    """A replay reads the lengths anew."""
    logits, lengths = random_logits(4, 5000, device="cuda"), torch.tensor([1, 9, 5000, 300], device="cuda")
    run = functools.partial(fused_topk.softmax_topk, logits, 5, lengths=lengths)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for new in ([5000, 0, 7, 1024], [2, 2, 2, 2]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        assert_same(captured, run())
