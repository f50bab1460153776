# SPDX-License-Identifier: Apache-2.0
"""Gradients, against finite differences in float64 and against autograd through torch's own operations."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import fused_topk
from oracle import DTYPES
from rows import INF, packed, random_logits, random_mask

ENTRIES = ("softmax_topk", "log_softmax_topk", "topk")
NORMALIZE = ("allowed", "all", "topk")


def torch_topk(entry, logits, indices, *, temperature=None, mask=None, normalize="allowed"):
    """(values, logsumexp) of plain torch operations, with the chosen tokens given."""
    x = logits.double()
    x = x if temperature is None else x / (temperature.unsqueeze(-1) if torch.is_tensor(temperature) else temperature)
    masked = x if mask is None else x.masked_fill(~mask, -INF)
    chosen = masked.gather(-1, indices)
    if entry == "topk":
        return chosen, masked.logsumexp(-1)
    normalizing = {"allowed": masked, "all": x, "topk": chosen}[normalize]
    values = chosen - normalizing.logsumexp(-1, keepdim=True)
    logsumexp = (x if normalize == "all" else masked).logsumexp(-1)
    return (values.exp() if entry == "softmax_topk" else values), logsumexp


def distinct(*shape: int) -> torch.Tensor:
    """Float64 logits whose order no finite difference changes."""
    generator = torch.Generator().manual_seed(0)
    size = torch.Size(shape).numel()
    return (torch.randperm(size, generator=generator).double() / 4 - size / 8).view(shape).requires_grad_()


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("temperature", [None, 0.7, "rows"], ids=str)
@pytest.mark.parametrize("mask", [None, "bool", "packed"], ids=str)
def test_row_topk_gradcheck(entry, normalize, temperature, mask):
    settings = {}
    if mask:
        allowed = random_mask(2, 7, share=0.6)
        allowed[:, 1:4] = True
        settings["mask"] = packed(allowed) if mask == "packed" else allowed
    if entry == "topk":
        if normalize != "allowed" or temperature:
            pytest.skip("topk has no such argument")
    else:
        rows = torch.tensor([0.5, 2.0], dtype=torch.float64)
        settings |= {"normalize": normalize, "temperature": rows if temperature == "rows" else temperature}

    def function(logits):
        values, _, logsumexp = getattr(fused_topk, entry)(logits, 3, **settings)
        return values, logsumexp

    assert torch.autograd.gradcheck(function, distinct(2, 7))


@pytest.mark.parametrize("normalize", ["allowed", "all"])
@pytest.mark.parametrize("temperature", [None, 0.7, "rows"], ids=str)
@pytest.mark.parametrize("mask", [None, "bool", "packed"], ids=str)
def test_beam_topk_gradcheck(normalize, temperature, mask):
    scores = torch.tensor([[0.1, -1.3], [0.7, 0.25]], dtype=torch.float64, requires_grad=True)
    settings = {"normalize": normalize}
    settings["temperature"] = torch.rand(2, 2, dtype=torch.float64) + 0.5 if temperature == "rows" else temperature
    if mask:
        allowed = random_mask(2, 2, 7, share=0.6)
        allowed[..., 1:4] = True
        settings["mask"] = packed(allowed) if mask == "packed" else allowed

    def function(logits, scores):
        values, _, logsumexp = fused_topk.beam_topk(logits, scores, 5, **settings)
        return values, logsumexp

    assert torch.autograd.gradcheck(function, (distinct(2, 2, 7), scores))


@pytest.mark.parametrize("dim", [0, 1])
def test_row_topk_gradcheck_with_dim(dim):
    assert torch.autograd.gradcheck(lambda x: fused_topk.softmax_topk(x, 2, dim=dim)[::2], distinct(3, 4, 2))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True], ids=["all_allowed", "masked"])
def test_row_topk_gradient_against_torch(backend, entry, dtype, masked):
    settings = {"mask": random_mask(3, 500, device=backend.device)} if masked else {}
    for normalize in NORMALIZE if entry != "topk" else NORMALIZE[:1]:
        if entry != "topk":
            rows = torch.tensor([0.5, 1.0, 3.0], device=backend.device)
            settings |= {"normalize": normalize, "temperature": rows}
        logits = random_logits(3, 500, dtype=DTYPES[dtype], device=backend.device).requires_grad_()
        got = backend(entry, logits, 6, **settings)
        weights = random_logits(3, 6, device=backend.device, seed=1), random_logits(3, device=backend.device, seed=2)

        def loss(values, logsumexp, weights=weights):
            return (values.double() * weights[0]).sum() + (logsumexp.double() * weights[1]).sum()

        (gradient,) = torch.autograd.grad(loss(got.values, got.logsumexp), logits)
        (want,) = torch.autograd.grad(loss(*torch_topk(entry, logits, got.indices, **settings)), logits)
        assert gradient.dtype == logits.dtype and gradient.shape == logits.shape
        torch.testing.assert_close(gradient, want, rtol=2e-5 if dtype == "fp32" else 2e-2, atol=2e-5)


@pytest.mark.parametrize("output", [0, 2], ids=["values", "logsumexp"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_row_topk_gradient_of_one_output(entry, output):
    """The other output's gradient is absent, which is zero."""
    logits = distinct(2, 9)
    got = getattr(fused_topk, entry)(logits, 3)
    (gradient,) = torch.autograd.grad(got[output].square().sum(), logits)
    want = torch_topk(entry, logits, got.indices)[output // 2]
    torch.testing.assert_close(gradient, torch.autograd.grad(want.square().sum(), logits)[0])


@pytest.mark.parametrize("entry", ENTRIES)
def test_row_topk_gradient_of_fewer_allowed_than_k(entry):
    """A token that may not be chosen gets no gradient, also where it fills a place of the result."""
    mask = torch.tensor([False, True, False, True, False])
    logits = distinct(5)
    values, _, logsumexp = getattr(fused_topk, entry)(logits, 4, mask=mask)
    (gradient,) = torch.autograd.grad(values[:2].sum() + logsumexp, logits)
    assert gradient.isfinite().all()
    assert (gradient[~mask] == 0).all()


def test_row_topk_gradient_through_a_large_offset():
    """Logits near 1e4 lose nothing in the backward pass either."""
    base = torch.arange(8.0).flip(0)
    gradients = []
    for offset in (0.0, 8192.0):
        logits = (base + offset).requires_grad_()
        fused_topk.log_softmax_topk(logits, 3).values.sum().backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beam_topk_gradient_against_torch(backend, dtype):
    logits = random_logits(2, 3, 200, dtype=dtype, device=backend.device).requires_grad_()
    scores = random_logits(2, 3, device=backend.device).requires_grad_()
    got = backend("beam_topk", logits, scores, 12)
    want = (logits.double().log_softmax(-1) + scores.double().unsqueeze(-1)).flatten(1).gather(1, got.indices)
    weights = random_logits(2, 12, device=backend.device, seed=3)
    gradients = torch.autograd.grad((got.values * weights).sum() + got.logsumexp.sum(), (logits, scores))
    loss = (want * weights).sum() + logits.double().logsumexp(-1).sum()
    for gradient, of_torch in zip(gradients, torch.autograd.grad(loss, (logits, scores)), strict=True):
        assert gradient.dtype == of_torch.dtype
        torch.testing.assert_close(gradient, of_torch, rtol=2e-5 if dtype == torch.float32 else 2e-2, atol=2e-5)


def test_beam_topk_gradient_of_a_score_alone():
    scores = torch.tensor([[0.5, 0.1]], requires_grad=True)
    fused_topk.beam_topk(distinct(1, 2, 5).detach(), scores, 4).values.sum().backward()
    assert scores.grad.sum() == 4


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
