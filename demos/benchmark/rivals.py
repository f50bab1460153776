# SPDX-License-Identifier: Apache-2.0
"""What else computes the same, or a part of it, and the floors: what no call can beat. A table for each operation has them by name, the
floor first. A package that is not installed is left out, and the report says so."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, softplus

import fused_topk

from . import ours
from .cases import SAMPLING, Case
from .devices import reader
from .inputs import beam_scores, lengths_of, router_settings, weight_of
from .timing import Function

if TYPE_CHECKING:
    from .suites import Maker

# Packages, by the first word of a rival's name, and those that run on GPUs only.
_PACKAGES = {"flashinfer": "flashinfer", "vllm": "vllm", "liger": "liger_kernel", "transformers": "transformers"}
_GPU_ONLY = ("flashinfer", "vllm", "liger")
FLOORS = ("read", "copy", "product", "products", "local", "empty")
"""Ways that do less than the function."""


def unavailable(name: str, device: torch.device) -> str | None:
    """Why a rival cannot run there, or None."""
    first = name.partition(" ")[0]
    if first in _GPU_ONLY and device.type != "cuda":
        return "runs on GPUs only"
    is_missing = first in _PACKAGES and importlib.util.find_spec(_PACKAGES[first]) is None
    return f"{_PACKAGES[first]} is not installed" if is_missing else None


def compiled(make: Maker) -> Maker:
    """torch.compile of a torch way."""

    def maker(case: Case, device: torch.device) -> Function | None:
        # Each case is compiled for its own shape. Without a reset, the second would make the shapes dynamic, and the ninth would
        # hit the limit of recompilations and run uncompiled.
        torch.compiler.reset()
        function = make(case, device)
        return function and torch.compile(function, dynamic=False)

    return maker


# ---- Floors ----


def read(case: Case, device: torch.device) -> Function:
    """Only reads the same bytes. Of rows with lengths as many as lie within these, one after the other."""
    function = reader(device)
    count = int(lengths_of(case, device).sum())
    return (lambda logits: function(logits.flatten()[:count].unsqueeze(0))) if case.kind == "ragged" else function


def product(case: Case, device: torch.device) -> Function:
    weight = weight_of(case, device)
    return lambda hidden: linear(hidden, weight)


def products(case: Case, device: torch.device, again: bool = False) -> Function:
    """A product, and the two of its gradients. again: the first one once more, as in a backward pass that has no logits."""
    weight = weight_of(case, device)

    def run(hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = [linear(hidden, weight) for _ in range(1 + again)][-1]
        return logits @ weight, logits.T @ hidden

    return run


# ---- Top-k ----


def torch_topk(case: Case, device: torch.device) -> Function:
    return lambda logits: torch.topk(torch.log_softmax(logits, -1, dtype=torch.float32), case.k)


def flashinfer_topk(is_as_ours: bool) -> Maker:
    """Its top-k alone, without softmax: in any order; or, as ours always is, sorted and deterministic."""

    def maker(case: Case, device: torch.device) -> Function:
        flashinfer = importlib.import_module("flashinfer")
        if case.kind == "ragged":
            # Indices alone, never sorted.
            lengths = lengths_of(case, device)
            begins = torch.zeros_like(lengths)
            ragged = flashinfer.top_k_ragged_transform
            return lambda logits: ragged(logits, begins, lengths, case.k, deterministic=is_as_ours)
        return lambda logits: flashinfer.top_k(logits, case.k, sorted=is_as_ours, deterministic=is_as_ours)

    return maker


def torch_beams(case: Case, device: torch.device) -> Function:
    scores = beam_scores(case, device)[..., None]
    return lambda logits: torch.topk((torch.log_softmax(logits, -1, dtype=torch.float32) + scores).flatten(1), case.k)


def rows_alone(case: Case, device: torch.device) -> Function:
    """Our top-k of the same rows: of each beam; of as many tokens as a draw looks at."""
    k = case.k or (50 if case.kind != "whole" else 8)
    function = ours.topk(case._replace(rows=case.num_rows, beams=0, k=k, kind=""), device)
    return lambda logits: function(logits.reshape(-1, case.vocab))


# ---- Draws ----


def torch_draw(case: Case, device: torch.device) -> Function:
    """torch.multinomial of what the filters leave: of the k best, or of the sorted row, or of a masked one."""

    def draw(logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
        if not top_k and top_p == 1:
            probs = torch.softmax(logits, -1, dtype=torch.float32)
            return torch.multinomial(probs.where(probs >= min_p * probs.amax(-1, keepdim=True), 0.0), 1)
        best = logits.float().topk(top_k) if top_k else logits.float().sort(dim=-1, descending=True)
        probs = best.values.softmax(-1)
        drawn = torch.multinomial(probs.where(probs.cumsum(-1) - probs < top_p, 0.0), 1)
        return best.indices.gather(-1, drawn)

    return partial(draw, **SAMPLING[case.kind])


def transformers_draw(case: Case, device: torch.device) -> Function:
    """Its warpers, softmax and torch.multinomial."""
    process = importlib.import_module("transformers.generation.logits_process")
    kinds = {"top_k": "TopKLogitsWarper", "top_p": "TopPLogitsWarper", "min_p": "MinPLogitsWarper"}
    warpers = [getattr(process, kinds[name])(number) for name, number in SAMPLING[case.kind].items()]

    def draw(logits: Tensor) -> Tensor:
        scores = logits.float()
        for warper in warpers:
            scores = warper(None, scores)
        return torch.multinomial(scores.softmax(-1), 1)

    return draw


def flashinfer_draw(case: Case, device: torch.device) -> Function:
    """Its function for these filters, with the softmax that it needs; of both top-p is of what top-k left, as in transformers."""
    sampling = importlib.import_module("flashinfer.sampling")

    def draw(logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> object:
        if top_k:
            order = {"filter_apply_order": "top_k_first"}
            return sampling.top_k_top_p_sampling_from_logits(logits.float(), top_k, top_p, **order)
        if top_p == 1 and not min_p:
            return sampling.sampling_from_logits(logits.float())
        probs = logits.softmax(-1, dtype=torch.float32)
        if top_p < 1:
            return sampling.top_p_sampling_from_probs(probs, top_p)
        return sampling.min_p_sampling_from_probs(probs, min_p)

    return partial(draw, **SAMPLING[case.kind])


# ---- Routers ----


def torch_route(case: Case, device: torch.device) -> Function:
    """The operations of transformers' routers: MixtralTopKRouter, DeepseekV3TopkRouter, DeepseekV4TopKRouter."""
    asked = {
        "scoring": "softmax",
        "bias": None,
        "groups": 1,
        "topk_groups": 1,
        "scale": 1.0,
        **router_settings(case, device),
    }
    bias, groups = asked["bias"], asked["groups"]
    scores_of: Callable[[Tensor], Tensor] = {
        "softmax": lambda x: torch.softmax(x, -1, dtype=torch.float32),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: softplus(x).sqrt(),
    }[asked["scoring"]]

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = scores_of(logits)
        choice = scores if bias is None else scores + bias
        if groups > 1:
            of_groups = choice.view(-1, groups, case.vocab // groups).topk(2, dim=-1)[0].sum(dim=-1)
            kept = torch.topk(of_groups, k=asked["topk_groups"], dim=-1, sorted=False)[1]
            mask = torch.zeros_like(of_groups).scatter_(1, kept, 1).repeat_interleave(case.vocab // groups, -1)
            choice = choice.masked_fill(~mask.bool(), -torch.inf)
        experts = torch.topk(choice, k=case.k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, experts)
        return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * asked["scale"], experts

    return route


def vllm_route(case: Case, device: torch.device) -> Function | None:
    """vLLM's kernel of softmax routers, which writes int32 experts."""
    if case.kind != "mixtral":
        return None
    ops = importlib.import_module("vllm._custom_ops")

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights = logits.new_empty((len(logits), case.k), dtype=torch.float32)
        experts, order = (torch.empty_like(weights, dtype=torch.int32) for _ in range(2))
        ops.topk_softmax(weights, experts, order, logits, True)
        return weights, experts

    return route


def flashinfer_route(case: Case, device: torch.device) -> Function | None:
    """FlashInfer's kernel of DeepSeek-V3's router."""
    if case.kind != "deepseek-v3":
        return None
    fused = importlib.import_module("flashinfer.fused_moe").fused_topk_deepseek
    settings = router_settings(case, device)

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights = logits.new_empty((len(logits), case.k), dtype=torch.float32)
        experts = torch.empty_like(weights, dtype=torch.int32)
        groups, of_groups = settings["groups"], settings["topk_groups"]
        fused(logits, settings["bias"], groups, of_groups, case.k, settings["scale"], weights, experts)
        return weights, experts

    return route


# ---- LM heads ----


def product_and_topk(case: Case, device: torch.device) -> Function:
    """The library's product, all logits, and our top-k of them."""
    logits_of = product(case, device)
    return lambda hidden: fused_topk.log_softmax_topk(logits_of(hidden), case.k)


def torch_head(case: Case, device: torch.device) -> Function:
    logits_of, function = product(case, device), torch_topk(case, device)
    return lambda hidden: function(logits_of(hidden))


def torch_train(case: Case, device: torch.device, entropy: bool = False) -> Function:
    """All logits are kept for the backward pass."""

    def loss(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
        logits = linear(hidden, weight).float()
        if not entropy:
            return cross_entropy(logits, tokens)
        log_probs = logits.log_softmax(-1)
        of_rows = -(log_probs.exp() * log_probs).sum(-1)
        return -(log_probs.gather(1, tokens[:, None])[:, 0] + ours.ENTROPY_BONUS * of_rows).mean()

    return ours.step_of(case, device, loss)


def liger_train(case: Case, device: torch.device) -> Function:
    """Its fused linear cross-entropy computes the gradients in the forward pass: of a mean alone, not of a token's log-probability."""
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return ours.step_of(case, device, lambda hidden, weight, tokens: loss(weight, hidden, tokens))


# ---- A vocabulary over processes ----


def local(case: Case, device: torch.device) -> Function:
    """The top-k of the process's own columns."""
    return lambda own: fused_topk.log_softmax_topk(own, case.k)


def empty_gather(case: Case, device: torch.device) -> Function:
    """An all-gather of 8 bytes a process."""
    word = torch.zeros(1, dtype=torch.int64, device=device)
    everywhere = word.new_empty(torch.distributed.get_world_size())
    return lambda own: torch.distributed.all_gather_into_tensor(everywhere, word)


def gathered(case: Case, device: torch.device) -> Function:
    """An all-gather of the logits, their columns side by side, then our top-k."""
    size = torch.distributed.get_world_size()

    def topk(own: Tensor) -> object:
        everywhere = own.new_empty((size * len(own), own.shape[-1]))
        torch.distributed.all_gather_into_tensor(everywhere, own)
        whole = everywhere.view(size, *own.shape).movedim(0, 1).flatten(1)
        return fused_topk.log_softmax_topk(whole, case.k)

    return topk


_READ: dict[str, Maker] = {"read": read}
TOPK = _READ | {"torch": torch_topk}
FLASHINFER_TOPK: dict[str, Maker] = {"flashinfer": flashinfer_topk(False), "flashinfer sorted": flashinfer_topk(True)}
BEAMS = _READ | {"top-k alone": rows_alone, "torch": torch_beams}
SOFTMAX: dict[str, Maker] = {"copy": lambda *_: Tensor.clone, "torch": lambda *_: partial(torch.softmax, dim=-1)}
DRAWS = _READ | {
    "top-k alone": rows_alone,
    "torch": torch_draw,
    "transformers": transformers_draw,
    "flashinfer": flashinfer_draw,
}
ROUTERS = _READ | {"torch": torch_route, "vllm": vllm_route, "flashinfer": flashinfer_route}
HEADS: dict[str, Maker] = {"product": product, "product, our top-k": product_and_topk, "torch": torch_head}
LOSSES: dict[str, Maker] = {
    "product": products,
    "products": partial(products, again=True),
    "kept logits": partial(ours.train, recompute=False),
    "entropy": partial(ours.train, entropy=True),
    "entropy, kept logits": partial(ours.train, entropy=True, recompute=False),
    "torch": torch_train,
    "torch entropy": partial(torch_train, entropy=True),
    "liger": liger_train,
}
SHARDED: dict[str, Maker] = {"local": local, "empty": empty_gather, "gathered": gathered}
