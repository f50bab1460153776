# SPDX-License-Identifier: Apache-2.0
"""torch.autocast: LM heads follow it as a linear layer does, and nothing else changes its result or its gradient."""

import itertools

import pytest
import torch

import fused_topk
from linear_heads import ALL_DTYPES, ENTRIES, exact_head, exact_logits
from oracle import assert_topk, expected
from rows import random_logits
from test_autograd import NUM_LOSSES, losses

pytestmark = pytest.mark.usefixtures("exact_library_products")

AUTOCASTS = pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@AUTOCASTS
@pytest.mark.parametrize("of_bias", [None, *ALL_DTYPES])
def test_linear_takes_what_a_linear_layer_takes(backend, to, of_bias):
    """Each combination of dtypes: the same logits in the same dtype, or an error from both."""
    head = exact_head(6, 24, 700, torch.float32, backend.device)
    for of_hidden, of_weight in itertools.product(ALL_DTYPES, ALL_DTYPES):
        hidden, weight = head[0].to(ALL_DTYPES[of_hidden]), head[1].to(ALL_DTYPES[of_weight])
        bias = None if of_bias is None else head[2].to(ALL_DTYPES[of_bias])
        with torch.autocast(backend.device, dtype=to):
            try:
                logits = torch.nn.functional.linear(hidden, weight, bias)
            except RuntimeError:
                with pytest.raises(TypeError, match="must have the dtype"):
                    backend("linear_topk", hidden, weight, 5, bias)
                with pytest.raises(TypeError, match="must have the dtype"):
                    backend("linear_sample", hidden, weight, bias, seed=3)
                continue
            if logits.dtype == torch.float64:
                # The native backends have no such kernel.
                continue
            for entry, whole in ENTRIES.items():
                got = backend(entry, hidden, weight, 5, bias)
                assert_topk(got, expected(whole, logits, 5), logits, whole)
            got, want = backend("linear_sample", hidden, weight, bias, seed=3), backend("sample", logits, seed=3)
            assert torch.equal(got.tokens, want.tokens)


@AUTOCASTS
@pytest.mark.parametrize("entry", ["linear_log_softmax_topk", "linear_token_logprobs"])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_linear_gradients_under_autocast(backend, to, entry, backward_inside):
    """Those of a call with the converted operands, in the dtypes of what is learned."""
    head = exact_head(40, 24, 700, torch.float32, backend.device)
    wanted = 5 if entry == "linear_log_softmax_topk" else torch.arange(40, device=backend.device)

    def loss(*learned):
        found = backend(entry, *learned[:2], wanted, learned[2], temperature=0.7)
        return sum(x.square().sum() for x in found if x is not None and x.is_floating_point())

    grads = []
    for is_autocast in (True, False):
        leaves = [x.clone().requires_grad_() for x in head]
        with torch.autocast(backend.device, dtype=to, enabled=is_autocast):
            total = loss(*(leaves if is_autocast else [x.to(to) for x in leaves]))
        with torch.autocast(backend.device, dtype=to, enabled=is_autocast and backward_inside):
            total.backward()
        grads.append([x.grad for x in leaves])
    for got, want in zip(*grads, strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, want)


def test_linear_backward_under_autocast_of_a_forward_without(backend):
    head = random_logits(40, 24, device=backend.device), random_logits(700, 24, device=backend.device, seed=1)
    grads = []
    for is_autocast in (True, False):
        leaves = [x.clone().requires_grad_() for x in head]
        found = backend("linear_log_softmax_topk", *leaves, 5)
        with torch.autocast(backend.device, dtype=torch.bfloat16, enabled=is_autocast):
            found.values.sum().backward()
        grads.append([x.grad for x in leaves])
    assert all(torch.equal(got, want) for got, want in zip(*grads, strict=True))


def test_linear_compiled_under_autocast(native):
    """One compiled function, called without autocast and under each kind."""
    torch._dynamo.reset()
    hidden, weight, bias = exact_head(6, 24, 700, torch.float32, native.device)
    weight.requires_grad_()
    hidden = hidden + 2**-12  # more than 16 bits hold

    def step(hidden, weight, bias):
        best = native("linear_topk", hidden, weight, 5, bias)
        return *best, torch.autograd.grad(best.values.sum(), weight)[0]

    compiled = torch.compile(
        lambda *head: fused_topk.linear_topk(*head[:2], 5, head[2], backend=native.name),
        fullgraph=True,
        backend="aot_eager",
    )
    for to in (None, torch.bfloat16, torch.float16, None):
        with torch.autocast(native.device, dtype=to, enabled=to is not None):
            best = compiled(hidden, weight, bias)
            (grad,) = torch.autograd.grad(best.values.sum(), weight)
            want = step(hidden, weight, bias)
        assert best.values.dtype == (to or torch.float32)
        assert all(torch.equal(a, b) for a, b in zip((*best, grad), want, strict=True))


def test_linear_under_autocast_of_another_device(backend):
    hidden, weight, _ = exact_head(6, 24, 700, torch.float32, backend.device)
    other = "cpu" if backend.device == "cuda" else "cuda"
    # Also where that device is not there.
    torch.set_autocast_enabled(other, True)
    try:
        got = backend("linear_topk", hidden, weight, 5)
    finally:
        torch.set_autocast_enabled(other, False)
    logits = exact_logits(hidden, weight)
    assert_topk(got, expected("topk", logits, 5), logits, "topk")


@pytest.mark.parametrize("index", range(NUM_LOSSES))
def test_autocast_changes_no_gradient_of_logits(backend, index):
    loss = list(losses(backend))[index]
    found = []
    for is_autocast in (True, False):
        logits = random_logits(3, 40, device=backend.device).requires_grad_()
        with torch.autocast(backend.device, dtype=torch.bfloat16, enabled=is_autocast):
            total = loss(logits)
            total.backward()
        found.append((total.detach(), logits.grad))
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


def test_linear_of_float64_under_autocast():
    hidden, weight, bias = exact_head(6, 24, 700, torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused_topk.linear_topk(hidden, weight, 5, bias).values.dtype == torch.float64
        assert torch.equal(fused_topk.linear_topk(hidden, weight, 5).values, (hidden @ weight.T).topk(5).values)
