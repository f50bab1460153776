# SPDX-License-Identifier: Apache-2.0
"""Room for new tokens, which grows as a text does: a step costs what its text is long, whatever length a call allows.

Sizes of steps that are kept double, so that few are made: on a GPU each is captured, for which it takes 0.1 to 0.2 s. Other steps
take little more than they need: transformers' loop has no room at all, and copies the cache at every token. They hold no more than it
does (:meth:`Decoder.spare_room`), and have no room while they read the prompt, when most is held.
"""

from __future__ import annotations

# New tokens that there is room for at first. A guess: attention to the places of 64 tokens of few beams is a small part of a
# step, and most texts that end soon end within them.
FIRST = 64
# By how much it grows where nothing is kept, at most. By 1 takes 1 to 5 % more of a step.
MORE = 16


def rounded_up(length: int, least: int = 16) -> int:
    """The length rounded up to 16, 24, 32, 48, 64, and so on: to less than half as much again, from 16 on.

    Args:
        least: the first of them, a power of two.
    """
    size = least
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def at_first(most: int, is_kept: bool) -> int:
    """Room for how many tokens a call of at most `most` begins with: the first one is not read before there is a second."""
    return min(FIRST, most) if is_kept else 1


def after(size: int, most: int, spare: int | None) -> int:
    """What follows the room for `size` tokens, where that is full.

    Args:
        spare: how many tokens there may be room for besides the next one; None in a step that is kept.
    """
    return min(2 * size if spare is None else size + min(1 + spare, MORE), most)
