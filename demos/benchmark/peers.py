# SPDX-License-Identifier: Apache-2.0
"""What else computes the same, or a part of it. A peer that is not installed says so and is left out."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .inputs import lengths_of, router_settings
from .suites import SAMPLING, Case
from .timing import Function


class Peer(NamedTuple):
    """A contender: what it does, why it cannot run on a device, and how to make its function for a case."""

    does: str
    unavailable: Callable[[torch.device], str | None]
    make: Callable[[Case, torch.device], Function | None]  # None: not for this case
    capturable: bool = True  # by a CUDA graph


def beam_scores(case: Case, device: torch.device) -> Tensor:
    """Scores (batch, beams) of beams that are some tokens long, the same in every run."""
    generator = torch.Generator().manual_seed(case.rows * 1000 + case.beams)
    scores = torch.rand((case.rows, case.beams), generator=generator) * -10.0
    return scores.to(device)


def _torch(case: Case, device: torch.device) -> Function:
    k = case.k
    if case.sampling:
        return _torch_sampling(**SAMPLING[case.sampling])
    if case.router:
        return _torch_router(k, **router_settings(case, device))
    if k == 0:
        return lambda logits: torch.softmax(logits, -1)
    if not case.beams:
        return lambda logits: torch.topk(torch.log_softmax(logits, -1, dtype=torch.float32), k)
    scores = beam_scores(case, device)[..., None]
    return lambda logits: torch.topk((torch.log_softmax(logits, -1, dtype=torch.float32) + scores).flatten(1), k)


def _torch_router(
    k: int,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = False,
    scale: float = 1.0,
) -> Function:
    """The operations of transformers' routers: MixtralTopKRouter, DeepseekV3TopkRouter, DeepseekV4TopKRouter."""
    scores_of: Callable[[Tensor], Tensor] = {
        "softmax": lambda x: torch.softmax(x, -1, dtype=torch.float32),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
    }[scoring]

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = scores_of(logits)
        choice = scores if bias is None else scores + bias
        if groups > 1:
            size = logits.shape[-1] // groups
            of_groups = choice.view(-1, groups, size).topk(2, dim=-1)[0].sum(dim=-1)
            kept = torch.topk(of_groups, k=topk_groups, dim=-1, sorted=False)[1]
            mask = torch.zeros_like(of_groups).scatter_(1, kept, 1)
            mask = mask.unsqueeze(-1).expand(-1, groups, size).reshape(-1, groups * size)
            choice = choice.masked_fill(~mask.bool(), -torch.inf)
        experts = torch.topk(choice, k=k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, experts)
        if renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * scale, experts

    return route


def _torch_sampling(top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0) -> Function:
    """torch.multinomial of what the filters leave: of the k best, or of the sorted row, or of a masked one."""

    def draw(logits: Tensor) -> Tensor:
        if not top_k and top_p == 1:
            probs = torch.softmax(logits, -1, dtype=torch.float32)
            return torch.multinomial(probs.where(probs >= min_p * probs.amax(-1, keepdim=True), 0.0), 1)
        best = logits.float().topk(int(top_k)) if top_k else logits.float().sort(dim=-1, descending=True)
        probs = best.values.softmax(-1)
        drawn = torch.multinomial(probs.where(probs.cumsum(-1) - probs < top_p, 0.0), 1)
        return best.indices.gather(-1, drawn)

    return draw


def _transformers(case: Case, device: torch.device) -> Function | None:
    if not case.sampling:
        return None
    process = importlib.import_module("transformers.generation.logits_process")
    kinds = {"top_k": "TopKLogitsWarper", "top_p": "TopPLogitsWarper", "min_p": "MinPLogitsWarper"}
    warpers = [getattr(process, kinds[name])(number) for name, number in SAMPLING[case.sampling].items()]

    def draw(logits: Tensor) -> Tensor:
        scores = logits.float()
        for warper in warpers:
            scores = warper(None, scores)
        return torch.multinomial(scores.softmax(-1), 1)

    return draw


def _compiled(case: Case, device: torch.device) -> Function:
    # Each case compiled for its own shape: without a reset, the second would make the shapes dynamic and the ninth
    # would hit the limit of recompilations and run uncompiled.
    torch.compiler.reset()
    compiled: Function = torch.compile(_torch(case, device), dynamic=False)
    return compiled


def _flashinfer(case: Case, device: torch.device) -> Function | None:
    if case.sampling:
        return _flashinfer_sampling(importlib.import_module("flashinfer.sampling"), **SAMPLING[case.sampling])
    return _flashinfer_topk(case, device, as_ours=False)


def _flashinfer_as_ours(case: Case, device: torch.device) -> Function | None:
    return None if case.sampling else _flashinfer_topk(case, device, as_ours=True)


def _flashinfer_topk(case: Case, device: torch.device, as_ours: bool) -> Function | None:
    if case.beams or case.k == 0 or case.router:
        return None
    flashinfer, k = importlib.import_module("flashinfer"), case.k
    if case.is_ragged:
        # Indices alone, in no order.
        lengths = lengths_of(case, device)
        begins = torch.zeros_like(lengths)
        return lambda logits: flashinfer.top_k_ragged_transform(logits, begins, lengths, k, deterministic=as_ours)
    return lambda logits: flashinfer.top_k(logits, k, sorted=as_ours, deterministic=as_ours)


def _flashinfer_sampling(module: Any, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0) -> Function:
    """Its functions for these filters; those for one filter take probabilities."""
    if top_k:
        # transformers' order: top-p of what top-k left.
        return lambda logits: module.top_k_top_p_sampling_from_logits(
            logits.float(), int(top_k), top_p, filter_apply_order="top_k_first"
        )
    if top_p < 1:
        return lambda logits: module.top_p_sampling_from_probs(logits.softmax(-1, dtype=torch.float32), top_p)
    if min_p > 0:
        return lambda logits: module.min_p_sampling_from_probs(logits.softmax(-1, dtype=torch.float32), min_p)
    return lambda logits: module.sampling_from_logits(logits.float())


def _cupy(case: Case, device: torch.device) -> Function | None:
    # CuPy has no bfloat16 that its sorts take.
    if case.beams or case.k == 0 or case.dtype == "bf16" or case.sampling or case.router:
        return None
    cupy, k = importlib.import_module("cupy"), case.k

    def log_softmax_topk(logits: Tensor) -> object:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            x = cupy.from_dlpack(logits).astype(cupy.float32, copy=False)
            shifted = x - x.max(axis=-1, keepdims=True)
            log_probs = shifted - cupy.log(cupy.exp(shifted).sum(axis=-1, keepdims=True))
            chosen = cupy.argpartition(log_probs, -k, axis=-1)[:, -k:]
            return cupy.take_along_axis(log_probs, chosen, axis=-1), chosen

    return log_softmax_topk


def _needs_transformers(device: torch.device) -> str | None:
    return None if importlib.util.find_spec("transformers") else "transformers is not installed"


def _always(device: torch.device) -> str | None:
    return None


def _needs_gpu_package(name: str) -> Callable[[torch.device], str | None]:
    def unavailable(device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"{name} runs on CUDA only"
        return None if importlib.util.find_spec(name) else f"{name} is not installed"

    return unavailable


PEERS = {
    "torch": Peer(
        "torch.topk(torch.log_softmax(logits, -1, dtype=float32), k), torch.softmax(logits, -1), or a router's operations",
        _always,
        _torch,
    ),
    "compiled": Peer("torch.compile of the same", _always, _compiled),
    "transformers": Peer(
        "its warpers, softmax and torch.multinomial, of sampling alone", _needs_transformers, _transformers
    ),
    "flashinfer": Peer(
        "top-k alone: no softmax, in any order; its sampling functions", _needs_gpu_package("flashinfer"), _flashinfer
    ),
    "flashinfer-sorted": Peer(
        "its top-k sorted and deterministic; of ragged rows deterministic alone",
        _needs_gpu_package("flashinfer"),
        _flashinfer_as_ours,
    ),
    # Its allocator and its sorts synchronise, which a capture forbids.
    "cupy": Peer("log_softmax and argpartition, unsorted; eager", _needs_gpu_package("cupy"), _cupy, capturable=False),
}
