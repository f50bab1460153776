# SPDX-License-Identifier: Apache-2.0
"""What a user asks for with a block, enable() or custom_generate, and what a block gives."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from ..arguments import check_flags
from ..problem import TopK

# The modes that are served.
SEARCH = (GenerationMode.GREEDY_SEARCH, GenerationMode.BEAM_SEARCH)
SAMPLING = (GenerationMode.SAMPLE, GenerationMode.BEAM_SAMPLE)
BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)


def mode_of(config: GenerationConfig) -> GenerationMode:
    mode: GenerationMode = config.get_generation_mode()
    return mode


class Options(NamedTuple):
    """The options of :func:`fused_topk.generation.fused_decoding`."""

    sampling: bool = False
    topk_per_step: int = 0
    whole_step: bool | str | None = None

    @staticmethod
    def checked(sampling: Any, topk_per_step: Any, whole_step: Any) -> Options:
        check_flags(sampling=sampling)
        if whole_step is not None and not isinstance(whole_step, (bool, str)):
            kind = type(whole_step).__name__
            raise TypeError(f'`whole_step` must be None, a bool, "compiled" or "eager", got {kind}; pass None')
        if isinstance(whole_step, str) and whole_step not in ("compiled", "eager"):
            raise ValueError(
                f'`whole_step` must be None, True, False, "compiled" or "eager", got {whole_step!r}; pass None'
            )
        if isinstance(topk_per_step, bool) or not isinstance(topk_per_step, int):
            raise TypeError(f"`topk_per_step` must be an int, got {type(topk_per_step).__name__}; pass 0 for no record")
        if topk_per_step < 0:
            raise ValueError(f"`topk_per_step` must not be negative, got {topk_per_step}; pass 0 for no record")
        return Options(sampling, topk_per_step, whole_step)


class FusedDecoding:
    """The record of a with block: :func:`fused_decoding` yields it.

    Attributes:
        topk: with topk_per_step=k, the steps of the last generate() call, each a TopK without any tensor of the vocabulary's
            size. values: float32 [rows, k], log-probabilities of the model's own distribution, before processors and
            warpers. indices: int64 [rows, k], their tokens, most probable first. logsumexp: float32 [rows], of the logits.
            Rows are those of the model's input in that step: sequences, or with beams sequence * beams + beam, as in
            `beam_indices`. Empty where a mode is not served.
    """

    def __init__(self) -> None:
        self.topk: list[TopK] = []


class Request:
    """What enable() or a with block asks for."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.given = FusedDecoding()
