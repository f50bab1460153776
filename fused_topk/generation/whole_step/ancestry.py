# SPDX-License-Identifier: Apache-2.0
"""Which places of the cache are a beam's past, told by the table of its ancestors.

Either all beams of a sequence look at the places of all, and a mask says which are theirs: nothing is copied, and the mask
grows with beams * beams * new tokens. Or each step gathers the new tokens of each beam: they are copied at every step, and
masks are small.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Guesses from counts, not measured on a GPU: masked, a token's pass reads beams * room keys that are not its own, through
# torch's fused attention; gathered, it copies the room * beams keys, and its attention is five operations. Beams as wide as
# those of recommender models (512 x 4 new tokens) are masked; 512 x 64 are gathered, whose mask would have 240 MB in bfloat16.
_LEAST_TO_GATHER = 1 << 14
_LEAST_SHARE = 4


def gathers(prompt: int, beams: int, room: int) -> bool:
    """Whether new tokens are to be gathered rather than masked: many beams, many new tokens, and a prompt that is shorter."""
    return beams * room >= _LEAST_TO_GATHER and beams * room >= _LEAST_SHARE * (prompt + room)


class Mask:
    """Makes the attention mask of a step.

    Args:
        prompt: bool [batch, prompt], False where it is padding.
        beams, room: of the cache.
        groups: query heads to a key head.
        window: how many of the last places layers with a window look at; None where no layer has one.
        dtype: of the model.
        is_gathered: whether attention gets each beam's own new tokens.
    """

    def __init__(
        self,
        prompt: Tensor,
        beams: int,
        room: int,
        groups: int,
        window: int | None,
        dtype: torch.dtype,
        is_gathered: bool,
    ) -> None:
        device = prompt.device
        self._is_gathered = is_gathered
        self.prompt = prompt
        self._groups = groups
        self._window = window
        self._beams = torch.arange(beams, device=device)
        self._steps = torch.arange(room, device=device)
        # Places in the order of the text: those of a step are beside each other.
        of_steps = self._steps + prompt.shape[1]
        of_steps = of_steps if is_gathered else of_steps.repeat_interleave(beams)
        self._order = torch.cat([torch.arange(prompt.shape[1], device=device), of_steps])
        self._zero = torch.zeros((), dtype=dtype, device=device)

    def written(self, parents: Tensor, step: Tensor, shown: int) -> Tensor:
        """int64 [batch, beams, shown]: at which place among the beams each new token of a beam's past was written.

        Args: see below.
        """
        return torch.where(self._steps[:shown] < step, parents[:, :, 1 : shown + 1], self._beams[:, None])

    def __call__(self, parents: Tensor, step: Tensor, shown: int) -> Tensor:
        """[batch, 1 or 2, groups * beams, places]: 0 where a beam may look, else -inf; the second with the window.

        Gathered, it is [batch, 1 or 2, beams, prompt + shown].

        Args:
            parents: int64 [batch, beams, shown + 1 or more]; parents[:, j, s + 1] is the place among the beams that
                token s of the beam that is now at j was written at, for all s < step.
            step: int64 [1], which of the new tokens is read.
            shown: of how many new tokens there are places, more than `step`.
        """
        batch, beams, _ = parents.shape
        steps = self._steps[:shown]
        if self._is_gathered:
            is_past = (steps <= step).expand(batch, beams, -1)
        else:
            is_past = (self.written(parents, step, shown)[..., None] == self._beams) & (steps <= step)[:, None]
        seen = torch.cat([self.prompt[:, None].expand(-1, beams, -1), is_past.flatten(2)], 2)
        masks = [seen]
        if self._window is not None:
            here = self.prompt.shape[1] + step
            masks.append(seen & (self._order[: seen.shape[2]] > here - self._window))
        groups = 1 if self._is_gathered else self._groups
        mask = torch.stack(masks, 1).unsqueeze(2).expand(-1, -1, groups, -1, -1)
        mask = mask.reshape(batch, len(masks), groups * beams, -1)
        return torch.where(mask, self._zero, -torch.inf)
