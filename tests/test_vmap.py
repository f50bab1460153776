# SPDX-License-Identifier: Apache-2.0
"""torch.func.vmap over every input of every function, alone and with the others, against a loop; and gradients under it."""

from __future__ import annotations

import pytest
import torch

import fused_topk
from contract_results import flat
from linear_heads import exact_head
from rows import packed, random_logits, random_mask

pytestmark = pytest.mark.usefixtures("exact_library_products")

COUNT = 3  # what vmap maps over


def _logits_and_settings():
    return {
        "logits": random_logits(COUNT, 4, 70),
        "temperature": torch.linspace(0.3, 3.0, COUNT * 4).view(COUNT, 4),
        "mask": random_mask(COUNT, 4, 70, share=0.4),
    }


def _row_topk(inputs, entry="softmax_topk", **settings):
    return getattr(fused_topk, entry)(inputs.pop("logits"), 5, **inputs, **settings)


def _beam_topk(inputs):
    return fused_topk.beam_topk(inputs.pop("logits"), inputs.pop("beam_scores"), 5, **inputs)


def _linear_topk(inputs, **settings):
    return fused_topk.linear_log_softmax_topk(inputs.pop("hidden"), inputs.pop("weight"), 5, **inputs, **settings)


def _merge_topk(inputs):
    temperature = inputs.pop("temperature")
    parts = [fused_topk.TopKState(*(inputs[f"{name}{i}"] for name in ("logits", "indices", "m", "d"))) for i in (0, 1)]
    return fused_topk.merge_topk(parts, 5, temperature=temperature)


def _parts():
    temperature = torch.linspace(0.3, 3.0, COUNT * 4).view(COUNT, 4)
    inputs = {"temperature": temperature}
    for i in (0, 1):
        # m and d are of one temperature in all calls: only that of the values is mapped over.
        part = fused_topk.topk_state(random_logits(COUNT, 4, 70, seed=i), 6, start=70 * i)
        inputs |= {f"{name}{i}": x for name, x in zip(("logits", "indices", "m", "d"), part, strict=True)}
    return inputs


def _head():
    hidden, weight, bias = exact_head((COUNT, 4), 8, 70, torch.float32)
    weights = torch.stack([weight, -weight, weight.flip(0)])
    inputs = {"hidden": hidden, "weight": weights, "bias": torch.stack([bias, 2 * bias, bias.flip(0)])}
    return inputs | {name: x for name, x in _logits_and_settings().items() if name != "logits"}


def _with_tokens(inputs):
    return inputs | {"tokens": torch.arange(COUNT * 4).view(COUNT, 4) * 5}


def _of_tokens(inputs, entry):
    return tuple(flat(getattr(fused_topk, entry)(k=5, ranks=True, **inputs)))


def _packed(inputs):
    return inputs | {"mask": packed(inputs["mask"])}


# For each function its inputs, of which the first dimension is what vmap maps over, and the call.
CALLS = {
    "softmax_topk": (_logits_and_settings(), _row_topk),
    "log_softmax_topk, packed": (
        _packed(_logits_and_settings()),
        lambda x: _row_topk(x, "log_softmax_topk", normalize="all"),
    ),
    "token_logprobs": (_with_tokens(_logits_and_settings()), lambda x: _of_tokens(x, "token_logprobs")),
    "topk_state": (_logits_and_settings(), lambda x: _row_topk(x, "topk_state")),
    "beam_topk": (_logits_and_settings(), lambda x: _beam_topk({n: t.unsqueeze(0) for n, t in x.items()})),
    "log_softmax": (
        {name: x for name, x in _logits_and_settings().items() if name != "mask"},
        lambda x: (fused_topk.log_softmax(x.pop("logits"), **x),),
    ),
    "linear_log_softmax_topk": (_head(), _linear_topk),
    "linear_token_logprobs, packed": (
        _with_tokens(_packed(_head())),
        lambda x: _of_tokens(x, "linear_token_logprobs"),
    ),
    "merge_topk": (_parts(), _merge_topk),
}
CALLS["beam_topk"][0]["beam_scores"] = random_logits(COUNT, 4, seed=3)


def _mapped_sets(inputs):
    """Each input alone, all but each one, and all."""
    names = list(inputs)
    alone = [{name} for name in names]
    return [*alone, *({*names} - each for each in alone if len(names) > 2), {*names}]


@pytest.mark.parametrize("name", CALLS)
def test_vmap_over_each_input(name):
    inputs, call = CALLS[name]
    for mapped in _mapped_sets(inputs):
        for place in (0, -1):
            given = {n: x.movedim(0, place) if n in mapped else x[1] for n, x in inputs.items()}
            dims = {n: place if n in mapped else None for n in inputs}
            got = torch.func.vmap(lambda x: tuple(y for y in call({**x}) if y is not None), in_dims=(dims,))(given)
            for i in range(COUNT):
                want = call({n: x[i if n in mapped else 1] for n, x in inputs.items()})
                for a, b in zip(got, (y for y in want if y is not None), strict=True):
                    torch.testing.assert_close(
                        a[i], b, rtol=0, atol=0, equal_nan=True, msg=f"{name}, mapped: {mapped} at {place}"
                    )


@pytest.mark.parametrize("name", CALLS)
def test_vmap_of_gradients_over_each_input(name):
    """Gradients with respect to every input that has one."""
    inputs, call = CALLS[name]
    learned = [n for n in ("logits", "hidden", "weight", "bias", "beam_scores", "logits0", "m0", "d1") if n in inputs]

    def loss(of_learned, others):
        found = [x for x in call({**of_learned, **others}) if x is not None and x.is_floating_point()]
        return sum((x.where(x.isfinite(), 0.0) * (1 + torch.arange(x.shape[-1]) % 3)).sum() for x in found)

    for mapped in _mapped_sets(inputs):
        if not mapped.intersection(learned):
            continue
        given = {n: x if n in mapped else x[1] for n, x in inputs.items()}
        dims = {n: 0 if n in mapped else None for n in inputs}

        def split(x):
            return {n: x[n] for n in learned}, {n: y for n, y in x.items() if n not in learned}

        got = torch.func.vmap(torch.func.grad(loss), in_dims=split(dims))(*split(given))
        for i in range(COUNT):
            of_learned, others = split({n: x[i if n in mapped else 1] for n, x in inputs.items()})
            leaves = {n: x.clone().requires_grad_() for n, x in of_learned.items()}
            wants = torch.autograd.grad(loss(leaves, others), list(leaves.values()), allow_unused=True)
            for n, want in zip(leaves, wants, strict=True):
                want = torch.zeros_like(leaves[n]) if want is None else want
                torch.testing.assert_close(got[n][i], want, rtol=1e-5, atol=1e-6, msg=f"{n}, mapped: {mapped}")
