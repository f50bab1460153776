# SPDX-License-Identifier: Apache-2.0
"""token_logprobs(): entropy and tail, and their gradients, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch

import fused_topk
from oracle import DTYPES
from rows import packed, random_logits, random_mask
from spread import exact_spread, loss_of

ALL_DTYPES = {**DTYPES, "fp64": torch.float64}


def tokens_of(*shape: int, vocab_size: int, device: str) -> torch.Tensor:
    """Some of them none, some twice."""
    tokens = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(len(shape)))
    tokens.view(-1)[::4] = -100
    if len(shape) == 3:
        tokens[..., 2] = tokens[..., 1]
    return tokens.to(device)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("normalize", ["allowed", "all"])
@pytest.mark.parametrize("hides", ["nothing", "mask", "packed", "lengths", "both"])
def test_against_float64(backend, dtype, normalize, hides):
    if dtype == "fp64" and backend.name != "reference":
        pytest.skip("of the reference alone")
    device = backend.device
    for vocab_size, several in itertools.product((33, 9000), ((), (4,))):
        logits = (random_logits(3, 5, vocab_size, device=device) * 2 + 1000 * (dtype != "fp16")).to(ALL_DTYPES[dtype])
        mask = random_mask(3, 5, vocab_size, device=device, share=0.5) if hides in ("mask", "packed", "both") else None
        lengths = None
        if hides in ("lengths", "both"):
            lengths = torch.arange(15, device=device).view(3, 5) * (vocab_size // 15) + 1
        tokens = tokens_of(3, 5, *several, vocab_size=vocab_size, device=device)
        temperature = torch.linspace(0.5, 2.0, 15, device=device).view(3, 5)
        settings = {"mask": mask, "lengths": lengths, "normalize": normalize, "temperature": temperature}
        given = logits.clone().requires_grad_()
        found = backend(
            "token_logprobs",
            given,
            tokens,
            entropy=True,
            tail=True,
            **{**settings, "mask": packed(mask) if hides == "packed" else mask},
        )
        exact = logits.double().requires_grad_()
        want = exact_spread(exact, tokens if several else tokens.unsqueeze(-1), **settings)
        bound = {"rtol": 4e-6, "atol": 4e-6} if dtype != "fp64" else {"rtol": 1e-12, "atol": 1e-11}
        for got, wanted in ((found.entropy, want.entropy), (found.tail, want.tail)):
            torch.testing.assert_close(got.double(), wanted, equal_nan=True, **bound)
        logprobs = found.logprobs if several else found.logprobs.unsqueeze(-1)
        loss_of(logprobs, found.entropy, found.tail, found.logsumexp).backward()
        loss_of(want.logprobs, want.entropy, want.tail, want.logsumexp).backward()
        unit = torch.finfo(ALL_DTYPES[dtype]).eps
        torch.testing.assert_close(given.grad.double(), exact.grad, rtol=unit, atol=max(unit, 2e-7) * 30)


def test_one_alone(backend):
    """Each of the two without the other, and neither, have the same numbers."""
    logits = random_logits(4, 300, device=backend.device)
    tokens = torch.tensor([1, 2, -1, 4], device=backend.device)
    both = backend("token_logprobs", logits, tokens, entropy=True, tail=True)
    entropy = backend("token_logprobs", logits, tokens, entropy=True)
    tail = backend("token_logprobs", logits, tokens, tail=True)
    assert torch.equal(entropy.entropy, both.entropy) and entropy.tail is None
    assert torch.equal(tail.tail, both.tail) and tail.entropy is None
    plain = backend("token_logprobs", logits, tokens)
    assert plain.entropy is None and plain.tail is None
    assert torch.equal(plain.logprobs.nan_to_num(7.0), both.logprobs.nan_to_num(7.0))


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
