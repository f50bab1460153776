# SPDX-License-Identifier: Apache-2.0
"""A user's streamer of a call that may run twice: as whole steps, and if those decline, as it would have without."""

from __future__ import annotations

from typing import Any

from transformers.generation.streamers import BaseStreamer


class Once(BaseStreamer):
    """Hands on to the user's streamer what it has not handed on before, from :meth:`open` on.

    A call that runs again gives the same pieces again, from its first one on.
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
        """The pieces after so many come again. Whether the user has seen one of them."""
        del self._pieces[number:]
        return self._num_given > number

    def open(self) -> None:
        """The call is served: what has been put may be seen."""
        self._is_open = True
        for piece in self._pieces[self._num_given :]:
            self._streamer.put(piece)
        self._num_given = max(self._num_given, len(self._pieces))

    def put(self, value: Any) -> None:
        self._pieces.append(value)
        if self._is_open:
            self.open()

    def restart(self) -> None:
        """The call runs again, and is served."""
        self._pieces.clear()
        self._is_open = True

    def end(self) -> None:
        self._streamer.end()
