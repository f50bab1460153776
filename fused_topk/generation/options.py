# SPDX-License-Identifier: Apache-2.0
"""What a user asks for with a block or enable(), and what a block gives."""

from __future__ import annotations

from typing import Any

from ..arguments import check_flags, check_int
from ..gone import refuse
from ..problem import TopK


class FusedDecoding:
    """The record of a with block: :func:`fused_decoding` yields it.

    Attributes:
        topk: with topk_per_step=k, the steps of the last generate() call, each a TopK without any tensor of the vocabulary's
            size. values: float32 [rows, k], log-probabilities of the model's own distribution, before processors and
            warpers. indices: int64 [rows, k], their tokens, most probable first. logsumexp: float32 [rows], of the logits.
            Rows are sequences, or with beams sequence * beams + beam, as in `beam_indices`. Empty where a call is not served.
    """

    def __init__(self) -> None:
        self.topk: list[TopK] = []


class Request:
    """What enable() or a with block asks for, and its record."""

    def __init__(self, compile: bool, topk_per_step: int) -> None:
        self.compile = compile
        self.topk_per_step = topk_per_step
        self.given = FusedDecoding()

    @staticmethod
    def checked(compile: Any, topk_per_step: Any, gone: dict[str, Any]) -> Request:
        if gone:
            refuse("fused_decoding", gone)
        check_flags(compile=compile)
        check_int("topk_per_step", topk_per_step)
        if topk_per_step < 0:
            raise ValueError(f"`topk_per_step` must not be negative, got {topk_per_step}; pass 0 for no record")
        return Request(compile, topk_per_step)
