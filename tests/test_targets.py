# SPDX-License-Identifier: Apache-2.0
"""Targets of the functions of top-k, and the ranks of drawn tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fused_topk
from fused_topk import TargetTopK, TopK
from fused_topk.backends import cpu as native_cpu
from fused_topk.backends import reference
from fused_topk.problem import RankProblem
from fused_topk.rows import LogitRows
from oracle import DTYPES, assert_same
from rows import NAN, adversarial_rows, packed, random_logits, random_mask

ENTRIES = ("softmax_topk", "log_softmax_topk")
ALL_DTYPES = {**DTYPES, "fp64": torch.float64}


def random_targets(*shape: int, vocab_size: int) -> Tensor:
    """Some of them none."""
    targets = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(len(shape)))
    targets.view(-1)[::4] = -100
    return targets


def shown(logits: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The logits in float64, -inf where a token is hidden."""
    x = logits.double()
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf)
    if lengths is not None:
        x = x.masked_fill(torch.arange(x.shape[-1], device=x.device) >= lengths.unsqueeze(-1), -torch.inf)
    return x


def assert_targets(
    got: TargetTopK,
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    target_ties: str = "index",
) -> None:
    """One target a row, of rows without NaN, against float64."""
    x = shown(logits, mask, lengths)
    scale = temperature.double().unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    over = shown(logits, None, lengths) if normalize == "all" else x
    exact = x / scale - (over / scale).logsumexp(-1, keepdim=True)
    tokens = targets.clamp(min=0).unsqueeze(-1)
    wanted = exact.gather(-1, tokens).squeeze(-1).where(targets >= 0, torch.nan)
    # The best token's as in oracle.py, with |z| <= |log-probability| + log V; the difference, its quotient and the sum are
    # rounded once each.
    unit = torch.finfo(got.target_logprobs.dtype).eps / 2
    bound = unit * (10 * wanted.abs() + 21 * math.log(logits.shape[-1]) + 22)
    same = (got.target_logprobs == wanted) | (got.target_logprobs.isnan() & wanted.isnan())
    assert (same | ((got.target_logprobs.double() - wanted).abs() <= bound)).all()
    theirs = x.gather(-1, tokens)
    if target_ties == "last":
        ranks = (x >= theirs).sum(-1)
    else:
        ranks = 1 + (x.sort(dim=-1, descending=True, stable=True).indices == tokens).int().argmax(-1)
    assert got.target_ranks.dtype == torch.int64 and torch.equal(got.target_ranks, ranks.where(targets >= 0, 0))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("normalize", ["allowed", "all", "topk"])
@pytest.mark.parametrize("hides", ["nothing", "mask", "packed", "lengths", "both"])
def test_against_float64(backend, dtype, normalize, hides):
    if dtype == "fp64" and backend.name != "reference":
        pytest.skip("of the reference alone")
    device = backend.device
    for entry, vocab_size in (*((entry, 33) for entry in ENTRIES), ("log_softmax_topk", 4100)):
        # Rounded: with ties.
        logits = (random_logits(3, 5, vocab_size, dtype=ALL_DTYPES[dtype], device=device) * 4).round() / 4
        targets = random_targets(3, 5, vocab_size=vocab_size).to(device)
        mask = random_mask(3, 5, vocab_size, device=device, share=0.5) if hides in ("mask", "packed", "both") else None
        lengths = torch.arange(15, device=device).view(3, 5) * (vocab_size // 15) + 1 if hides in ("lengths", "both") else None  # fmt: skip
        temperature = torch.linspace(0.5, 2.0, 15, dtype=torch.float64, device=device).view(3, 5).to(logits.dtype)
        settings = {"mask": mask, "lengths": lengths, "normalize": normalize, "temperature": temperature.float()}
        given = {**settings, "mask": packed(mask) if hides == "packed" else mask}
        for ties in ("index", "last"):
            got = backend(entry, logits, 7, targets=targets, target_ties=ties, **given)
            assert isinstance(got, TargetTopK)
            assert_targets(got, logits, targets, target_ties=ties, **settings)
            # The rest is what it is without targets.
            assert_same(TopK(*got[:3]), backend(entry, logits, 7, **given))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 37, 300, 4500])
def test_a_rank_is_a_place_in_the_order(backend, dtype, vocab_size):
    """Whatever the row has: NaN of any bits, infinities, zeros of both signs, subnormal numbers."""
    rows = torch.stack(list(adversarial_rows(vocab_size, 1, DTYPES[dtype]).values())).to(backend.device)
    targets = torch.arange(len(rows), device=backend.device) * 7 % vocab_size
    order = backend("topk", rows, vocab_size).indices
    got = backend("log_softmax_topk", rows, 1, targets=targets)
    assert torch.equal(order.gather(-1, got.target_ranks.unsqueeze(-1) - 1).squeeze(-1), targets)
    last = backend("log_softmax_topk", rows, 1, targets=targets, target_ties="last").target_ranks
    # Up to the last of those that tie, in the order.
    is_tie = (rows == rows.gather(-1, targets.unsqueeze(-1))) | (rows.isnan() & rows.gather(-1, targets.unsqueeze(-1)).isnan())  # fmt: skip
    places = torch.arange(1, vocab_size + 1, device=backend.device)
    assert torch.equal(last, (places * is_tie.gather(-1, order)).amax(-1))


@pytest.mark.parametrize("vocab_size", [1, 31, 64, 4097, 9000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set(cpu, dtype, vocab_size):
    rows = torch.stack(list(adversarial_rows(vocab_size, 1, DTYPES[dtype]).values()))
    targets = torch.cat([random_targets(len(rows), 3, vocab_size=vocab_size), torch.full((len(rows), 1), vocab_size)], -1)  # fmt: skip
    mask = random_mask(*rows.shape, share=0.7)
    lengths = torch.arange(len(rows)) * 997 % (vocab_size + 1)
    for given in (LogitRows(rows), LogitRows(rows, mask=packed(mask)), LogitRows(rows, mask=mask, lengths=lengths)):
        for counts_ties in (True, False):
            problem = RankProblem(given, targets, counts_ties)
            want = torch.empty_like(targets)
            reference.target_ranks(problem, want)
            for instruction_set in native_cpu._cpu.instruction_sets():
                got = torch.empty_like(targets)
                native_cpu.target_ranks(problem, got, instruction_set)
                assert torch.equal(got, want)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads(cpu, threads, count):
    """A row in parts, and rows that threads share."""
    threads(count)
    for rows in (1, 3, 70):
        logits = random_logits(rows, 70_000).round()
        targets = torch.arange(rows) * 999
        assert_targets(cpu("log_softmax_topk", logits, 1, targets=targets), logits, targets)
    # What lies behind the length counts once, whichever part has it.
    logits, targets, lengths = random_logits(2, 70_000), torch.tensor([45_000, 69_999]), torch.tensor([40_000, 60_000])
    for ties in ("index", "last"):
        got = cpu("log_softmax_topk", logits, 1, lengths=lengths, targets=targets, target_ties=ties)
        assert_targets(got, logits, targets, lengths=lengths, target_ties=ties)


def test_rows_without_probabilities(backend):
    x = torch.zeros(4, 9)
    x[0, 3], x[1, 3], x[2] = NAN, torch.inf, -torch.inf
    targets = torch.tensor([1, 3, 5, -1])
    for entry in ENTRIES:
        got = backend(entry, x.to(backend.device), 2, targets=targets.to(backend.device))
        assert got.target_logprobs.isnan().all()
        assert got.target_ranks.tolist() == [3, 1, 6, 0]


def test_rows_in_which_nothing_is_allowed(backend):
    logits, targets = random_logits(2, 9, device=backend.device), torch.tensor([4, 0], device=backend.device)
    logits[1, 0] = -torch.inf
    nothing = torch.zeros(9, dtype=torch.bool, device=backend.device)
    only_infinities = torch.arange(9, device=backend.device) == 0
    got = backend("log_softmax_topk", logits, 2, mask=nothing, targets=targets)
    assert got.target_logprobs.isnan().all() and got.target_ranks.tolist() == [5, 1]
    got = backend("log_softmax_topk", logits, 2, mask=nothing, normalize="all", targets=targets)
    assert (got.target_logprobs == -torch.inf).all() and got.target_ranks.tolist() == [5, 1]
    got = backend("softmax_topk", logits[1:], 2, mask=only_infinities, normalize="all", targets=targets[1:])
    assert got.target_logprobs.item() == -torch.inf and got.target_ranks.item() == 1


def test_a_common_offset_costs_nothing(backend):
    logits = random_logits(4, 5000, device=backend.device).double().add(2.0**13).float()
    targets = random_targets(4, vocab_size=5000).to(backend.device)
    for entry in ENTRIES:
        assert_targets(backend(entry, logits, 3, targets=targets), logits, targets)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_several_targets_and_other_dimensions(backend, dim):
    logits = random_logits(4, 6, 40, device=backend.device)
    several = random_targets(4, 6, 3, vocab_size=40).to(backend.device)
    want = backend("softmax_topk", logits, 5, targets=several)
    assert want.target_ranks is None and want.target_logprobs.shape == several.shape
    ones = [backend("softmax_topk", logits, 5, targets=several[..., i].contiguous()) for i in range(3)]
    assert torch.equal(torch.stack([x.target_logprobs for x in ones], -1).nan_to_num(7.0), want.target_logprobs.nan_to_num(7.0))  # fmt: skip
    got = backend("softmax_topk", logits.movedim(-1, dim), 5, dim=dim, targets=several.movedim(-1, dim))
    assert got.target_ranks is None
    for a, b in zip((got.values, got.indices, got.target_logprobs), (want.values, want.indices, want.target_logprobs)):
        assert torch.equal(a.movedim(dim, -1).nan_to_num(7.0), b.nan_to_num(7.0))
    one = backend("softmax_topk", logits.movedim(-1, dim), 5, dim=dim, targets=several[..., 0])
    assert torch.equal(one.target_ranks, ones[0].target_ranks) and one.values.movedim(dim, -1).shape == (4, 6, 5)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)], ids=str)
def test_few_rows(backend, shape):
    logits = random_logits(*shape, 9, device=backend.device)
    got = backend("log_softmax_topk", logits, 2, targets=torch.ones(shape, dtype=torch.int64, device=backend.device))
    assert got.target_logprobs.shape == got.target_ranks.shape == torch.Size(shape)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("normalize", ["allowed", "all", "topk"])
def test_gradcheck(entry, normalize):
    logits = random_logits(3, 9, dtype=torch.float64).requires_grad_()
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[:, 2] = mask[1, 5] = False
    settings = {"normalize": normalize, "temperature": 0.7}
    for targets in (torch.tensor([4, 1, 8]), torch.tensor([[4, 1], [3, 3], [8, 0]])):

        def logprobs(x, targets=targets):
            return getattr(fused_topk, entry)(x, 2, mask=mask, targets=targets, **settings).target_logprobs

        assert torch.autograd.gradcheck(logprobs, logits)


def test_a_constant_has_no_gradient():
    """A hidden target, and a position without one."""
    logits = random_logits(2, 9).requires_grad_()
    mask = torch.ones(9, dtype=torch.bool)
    mask[3] = False
    got = fused_topk.log_softmax_topk(logits, 2, mask=mask, targets=torch.tensor([3, -1]))
    got.target_logprobs.sum().backward()
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("entry", ["log_softmax_topk", pytest.param("softmax_topk", marks=pytest.mark.exhaustive)])
def test_compiled(backend, entry):
    torch._dynamo.reset()
    logits, targets = random_logits(3, 40, device=backend.device), torch.tensor([3, -1, 39], device=backend.device)

    def call(x, t):
        return tuple(backend(entry, x, 5, targets=t, target_ties="last"))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(logits, targets), call(logits, targets)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
    gradients = []
    for run in (compiled, call):
        leaf = logits.clone().requires_grad_()
        run(leaf, targets)[3].nan_to_num(0.0).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(40,), (2, 3, 40), (0, 40)], ids=str)
def test_opcheck(backend, shape):
    logits = random_logits(*shape, device=backend.device)
    targets = torch.ones(*shape[:-1], 2, dtype=torch.int64, device=backend.device)
    torch.library.opcheck(torch.ops.fused_topk.target_ranks.default, (*LogitRows(logits), targets, True, backend.name))


def test_meta_tensors():
    logits, targets = torch.empty(2, 9, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    got = fused_topk.log_softmax_topk(logits, 3, targets=targets)
    assert got.target_logprobs.shape == got.target_ranks.shape == (2,) and got.target_ranks.dtype == torch.int64


def test_out_and_targets_exclude_each_other():
    out = tuple(fused_topk.softmax_topk(random_logits(2, 9), 2))
    for entry in ENTRIES:
        with pytest.raises(ValueError, match="`out` must be None where `targets` are given"):
            getattr(fused_topk, entry)(random_logits(2, 9), 2, targets=torch.tensor([1, 2]), out=out)


@pytest.mark.parametrize(("ties", "error"), [("first", ValueError), (None, TypeError), (1, TypeError)])
def test_ties_are_checked_without_targets_too(ties, error):
    for entry in ENTRIES:
        with pytest.raises(error, match="`target_ties` must be"):
            getattr(fused_topk, entry)(random_logits(2, 9), 2, target_ties=ties)
        got = getattr(fused_topk, entry)(random_logits(2, 9, seed=3), 2, target_ties="last")
        assert_same(got, getattr(fused_topk, entry)(random_logits(2, 9, seed=3), 2))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("hides", ["nothing", "mask", "lengths"])
def test_ranks_of_draws(backend, dtype, hides):
    if dtype == "fp64" and backend.name != "reference":
        pytest.skip("of the reference alone")
    logits = random_logits(2, 3, 200, dtype=ALL_DTYPES[dtype], device=backend.device).round()
    mask = random_mask(2, 3, 200, device=backend.device, share=0.5) if hides == "mask" else None
    lengths = torch.arange(6, device=backend.device).view(2, 3) * 30 + 1 if hides == "lengths" else None
    settings = {"mask": mask, "lengths": lengths, "seed": 3, "num_samples": 4, "temperature": 2.0, "top_k": 150}
    got = backend("sample", logits, ranks=True, **settings)
    plain = backend("sample", logits, **settings)
    assert plain.ranks is None and torch.equal(plain.tokens, got.tokens)
    x = shown(logits, mask, lengths)
    want = (x.unsqueeze(-2) >= x.gather(-1, got.tokens).unsqueeze(-1)).sum(-1)
    assert got.ranks.dtype == torch.int64 and torch.equal(got.ranks, want)


def test_ranks_of_draws_in_every_form(backend):
    logits = random_logits(3, 40, device=backend.device)
    best = backend("sample", logits, temperature=0, ranks=True)
    assert best.ranks.tolist() == [[1], [1], [1]]
    assert backend("sample", logits[0], temperature=0, ranks=True).ranks.tolist() == [1]
    assert backend("sample", logits[:0], temperature=0, ranks=True).ranks.shape == (0, 1)
    compiled = torch.compile(lambda x: backend("sample", x, seed=1, ranks=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits).ranks, backend("sample", logits, seed=1, ranks=True).ranks)
    with pytest.raises(TypeError, match="`ranks` must be a bool, got int; pass True or False"):
        backend("sample", logits, ranks=1)
