# SPDX-License-Identifier: Apache-2.0
"""The operators as functions: with checked arguments, each takes the shortest way that serves its tensors.

The public functions call them, and so does fused_topk.distributed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem import RouterTopK, TopK
from ..rows import LogitRows
from . import full_rows as of_full_rows
from . import merging, ranks, routing, transforms
from . import row_topk as of_row_topk
from . import token_spread as of_token_spread
from .dispatch import need_dispatcher, way_of_call

# These are looked up once, not at every call.
_row_topk = torch.ops.fused_topk.row_topk.default
_row_topk_out = torch.ops.fused_topk.row_topk_out.default
_beam_topk = torch.ops.fused_topk.beam_topk.default
_full_rows = torch.ops.fused_topk.full_rows.default
_router_topk = torch.ops.fused_topk.router_topk.default
_router_topk_out = torch.ops.fused_topk.router_topk_out.default
_target_ranks = torch.ops.fused_topk.target_ranks.default
_token_spread = torch.ops.fused_topk.token_spread.default
_merge_parts = torch.ops.fused_topk.merge_parts.default


def row_topk(rows: LogitRows, k: int, values: str, normalize: str, backend: str | None) -> TopK:
    """See :class:`TopkProblem`."""
    run = way_of_call(of_row_topk.row_topk, _row_topk, transforms.RowTopk.apply, *rows.tensors())
    return TopK(*run(*rows, k, values, normalize, backend))


def row_topk_into(rows: LogitRows, k: int, values: str, normalize: str, backend: str | None, out: TopK) -> bool:
    """Writes into the tensors of `out`. Returns whether torch has seen the call."""
    is_seen = need_dispatcher(*rows.tensors(), *out)
    run = _row_topk_out if is_seen else of_row_topk.row_topk_out
    run(*rows, k, values, normalize, backend, *out)
    return is_seen


def beam_topk(rows: LogitRows, beam_scores: Tensor, k: int, normalize: str, backend: str | None) -> TopK:
    """The k best over the beams of (batch, beams, V)."""
    tensors = rows.tensors()
    run = way_of_call(of_row_topk.beam_topk, _beam_topk, transforms.BeamTopk.apply, *tensors, beam_scores)
    return TopK(*run(*rows, beam_scores, k, normalize, backend))


def full_rows(rows: LogitRows, values: str, dtype: torch.dtype, backend: str | None) -> Tensor:
    """See :class:`FullRowProblem`."""
    run = way_of_call(of_full_rows.full_rows, _full_rows, transforms.FullRowValues.apply, *rows.tensors())
    result: Tensor = run(*rows, values, dtype, backend)
    return result


def target_ranks(rows: LogitRows, targets: Tensor, counts_ties: bool, backend: str | None) -> Tensor:
    """See :class:`RankProblem`."""
    run = way_of_call(ranks.target_ranks, _target_ranks, transforms.TargetRanks.apply, *rows.tensors(), targets)
    result: Tensor = run(*rows, targets, counts_ties, backend)
    return result


def token_spread(
    rows: LogitRows, tokens: Tensor, normalize: str, has_tail: bool, backend: str | None
) -> tuple[Tensor, Tensor]:
    """The entropy and the tail of each row. tokens: (..., n)."""
    run = way_of_call(
        of_token_spread.token_spread, _token_spread, transforms.TokenSpread.apply, *rows.tensors(), tokens
    )
    entropy, tail = run(*rows, tokens, normalize, has_tail, backend)
    return entropy, tail


def router_topk(
    rows: LogitRows, bias: Tensor | None, request: tuple[Any, ...], index_dtype: torch.dtype, backend: str | None
) -> RouterTopK:
    """See :class:`RouterProblem`, whose fields after the bias are the request."""
    tensors = *rows.tensors(), bias
    run = way_of_call(routing.router_topk, _router_topk, transforms.RouterChoice.apply, *tensors)
    return RouterTopK(*run(*rows, bias, *request, index_dtype, backend))


def router_topk_into(
    rows: LogitRows, bias: Tensor | None, request: tuple[Any, ...], backend: str | None, out: RouterTopK
) -> bool:
    """Writes into the tensors of `out`. Returns whether torch has seen the call."""
    is_seen = need_dispatcher(*rows.tensors(), bias, *out)
    run = _router_topk_out if is_seen else routing.router_topk_out
    run(*rows, bias, *request, backend, *out)
    return is_seen


def merge_parts(*arguments: Any) -> TopK:
    """arguments: the fields of :class:`MergeProblem`, then the backend."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    run = way_of_call(merging.merge_parts, _merge_parts, transforms.MergeParts.apply, *tensors)
    return TopK(*run(*arguments))
