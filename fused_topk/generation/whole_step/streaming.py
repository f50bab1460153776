# SPDX-License-Identifier: Apache-2.0
"""The user's streamer in a call that may run twice: in whole steps, and if these decline, in transformers' loop."""

from __future__ import annotations

from typing import Any

from transformers.generation.streamers import BaseStreamer


class Once(BaseStreamer):
    """Hands each piece to the user's streamer once, though a call that runs twice puts its pieces twice, from the first one on.

    Until :meth:`open` it only keeps the pieces.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._pieces: list[Any] = []
        self._num_given = 0
        self._is_open = False

    @property
    def num_put(self) -> int:
        return len(self._pieces)

    def rewind(self, number: int) -> bool:
        """Drops all pieces after the first `number`, which will be put again. Returns whether the user has seen one of them."""
        del self._pieces[number:]
        return self._num_given > number

    def open(self) -> None:
        """From now on the user gets the pieces, those that have been put before first."""
        self._is_open = True
        for piece in self._pieces[self._num_given :]:
            self._streamer.put(piece)
        self._num_given = max(self._num_given, len(self._pieces))

    def put(self, value: Any) -> None:
        self._pieces.append(value)
        if self._is_open:
            self.open()

    def restart(self) -> None:
        """The call runs again from its beginning. The user gets the pieces that are new."""
        self._pieces.clear()
        self._is_open = True

    def end(self) -> None:
        self._streamer.end()
