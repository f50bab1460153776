# SPDX-License-Identifier: Apache-2.0
"""The public function that routes tokens to experts. It checks the arguments and runs a plan, or the operator where torch must see
the call.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..arguments import INDEX_DTYPES, check_backend, check_bias, check_router
from ..backends import REQUESTS
from ..gone import refuse
from ..operators.routing import plan, result_of
from ..operators.routing import router_topk as routed
from ..problem import RouterTopK, result_dtype
from ..row_arguments import check_rows, is_plain, plain_rows
from ..rows import like_given
from .out import copied_into, may_be_plain, run_into

_OUT_TYPES = (RouterTopK, tuple)
_REQUEST_TYPES = (int, str, int, int, str, bool)


def router_topk(
    logits: Tensor,
    k: int,
    *,
    mask: Tensor | None = None,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "top2",
    renormalize: bool = False,
    scale: float = 1.0,
    index_dtype: torch.dtype = torch.int64,
    dim: int = -1,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
    **gone: NoReturn,
) -> RouterTopK:
    """The k experts of each token and their weights, as mixtures of experts route: one launch, one read of the logits.

    >>> router_topk(torch.tensor([1.0, 3.0, 2.0, 3.0]), 2, scoring="sigmoid", renormalize=True)
    RouterTopK(weights=tensor([0.5000, 0.5000]), experts=tensor([1, 3]))

    Each expert has a score. The k experts with the greatest sums of score and bias are chosen; their weights are the scores.

    ======================================================= =============================================================
    models                                                  arguments
    ======================================================= =============================================================
    Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, Hunyuan           `renormalize=True` (Qwen, OLMoE: as the configuration has it)
    DeepSeek-V2                                             `scale=`; with groups `groups=, topk_groups=, group_score="max"`
    DeepSeek-V3, V3.2, Kimi-K2, GLM-4.5, dots.llm1          `scoring="sigmoid", bias=, groups=, topk_groups=,
                                                            renormalize=True, scale=`
    MiniMax-M2                                              `scoring="sigmoid", bias=, renormalize=True`
    DeepSeek-V4                                             `scoring="sqrtsoftplus", bias=, renormalize=True, scale=`
    ERNIE-4.5                                               `bias=, renormalize=True`
    GPT-OSS                                                 `softmax_topk(logits, k, normalize="topk")`
    ======================================================= =============================================================

    Args:
        logits: shape (..., E), as for :func:`softmax_topk`.
        k: the number of experts per token, 1 <= k <= E.
        mask: the experts that may be chosen, bool or packed int32 as for :func:`softmax_topk`: others count as logits of -inf.
        scoring: "softmax" of the row, "sigmoid", or "sqrtsoftplus", the square root of log(1 + e^x).
        bias: shape (E,), added to the scores for the choice alone. float32 (float64 for float64 logits); others are converted.
        groups: the number of groups of adjacent experts, all of one size.
        topk_groups: how many groups are kept, before experts are chosen from these. They must have at least k experts.
        group_score: the score of a group: "top2", the sum of its two best experts' score + bias; or "max", its best expert's.
        renormalize: whether the weights are divided by their sum + 1e-20.
        scale: multiplies the weights, at the end.
        index_dtype: torch.int64 or torch.int32, of the experts; written directly. `out` has its own.
        dim: the dimension of the experts.
        out: (weights, experts) to write into instead of new tensors. They may have any strides.
        backend: "cuda" and "cpu" take E <= 1024 and k <= 32, and no float64. None runs torch operations beyond that.

    Returns:
        RouterTopK with weights float32 (..., k), and experts (..., k), both with the k along `dim`. float64 logits give float64
        weights.

    The errors are those of :func:`softmax_topk`.

    Contract:
        Scores, sums and weights are float32 whatever the dtype of the logits. Every operation of a score is rounded by itself,
        in a fixed order: so the experts are the same on every backend, and the scores within 8 units of 2^-24. A score below
        e^-87 is 0 (of sqrtsoftplus, its square).
        Order: greater score + bias first, NaN above +inf, equal ones by smaller index; groups likewise. Different logits may have
        equal scores: the sigmoids of 20 and of 100 are both 1. Weights are in the order of the choice.
        A logit of -inf takes its expert out: its score + bias counts as -inf and its weight is 0, whatever the bias. Where fewer
        than k are left, the others follow by index. Experts are always distinct, in range and of the groups that are kept.
        NaN: with sigmoid and sqrtsoftplus an expert whose logit is NaN comes first and has the weight NaN; normalized, all of the
        row's weights are NaN. With softmax a row with NaN, with +inf, or of only -inf has scores of NaN, as in torch: its weights
        are NaN, and its experts follow by index, those with logits of -inf last. +inf has the sigmoid 1 and sqrtsoftplus +inf.
        The weights are differentiable with respect to the logits, as a function of the experts that are chosen: the choice has no
        gradient. That of the bias, which has an effect on the choice alone, is zero.
    """
    if gone:
        refuse("router_topk", gone)
    request: tuple[Any, ...] = (k, scoring, groups, topk_groups, group_score, renormalize)
    # Arguments of exactly these types can be the key of a cached plan. All others are checked below.
    if (
        tuple(map(type, request)) == _REQUEST_TYPES
        and type(scale) is float
        and type(index_dtype) is torch.dtype
        and type(dim) is int
        and dim == -1
        and backend in REQUESTS
        and (out is None or may_be_plain(out, _OUT_TYPES, 2))
    ):
        rows = plain_rows(logits, mask=mask, others=out or ())
        if rows is not None and (
            bias is None
            or (is_plain(bias, logits, result_dtype(logits.dtype), logits.shape[-1:]) and bias.is_contiguous())
        ):
            if out is not None:
                index_dtype = _index_dtype_of(out)
            asked = (*request, scale)
            planned = plan(logits.device, rows.layout(), like_given(bias), asked, index_dtype, backend)
            if out is None:
                return planned.run(rows, bias)
            return run_into(planned, out, rows, bias)
    rows = check_rows(logits, mask=mask, dim=dim)
    bias = check_bias(bias, rows.logits)
    if out is not None:
        index_dtype = _index_dtype_of(out)
    check_router(logits.shape[dim], index_dtype, (*request, scale))
    check_backend(backend)

    def compute() -> RouterTopK:
        result = routed(rows, bias, (*request, float(scale)), index_dtype, backend)
        return result if rows.logits is logits else RouterTopK(*(x.movedim(-1, dim) for x in result))

    if out is None:
        return compute()
    result = result_of(rows.logits, k, index_dtype)
    return copied_into(out, RouterTopK._fields, result, compute, rows, dim, bias)


def _index_dtype_of(out: Any) -> Any:
    """The dtype of the experts in `out`. int64 if they have none that check_out() takes."""
    dtype = getattr(out[-1], "dtype", None) if isinstance(out, (tuple, list)) and out else None
    return dtype if dtype in INDEX_DTYPES else torch.int64
