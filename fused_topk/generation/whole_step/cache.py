# SPDX-License-Identifier: Apache-2.0
"""A cache that keeps a prompt once for all beams of its sequence, and is never reordered.

A layer has one tensor of keys and one of values, [batch, heads, prompt + room * beams, dim]: places for the prompt, then
`beams` places for each new token. Beam j of step t writes to place prompt + t * beams + j, for good. Which of the places
are a beam's past is told by the mask (:mod:`ancestry`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Places:
    """Where all layers of a cache write, and what of it is shown.

    Args:
        prompt: places for the prompt, which is written to the last of them.
        beams, room: rows for each sequence, and new tokens of each.
    """

    def __init__(self, prompt: int, beams: int, room: int, device: torch.device) -> None:
        self.prompt = prompt
        self.beams = beams
        self.room = room
        self.is_reading_prompt = True
        self._of_step = torch.arange(beams, device=device) + prompt
        self.written = self._of_step
        self.shown = prompt

    @property
    def total(self) -> int:
        return self.prompt + self.room * self.beams

    def begin_step(self, step: Tensor, shown: int) -> None:
        """Args: see ancestry.Mask."""
        self.written = self._of_step + step * self.beams
        self.shown = self.prompt + shown * self.beams


class SharedPromptLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = places

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        values = key_states if value_states is None else value_states
        if self.is_initialized:
            # Of the call before.
            self.keys.zero_()
            self.values.zero_()
            return
        self.keys, self.values = (self._empty(each) for each in (key_states, values))
        self.is_initialized = True

    def _empty(self, like: Tensor) -> Tensor:
        batch, heads, _, dim = like.shape
        # Zeros: what no beam looks at is multiplied by zero all the same, and must not be NaN.
        return like.new_zeros(batch, heads, self._places.total, dim)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        places = self._places
        if places.is_reading_prompt:
            self.lazy_initialization(key_states, value_states)
            begin = places.prompt - key_states.shape[2]
            self.keys[:, :, begin : places.prompt] = key_states
            self.values[:, :, begin : places.prompt] = value_states
            return key_states, value_states
        for kept, written in ((self.keys, key_states), (self.values, value_states)):
            _, heads, _, dim = written.shape
            of_beams = written.view(-1, places.beams, heads, dim).transpose(1, 2)
            kept.index_copy_(2, places.written, of_beams)
        return self.keys[:, :, : places.shown], self.values[:, :, : places.shown]

    def get_seq_length(self, *args: Any) -> int:
        return 0 if self._places.is_reading_prompt else self._places.prompt

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        # Before transformers 5.5 it is the positions of the queries.
        length = query_length if isinstance(query_length, int) else len(query_length)
        return self.get_seq_length() + length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The same, as transformers 4 and 5.0 call it."""
        return -1


def shared_prompt_cache(num_layers: int, places: Places) -> Cache:
    return Cache(layers=[SharedPromptLayer(places) for _ in range(num_layers)])
