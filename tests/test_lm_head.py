# SPDX-License-Identifier: Apache-2.0
"""Models whose LM head is a plain linear layer: log-probabilities without their logits. Others: the stock way."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

import transformers

from decoding import one_thread, tiny  # noqa: F401
from fused_topk import token_logprobs
from fused_topk.generation import lm_head, next_token_topk, text_token_logprobs

SIZES = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def model_of(kind: str):
    torch.manual_seed(0)
    if kind == "gemma2":
        config = transformers.Gemma2Config(
            **SIZES, num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0, pad_token_id=0
        )
        return transformers.Gemma2ForCausalLM(config).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, pad_token_id=0)).eval()


def tokens():
    return torch.randint(1, 97, (2, 7), generator=torch.Generator().manual_seed(3))


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("written", ["logits", "hidden states"])
def test_a_model_that_writes_to_its_logits_or_its_hidden_states_is_refused(written):
    model, ids = model_of("llama"), tokens()
    forward = model.forward

    def writing(**arguments):
        seen = []
        handle = model.model.register_forward_hook(lambda module, args, output: seen.append(output[0]))
        output = forward(**arguments)
        handle.remove()
        (output.logits if written == "logits" else seen[0]).mul_(2)
        return output

    model.forward = writing
    with torch.no_grad():
        found = lm_head.run_with_head(model, {"input_ids": ids})
        assert torch.equal(found, logits_of(model, ids)) and model in lm_head._refused


@pytest.mark.parametrize("learned", ["all", "head", "trunk", "none"])
def test_a_model_may_ask_whether_its_logits_require_a_gradient(learned):
    model, ids = model_of("llama"), tokens()
    model.model.requires_grad_(learned in ("all", "trunk"))
    model.lm_head.requires_grad_(learned in ("all", "head"))
    forward = model.forward

    def asking(**arguments):
        output = forward(**arguments)
        if output.logits.requires_grad:
            output.logits = output.logits * 2
        return output

    model.forward = asking
    found = text_token_logprobs(model, ids, ids, k=5)
    want = token_logprobs(model(input_ids=ids).logits, ids, k=5)
    assert torch.equal(found.topk.indices, want.topk.indices)
    torch.testing.assert_close(found.topk.values, want.topk.values, rtol=0, atol=4e-6)
    torch.testing.assert_close(found.logprobs, want.logprobs, rtol=0, atol=4e-6)
    assert found.logprobs.requires_grad == (learned != "none")


def assert_same(found, want):
    assert torch.equal(found.topk.indices, want.topk.indices) and torch.equal(found.ranks, want.ranks)
    assert (found.entropy is None) == (want.entropy is None)
    for got, exact in zip((*found[:2], *found[3:5], found.topk.values), (*want[:2], *want[3:5], want.topk.values)):
        if exact is None:
            continue
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=4e-6, equal_nan=True)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("ties", ["index", "last"])
def test_text_token_logprobs(kind, ties):
    model, ids = model_of(kind), tokens()
    following = ids.roll(-1, 1)
    following[:, -1] = -100
    wanted = {"k": 5, "ranks": True, "entropy": True, "tail": True, "ties": ties, "temperature": 0.7}
    with torch.no_grad():
        found = text_token_logprobs(model, ids, following, **wanted)
        several = text_token_logprobs(model, ids, found.topk.indices, temperature=0.7)
    want = token_logprobs(logits_of(model, ids).double(), following, **wanted)
    assert_same(found, want)
    assert several.ranks is None and several.topk is None
    torch.testing.assert_close(several.logprobs, found.topk.values, rtol=0, atol=2e-6)
    assert torch.equal(next_token_topk(model, ids, 5).indices, want.topk.indices[:, -1])


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("recompute", [True, False])
def test_text_token_logprobs_gradients(kind, recompute):
    """Of the text's own tokens."""
    model, ids = model_of(kind), tokens()
    stock = copy.deepcopy(model)
    found = text_token_logprobs(model, ids, entropy=True, recompute=recompute)
    (found.logprobs[:, :-1].sum() + found.entropy.sum()).backward()
    logp = stock(input_ids=ids).logits.log_softmax(-1)
    (logp[:, :-1].gather(-1, ids[:, 1:].unsqueeze(-1)).sum() - (logp.exp() * logp).sum()).backward()
    for (name, got), want in zip(model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("change", ["hook", "forward", "subclass"])
def test_heads_that_others_have_a_hand_in_run_stock(change):
    model, ids = model_of("llama"), tokens()
    head = model.lm_head
    if change == "hook":
        head.register_forward_hook(lambda module, args, output: output * 2)
    elif change == "forward":
        head.forward = lambda x: torch.nn.functional.linear(x, head.weight) * 2
    else:
        head.__class__ = type("Scaled", (torch.nn.Linear,), {"forward": lambda self, x: 2 * (x @ self.weight.T)})
    found = lm_head.run_with_head(model, {"input_ids": ids})
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found.detach(), logits_of(model, ids))
    assert torch.equal(next_token_topk(model, ids, 5).indices, logits_of(model, ids)[:, -1].topk(5).indices)


def rounded(model):
    """The model with hidden states and a head whose products float32 adds up exactly, and bfloat16 does not hold."""
    with torch.no_grad():
        model.lm_head.weight.copy_((model.lm_head.weight * 2**12).round() / 2**7)
    model.model.norm.register_forward_hook(lambda module, args, output: (output * 2**8).round() / 2**8)
    return model


@pytest.mark.parametrize("where", ["call", "forward", "call, not the head"])
def test_text_token_logprobs_under_autocast(where):
    """Log-probabilities are those of the logits that the model has: autocast counts as it is at the head."""
    model, ids = rounded(model_of("llama")), tokens()
    if where == "forward":
        model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    elif where == "call, not the head":
        # Hooks of the head itself would make it run the stock way.
        model.model.register_forward_hook(lambda *_: torch.set_autocast_enabled("cpu", False))
        model.register_forward_hook(lambda *_: torch.set_autocast_enabled("cpu", True))
    following = ids.roll(-1, 1)

    def call(run):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where != "forward"):
            return run()

    stock = copy.deepcopy(model)
    logits = call(lambda: stock(input_ids=ids).logits)
    assert logits.dtype == (torch.float32 if where == "call, not the head" else torch.bfloat16)
    found = call(lambda: text_token_logprobs(model, ids, following, k=5, ranks=True))
    assert model not in lm_head._refused
    assert_same(found, token_logprobs(logits.double(), following, k=5, ranks=True))
    best = call(lambda: next_token_topk(model, ids, 5))
    assert torch.equal(best.indices, found.topk.indices[:, -1])
    torch.testing.assert_close(best.values, found.topk.values[:, -1].detach(), rtol=0, atol=1e-6)
