# SPDX-License-Identifier: Apache-2.0
"""Which places of the cache are a beam's past: an attention mask made of the table of its ancestors."""

from __future__ import annotations

import torch
from torch import Tensor


class Mask:
    """Makes the attention mask of a step.

    Args:
        prompt: bool [batch, prompt], False where it is padding.
        beams, room: of the cache.
        groups: query heads to a key head.
        window: how many of the last places layers with a window look at; None where no layer has one.
        dtype: of the model.
    """

    def __init__(
        self, prompt: Tensor, beams: int, room: int, groups: int, window: int | None, dtype: torch.dtype
    ) -> None:
        device = prompt.device
        self.prompt = prompt
        self._groups = groups
        self._window = window
        self._beams = torch.arange(beams, device=device)
        self._steps = torch.arange(room, device=device)
        # Places in the order of the text: those of a step are beside each other.
        self._order = torch.cat(
            [torch.arange(prompt.shape[1], device=device), (self._steps + prompt.shape[1]).repeat_interleave(beams)]
        )
        self._zero = torch.zeros((), dtype=dtype, device=device)

    def __call__(self, parents: Tensor, step: Tensor, shown: int) -> Tensor:
        """[batch, 1 or 2, groups * beams, places]: 0 where a beam may look, else -inf; the second with the window.

        Args:
            parents: int64 [batch, beams, shown + 1 or more]; parents[:, j, s + 1] is the place among the beams that
                token s of the beam that is now at j was written at, for all s < step.
            step: int64 [1], which of the new tokens is read.
            shown: of how many new tokens there are places, more than `step`.
        """
        batch, beams, _ = parents.shape
        steps = self._steps[:shown]
        written = torch.where(steps < step, parents[:, :, 1 : shown + 1], self._beams[:, None])
        is_past = (written[..., None] == self._beams) & (steps <= step)[:, None]
        seen = torch.cat([self.prompt[:, None].expand(-1, beams, -1), is_past.flatten(2)], 2)
        masks = [seen]
        if self._window is not None:
            here = self.prompt.shape[1] + step
            masks.append(seen & (self._order[: seen.shape[2]] > here - self._window))
        mask = torch.stack(masks, 1).unsqueeze(2).expand(-1, -1, self._groups, -1, -1)
        mask = mask.reshape(batch, len(masks), self._groups * beams, -1)
        return torch.where(mask, self._zero, -torch.inf)
