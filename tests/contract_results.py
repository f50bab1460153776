# SPDX-License-Identifier: Apache-2.0
"""Calls of the functions of contract.py, what they must give, in float64 by operations of torch, and the comparison."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fused_topk
from contract import GeneratorOf, K, V, function_of, parameters
from rows import INF, NAN

LEARNED = ("logits", "hidden", "weight", "bias", "beam_scores")
_CUT = 40  # where the parts of merged states meet


def call(name: str, given: dict[str, Any], backend: Any = None) -> list[Tensor]:
    """The tensors of a function's result, by one of the backends of conftest.py."""
    if backend is not None:
        given = {x: _on(backend.device, y) for x, y in given.items()} | {"backend": backend.name}
    if name.startswith("merge"):
        given = {x: y for x, y in given.items() if x != "logits"} | {
            "parts": given["parts"] if "parts" in given else parts_of(given)
        }
    if isinstance(given.get("generator"), GeneratorOf):
        given["generator"] = torch.Generator().manual_seed(given["generator"])
    named = {x: f"local_{x}" if f"local_{x}" in parameters(name) else x for x in given}
    before = {x: y.clone() for x, y in given.items() if type(y) is Tensor and not y.is_meta}
    found = [x.cpu() for x in flat(function_of(name)(**{named[x]: y for x, y in given.items()}))]
    for x, y in before.items():
        assert given[x].equal(y), f"{name} has written to its `{x}`"
    return found


def _on(device: str, value: Any) -> Any:
    """The tensor, or the list of states, on this device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list) and all(isinstance(x, fused_topk.TopKState) for x in value):
        return [fused_topk.TopKState(*(x.to(device) for x in state)) for state in value]
    return value


def parts_of(given: dict[str, Any]) -> list[fused_topk.TopKState]:
    """The states of two parts of a row, which hold their own k best."""
    made, how = given["logits"], {"temperature": given.get("temperature", 1.0), "k": max(given["k"], K)}
    return [fused_topk.topk_state(made[..., :_CUT], **how), fused_topk.topk_state(made[..., _CUT:], start=_CUT, **how)]


def flat(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif result is not None:
        for each in result:
            yield from flat(each)


def with_gradients(given: dict[str, Any], *learned: str) -> dict[str, Any]:
    """The arguments, with leaves of their own in place of those that require a gradient."""
    return given | {x: given[x].detach().requires_grad_() for x in learned}


def gradients(results: list[Tensor], given: dict[str, Any], *learned: str) -> list[Tensor]:
    """Of a loss that has a share of its own for every number."""
    if not any(x.requires_grad for x in results):
        return []
    loss = torch.zeros((), dtype=torch.float64)
    for each in results:
        if each.requires_grad:
            share = torch.linspace(-1.0, 2.0, each.numel(), dtype=torch.float64).view(each.shape)
            loss = loss + (each.where(each.isfinite(), 0.0).double() * share).sum()
    return list(torch.autograd.grad(loss, [given[x] for x in learned]))


def assert_close(got: list[Tensor], want: list[Tensor], told: str, tolerance: float = 3e-5) -> None:
    assert len(got) == len(want), told
    for i, (of_got, of_want) in enumerate(zip(got, want, strict=True)):
        try:
            rtol, atol = (tolerance, tolerance) if of_got.is_floating_point() else (0, 0)
            torch.testing.assert_close(
                of_got, of_want.to(of_got.dtype), rtol=rtol, atol=atol, equal_nan=True, check_stride=False
            )
        except AssertionError as error:
            raise AssertionError(f"{told}, tensor {i}: {error}") from error


def logits_of(given: dict[str, Any]) -> Tensor:
    if "logits" in given:
        return given["logits"]
    bias = given.get("bias")
    return given["hidden"] @ given["weight"].T + (0 if bias is None else bias)


def unpacked(mask: Tensor | None) -> Tensor | None:
    if mask is None or mask.dtype == torch.bool:
        return mask
    return (mask.unsqueeze(-1) >> torch.arange(32) & 1).flatten(-2)[..., :V].bool()


def exact(name: str, given: dict[str, Any]) -> list[Tensor]:
    """What a function must give, differentiable with respect to what it is given."""
    name, given = name.removeprefix("distributed."), {x: y for x, y in given.items() if x not in ("group", "backend")}
    x = logits_of(given)
    lead, places = x.shape[:-1], torch.arange(V)
    lengths, allowed = given.get("lengths"), unpacked(given.get("mask"))
    there = x if lengths is None else x.masked_fill(places >= lengths.expand(lead).unsqueeze(-1), -INF)
    counted = there if allowed is None else there.masked_fill(~allowed, -INF)
    if name in ("sample", "linear_sample", "router_topk"):
        return _by_the_reference(name.removeprefix("linear_"), given, counted)
    x, there, counted = x.double(), there.double(), counted.double()
    t = given.get("temperature")
    t = 1.0 if t is None else t.double().expand(lead).unsqueeze(-1) if isinstance(t, Tensor) else t
    base = there if given.get("normalize") == "all" else counted
    logsumexp = (base / t).logsumexp(-1)
    if name == "logsumexp":
        return [logsumexp]
    log_probs = counted / t - logsumexp.unsqueeze(-1)
    if name in ("softmax", "log_softmax"):
        return [log_probs.exp() if name == "softmax" else log_probs]
    if name == "beam_topk":
        log_probs = log_probs + given["beam_scores"].double().unsqueeze(-1)
        order = log_probs.detach().flatten(1).sort(dim=-1, descending=True, stable=True).indices[:, : given["k"]]
        return [log_probs.flatten(1).gather(1, order), order, logsumexp]
    order = counted.detach().sort(dim=-1, descending=True, stable=True).indices
    indices = order[..., : given["k"]]
    best = counted.gather(-1, indices)
    if name in ("topk_state", "merge_states"):
        m = base.gather(-1, order[..., :1] if base is counted else base.detach().max(-1, keepdim=True).indices)
        return [best, indices + given.get("start", 0), m.squeeze(-1), ((base - m) / t).exp().sum(-1)]
    if name.endswith("token_logprobs"):
        return _of_tokens(given, counted, log_probs, base / t - logsumexp.unsqueeze(-1), logsumexp, order)
    values = best
    kind = given.get("kind", "softmax") if name == "merge_topk" else name.removeprefix("linear_")
    if kind not in ("topk", "logits"):
        is_of_k = given.get("normalize") == "topk"
        values = best / t - ((best / t).logsumexp(-1, keepdim=True) if is_of_k else logsumexp.unsqueeze(-1))
        values = values.exp() if kind.startswith("softmax") else values
    is_of_logits = name.removeprefix("linear_") == "topk"
    return [values, indices] if is_of_logits else [values, indices, logsumexp]


def _of_tokens(
    given: dict[str, Any], counted: Tensor, log_probs: Tensor, over: Tensor, logsumexp: Tensor, order: Tensor
) -> list[Tensor]:
    """Of several tokens a row. over: the log-probabilities of all tokens that the normalizer counts."""
    tokens, k = given["tokens"], given["k"]
    places = tokens.clamp(min=0)
    found = [log_probs.gather(-1, places).where(tokens >= 0, NAN), logsumexp]
    if given.get("ranks"):
        own = counted.gather(-1, places).unsqueeze(-1)
        counts = counted.unsqueeze(-2) == own
        if given.get("ties") != "last":
            counts = counts & (torch.arange(V) <= places.unsqueeze(-1))
        found.append((counts | (counted.unsqueeze(-2) > own)).sum(-1).where(tokens >= 0, 0))
    if given.get("entropy"):
        found.append(-(over.exp() * over.where(over != -INF, 0.0)).sum(-1))
    if given.get("tail"):
        is_given = (torch.arange(V) == tokens.unsqueeze(-1)).any(-2)
        found.append(log_probs.masked_fill(is_given, -INF).logsumexp(-1))
    return [*found, log_probs.gather(-1, order[..., :k]), order[..., :k], logsumexp] if k else found


def _by_the_reference(name: str, given: dict[str, Any], counted: Tensor) -> list[Tensor]:
    """Of rows in which what does not count has been set to -inf, with a number of its own for every row."""
    lead = counted.shape[:-1]
    hides = ("logits", "hidden", "weight", "mask", "lengths", *(("bias",) if name == "sample" else ()))
    given = {x: y for x, y in given.items() if x not in hides}
    if name == "sample":
        given = {
            x: y.expand(lead).contiguous() if isinstance(y, Tensor) and x != "noise" else y for x, y in given.items()
        }
    return call(name, {"logits": counted, **given, "backend": "reference"})
