# SPDX-License-Identifier: Apache-2.0
"""A model's forward pass over beams that share their prompt."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ancestry import Mask
from .attention import Call, watched
from .cache import Places, shared_prompt_cache


class Prompt(NamedTuple):
    """The inputs of a call, a row for each sequence."""

    ids: Tensor  # int64 [batch, length]
    is_text: Tensor  # bool [batch, length], False where it is padding
    positions: Tensor  # int64 [batch, length]
    extra: dict[str, Any]  # further arguments of the model


class Decoder:
    """Reads prompts, then a token a beam.

    Args:
        twin: see :mod:`twin`.
        batch: how many sequences.
        prompt: how many places a prompt has; a shorter one has padding before it.
        beams: rows for each sequence.
        room: for how many tokens a beam.
    """

    def __init__(self, twin: Any, batch: int, prompt: int, beams: int, room: int, device: torch.device) -> None:
        self._twin = twin
        self._cache_argument = cache_argument(twin)
        self._beams = beams
        self.room = room
        self._places = Places(prompt, beams, room, device)
        config = twin.config.get_text_config(decoder=True)
        self._cache = shared_prompt_cache(config.num_hidden_layers, self._places)
        self._is_text = torch.zeros(batch, prompt, dtype=torch.bool, device=device)
        self._last_positions = torch.zeros(batch * beams, 1, dtype=torch.int64, device=device)
        self._mask: Mask | None = None
        self.calls: list[Call] = []

    @property
    def num_bytes(self) -> int:
        """Of the cache."""
        layers: list[Any] = self._cache.layers
        return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in layers)

    def read_prompt(self, prompt: Prompt) -> Tensor:
        """The last logits [batch, V]."""
        padding = self._is_text.shape[1] - prompt.ids.shape[1]
        self._is_text[:, :padding] = False
        self._is_text[:, padding:] = prompt.is_text
        self._last_positions.copy_(prompt.positions[:, -1:].repeat_interleave(self._beams, 0))
        self._places.is_reading_prompt = True
        with watched() as calls:
            logits = self._forward(
                prompt.ids,
                # transformers' functions are quicker where they know that there is none.
                None if bool(prompt.is_text.all()) else prompt.is_text.long(),
                prompt.positions,
                **prompt.extra,
            )
        self._places.is_reading_prompt = False
        self.calls = calls
        if self._mask is None:
            windows = [call.window for call in calls if call.window is not None]
            self._mask = Mask(
                self._is_text, self._beams, self.room, calls[0].groups, max(windows, default=None), logits.dtype
            )
        return logits

    def read(self, tokens: Tensor, parents: Tensor, step: Tensor, shown: int) -> Tensor:
        """The last logits [batch * beams, V].

        Args:
            tokens: int64 [batch, beams], the new token of each beam.
            parents, step, shown: see :class:`ancestry.Mask`.
        """
        assert self._mask is not None
        self._places.begin_step(step, shown)
        return self._forward(tokens.reshape(-1, 1), self._mask(parents, step, shown), self._last_positions + (step + 1))

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, **extra: Any) -> Tensor:
        output = self._twin(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **{self._cache_argument: self._cache},
            **extra,
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def cache_argument(model: Any) -> str:
    """What the model's forward pass calls the cache: `cache` from transformers 5.2x on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def positions_of(is_text: Tensor) -> Tensor:
    """Positions of tokens that are text, from 0 on, as generate() counts them."""
    return (is_text.long().cumsum(-1) - 1).clamp(min=0)
