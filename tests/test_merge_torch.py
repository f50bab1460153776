# SPDX-License-Identifier: Apache-2.0
"""States and their merge as citizens of torch: gradients, operators, fake tensors, torch.compile, torch.func."""

import pytest
import torch

import fused_topk
from fused_topk.rows import LogitRows
from oracle import VALUES_OF
from rows import random_logits, random_mask
from test_autograd import distinct
from test_merge import ENTRIES, states


@pytest.mark.parametrize("values", ["softmax", "log_softmax", "logits", "state"])
@pytest.mark.parametrize("normalize", ["allowed", "topk"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "rows"], ids=str)
def test_merge_gradcheck(values, normalize, temperature):
    """With respect to the candidates and to (m, d) of every part, as if these were independent."""
    t = torch.tensor([0.6, 1.7], dtype=torch.float64) if temperature == "rows" else temperature
    parts = states(lambda entry, *a, **kw: getattr(fused_topk, entry)(*a, **kw), distinct(2, 9).detach(), 3, [3, 5])

    def run(*tensors):
        live = [part._replace(logits=a, m=b, d=c) for part, a, b, c in zip(parts, *[iter(tensors)] * 3, strict=True)]
        if values == "state":
            return (
                fused_topk.merge_states(live, 4, temperature=t)[:4:2]
                + fused_topk.merge_states(live, 4, temperature=t)[3:]
            )
        result = fused_topk.merge_topk(live, 4, kind=values, temperature=t, normalize=normalize)
        return result.values, result.logsumexp

    inputs = [x.clone().requires_grad_() for part in parts for x in (part.logits, part.m, part.d)]
    torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("normalize", ["allowed", "all", "topk"])
def test_gradients_are_those_of_the_unsharded_call(backend, entry, normalize):
    logits = random_logits(4, 60, device=backend.device)
    mask = random_mask(4, 60, share=0.7).to(backend.device)
    settings = {} if entry == "topk" else {"temperature": 0.7, "normalize": normalize}
    weights = torch.linspace(0.5, 2.0, 5, device=backend.device)
    gradients = []
    for is_sharded in (False, True):
        x = logits.clone().requires_grad_()
        if is_sharded:
            parts = states(backend, x, 5, [7, 30], mask=mask, **settings)
            result = backend("merge_topk", parts, 5, kind=VALUES_OF[entry], **settings)
        else:
            result = backend(entry, x, 5, mask=mask, **settings)
        loss = (result.values * weights).sum()
        (loss if entry == "topk" else loss + 0.3 * result.logsumexp.sum()).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


def test_a_hidden_token_passes_on_no_gradient(backend):
    """Where fewer tokens are allowed than k, hidden ones are among the candidates, with the constant -inf."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=backend.device, requires_grad=True)
    mask = torch.tensor([True, False, False, False], device=backend.device)
    state = backend("topk_state", logits, 3, mask=mask)
    merged = fused_topk.merge_topk([state], 3, kind="logits", backend=backend.name)
    for values in (backend("topk", logits, 3, mask=mask).values, state.logits, merged.values):
        (gradient,) = torch.autograd.grad(values, logits, torch.ones_like(values), retain_graph=True)
        assert gradient.tolist() == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.filterwarnings("error")
def test_a_gradient_of_lists_of_one_entry_warns_of_nothing(backend):
    logits = random_logits(3, 8, device=backend.device).requires_grad_()
    parts = [backend("topk_state", part, 1, start=start) for part, start in ((logits[:, :4], 0), (logits[:, 4:], 4))]
    fused_topk.merge_topk(parts, 1, kind="logits", backend=backend.name).values.sum().backward()
    assert torch.equal(logits.grad, torch.nn.functional.one_hot(logits.argmax(-1), 8).float())


def test_what_an_operator_must_not_be_given(backend):
    """What no public function passes on: it would be read as something else, or not at all."""
    logits = random_logits(3, 40, device=backend.device)
    of_rows = torch.ones(3, dtype=torch.float64, device=backend.device)
    with pytest.raises(TypeError, match=r"`row_temperature` must be torch\.float32"):
        torch.ops.fused_topk.row_topk(
            *LogitRows(logits, row_temperature=of_rows), 4, "softmax", "allowed", backend.name
        )
