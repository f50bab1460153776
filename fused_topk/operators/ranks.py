# SPDX-License-Identifier: Apache-2.0
"""The operator of ranks, `target_ranks`: the ranks of given tokens in their rows. It has no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..problem import RankProblem
from ..rows import ROWS_SCHEMA, unflattened
from .dispatch import library, register

library.define(f"target_ranks({ROWS_SCHEMA}, Tensor targets, bool counts_ties, str? backend) -> Tensor")


def target_ranks(*arguments: Any) -> Tensor:
    """Computes the operator. `arguments`: the operator's, in its order."""
    rows, (targets, counts_ties, backend) = unflattened(arguments)
    chosen = backends.pick(rows.logits.device, rows.logits.dtype, 1, backend)
    out = torch.empty_like(targets, memory_format=torch.contiguous_format)
    if out.numel():
        chosen.target_ranks(RankProblem(rows.unscaled(), targets.contiguous(), counts_ties), out)
    return out


def _fake_target_ranks(*arguments: Any) -> Tensor:
    _, (targets, *_) = unflattened(arguments)
    return torch.empty_like(targets, memory_format=torch.contiguous_format)


register("target_ranks", target_ranks, _fake_target_ranks)
