# SPDX-License-Identifier: Apache-2.0
"""Gradients, against finite differences in float64 and against autograd through torch's own operations."""

import pytest
import torch
from torch.autograd import forward_ad

import fused_topk
from rows import INF, packed, random_logits, random_mask

ENTRIES = ("softmax_topk", "log_softmax_topk", "topk")
NORMALIZE = ("allowed", "all", "topk")


def distinct(*shape: int) -> torch.Tensor:
    """Float64 logits whose order no finite difference changes."""
    generator = torch.Generator().manual_seed(0)
    size = torch.Size(shape).numel()
    return (torch.randperm(size, generator=generator).double() / 4 - size / 8).view(shape).requires_grad_()


def test_row_topk_gradient_through_a_large_offset():
    """Logits near 1e4 lose nothing in the backward pass either."""
    base = torch.arange(8.0).flip(0)
    gradients = []
    for offset in (0.0, 8192.0):
        logits = (base + offset).requires_grad_()
        fused_topk.log_softmax_topk(logits, 3).values.sum().backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [fused_topk.log_softmax_topk, fused_topk.topk])
def test_forward_mode_is_refused(function):
    """Rather than to give a derivative of zero."""
    logits, tangent = torch.randn(2, 3, 40)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda x: function(x, 4).values, (logits,), (tangent,))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        function(forward_ad.make_dual(logits, tangent), 4)
    with forward_ad.dual_level():
        assert torch.equal(function(logits, 4).indices, function(logits, 4).indices)


def test_forward_mode_of_scores_and_temperatures_is_refused():
    logits, scores, rows = random_logits(2, 3, 40), torch.zeros(2, 3), torch.ones(2, 3)
    for function, at in (
        (lambda x: fused_topk.beam_topk(logits, x, 4).values, scores),
        (lambda x: fused_topk.beam_topk(logits, scores, 4, temperature=x).values, rows),
        (lambda x: fused_topk.softmax_topk(logits, 4, temperature=x).values, rows),
        (lambda x: fused_topk.softmax(logits, temperature=x), rows),
        (lambda x: fused_topk.logsumexp(logits, temperature=x), rows),
    ):
        with pytest.raises(RuntimeError, match="forward-mode"):
            torch.func.jvp(function, (at,), (torch.ones_like(at),))


NUM_LOSSES = 8


def losses(backend):
    """Functions of logits [3, 40] that give a number, with tensors of every kind beside them."""
    rows, mask = torch.tensor([0.5, 1.0, 2.0], device=backend.device), random_mask(3, 40, device=backend.device)
    scores = random_logits(1, 3, device=backend.device, seed=5)

    def of_result(found):
        return found.values.square().sum() + sum(x.sum() for x in found[2:])

    yield lambda x: of_result(backend("softmax_topk", x, 4))
    yield lambda x: of_result(backend("log_softmax_topk", x, 4, temperature=rows, mask=mask))
    yield lambda x: of_result(backend("log_softmax_topk", x, 4, mask=packed(mask), normalize="all"))
    yield lambda x: of_result(backend("topk", x, 4, mask=mask))
    yield lambda x: of_result(backend("beam_topk", x.unsqueeze(0), scores, 4, mask=mask.unsqueeze(0)))
    yield lambda x: backend("softmax", x, temperature=rows).square().sum()
    yield lambda x: backend("log_softmax", x).square().sum()
    yield lambda x: backend("logsumexp", x).square().sum()


# Each takes seconds, and most share all of their code.
@pytest.mark.parametrize(
    "index", [i if i % 3 == 0 else pytest.param(i, marks=pytest.mark.exhaustive) for i in range(NUM_LOSSES)]
)
def test_hessians_of_torch_func(backend, index):
    """By reverse mode twice. Forward mode is refused with what works."""
    loss = list(losses(backend))[index]
    logits = random_logits(3, 40, device=backend.device)
    want = torch.autograd.functional.hessian(loss, logits)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(loss))(logits), want)
    with pytest.raises(
        RuntimeError, match=r"got forward mode, which torch\.func\.hessian .* use torch\.func\.jacrev, twice"
    ):
        torch.func.hessian(loss)(logits)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("num_allowed", [0, 2])
def test_gradient_on_all_values_of_few_allowed(entry, normalize, num_allowed):
    """Finite; zero for what is hidden; for the others as if only they had been asked for."""
    if entry == "topk" and normalize != "allowed":
        pytest.skip("topk has no such argument")
    settings = {} if entry == "topk" else {"normalize": normalize}
    mask = torch.tensor([False, True, False, True, False]) & (num_allowed > 0)
    logits = distinct(5)
    values = getattr(fused_topk, entry)(logits, 4, mask=mask, **settings).values
    weights = torch.tensor([1.0, 2.0, 30.0, 400.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(values, logits, weights)
    assert gradient.isfinite().all() and (gradient[~mask] == 0).all() | (normalize == "all")
    want = torch.zeros_like(logits)
    if num_allowed:
        of_allowed = getattr(fused_topk, entry)(logits, num_allowed, mask=mask, **settings).values
        (want,) = torch.autograd.grad(of_allowed, logits, weights[:num_allowed])
    torch.testing.assert_close(gradient, want)


@pytest.mark.parametrize("normalize", ["allowed", "all"])
def test_gradient_of_beams_of_which_one_may_not_go_on(normalize):
    logits, scores = distinct(1, 2, 5), torch.tensor([[0.5, 0.1]], dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(1, 2, 5, dtype=torch.bool)
    mask[0, 1, :3] = True
    values, indices, _ = fused_topk.beam_topk(logits, scores, 6, mask=mask, normalize=normalize)
    gradients = torch.autograd.grad(values, (logits, scores), torch.ones_like(values))
    assert all(gradient.isfinite().all() for gradient in gradients)
    # The tokens that are not allowed say nothing of their beam's score.
    assert gradients[1].tolist() == [[0, mask.flatten()[indices].sum()]]
    assert (gradients[0][~mask] == 0).all() | (normalize == "all")


@pytest.mark.parametrize("normalize", ["allowed", "all"])
@pytest.mark.parametrize("mask_kind", ["none", "bool", "packed"])
def test_gradient_of_a_row_without_a_finite_logit(backend, mask_kind, normalize):
    """Of a state: what reaches its logits reaches the allowed ones of the row, m and d depend on nothing. The row beside it is as
    alone."""
    logits = random_logits(3, 70, device=backend.device)
    logits[1] = -INF
    mask = None
    if mask_kind != "none":
        mask = random_mask(3, 70, device=backend.device)
        mask[1, ::2] = True
    settings = {"mask": packed(mask) if mask_kind == "packed" else mask, "normalize": normalize, "temperature": 0.7}
    leaf = logits.clone().requires_grad_()
    state = backend("topk_state", leaf, 5, **settings)
    ((state.logits * 3).sum() + 2 * state.m.sum() + 4 * state.d.sum()).backward()
    assert leaf.grad.isfinite().all()
    of_logits = torch.full_like(state.logits[1], 3)
    if mask is not None:
        of_logits = of_logits.where(mask[1, state.indices[1]], 0.0)
    want = torch.zeros(70, device=backend.device).scatter_add(0, state.indices[1], of_logits)
    m_and_d = leaf.grad[1] - want
    assert m_and_d.count_nonzero() <= 1 and (m_and_d == 0).logical_or(m_and_d == 2).all()
    for row in (0, 2):
        alone = logits[row : row + 1].clone().requires_grad_()
        of_row = {"mask": None if mask is None else settings["mask"][row : row + 1]}
        state = backend("topk_state", alone, 5, **{**settings, **of_row})
        ((state.logits * 3).sum() + 2 * state.m.sum() + 4 * state.d.sum()).backward()
        torch.testing.assert_close(leaf.grad[row], alone.grad[0])


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_gradient_of_parts_of_which_one_has_no_finite_logit(backend, entry, empty):
    """As that of whole rows: a part of only -inf is nothing."""
    whole = random_logits(3, 90, device=backend.device)
    whole[:2, 30 * empty : 30 * empty + 30] = -INF
    settings = {} if entry == "topk" else {"temperature": 0.7}
    values = {"softmax_topk": "softmax", "log_softmax_topk": "log_softmax", "topk": "logits"}[entry]
    grads = []
    for in_parts in (True, False):
        logits = whole.clone().requires_grad_()
        if in_parts:
            parts = [
                backend("topk_state", part, 5, start=30 * i, **settings) for i, part in enumerate(logits.split(30, -1))
            ]
            found = backend("merge_topk", parts, 5, kind=values, **settings)
        else:
            found = backend(entry, logits, 5, **settings)
        found.values.square().sum().backward()
        grads.append(logits.grad)
    assert grads[1].isfinite().all()
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [40, 9000, 70000])
@pytest.mark.parametrize("entry", ["log_softmax_topk", "softmax_topk"])
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_gradient_of_the_native_kernel(cpu, threads, entry, vocab_size, normalize):
    """As in float64; zero for hidden tokens, those of a row without probabilities too; NaN for the others there."""
    threads(2)
    logits = random_logits(3, vocab_size)
    logits[1] = -INF
    mask, lengths = random_mask(3, vocab_size), torch.tensor([vocab_size, vocab_size - 5, vocab_size // 2])
    # So that hidden tokens are among the chosen ones.
    mask[2, 3:] = False
    rows = torch.tensor([0.5, 1.0, 2.0])
    grad_values, grad_logsumexp = random_logits(3, 7, seed=1), random_logits(3, seed=2)
    for settings in (
        {},
        {"lengths": lengths, "temperature": rows},
        {"mask": mask},
        {"mask": packed(mask), "temperature": 0.7},
    ):
        gradients = []
        for dtype in (torch.float32, torch.float64):
            given = {name: x.to(dtype) if x is rows else x for name, x in settings.items()}
            leaf = logits.to(dtype).requires_grad_()
            found = getattr(fused_topk, entry)(leaf, 7, normalize=normalize, **given)
            of_results = [grad_values.to(dtype), grad_logsumexp.to(dtype)]
            gradients.append(
                torch.autograd.grad((found.values, found.logsumexp), leaf, of_results)[0].to(torch.float32)
            )
        torch.testing.assert_close(*gradients, rtol=5e-5, atol=2e-6, equal_nan=True)
