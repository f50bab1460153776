# SPDX-License-Identifier: Apache-2.0
"""Makes the result of generate() from the end of a search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from .beams import Hypotheses
from .given_cache import NAMES


class KeptOutputs(NamedTuple):
    """Tensors of each step that are kept for the user; None where the user has not asked for them."""

    scores: list[Tensor] | None
    logits: list[Tensor] | None

    @staticmethod
    def asked_for(config: GenerationConfig) -> KeptOutputs:
        is_kept = config.return_dict_in_generate
        return KeptOutputs(*([] if is_kept and each else None for each in (config.output_scores, config.output_logits)))

    def add(self, logits: Tensor, scores: Callable[[], Tensor]) -> None:
        """Keeps one step's logits [rows, V]. `scores` gives the scores that the processors make of them."""
        if self.logits is not None:
            self.logits.append(logits.to(torch.float32, copy=True))
        if self.scores is not None:
            self.scores.append(scores())

    def of_first(self, steps: int) -> KeptOutputs:
        return KeptOutputs(*(None if each is None else each[:steps] for each in self))

    def fields(self, cache: Any, of: Any) -> dict[str, Any]:
        """Arguments for the class `of` of the result, with the cache."""
        kept = {name: None if each is None else tuple(each) for name, each in zip(self._fields, self, strict=True)}
        return {**kept, next(name for name in NAMES if name in of.__dataclass_fields__): cache}


def of_beams(
    prompt: Tensor,
    ended: Hypotheses,
    fill: int,
    kept: KeptOutputs,
    config: GenerationConfig,
    has_source: bool,
    cache: Any,
) -> Any:
    """The result of a beam search, with the best texts of each sequence. `fill` is the token after the end of a text."""
    batch, beams = ended.scores.shape
    count = config.num_return_sequences
    scores, tokens, parents = (each[:, :count].flatten(0, 1) for each in ended)
    is_token = parents >= 0
    longest = int(is_token.sum(1).max())
    tokens = tokens.where(is_token, fill)[:, :longest]
    sequences = torch.cat([prompt.repeat_interleave(count, 0), tokens], 1)
    if not config.return_dict_in_generate:
        return sequences
    first = torch.arange(batch, device=prompt.device).repeat_interleave(count)[:, None] * beams
    output: Any = GenerateBeamEncoderDecoderOutput if has_source else GenerateBeamDecoderOnlyOutput
    return output(
        sequences=sequences,
        sequences_scores=scores if config.output_scores else None,
        beam_indices=(parents + first).where(is_token, -1)[:, :longest].int(),
        **kept.fields(cache, output),
    )


def of_texts(
    prompt: Tensor, tokens: Tensor, kept: KeptOutputs, config: GenerationConfig, has_source: bool, cache: Any
) -> Any:
    """The result of a search without beams, of its new `tokens` [batch, n]."""
    sequences = torch.cat([prompt, tokens], 1)
    if not config.return_dict_in_generate:
        return sequences
    output: Any = GenerateEncoderDecoderOutput if has_source else GenerateDecoderOnlyOutput
    return output(sequences=sequences, **kept.fields(cache, output))
