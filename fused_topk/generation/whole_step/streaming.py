# SPDX-License-Identifier: Apache-2.0
"""The user's streamer in a call that may run twice: by a step that is kept, and where that cannot be made without."""

from __future__ import annotations

from typing import Any


class Once:
    """Hands each piece to the user's streamer once, though a call that runs twice puts its pieces twice.

    Attributes:
        num_put: how many pieces have been put, those after a :meth:`rewind` again.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self.num_put = 0
        self._num_given = 0

    def rewind(self, number: int) -> None:
        """All pieces after the first `number` will be put again."""
        self.num_put = number

    def put(self, value: Any) -> None:
        self.num_put += 1
        if self.num_put > self._num_given:
            self._num_given = self.num_put
            self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()
