# SPDX-License-Identifier: Apache-2.0
"""The shape that a kept step is made for, and the way in which steps run."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import graphs
from .beams import Rules
from .decoder import Prompt
from .room import rounded_up

# Calls with more beams than this usually write few tokens, as of semantic ids.
_WIDE = 32


class Way(NamedTuple):
    """How the steps of a call are to run."""

    is_compiled: bool
    is_captured: bool

    @staticmethod
    def on(device: torch.device, compile: bool) -> Way | None:
        """The way of steps on a device, compiled or not; None where no step is kept."""
        is_captured = graphs.is_cuda(device)
        return Way(compile, is_captured) if compile or is_captured else None

    def and_simpler(self) -> list[Way]:
        """This way, and the ways to try if it fails: some models can be captured, but not compiled."""
        return [self, Way(False, True)] if all(self) else [self]

    def __str__(self) -> str:
        return " and ".join(name for name, is_so in zip(("compiled", "captured"), self, strict=True) if is_so)


class Shape(NamedTuple):
    """The shape of the calls that a kept step serves."""

    batch: int
    prompt: int
    source: int | None  # the length of an encoder's output
    beams: int
    kept: int  # continuations that are looked at: see Rules
    axes: tuple[int, ...]  # of positions
    device: torch.device
    way: Way
    # Tensors that are made in inference mode cannot be written to outside of it.
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
        return Shape(batch, length, source, rules.beams, rules.kept, prompt.axes, prompt.ids.device, way, mode)

    def of_code(self, any_beams: bool = False) -> Shape:
        """The same for all shapes that share compiled code. A size of 1 needs other code; all greater sizes share it.

        Args:
            any_beams: whether code looks at the number of rows alone, whichever of them are a sequence's beams.
        """
        source = None if self.source is None else min(self.source, 2)
        batch, beams = (self.batch * self.beams, 1) if any_beams else (self.batch, self.beams)
        return self._replace(batch=min(batch, 2), prompt=min(self.prompt, 2), source=source, beams=beams, kept=0)

    def of_layers(self) -> Shape:
        """The same for all shapes whose layers share compiled code."""
        return self.of_code()._replace(beams=min(self.beams, 2))


def most_room(rules: Rules) -> int:
    """The most tokens that a kept step has room for. Rounded up, so that there are few sizes."""
    # Room for one more token takes a place for each beam. So with many beams less is rounded up.
    return rounded_up(rules.room, 4 if rules.beams > _WIDE else 16)
