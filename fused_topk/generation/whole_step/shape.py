# SPDX-License-Identifier: Apache-2.0
"""What a step that is kept is made for: its shape, and how it runs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import graphs
from .beams import Rules
from .decoder import Prompt
from .room import rounded_up

# More beams than that are those of models that add few tokens.
_WIDE = 32


class Way(NamedTuple):
    """How the steps of a call are to run."""

    is_compiled: bool
    is_captured: bool

    @staticmethod
    def on(device: torch.device, whole_step: bool | str | None) -> Way | None:
        """None where nothing is kept.

        Args:
            whole_step: None for a step that is captured, where that can be. True for one that is compiled elsewhere.
                "compiled" for both. "eager" for neither.
        """
        is_captured = graphs.is_cuda(device)
        if whole_step == "eager" or (whole_step is None and not is_captured):
            return None
        return Way(whole_step == "compiled" or not is_captured, is_captured)

    def and_simpler(self) -> list[Way]:
        """This one, and what is tried where it fails: some models are captured that are not compiled in one piece."""
        return [self, Way(False, True)] if all(self) else [self]

    def __str__(self) -> str:
        return " and ".join(name for name, is_so in zip(("compiled", "captured"), self, strict=True) if is_so)


class Shape(NamedTuple):
    """What a step is made for."""

    batch: int
    prompt: int
    source: int | None  # of what an encoder has read
    beams: int
    num_ends: int  # tokens that end a text
    axes: tuple[int, ...]  # of positions
    device: torch.device
    way: Way
    # Tensors of that mode cannot be written outside of it.
    is_inference: bool

    @staticmethod
    def of(prompt: Prompt, rules: Rules, way: Way) -> Shape:
        (batch, length), source = prompt.is_text.shape, None
        if prompt.source is not None:
            source = prompt.source.hidden.shape[1]
            # Without a mask there is no padding.
            source = source if prompt.source.is_text is None else rounded_up(source)
        mode = torch.is_inference_mode_enabled()
        length = length if prompt.is_exact else rounded_up(length)
        return Shape(batch, length, source, rules.beams, rules.num_ends, prompt.axes, prompt.ids.device, way, mode)

    def of_code(self) -> Shape:
        """The same for all shapes that compiled code is the same for: but for one row, how many there are is no matter of it."""
        source = None if self.source is None else min(self.source, 2)
        return self._replace(batch=min(self.batch, 2), prompt=min(self.prompt, 2), source=source)

    @property
    def kept(self) -> int:
        """See :attr:`Rules.kept`."""
        return (1 + self.num_ends) * self.beams


def most_room(rules: Rules) -> int:
    """For how many tokens there may be room in a step that is kept: rounded up, so that there are few sizes."""
    # A place for a new token is one for each beam.
    return rounded_up(rules.room, 4 if rules.beams > _WIDE else 16)
