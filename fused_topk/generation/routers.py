# SPDX-License-Identifier: Apache-2.0
"""Expert routers of transformers' models that choose by one launch in place of five to ten operations.

A router is a module that multiplies the hidden states by its weight, chooses experts, and returns the logits, the weights and
the experts. The table `_ROUTERS` has the known classes, each with a function that does the same by :func:`fused_topk.router_topk`.
The code of a class may differ in another version of transformers. So each router is tried on a few tokens, and a router that
returns something else stays as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..functional import router_topk, softmax_topk
from .statistics import tell_once

_TRIED_TOKENS = 4
_Routed = tuple[Tensor, Tensor, Tensor]  # logits, weights and experts, as routers return them
# Modules of unknown classes with such names are reported as routers that stay as they are.
_NAME = re.compile(r"(Router|Gate)$")


class FusedRouters(NamedTuple):
    """What :func:`fuse_routers` has done.

    Attributes:
        fused: for each class the number of routers that choose by :func:`fused_topk.router_topk`.
        stock: for each other class of routers why they stay as they are.
    """

    fused: dict[str, int]
    stock: dict[str, str]


# ---- What replaces forward() ----


def _mixtral(router: Any, hidden: Tensor) -> _Routed:
    logits = linear(_flat(hidden), router.weight)
    return logits, *router_topk(logits, router.top_k, renormalize=True)


def _qwen(router: Any, hidden: Tensor) -> _Routed:
    logits = linear(_flat(hidden), router.weight)
    # Classes without this attribute normalize.
    weights, experts = router_topk(logits, router.top_k, renormalize=bool(getattr(router, "norm_topk_prob", True)))
    return logits, weights.to(logits.dtype), experts


def _hunyuan(router: Any, hidden: Tensor) -> _Routed:
    hidden = _flat(hidden)
    logits = router.wg(hidden.float() if router.wg.weight.dtype == torch.float32 else hidden)
    weights, experts = router_topk(logits, router.top_k, renormalize=True)
    return logits, weights.to(logits.dtype), experts


def _gpt_oss(router: Any, hidden: Tensor) -> _Routed:
    logits = linear(hidden, router.weight, router.bias)
    weights, experts, _ = softmax_topk(logits, router.top_k, normalize="topk")
    return logits, weights.to(logits.dtype), experts


def _deepseek_v2(router: Any, hidden: Tensor) -> _Routed:
    logits = linear(_flat(hidden).float(), router.weight.float())
    groups: dict[str, Any] = {}
    if router.topk_method == "group_limited_greedy":
        groups = {"groups": router.num_group, "topk_groups": router.topk_group, "group_score": "max"}
    return logits, *router_topk(logits, router.top_k, scale=router.routed_scaling_factor, **groups)


def _deepseek_v3(router: Any, hidden: Tensor) -> _Routed:
    logits = linear(_flat(hidden).float(), router.weight.float())
    return logits, *router_topk(
        logits,
        router.top_k,
        scoring="sigmoid",
        bias=router.e_score_correction_bias,
        groups=router.num_group,
        topk_groups=router.topk_group,
        renormalize=bool(router.norm_topk_prob),
        scale=router.routed_scaling_factor,
    )


def _minimax_m2(router: Any, hidden: Tensor, e_score_correction_bias: Tensor) -> _Routed:
    logits = linear(_flat(hidden).to(router.weight.dtype), router.weight)
    bias = e_score_correction_bias
    return logits, *router_topk(logits, router.top_k, scoring="sigmoid", bias=bias, renormalize=True)


def _ernie(router: Any, hidden: Tensor) -> _Routed:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = linear(hidden.float(), router.weight.float())
        weights, experts = router_topk(logits, router.top_k, bias=router.moe_statics.e_score_correction_bias.view(-1))
        # The sum has another lower bound than in router_topk().
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=router.norm_min)
    return logits, weights.to(hidden.dtype), experts


def _flat(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1])


_ROUTERS: dict[str, Callable[..., _Routed]] = {
    **dict.fromkeys(("MixtralTopKRouter", "MiniMaxTopKRouter"), _mixtral),
    **dict.fromkeys(
        (
            "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "Qwen3NextTopKRouter", "Qwen3_5MoeTopKRouter",
            "Qwen3VLMoeTextTopKRouter", "Qwen3OmniMoeTextTopKRouter", "Qwen3OmniMoeThinkerTextTopKRouter",
            "Qwen3OmniMoeTalkerTextTopKRouter", "OlmoeTopKRouter", "FlexOlmoTopKRouter",
        ),
        _qwen,
    ),
    "HunYuanMoEV1Gate": _hunyuan,
    "GptOssTopKRouter": _gpt_oss,
    "DeepseekV2TopkRouter": _deepseek_v2,
    **dict.fromkeys(
        (
            "DeepseekV3TopkRouter", "DeepseekV32TopkRouter", "Glm4MoeTopkRouter", "Glm4MoeLiteTopkRouter",
            "Glm4vMoeTextTopkRouter", "GlmMoeDsaTopkRouter", "Dots1TopkRouter", "KimiLinearTopkRouter",
            "BailingHybridTopkRouter", "ExaoneMoeTopkRouter", "NemotronHTopkRouter", "MiMoV2FlashTopkRouter",
            "SolarOpenTopkRouter",
        ),
        _deepseek_v3,
    ),
    "MiniMaxM2TopKRouter": _minimax_m2,
    "Ernie4_5_MoeTopKRouter": _ernie,
}  # fmt: skip


# ---- Which routers, and how they come and go ----


@contextmanager
def fuse_routers(model: nn.Module) -> Iterator[FusedRouters]:
    """Makes the expert routers of a model choose by one launch each, in a with block: in training and in inference.

    >>> with fuse_routers(model) as routers:  # doctest: +SKIP
    ...     model.generate(**inputs)

    These routers are served: Mixtral, MiniMax, MiniMax-M2, Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE, Qwen3-VL and -Omni-MoE,
    OLMoE, FlexOlmo, GPT-OSS, Hunyuan, ERNIE-4.5-MoE, DeepSeek-V2, V3 and V3.2, GLM-4-MoE and its kin, dots.llm1, Kimi-Linear,
    Bailing, EXAONE-MoE, Nemotron-H, MiMo-V2 and Solar, as transformers 5 has them. Each is tried on a few tokens first.

    Weights equal those of the model's own operations to float32 rounding. Experts are the same except for ties, where the smaller
    index is chosen. They come best first, as from :func:`fused_topk.router_topk`. Under torch.autocast scores are float32, where
    some models' own are bfloat16.

    Args:
        model: a transformers model, or any module that has such routers. Blocks of one model may be nested, not interleaved.

    Yields:
        FusedRouters: which classes are fused, and why others are not. Also logged.

    Raises:
        TypeError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}; pass the model itself")
    found: list[tuple[nn.Module, Callable[..., _Routed]]] = []
    stock: dict[str, str] = {}
    for module in model.modules():
        name = type(module).__name__
        forward = _ROUTERS.get(name)
        if forward is None and not _NAME.search(name):
            continue
        reason = "its class is not known" if forward is None else _reason_against(module, forward)
        if forward is not None and reason is None:
            found.append((module, forward))
        else:
            stock[name] = str(reason)
            tell_once(f"routers of {name} stay as they are: {reason}")
    ours = [module for module, _ in found if not _is_fused(module)]
    for module, forward in found:
        module.__dict__["forward"] = MethodType(forward, module)
    try:
        yield FusedRouters(dict(Counter(type(module).__name__ for module, _ in found)), stock)
    finally:
        for module in ours:
            module.__dict__.pop("forward", None)


def _is_fused(module: nn.Module) -> bool:
    """Whether a block that is open around this one has fused it."""
    return getattr(module.__dict__.get("forward"), "__func__", None) in _ROUTERS.values()


def _reason_against(router: Any, forward: Callable[..., _Routed]) -> str | None:
    """Why a router of a known name stays as it is; None where it computes what `forward` does."""
    if not type(router).__module__.startswith("transformers.models."):
        return f"it is of {type(router).__module__}, not of transformers"
    if "forward" in router.__dict__ and not _is_fused(router):
        return "its forward() is replaced already"
    weight = next(router.parameters())
    if weight.is_meta:
        return "its weight has no memory yet"
    try:
        with torch.no_grad():
            return _difference(router, forward, weight)
    # An error on the trial need not be one of the router in its model.
    except Exception as error:
        return f"it raises {type(error).__name__} on a trial: {error}"


def _difference(router: Any, forward: Callable[..., _Routed], weight: Tensor) -> str | None:
    experts, size = weight.shape
    numbers = torch.arange(_TRIED_TOKENS * size, dtype=torch.float32, device=weight.device)
    hidden = (numbers * 0.7).sin().view(_TRIED_TOKENS, size).to(weight.dtype)
    others = [numbers.new_zeros(experts)] if forward is _minimax_m2 else []
    own = type(router).forward(router, hidden, *others)
    if not isinstance(own, tuple) or len(own) != 3:
        return "it returns other things in this version of transformers"
    for mine, given in zip(forward(router, hidden, *others), own, strict=True):
        if mine.shape != given.shape or mine.dtype != given.dtype:
            return "it returns tensors of other shapes or dtypes in this version of transformers"
        # Experts may be in another order, and others where scores tie.
        if mine.is_floating_point():
            sorted_mine, sorted_given = (x.float().sort(-1).values for x in (mine, given))
            if not torch.allclose(sorted_mine, sorted_given, rtol=1e-2, atol=1e-4):
                return "it computes other weights in this version of transformers"
    return None
