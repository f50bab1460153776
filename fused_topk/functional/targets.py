# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and ranks of targets: tokens that the caller names, beside a row's k best."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import check_choice, check_same_device, check_tensor, is_readable
from ..operators import calls
from ..problem import TopK
from ..rows import LogitRows

_TIES = ("index", "last")


def check_target_ties(target_ties: Any) -> None:
    check_choice("target_ties", target_ties, _TIES)


def check_row_targets(targets: Any, logits: Tensor, out: Any) -> None:
    """Checks targets, and that there is no `out`. Several targets of a row lie along the last dimension."""
    if out is not None:
        raise ValueError("`out` must be None where `targets` are given, got both; leave one out")
    check_targets(targets, logits)


def check_targets(targets: Any, logits: Tensor, is_part: bool = False) -> None:
    """Checks one target a row, or several in a last dimension. is_part: whether `logits` have only a part of the vocabulary, which
    targets may lie outside of."""
    check_tensor("targets", targets)
    if targets.dtype != torch.int64:
        raise TypeError(f"`targets` must be int64, got {targets.dtype}; use .long()")
    is_several = targets.dim() == logits.dim()
    if is_several and targets.shape[-1] == 0:
        raise ValueError("`targets` must have at least one token a row, got none; leave targets=None")
    if (targets.shape[:-1] if is_several else targets.shape) != logits.shape[:-1]:
        raise ValueError(
            f"`targets` must have the shape {tuple(logits.shape[:-1])} of the positions, got {tuple(targets.shape)}; "
            "for a causal model drop the last position and the first target"
        )
    check_same_device("targets", targets, logits)
    if is_part or not targets.numel() or not is_readable(targets):
        return
    greatest = int(targets.max())
    if greatest >= logits.shape[-1]:
        raise ValueError(
            f"`targets` must be below the vocabulary size {logits.shape[-1]}, got {greatest}; negative ones mark positions "
            "without a target"
        )


def of_targets(
    rows: LogitRows, targets: Tensor, best: TopK, values: str, normalize: str, target_ties: str, backend: str | None
) -> tuple[Tensor, Tensor | None]:
    """The log-probabilities and the ranks of targets (...). For targets (..., n) the ranks are None.

    best: the k best of the rows, with these `values` and this `normalize`.
    """
    has_ranks = targets.dim() < rows.logits.dim()
    tokens = targets.unsqueeze(-1) if has_ranks else targets
    if values != "log_softmax" or normalize == "topk":
        # The log-probability of the best token, from which those of the targets are computed.
        best = calls.row_topk(rows, 1, "log_softmax", "all" if normalize == "all" else "allowed", backend)
    logprobs = _logprobs(rows, tokens, best.values[..., :1], best.indices[..., :1])
    if not has_ranks:
        return logprobs, None
    ranks = calls.target_ranks(rows, tokens, target_ties == "last", backend)
    return logprobs.squeeze(-1), ranks.squeeze(-1)


def _logprobs(rows: LogitRows, targets: Tensor, first: Tensor, index: Tensor) -> Tensor:
    """index, first: the best token, and its log-probability, NaN in a row without probabilities."""
    # Computed as a difference to the best token, so a common offset of the logits costs no digits.
    tokens = targets.clamp(0, rows.logits.shape[-1] - 1)
    best = rows.logits.gather(-1, index).to(first.dtype)
    # -inf - -inf would be NaN. A row whose best logit is -inf has no greater one.
    best = best.where(best != -torch.inf, 0.0)
    logprobs = first + rows.scale().log_weight(rows.logits.gather(-1, tokens).to(first.dtype), best)
    counted = rows.counted_at(tokens)
    if counted is not None:
        logprobs = logprobs.where(counted | first.isnan(), -torch.inf)
    return logprobs.where(targets >= 0, torch.nan)
