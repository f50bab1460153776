# SPDX-License-Identifier: Apache-2.0
"""The operators of top-k: what torch.compile, fake tensors, autograd and CUDA graphs see of it.

    row_topk        softmax_topk, log_softmax_topk and topk
    row_topk_out    the same into given tensors
    beam_topk       beam_topk

Arguments are checked, and logits have the vocabulary last. Each operator takes the request's plan and runs it. Its
first arguments are the fields of LogitRows, as ROWS_SCHEMA has them.
"""

from __future__ import annotations

from typing import Any

from .. import plans
from ..problem import TopK, result_dtype
from ..rows import ROWS_SCHEMA, like, unflattened
from . import gradients
from .dispatch import library, register

_REQUEST = f"{ROWS_SCHEMA}, SymInt k, str values, str normalize, str? backend"
library.define(f"row_topk({_REQUEST}) -> (Tensor, Tensor, Tensor)")
library.define(
    f"row_topk_out({_REQUEST}, Tensor(a!) out_values, Tensor(b!) out_indices, Tensor(c!) out_logsumexp) -> ()"
)
library.define(
    f"beam_topk({ROWS_SCHEMA}, Tensor beam_scores, SymInt k, str normalize, str? backend) -> (Tensor, Tensor, Tensor)"
)


def row_topk(*arguments: Any) -> TopK:
    rows, request = unflattened(arguments)
    return plans.topk_plan(rows.logits.device, rows.layout(), *request).run(rows)


def row_topk_out(*arguments: Any) -> None:
    rows, (*request, values, indices, logsumexp) = unflattened(arguments)
    plan = plans.topk_plan(rows.logits.device, rows.layout(), *request)
    plan.run_into(TopK(values, indices, logsumexp), rows)


def beam_topk(*arguments: Any) -> TopK:
    rows, (beam_scores, k, normalize, backend) = unflattened(arguments)
    scores = beam_scores.to(result_dtype(rows.logits.dtype))
    device = rows.logits.device
    plan = plans.topk_plan(device, rows.layout(), k, "log_softmax", normalize, backend, like(scores))
    return plan.run(rows, scores)


def _fake_row_topk(*arguments: Any) -> TopK:
    rows, (k, values, _, _) = unflattened(arguments)
    return plans.row_result(rows.logits, k, values).empty(rows.logits.device)


def _fake_beam_topk(*arguments: Any) -> TopK:
    rows, (_, k, _, _) = unflattened(arguments)
    return plans.beam_result(rows.logits, k).empty(rows.logits.device)


register("row_topk", row_topk, _fake_row_topk, gradients.row_setup_context, gradients.row_backward)
register("row_topk_out", row_topk_out)
register("beam_topk", beam_topk, _fake_beam_topk, gradients.beam_setup_context, gradients.beam_backward)
