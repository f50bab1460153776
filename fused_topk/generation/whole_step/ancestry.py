# SPDX-License-Identifier: Apache-2.0
"""Which places of the cache are a beam's past, as a table of its ancestors says.

There are two ways. On most GPUs attention reads the table itself (:class:`Table`). Elsewhere each beam looks at the places of all
beams of its sequence, and a mask says which of them are its own (:class:`Mask`). It grows with beams * beams * new tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Table:
    """Makes what attention reads in the place of a mask: integers that say of each beam which places are its past.

    Args:
        prompt: bool [batch, prompt], False where it is padding. It may change between prompts.
    """

    def __init__(self, prompt: Tensor, beams: int) -> None:
        batch, places = prompt.shape
        self._prompt = prompt
        self._beams = beams
        # The bits of the prompt, 32 a word, and before them how many places it has.
        self.of_prompt = prompt.new_full((batch, 1, 1, 1 + -(-places // 32)), places, dtype=torch.int32)

    def begin(self) -> None:
        """Reads which places of the prompt are padding."""
        words = self.of_prompt[:, 0, 0, 1:]
        padded = torch.nn.functional.pad(self._prompt, (0, 32 * words.shape[1] - self._prompt.shape[1]))
        bits = torch.arange(32, device=padded.device)
        words.copy_((padded.unflatten(1, (-1, 32)).long() << bits).sum(-1))  # type: ignore[no-untyped-call]

    def __call__(self, parents: Tensor | None, step: Tensor, shown: int) -> Tensor:
        """int32 [batch, 1, beams, 2 + words + shown], as csrc/attention/step_attention.cu reads it; for one beam [batch, 1, 1, 2 + words].

        Args: see :meth:`Mask.__call__`.
        """
        of_prompt = self.of_prompt.expand(-1, -1, self._beams, -1)
        written = (step + 1).to(torch.int32).expand(len(self._prompt), 1, self._beams, 1)
        parts = [of_prompt[..., :1], written, of_prompt[..., 1:]]
        if parents is not None:
            parts.append(written_places(parents, step, shown).to(torch.int32).unsqueeze(1))
        return torch.cat(parts, -1)


def written_places(parents: Tensor, step: Tensor, shown: int) -> Tensor:
    """int64 [batch, beams, shown]: the place among the beams where each new token of a beam's past was written.

    A token is written at the place of its beam at that time, which is the parent of the token after it.

    Args: see :meth:`Mask.__call__`.
    """
    is_before = torch.arange(shown, device=parents.device) < step
    own = torch.arange(parents.shape[1], device=parents.device)[:, None]
    return torch.where(is_before, parents[:, :, 1 : shown + 1], own)


class Mask:
    """Makes the attention mask of a step.

    Args:
        prompt: bool [batch, prompt], False where it is padding.
        groups: query heads to a key head.
        window: how many of the last places layers with a window look at; None where no layer has one.
    """

    def __init__(self, prompt: Tensor, beams: int, groups: int, window: int | None, dtype: torch.dtype) -> None:
        device = prompt.device
        self.prompt = prompt
        self._groups = groups
        self._window = window
        self._beams = torch.arange(beams, device=device)
        self._zero = torch.zeros((), dtype=dtype, device=device)
        # [batch, 1 or 2, 1, places], the mask of one beam.
        self._of_one = torch.empty(len(prompt), 1, 1, 0, dtype=dtype, device=device)

    def of_one_beam(self, shown: int) -> Tensor:
        """[batch, 1 or 2, 1, prompt + shown]: the mask of the step after `shown` - 1 new tokens, not fewer than in the call before. It is a
        part of one that all steps share."""
        (batch, prompt), end = self.prompt.shape, self.prompt.shape[1] + shown
        if end > self._of_one.shape[3]:
            number = 1 if self._window is None else 2
            self._of_one = self._zero.new_zeros(batch, number, 1, prompt + 2 * shown + 64)
            self._of_one[..., :prompt].masked_fill_(~self.prompt[:, None, None], -torch.inf)
        if self._window is not None and end > self._window:
            self._of_one[:, 1, :, : end - self._window] = -torch.inf
        return self._of_one[..., :end]

    def __call__(self, parents: Tensor | None, step: Tensor, shown: int) -> Tensor:
        """[batch, 1 or 2, groups * beams, places]: 0 where a beam may look, else -inf. The second mask is for layers with a window.

        Args:
            parents: int64 [batch, beams, shown + 1 or more]; parents[:, j, s + 1] is the place among the beams where
                token s of the beam that is now at j was written, for all s < step. None for one beam.
            step: int64 [1], which of the new tokens is read.
            shown: how many new tokens have places that attention looks at; more than `step`.
        """
        (batch, prompt), beams = self.prompt.shape, len(self._beams)
        steps = torch.arange(shown, device=self.prompt.device)
        if parents is None:
            is_past = (steps <= step).expand(batch, beams, -1)
        else:
            is_past = (written_places(parents, step, shown)[..., None] == self._beams) & (steps <= step)[:, None]
            # Places of a step are beside each other.
            steps = steps[:, None].expand(-1, beams).flatten()
        seen = torch.cat([self.prompt[:, None].expand(-1, beams, -1), is_past.flatten(2)], 2)
        masks = [seen]
        if self._window is not None:
            order = torch.cat([torch.arange(prompt, device=steps.device), steps + prompt])
            masks.append(seen & (order > prompt + step - self._window))
        mask = torch.stack(masks, 1).unsqueeze(2).expand(-1, -1, self._groups, -1, -1)
        mask = mask.reshape(batch, len(masks), self._groups * beams, -1)
        return torch.where(mask, self._zero, -torch.inf)
