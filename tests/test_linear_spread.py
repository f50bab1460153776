# SPDX-License-Identifier: Apache-2.0
"""linear_token_logprobs(): entropy, tail and kept logits, and all gradients, against float64 autograd of whole logits."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fused_topk
from fused_topk.operators import linear_backward
from linear_heads import ALL_DTYPES, exact_head, exact_logits, gradients_in_pieces, merged_in_pieces
from oracle import DTYPES
from rows import packed, random_mask
from spread import exact_spread, loss_of

pytestmark = pytest.mark.usefixtures("exact_library_products")
LEAD, DEPTH, V = (2, 9), 8, 2500
RECOMPUTE = pytest.mark.parametrize("recompute", [True, False], ids=["again", "kept"])


def given_tokens(several: bool, device: str) -> torch.Tensor:
    """Some none; with several a row, some equal.."""
    tokens = torch.randint(0, V, (*LEAD, *((4,) if several else ())), generator=torch.Generator().manual_seed(3))
    tokens.view(-1)[::5] = -100
    if several:
        tokens[..., 2] = tokens[..., 1]
    return tokens.to(device)


@RECOMPUTE
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("mask_kind", ["none", "bool", "packed"])
@pytest.mark.parametrize("normalize", ["allowed", "all"])
@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_against_float64(monkeypatch, backend, dtype, several, mask_kind, normalize, in_pieces, recompute, k):
    if dtype == "fp64" and backend.name != "reference":
        pytest.skip("of the reference alone")
    device = backend.device
    hidden, weight, bias = exact_head(LEAD, DEPTH, V, ALL_DTYPES[dtype], device)
    rows, tokens = (7, 1024) if in_pieces else (18, V)
    if in_pieces:
        merged_in_pieces(monkeypatch, rows, tokens, 2)
    gradients_in_pieces(monkeypatch, rows, tokens)
    mask = None if mask_kind == "none" else random_mask(*LEAD, V, share=0.7, device=device)
    settings = {
        "mask": mask,
        "normalize": normalize,
        "temperature": torch.linspace(0.5, 2.0, 18, device=device).view(LEAD),
    }
    given = {**settings, "mask": packed(mask) if mask_kind == "packed" else mask}
    best = backend("linear_log_softmax_topk", hidden, weight, 3, bias, **given)
    wanted = given_tokens(several, device)
    if several:
        wanted[..., 0] = best.indices[..., 1]
    learned = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    asked = {"entropy": True, "tail": True, "ranks": k > 0, "k": k, "recompute": recompute}
    found = backend("linear_token_logprobs", *learned[:2], wanted, learned[2], **given, **asked)
    logits = exact_logits(hidden, weight, bias).double().requires_grad_()
    of_row = wanted if several else wanted.unsqueeze(-1)
    want = exact_spread(logits, of_row, **settings)
    bound = {"rtol": 4e-6, "atol": 4e-6} if dtype != "fp64" else {"rtol": 1e-12, "atol": 1e-12}
    got_logprobs = found.logprobs if several else found.logprobs.unsqueeze(-1)
    for got, exact in (
        (got_logprobs, want.logprobs),
        (found.logsumexp, want.logsumexp),
        (found.entropy, want.entropy),
        (found.tail, want.tail),
    ):
        torch.testing.assert_close(got.double(), exact, equal_nan=True, **bound)
    chosen, of_chosen = [], []
    if k:
        chosen, of_chosen = [found.topk.values], [exact_spread(logits, best.indices, **settings).logprobs]
        assert torch.equal(found.topk.indices, best.indices)
        torch.testing.assert_close(found.topk.values, best.values, **bound)
        ranks = fused_topk.token_logprobs(exact_logits(hidden, weight, bias), wanted, ranks=True, **given).ranks
        assert torch.equal(found.ranks, ranks)
    loss_of(got_logprobs, found.entropy, found.tail, found.logsumexp, *chosen).backward()
    loss_of(want.logprobs, want.entropy, want.tail, want.logsumexp, *of_chosen).backward()
    g, size, h = logits.grad.flatten(0, 1), logits.grad.abs().flatten(0, 1), hidden.double().flatten(0, 1)
    # Rounded as an element, as the product of each piece or block, and as the sum; of float32 what its sums lose.
    roundings = 2.1 + (-(-18 // rows) + -(-V // tokens) if recompute else 1)
    unit = torch.finfo(ALL_DTYPES[dtype]).eps / 2 * roundings if dtype in ("fp16", "bf16") else 2.0**-18
    for got, exact, terms in (
        (learned[0].grad.flatten(0, 1), g @ weight.double(), size @ weight.double().abs()),
        (learned[1].grad, g.T @ h, size.T @ h.abs()),
        (learned[2].grad, g.sum(0), size.sum(0)),
    ):
        assert got.dtype == ALL_DTYPES[dtype]
        assert ((got.double() - exact).abs() <= unit * terms + 2.0**-25 * V).all()


@pytest.mark.parametrize("normalize", ["allowed", "all"])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_gradcheck(monkeypatch, normalize, in_pieces):
    if in_pieces:
        merged_in_pieces(monkeypatch, 2, 4, 2)
        gradients_in_pieces(monkeypatch, 2, 4)
    generator = torch.Generator().manual_seed(5)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 5), (11, 5), (11,))
    )
    settings = {
        "normalize": normalize,
        "temperature": torch.tensor([0.7, 1.0, 1.9], dtype=torch.float64),
        "mask": random_mask(3, 11, share=0.7),
    }
    tokens = torch.tensor([[0, 0], [-1, 4], [10, 3]])

    def function(*learned):
        found = fused_topk.linear_token_logprobs(*learned[:2], tokens, learned[2], entropy=True, tail=True, **settings)
        shown = found.logprobs.where(found.logprobs.isfinite(), 0.0)
        return shown, found.logsumexp, found.entropy, found.tail

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.sanitize
@RECOMPUTE
def test_rows_of_special_values(backend, recompute):
    """One token that counts, none, logits of +inf and NaN; V = 1; no rows."""
    inf, device = torch.inf, backend.device
    # The logits are the bias's, times the hidden state.
    hidden = torch.tensor([[1.0], [1.0], [inf], [torch.nan]], device=device).requires_grad_()
    weight = torch.tensor([[0.0], [5.0], [1.0]], device=device).requires_grad_()
    mask = torch.tensor([[False, True, False], [False] * 3, [True] * 3, [True] * 3], device=device)
    tokens = torch.tensor([1, 0, 1, 1], device=device)
    asked = {"entropy": True, "tail": True, "recompute": recompute}
    found = backend("linear_token_logprobs", hidden, weight, tokens, mask=mask, **asked)
    assert found.logprobs[0] == found.entropy[0] == 0 and found.tail[0] == -inf
    assert all(x[1:].isnan().all() for x in (found.logprobs, found.entropy, found.tail))
    # A row with no token that counts has no gradient, whatever comes in.
    shown = (found.logprobs, found.entropy, found.tail)
    sum((x[:2].where(x[:2].isfinite(), 0.0)).sum() for x in shown).backward()
    assert torch.equal(hidden.grad[:2], torch.zeros_like(hidden.grad[:2]))
    one = backend("linear_token_logprobs", hidden[:1], weight[:1], tokens[:1] * 0, **asked)
    assert one.logprobs.tolist() == one.entropy.tolist() == [0.0] and one.tail.tolist() == [-inf]
    none = backend("linear_token_logprobs", hidden[:0], weight, tokens[:0], **asked)
    assert none.logprobs.shape == none.entropy.shape == none.tail.shape == (0,)
    weight.grad = None
    (none.logprobs.sum() + none.entropy.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@RECOMPUTE
def test_a_common_offset(backend, recompute):
    """A bias of 1e4 on all tokens changes nothing but the rounding of the logits, which are multiples of 1/32."""
    hidden, weight, _ = exact_head(40, DEPTH, 300, torch.float32, backend.device)
    tokens = torch.arange(80, device=backend.device).view(40, 2)
    results = []
    for offset in (0.0, 1e4):
        given, bias = hidden.clone().requires_grad_(), torch.full((300,), offset, device=backend.device)
        found = backend(
            "linear_token_logprobs", given, weight, tokens, bias, entropy=True, tail=True, recompute=recompute
        )
        loss_of(found.logprobs, found.entropy, found.tail).backward()
        results.append((found.logprobs, found.entropy, found.tail, given.grad))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=0, atol=4e-6)


@RECOMPUTE
def test_what_needs_no_gradient_costs_none(monkeypatch, backend, recompute):
    """Frozen arguments have no product in the backward pass."""
    hidden, weight, bias = exact_head(6, DEPTH, 300, torch.float32, backend.device)
    tokens = torch.arange(6, device=backend.device)
    asked = []
    for name in ("_results",):
        made = getattr(linear_backward, name)
        monkeypatch.setattr(linear_backward, name, lambda *given, made=made: asked.append(given[2]) or made(*given))
    for i in range(3):
        learned = [x.clone().requires_grad_(i == j) for j, x in enumerate((hidden, weight, bias))]
        found = backend("linear_token_logprobs", *learned[:2], tokens, learned[2], entropy=True, recompute=recompute)
        (found.logprobs.sum() + found.entropy.sum()).backward()
        assert asked.pop() == [i == j for j in range(3)]
        assert [x.grad is not None for x in learned] == [i == j for j in range(3)]
    # Nothing is kept where nothing is learned.
    found = backend("linear_token_logprobs", hidden, weight, tokens, bias, recompute=False)
    assert not found.logprobs.requires_grad


def test_a_second_backward_pass():
    hidden, weight, _ = exact_head(3, DEPTH, 30, torch.float32)
    tokens = torch.arange(3)
    hidden.requires_grad_()
    for recompute in (True, False):
        found = fused_topk.linear_token_logprobs(hidden, weight, tokens, entropy=True, recompute=recompute)
        loss = found.logprobs.sum() + found.entropy.sum()
        (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        # The gradient of a gradient raises; the first one of it is right.
        if recompute:
            (again,) = torch.autograd.grad(loss, hidden, create_graph=True)
            torch.testing.assert_close(again, first)
            with pytest.raises(RuntimeError, match="differentiated again"):
                again.sum().backward()
        else:
            with pytest.raises(RuntimeError, match="`recompute` must be True"):
                torch.autograd.grad(loss, hidden)


@RECOMPUTE
def test_torch_sees_it(recompute):
    """torch.compile, checkpoints, autocast and torch.func."""
    hidden, weight, bias = exact_head(5, DEPTH, 50, torch.float32)
    tokens = torch.arange(10).view(5, 2)

    def function(hidden, weight, bias):
        found = fused_topk.linear_token_logprobs(
            hidden, weight, tokens, bias, entropy=True, tail=True, recompute=recompute
        )
        return found.logprobs.sum() + (found.entropy * 2).sum() + (found.tail * 3).sum()

    def grads(run):
        learned = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        loss = run(*learned)
        loss.backward()
        return [loss.detach(), *(x.grad for x in learned)]

    want = grads(function)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for run in (compiled, lambda *given: checkpoint(function, *given, use_reentrant=False)):
        for got, exact in zip(grads(run), want):
            torch.testing.assert_close(got, exact)
    for got, exact in zip(torch.func.grad(function, argnums=(0, 1, 2))(hidden, weight, bias), want[1:]):
        torch.testing.assert_close(got, exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        learned = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        loss = function(*learned)
        loss.backward()
    assert all(x.grad.dtype == torch.float32 for x in learned)
    # These products are exact in bfloat16; the gradients are rounded to it.
    torch.testing.assert_close(loss.detach(), want[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(learned[0].grad, want[1], rtol=0.02, atol=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_logits_are_rounded_once(backend, dtype):
    """The weight's gradient of many rows, whose sum would lose digits if it were rounded on the way."""
    rows = 3000
    hidden, weight, _ = exact_head(rows, DEPTH, 64, DTYPES[dtype], backend.device)
    tokens = torch.zeros(rows, dtype=torch.int64, device=backend.device)
    learned = weight.clone().requires_grad_()
    backend("linear_token_logprobs", hidden, learned, tokens, recompute=False).logprobs.sum().backward()
    logits = exact_logits(hidden, weight).double().requires_grad_()
    logits.log_softmax(-1)[:, 0].sum().backward()
    # What is rounded is each element of the logits' gradient, and the sum.
    unit = torch.finfo(DTYPES[dtype]).eps / 2
    g = logits.grad
    want = g.T @ hidden.double()
    bound = unit * want.abs() + 6 * unit * ((g * g).T @ (hidden.double() ** 2)).sqrt() + 1e-3 * (dtype == "fp16") + 1e-4
    assert ((learned.grad.double() - want).abs() <= bound).all()
