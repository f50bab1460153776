# SPDX-License-Identifier: Apache-2.0
"""The operators of top-k: what torch.compile, fake tensors, autograd and CUDA graphs see of it.

    row_topk        softmax_topk, log_softmax_topk and topk
    row_topk_out    the same into given tensors
    beam_topk       beam_topk

Arguments are checked in functional/; logits have the vocabulary last. Each operator takes the request's plan and runs it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import plans
from ..plans import Like, TopkPlan
from ..problem import TopK, result_dtype
from . import gradients
from .dispatch import library

_ROW_ARGUMENTS = (
    "Tensor logits, SymInt k, float temperature, Tensor? row_temperature, Tensor? mask, "
    "str values, str normalize, str? backend"
)
library.define(f"row_topk({_ROW_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
library.define(
    f"row_topk_out({_ROW_ARGUMENTS}, Tensor(a!) out_values, Tensor(b!) out_indices, Tensor(c!) out_logsumexp) -> ()"
)
library.define(
    "beam_topk(Tensor logits, Tensor beam_scores, SymInt k, float temperature, Tensor? row_temperature, Tensor? mask, "
    "str normalize, str? backend) -> (Tensor, Tensor, Tensor)"
)


def row_topk(
    logits: Tensor,
    k: int,
    temperature: float,
    row_temperature: Tensor | None,
    mask: Tensor | None,
    values: str,
    normalize: str,
    backend: str | None,
) -> TopK:
    plan = _plan_of(logits, k, temperature, row_temperature, mask, values, normalize, backend)
    return plan.run(logits, mask, row_temperature)


def row_topk_out(
    logits: Tensor,
    k: int,
    temperature: float,
    row_temperature: Tensor | None,
    mask: Tensor | None,
    values: str,
    normalize: str,
    backend: str | None,
    out_values: Tensor,
    out_indices: Tensor,
    out_logsumexp: Tensor,
) -> None:
    plan = _plan_of(logits, k, temperature, row_temperature, mask, values, normalize, backend)
    plan.run_into(TopK(out_values, out_indices, out_logsumexp), logits, mask, row_temperature)


def beam_topk(
    logits: Tensor,
    beam_scores: Tensor,
    k: int,
    temperature: float,
    row_temperature: Tensor | None,
    mask: Tensor | None,
    normalize: str,
    backend: str | None,
) -> TopK:
    scores = beam_scores.to(result_dtype(logits.dtype))
    plan = _plan_of(logits, k, temperature, row_temperature, mask, "log_softmax", normalize, backend, scores)
    return plan.run(logits, mask, row_temperature, scores)


def _plan_of(
    logits: Tensor,
    k: int,
    temperature: float,
    row_temperature: Tensor | None,
    mask: Tensor | None,
    values: str,
    normalize: str,
    backend: str | None,
    beam_scores: Tensor | None = None,
) -> TopkPlan:
    return plans.topk_plan(
        logits.device,
        Like(logits.dtype, logits.shape, logits.stride()),
        k,
        temperature,
        Like.of(row_temperature),
        Like.of(mask),
        values,
        normalize,
        backend,
        Like.of(beam_scores),
    )


def _fake_row_topk(
    logits: Tensor,
    k: int,
    temperature: float,
    row_temperature: Tensor | None,
    mask: Tensor | None,
    values: str,
    normalize: str,
    backend: str | None,
) -> TopK:
    return plans.row_result(logits, k, values).empty(logits.device)


def _fake_row_topk_out(*args: Any) -> None:
    return None


def _fake_beam_topk(
    logits: Tensor,
    beam_scores: Tensor,
    k: int,
    temperature: float,
    row_temperature: Tensor | None,
    mask: Tensor | None,
    normalize: str,
    backend: str | None,
) -> TopK:
    return plans.beam_result(logits, k).empty(logits.device)


library.impl("row_topk", row_topk, "CompositeExplicitAutograd")
library.impl("row_topk_out", row_topk_out, "CompositeExplicitAutograd")
library.impl("beam_topk", beam_topk, "CompositeExplicitAutograd")
torch.library.register_fake("fused_topk::row_topk", _fake_row_topk, lib=library)
torch.library.register_fake("fused_topk::row_topk_out", _fake_row_topk_out, lib=library)
torch.library.register_fake("fused_topk::beam_topk", _fake_beam_topk, lib=library)
torch.library.register_autograd(
    "fused_topk::row_topk", gradients.row_backward, setup_context=gradients.row_setup_context, lib=library
)
torch.library.register_autograd(
    "fused_topk::beam_topk", gradients.beam_backward, setup_context=gradients.beam_setup_context, lib=library
)
