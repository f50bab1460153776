# SPDX-License-Identifier: Apache-2.0
"""Search without beams: the state of the texts, a row for each sequence, and what a new token makes of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .beams import Rules


class Texts(NamedTuple):
    """The state of a call between two tokens."""

    tokens: Tensor  # int64 [batch, room]
    has_ended: Tensor  # bool [batch]
    goes_on: Tensor  # bool []

    def with_room(self, room: int) -> Texts:
        return self._replace(tokens=F.pad(self.tokens, (0, room - self.tokens.shape[1])))


class TextConstants(NamedTuple):
    """What the choices of a call need on its device."""

    ends: Tensor  # of Rules.end_tokens()
    padding: Tensor  # int64 [1], the token after the end of a text
    is_padded: Tensor  # bool [1]: False where a text that has ended goes on with the others

    @staticmethod
    def of(rules: Rules, padding: int | None, device: torch.device) -> TextConstants:
        return TextConstants(
            rules.end_tokens(device),
            torch.full((1,), padding or 0, device=device),
            torch.full((1,), padding is not None, device=device),
        )


def at_first(batch: int, room: int, device: torch.device) -> Texts:
    """Before the first token. Args: room: for how many tokens there is room."""
    return Texts(
        torch.zeros(batch, room, dtype=torch.int64, device=device),
        torch.zeros(batch, dtype=torch.bool, device=device),
        torch.ones((), dtype=torch.bool, device=device),
    )


def choose_tokens(texts: Texts, constants: TextConstants, chosen: Tensor, step: Tensor, are_last: Tensor) -> Texts:
    """Goes on with the tokens `chosen` [batch].

    Args:
        step: int64 [1], which of the new tokens it is.
        are_last: bool [1] or [batch], which texts end with this token, whatever it is.
    """
    chosen = torch.where(texts.has_ended & constants.is_padded, constants.padding, chosen)
    # Not torch.isin, which for many end tokens waits for the device.
    is_end = chosen == constants.ends if len(constants.ends) == 1 else (chosen[:, None] == constants.ends).any(-1)
    has_ended = texts.has_ended | is_end | are_last
    return Texts(texts.tokens.index_copy(1, step, chosen[:, None]), has_ended, ~has_ended.all())
