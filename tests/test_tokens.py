# SPDX-License-Identifier: Apache-2.0
"""token_logprobs(): log-probabilities and ranks of given tokens; and the ranks of drawn ones."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import fused_topk
from fused_topk import TokenLogprobs, operators
from fused_topk.backends import cpu as native_cpu
from fused_topk.problem import RankProblem
from fused_topk.rows import LogitRows
from oracle import DTYPES, assert_same
from rows import NAN, adversarial_rows, packed, random_logits, random_mask

ALL_DTYPES = {**DTYPES, "fp64": torch.float64}


def random_tokens(*shape: int, vocab_size: int) -> Tensor:
    """Some of them none."""
    tokens = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(len(shape)))
    tokens.view(-1)[::4] = -100
    return tokens


def shown(logits: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The logits in float64, -inf where a token is hidden."""
    x = logits.double()
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf)
    if lengths is not None:
        x = x.masked_fill(torch.arange(x.shape[-1], device=x.device) >= lengths.unsqueeze(-1), -torch.inf)
    return x


def assert_right(
    got: TokenLogprobs,
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    ties: str = "index",
) -> None:
    """Of rows without NaN, against float64."""
    x = shown(logits, mask, lengths)
    scale = temperature.double().unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    over = shown(logits, None, lengths) if normalize == "all" else x
    exact = x / scale - (over / scale).logsumexp(-1, keepdim=True)
    of_row = (tokens if tokens.dim() == logits.dim() else tokens.unsqueeze(-1)).clamp(min=0)
    wanted = exact.gather(-1, of_row).view(tokens.shape).where(tokens >= 0, torch.nan)
    # The best token's as in oracle.py, with |z| <= |log-probability| + log V; the difference, its quotient and the sum are
    # rounded once each.
    unit = torch.finfo(got.logprobs.dtype).eps / 2
    bound = unit * (10 * wanted.abs() + 21 * math.log(logits.shape[-1]) + 22)
    same = (got.logprobs == wanted) | (got.logprobs.isnan() & wanted.isnan())
    assert (same | ((got.logprobs.double() - wanted).abs() <= bound)).all()
    torch.testing.assert_close(got.logsumexp.double(), (over / scale).logsumexp(-1), rtol=1e-5, atol=1e-5)
    if got.ranks is None:
        return
    theirs = x.gather(-1, of_row).unsqueeze(-1)
    counts = x.unsqueeze(-2) == theirs
    if ties == "index":
        counts &= torch.arange(x.shape[-1], device=x.device) <= of_row.unsqueeze(-1)
    ranks = (counts | (x.unsqueeze(-2) > theirs)).sum(-1).view(tokens.shape)
    assert got.ranks.dtype == torch.int64 and torch.equal(got.ranks, ranks.where(tokens >= 0, 0))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("normalize", ["allowed", "all"])
@pytest.mark.parametrize("hides", ["nothing", "mask", "packed", "lengths", "both"])
def test_against_float64(backend, dtype, normalize, hides):
    if dtype == "fp64" and backend.name != "reference":
        pytest.skip("of the reference alone")
    device = backend.device
    for vocab_size in (33, 4100):
        # Rounded: with ties.
        logits = (random_logits(3, 5, vocab_size, dtype=ALL_DTYPES[dtype], device=device) * 4).round() / 4
        mask = random_mask(3, 5, vocab_size, device=device, share=0.5) if hides in ("mask", "packed", "both") else None
        lengths = torch.arange(15, device=device).view(3, 5) * (vocab_size // 15) + 1 if hides in ("lengths", "both") else None  # fmt: skip
        temperature = torch.linspace(0.5, 2.0, 15, dtype=torch.float64, device=device).view(3, 5).to(logits.dtype)
        settings = {"mask": mask, "lengths": lengths, "normalize": normalize, "temperature": temperature.float()}
        given = {**settings, "mask": packed(mask) if hides == "packed" else mask}
        best = backend("log_softmax_topk", logits, 7, **given)
        for several, ties in itertools.product(((), (4,)), ("index", "last")):
            tokens = random_tokens(3, 5, *several, vocab_size=vocab_size).to(device)
            got = backend("token_logprobs", logits, tokens, k=7, ranks=True, ties=ties, **given)
            assert type(got) is TokenLogprobs
            assert_right(got, logits, tokens, ties=ties, **settings)
            assert_same(got.topk, best)
            # Nobody's result depends on what else is asked for.
            plain = backend("token_logprobs", logits, tokens, **given)
            assert plain.ranks is None and plain.topk is None
            assert torch.equal(plain.logprobs.nan_to_num(7.0), got.logprobs.nan_to_num(7.0))
            assert torch.equal(plain.logsumexp, got.logsumexp)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 37, 300, 4500])
def test_a_rank_is_a_place_in_the_order(backend, dtype, vocab_size):
    """Whatever the row has: NaN of any bits, infinities, zeros of both signs, subnormal numbers."""
    rows = torch.stack(list(adversarial_rows(vocab_size, 1, DTYPES[dtype]).values())).to(backend.device)
    tokens = torch.arange(len(rows), device=backend.device) * 7 % vocab_size
    order = backend("topk", rows, vocab_size).indices
    got = backend("token_logprobs", rows, tokens, ranks=True)
    assert torch.equal(order.gather(-1, got.ranks.unsqueeze(-1) - 1).squeeze(-1), tokens)
    last = backend("token_logprobs", rows, tokens, ranks=True, ties="last").ranks
    # Up to the last of those that tie, in the order.
    is_tie = (rows == rows.gather(-1, tokens.unsqueeze(-1))) | (rows.isnan() & rows.gather(-1, tokens.unsqueeze(-1)).isnan())  # fmt: skip
    places = torch.arange(1, vocab_size + 1, device=backend.device)
    assert torch.equal(last, (places * is_tie.gather(-1, order)).amax(-1))


@pytest.mark.parametrize("vocab_size", [1, 31, 64, 4097, 9000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set(cpu, dtype, vocab_size):
    rows = torch.stack(list(adversarial_rows(vocab_size, 1, DTYPES[dtype]).values()))
    targets = torch.cat([random_tokens(len(rows), 3, vocab_size=vocab_size), torch.full((len(rows), 1), vocab_size)], -1)  # fmt: skip
    mask = random_mask(*rows.shape, share=0.7)
    lengths = torch.arange(len(rows)) * 997 % (vocab_size + 1)
    for given in (LogitRows(rows), LogitRows(rows, mask=packed(mask)), LogitRows(rows, mask=mask, lengths=lengths)):
        for counts_ties in (True, False):
            problem = RankProblem(given, targets, counts_ties)
            want = torch.empty_like(targets)
            operators.ranks.reference(problem, want)
            for instruction_set in native_cpu.native.instruction_sets():
                got = torch.empty_like(targets)
                operators.ranks.on_cpu(problem, got, instruction_set)
                assert torch.equal(got, want)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads(cpu, threads, count):
    """A row in parts, and rows that threads share."""
    threads(count)
    for rows in (1, 3, 70):
        logits = random_logits(rows, 70_000).round()
        tokens = torch.arange(rows) * 999
        assert_right(cpu("token_logprobs", logits, tokens, ranks=True), logits, tokens)
    # What lies behind the length counts once, whichever part has it.
    logits, tokens, lengths = random_logits(2, 70_000), torch.tensor([45_000, 69_999]), torch.tensor([40_000, 60_000])
    for ties in ("index", "last"):
        got = cpu("token_logprobs", logits, tokens, lengths=lengths, ranks=True, ties=ties)
        assert_right(got, logits, tokens, lengths=lengths, ties=ties)


def test_rows_without_probabilities(backend):
    x = torch.zeros(4, 9)
    x[0, 3], x[1, 3], x[2] = NAN, torch.inf, -torch.inf
    tokens = torch.tensor([1, 3, 5, -1])
    got = backend("token_logprobs", x.to(backend.device), tokens.to(backend.device), ranks=True)
    assert got.logprobs.isnan().all()
    assert got.ranks.tolist() == [3, 1, 6, 0]


def test_rows_in_which_nothing_is_allowed(backend):
    logits, tokens = random_logits(2, 9, device=backend.device), torch.tensor([4, 0], device=backend.device)
    logits[1, 0] = -torch.inf
    nothing = torch.zeros(9, dtype=torch.bool, device=backend.device)
    only_infinities = torch.arange(9, device=backend.device) == 0
    got = backend("token_logprobs", logits, tokens, mask=nothing, ranks=True)
    assert got.logprobs.isnan().all() and got.ranks.tolist() == [5, 1]
    got = backend("token_logprobs", logits, tokens, mask=nothing, normalize="all", ranks=True)
    assert (got.logprobs == -torch.inf).all() and got.ranks.tolist() == [5, 1]
    got = backend("token_logprobs", logits[1:], tokens[1:], mask=only_infinities, normalize="all", ranks=True)
    assert got.logprobs.item() == -torch.inf and got.ranks.item() == 1


def test_a_common_offset_costs_nothing(backend):
    logits = random_logits(4, 5000, device=backend.device).double().add(2.0**13).float()
    tokens = random_tokens(4, vocab_size=5000).to(backend.device)
    assert_right(backend("token_logprobs", logits, tokens), logits, tokens)


def test_positions_that_do_not_merge(backend):
    logits = random_logits(3, 20, 33, device=backend.device)
    # Without its last position the batch does not merge with the positions.
    for view in (logits, logits[:, :-1], logits.transpose(0, 1)):
        tokens = random_tokens(*view.shape[:-1], vocab_size=33).to(backend.device)
        assert_right(backend("token_logprobs", view, tokens, ranks=True), view, tokens)


def test_a_constant_has_no_gradient():
    """A hidden token, and a position without one."""
    logits = random_logits(2, 9).requires_grad_()
    mask = torch.ones(9, dtype=torch.bool)
    mask[3] = False
    fused_topk.token_logprobs(logits, torch.tensor([3, -1]), mask=mask).logprobs.sum().backward()
    assert (logits.grad == 0).all()


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
