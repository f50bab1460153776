# SPDX-License-Identifier: Apache-2.0
"""token_logprobs(): log-probabilities and ranks of given tokens, entropy and tail, against float64; and the ranks of drawn tokens."""

import itertools
import math
from typing import Any

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
from spread import Exact, exact_spread, loss_of

ALL_DTYPES = {**DTYPES, "fp64": torch.float64}


def random_tokens(*shape: int, vocab_size: int) -> Tensor:
    """Some of them none, and of several some twice."""
    tokens = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(len(shape)))
    tokens.view(-1)[::4] = -100
    if len(shape) == 3:
        tokens[..., 2] = tokens[..., 1]
    return tokens


def shown(logits: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The logits in float64, -inf where a token is hidden."""
    x = logits.double()
    if mask is not None:
        x = x.masked_fill(~mask, -torch.inf)
    if lengths is not None:
        x = x.masked_fill(torch.arange(x.shape[-1], device=x.device) >= lengths.unsqueeze(-1), -torch.inf)
    return x


def assert_right(got: TokenLogprobs, logits: Tensor, tokens: Tensor, *, ties: str = "index", **settings: Any) -> Exact:
    """Of rows without NaN, against float64. settings: as of exact_spread()."""
    of_row = tokens if tokens.dim() == logits.dim() else tokens.unsqueeze(-1)
    exact = exact_spread(logits, of_row, **settings)
    wanted = exact.logprobs.detach().view(tokens.shape)
    # The best token's as in oracle.py, with |z| <= |log-probability| + log V; the difference, its quotient and the sum are
    # rounded once each.
    unit = torch.finfo(got.logprobs.dtype).eps / 2
    bound = unit * (10 * wanted.abs() + 21 * math.log(logits.shape[-1]) + 22)
    same = (got.logprobs == wanted) | (got.logprobs.isnan() & wanted.isnan())
    assert (same | ((got.logprobs.double() - wanted).abs() <= bound)).all()
    torch.testing.assert_close(got.logsumexp.double(), exact.logsumexp, rtol=1e-5, atol=1e-5)
    tolerance = 4e-6 if unit > 2.0**-30 else 1e-11
    for found, wanted in ((got.entropy, exact.entropy), (got.tail, exact.tail)):
        if found is not None:
            torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    if got.ranks is not None:
        x = shown(logits.detach(), settings.get("mask"), settings.get("lengths"))
        theirs = x.gather(-1, of_row.clamp(min=0)).unsqueeze(-1)
        counts = x.unsqueeze(-2) == theirs
        if ties == "index":
            counts &= torch.arange(x.shape[-1], device=x.device) <= of_row.unsqueeze(-1)
        ranks = (counts | (x.unsqueeze(-2) > theirs)).sum(-1).view(tokens.shape)
        assert got.ranks.dtype == torch.int64 and torch.equal(got.ranks, ranks.where(tokens >= 0, 0))
    return exact


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("normalize", ["allowed", "all"])
@pytest.mark.parametrize("hides", ["nothing", "mask", "packed", "lengths", "both"])
def test_against_float64(backend, dtype, normalize, hides):
    """Of logits with ties, also far from 0; and their gradients."""
    if dtype == "fp64" and backend.name != "reference":
        pytest.skip("of the reference alone")
    device = backend.device
    for vocab_size, several, ties in itertools.product((33, 4100), ((), (4,)), ("index", "last")):
        logits = (random_logits(3, 5, vocab_size, device=device) * 4).round() / 4 + 1000 * (dtype in ("fp32", "bf16"))
        logits = logits.to(ALL_DTYPES[dtype])
        mask = random_mask(3, 5, vocab_size, device=device, share=0.5) if hides in ("mask", "packed", "both") else None
        lengths = torch.arange(15, device=device).view(3, 5) * (vocab_size // 15) + 1 if hides in ("lengths", "both") else None  # fmt: skip
        temperature = torch.linspace(0.5, 2.0, 15, device=device).view(3, 5)
        settings = {"mask": mask, "lengths": lengths, "normalize": normalize, "temperature": temperature}
        given = {**settings, "mask": packed(mask) if hides == "packed" else mask}
        tokens = random_tokens(3, 5, *several, vocab_size=vocab_size).to(device)
        leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
        got = backend("token_logprobs", leaf, tokens, k=7, ranks=True, ties=ties, entropy=True, tail=True, **given)
        want = assert_right(got, exact, tokens, ties=ties, **settings)
        best = backend("log_softmax_topk", logits, 7, **given)
        assert_same(type(best)(*(x.detach() for x in got.topk)), best)
        loss_of(got.logprobs.view(want.logprobs.shape), got.entropy, got.tail, got.logsumexp).backward()
        loss_of(*want[:1], *want[2:4], want.logsumexp).backward()
        unit = torch.finfo(logits.dtype).eps
        torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=unit, atol=max(unit, 2e-7) * 30)
        # Nobody's result depends on what else is asked for.
        plain = backend("token_logprobs", logits, tokens, **given)
        assert plain.ranks is plain.topk is plain.entropy is plain.tail is None
        assert torch.equal(plain.logprobs.nan_to_num(7.0), got.logprobs.nan_to_num(7.0))
        assert torch.equal(plain.logsumexp, got.logsumexp)
        for one in ("entropy", "tail"):
            alone = backend("token_logprobs", logits, tokens, **{one: True}, **given)
            assert torch.equal(getattr(alone, one), getattr(got, one))
            assert alone.entropy is None or alone.tail is None


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


# Entropy and tail.


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_special_values(backend, dtype):
    """One token that counts, none, +inf, NaN; of one token; and what no gradient may reach."""
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [[0.0, 5.0, 1.0, 2.0], [3.0, -inf, -inf, -inf], [-inf] * 4, [0.0, inf, 1.0, 0.0], [0.0, nan, 1.0, 0.0]],
        dtype=DTYPES[dtype],
        device=backend.device,
        requires_grad=True,
    )
    mask = torch.ones(5, 4, dtype=torch.bool, device=backend.device)
    mask[0] = torch.tensor([False, True, False, False])
    tokens = torch.tensor([1, 0, 0, 0, 0], device=backend.device)
    found = backend("token_logprobs", logits, tokens, mask=mask, entropy=True, tail=True)
    assert found.entropy.tolist()[:2] == [0.0, 0.0] and found.entropy[2:].isnan().all()
    assert found.tail.tolist()[:2] == [-inf, -inf] and found.tail[2:].isnan().all()
    (found.entropy[:2].sum() + found.tail[:2].exp().sum() + (found.tail[:2] * 0.5).sum()).backward()
    assert torch.equal(logits.grad[:2], torch.zeros_like(logits.grad[:2]))
    one = backend("token_logprobs", logits[:1, :1].detach(), tokens[:1] * 0, entropy=True, tail=True)
    assert one.entropy.tolist() == [0.0] and one.tail.tolist() == [-inf]
    none = backend("token_logprobs", logits[:0].detach(), tokens[:0], entropy=True, tail=True)
    assert none.entropy.shape == none.tail.shape == (0,)


def test_a_tail_keeps_its_digits(backend):
    """Where the given tokens have all but e^-200 of the probability, and a common offset takes digits of the logits."""
    logits = torch.full((1, 5000), -200.0, device=backend.device)
    logits[0, 17], logits[0, 4500] = 0.0, 1.0
    for offset in (0.0, 8192.0):
        x = (logits + offset).requires_grad_()
        found = backend(
            "token_logprobs", x, torch.tensor([[4500, 17, 17]], device=backend.device), entropy=True, tail=True
        )
        want = exact_spread(x.detach(), torch.tensor([[4500, 17, 17]], device=backend.device))
        torch.testing.assert_close(found.tail.double(), want.tail, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.entropy.double(), want.entropy, rtol=1e-6, atol=0)
        found.tail.sum().backward()
        # The softmax of those that are left, and the probabilities of the two.
        torch.testing.assert_close(x.grad[0, :17], torch.full((17,), 1 / 4998, device=x.device), rtol=1e-5, atol=0)
        torch.testing.assert_close(x.grad[0, [17, 4500]], -want.logprobs[0, [1, 0]].exp().float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("normalize", ["allowed", "all"])
def test_second_gradients(normalize):
    logits = random_logits(3, 9).double().requires_grad_()
    tokens = torch.tensor([[0, 1], [3, 3], [-1, 8]])
    mask = random_mask(3, 9, share=0.7)
    mask[:, 8] = True

    def function(logits):
        found = fused_topk.token_logprobs(
            logits, tokens, temperature=0.7, mask=mask, normalize=normalize, entropy=True, tail=True
        )
        return found.entropy, found.tail

    assert torch.autograd.gradgradcheck(function, logits)
