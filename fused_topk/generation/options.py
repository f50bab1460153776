# SPDX-License-Identifier: Apache-2.0
"""What a user asks for with a block or enable(), and what a block gives."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arguments import check_flags
from ..gone import refuse
from ..problem import TopK


class Options(NamedTuple):
    """The options of :func:`fused_topk.generation.fused_decoding`."""

    compile: bool = False
    topk_per_step: int = 0

    @staticmethod
    def checked(compile: Any, topk_per_step: Any, gone: dict[str, Any]) -> Options:
        if gone:
            refuse("fused_decoding", gone)
        check_flags(compile=compile)
        if isinstance(topk_per_step, bool) or not isinstance(topk_per_step, int):
            raise TypeError(f"`topk_per_step` must be an int, got {type(topk_per_step).__name__}; pass 0 for no record")
        if topk_per_step < 0:
            raise ValueError(f"`topk_per_step` must not be negative, got {topk_per_step}; pass 0 for no record")
        return Options(compile, topk_per_step)


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
    """What enable() or a with block asks for."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.given = FusedDecoding()
