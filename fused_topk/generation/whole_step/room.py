# SPDX-License-Identifier: Apache-2.0
"""Room for new tokens, which grows with the texts: the cost of a step depends on the length of its texts, not on what a call allows.

The room of a step that is kept doubles, so that there are few sizes: on a GPU a step is captured for each, which takes 0.1 to 0.2 s.
Other steps have little more room than they need. transformers' loop has no room at all, and copies the cache at every token. These
steps hold no more memory than it does (:meth:`Decoder.spare_room`). While they read the prompt, when a call holds most, they have no
room.
"""

from __future__ import annotations

# The number of new tokens that there is room for at first. A guess: attention to the places of 64 tokens of few beams is a small
# part of a step, and most texts that end soon have no more tokens.
FIRST = 64
# By how much the room grows at most, where steps are not kept. If it grew by 1 each time, a step would take 1 to 5 % longer.
MORE = 16


def rounded_up(length: int, least: int = 16) -> int:
    """The length rounded up to `least`, a power of two, or to 1.5, 2, 3, 4, 6, ... times that: to less than half as much again."""
    size = least
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def at_first(most: int, is_kept: bool) -> int:
    """The room that a call of at most `most` tokens begins with. Of steps that are not kept 1: that token is not read."""
    return min(FIRST, most) if is_kept else 1


def after(size: int, most: int, spare: int | None) -> int:
    """The next room, where that for `size` tokens is full. `spare` says how many tokens there may be room for beside the next one; None
    for a step that is kept."""
    return min(2 * size if spare is None else size + min(1 + spare, MORE), most)
