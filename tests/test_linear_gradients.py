# SPDX-License-Identifier: Apache-2.0
"""LM heads under autograd and torch's transforms: what they refuse, compilation, and memory that holds anything."""

from __future__ import annotations

import pytest
import torch

import fused_topk
from fused_topk import arguments
from linear_heads import exact_head
from rows import random_logits

pytestmark = pytest.mark.usefixtures("exact_library_products")


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
