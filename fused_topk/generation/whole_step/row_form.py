# SPDX-License-Identifier: Apache-2.0
"""The second form of whole steps: a row for each beam, for models with attention of their own.

The beams share a cache, as in the first form (:mod:`cache`). In a step each layer gives the model the keys of every beam's own past in
the order of the text, as transformers' caches hold them after a reorder. So nothing is reordered, and a step that runs twice changes
nothing. The model computes with its own attention and masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import attention
from .ancestry import written_places
from .cache import Places, SharedPromptLayer
from .decoder import Decoder, source_inputs
from .twin import text_config


def decoder_of(twin: Any) -> type[Decoder]:
    """The form of a twin's steps: the first one if the twin has our attention."""
    own = text_config(twin.config)._attn_implementation
    return Decoder if own in (attention.PLAIN, attention.CAPPED) else RowDecoder


class RowPlaces(Places):
    """Where all layers write, and which places are the past of each row."""

    # int64 [batch, beams, shown], the place among the beams where each new token of a beam's past was written.
    past: Tensor | None = None
    # How many tokens the cache has: a number, or a tensor in a step that is kept.
    num_read: Any = 0

    @property
    def length(self) -> Any:
        return self.num_read

    def sizes_that_vary(self) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        yield from super().sizes_that_vary()
        if self.past is not None:
            yield self.past, (0, 1, 2)


class RowLayer(SharedPromptLayer):  # type: ignore[no-untyped-call]
    _places: RowPlaces

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        places = self._places
        if places.is_reading_prompt:
            return keys, values
        return self.rows(0, places.shown, places.past)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        places = self._places
        return super().get_mask_sizes(query_length) if places.is_reading_prompt else (places.prompt + places.shown, 0)


class RowDecoder(Decoder):
    """Reads prompts, a row for each sequence, then a token a beam, with a row for each."""

    _places: RowPlaces
    _kind_of_places = RowPlaces
    _kind_of_layer = RowLayer
    _repeats_source = True
    shares_code = False

    def prepared(self, parents: Tensor | None, step: Tensor, shown: int) -> tuple[Tensor, ...]:
        is_past = (torch.arange(shown, device=step.device) <= step).expand(len(self._is_text), -1)
        mask = torch.cat([self._is_text, is_past], 1).repeat_interleave(self._beams, 0).long()
        past = () if parents is None else (written_places(parents, step, shown),)
        return mask, self._places.written_by(step), *past

    def forward(self, twin: Any, tokens: Tensor, step: Tensor, shown: int, prepared: tuple[Tensor, ...]) -> Tensor:
        places, beams = self._places, self._beams
        mask, written, *past = prepared
        places.begin_step(step, shown, written)
        if past:
            places.past = past[0]
        # Unless the step is kept, the host knows the number, and the model gets an int as in transformers' loop.
        places.num_read = places.prompt + (step.squeeze(0) if self._is_kept else shown - 1)
        extra: dict[str, Any] = {}
        if self._of_source:
            hidden = self._of_source["encoder_outputs"].last_hidden_state
            is_text = self._of_source.get("attention_mask")
            is_text = None if is_text is None else is_text.repeat_interleave(beams, 0)
            extra = source_inputs(hidden[:1].expand(len(hidden) * beams, -1, -1), is_text)
        if "cache_position" in self._arguments:
            extra["cache_position"] = step + places.prompt
        return self._forward(twin, tokens, mask, self._last_positions + (step + 1), **extra)
