# SPDX-License-Identifier: Apache-2.0
"""LM heads under autograd and torch's transforms: gradients in pieces, compilation, fake tensors; and what they refuse."""

from __future__ import annotations

import pytest
import torch

import fused_topk
from fused_topk import arguments
from linear_heads import exact_head, exact_logits, gradients_in_pieces
from oracle import DTYPES
from rows import packed, random_logits, random_mask

pytestmark = pytest.mark.usefixtures("exact_library_products")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_linear_gradients_of_16_bits(backend, dtype):
    """Against float64 gradients from the same rounded logits: what is left is the rounding of the logits' gradient."""
    hidden, weight, bias = exact_head(20, 8, 900, DTYPES[dtype], backend.device)
    learned = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    tokens = torch.arange(20, device=backend.device)
    found = backend("linear_token_logprobs", *learned[:2], tokens, learned[2], k=4)
    (found.topk.values.sum() - found.logprobs.sum()).backward()
    logits = exact_logits(hidden, weight, bias).double().requires_grad_()
    logp = logits.log_softmax(-1)
    (logp.gather(-1, found.topk.indices).sum() - logp.gather(-1, tokens[:, None]).sum()).backward()
    g, size = logits.grad, logits.grad.abs()
    # Rounded once as a number of the logits' gradient and once as a sum, with float32 between: 2.1 roundings at most. Below
    # float16's normal numbers a rounding is of 2^-25.
    u = torch.finfo(DTYPES[dtype]).eps / 2 * 2.1
    tiny = 2.0**-25 * 900
    for got, exact, terms in (
        (learned[0].grad, g @ weight.double(), size @ weight.double().abs()),
        (learned[1].grad, g.T @ hidden.double(), size.T @ hidden.double().abs()),
        (learned[2].grad, g.sum(0), size.sum(0)),
    ):
        assert got.dtype == DTYPES[dtype]
        assert ((got.double() - exact).abs() <= u * terms + tiny).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_kind", ["none", "bool", "packed"])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_linear_gradients_of_equal_tokens(monkeypatch, backend, dtype, mask_kind, in_pieces):
    """Given tokens that are equal, that are among the chosen, that are hidden and that are none, with a temperature a row."""
    rows, vocab_size, device = 20, 2500, backend.device
    hidden, weight, bias = exact_head(rows, 8, vocab_size, DTYPES[dtype], device)
    block, tokens = (7, 1024) if in_pieces else (rows, vocab_size)
    gradients_in_pieces(monkeypatch, block, tokens)
    mask = None if mask_kind == "none" else random_mask(rows, vocab_size, share=0.7, device=device)
    settings = {"mask": packed(mask) if mask_kind == "packed" else mask}
    settings["temperature"] = torch.linspace(0.5, 2.0, rows, device=device)
    best = backend("linear_log_softmax_topk", hidden, weight, 5, bias, **settings).indices
    generator = torch.Generator().manual_seed(2)
    given = torch.randint(0, vocab_size, (rows, 8), generator=generator).to(device)
    given[:, :2], given[:, 2], given[:, 3] = best[:, :2], best[:, 0], -100
    given[:, 5] = given[:, 4]
    shares = [torch.randn(shape, generator=generator).to(device) for shape in ((rows, 5), (rows, 8), (rows,))]

    def loss(values, logprobs, logsumexp):
        shown = logprobs.where((given >= 0) & logprobs.isfinite(), 0.0)
        return sum((x * share).sum() for x, share in zip((values, shown, logsumexp), shares))

    learned = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    found = backend("linear_token_logprobs", *learned[:2], given, learned[2], k=5, **settings)
    loss(found.topk.values, found.logprobs, found.logsumexp).backward()
    logits = exact_logits(hidden, weight, bias).double().requires_grad_()
    scaled = (logits if mask is None else logits.masked_fill(~mask, -torch.inf)) / settings["temperature"].unsqueeze(-1)
    logp = scaled.log_softmax(-1)
    loss(logp.gather(-1, best), logp.gather(-1, given.clamp(min=0)), scaled.logsumexp(-1)).backward()
    g, size = logits.grad, logits.grad.abs()
    # Rounded as an element, as the product of each piece or block, and as the sum; of float32 what its sums lose.
    roundings = 2.1 + max(-(-rows // block), -(-vocab_size // tokens))
    u = torch.finfo(DTYPES[dtype]).eps / 2 * roundings if dtype != "fp32" else 2.0**-18
    for got, exact, terms in (
        (learned[0].grad, g @ weight.double(), size @ weight.double().abs()),
        (learned[1].grad, g.T @ hidden.double(), size.T @ hidden.double().abs()),
        (learned[2].grad, g.sum(0), size.sum(0)),
    ):
        assert ((got.double() - exact).abs() <= u * terms + 2.0**-25 * vocab_size).all()


def test_linear_has_no_second_gradient():
    hidden, weight, _ = exact_head(3, 8, 30, torch.float32)
    hidden.requires_grad_()
    found = fused_topk.linear_softmax_topk(hidden, weight, 4)
    (grad,) = torch.autograd.grad(found.logsumexp.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        grad.sum().backward()

    def loss(hidden):
        return fused_topk.linear_softmax_topk(hidden, weight, 4).logsumexp.sum()

    with pytest.raises(RuntimeError, match="got forward mode"):
        torch.func.hessian(loss)(hidden)
    with pytest.raises(RuntimeError, match="differentiated again"):
        torch.func.jacrev(torch.func.jacrev(loss))(hidden)


# ---- torch ----


def test_linear_compile_does_not_look_for_dtensors(monkeypatch):
    """torch.compile would copy the list of modules, and fails if another thread imports one meanwhile."""
    monkeypatch.setattr(arguments, "sys", None)
    hidden, weight, _ = exact_head(2, 8, 50, torch.float32)
    compiled = torch.compile(fused_topk.linear_topk, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = compiled(hidden, torch.nn.Parameter(weight), 4)
    assert torch.equal(found.indices, (hidden @ weight.T).topk(4).indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_memory_that_holds_nan(backend, dtype, monkeypatch):
    """What a process gets for its logits may hold anything. A product of bfloat16 on CPUs with AMX reads beyond the ends of rows."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(torch.nan))
    leaves = [
        random_logits(*shape, device=backend.device, seed=seed).to(dtype).requires_grad_()
        for seed, shape in enumerate([(40, 24), (700, 24)])
    ]
    backend("linear_log_softmax_topk", *leaves, 5).values.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
