# SPDX-License-Identifier: Apache-2.0
"""A model's logits that notice when a decoding loop takes the last row of each text.

There is one tensor subclass here and no more: to make and drop one costs most of this code's time at every step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from .stand_in import StandIn


def _as_plain(
    func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    return Tensor.__torch_function__(func, (), args, kwargs)  # type: ignore[no-untyped-call]


class StockLoop(Protocol):
    """The decoding loop that the logits are for."""

    def is_in(self, frame: FrameType) -> bool:
        """Whether the frame is the loop's own function. Other functions may look at the logits before it does."""
        raise NotImplementedError

    def take(self, rows: Tensor, of: Tensor) -> Any:
        """What the loop is to compute on in place of the last rows [R, V] of the logits `of`."""
        raise NotImplementedError


class ModelLogits(Tensor):
    """The logits [R, length, V] that a model has returned to a loop. A real tensor: every operation on it gives plain tensors.

    A loop takes the last rows [R, V] and converts them to float32. It then gets `loop.take(rows, these logits)`, by way of a
    stand-in. From then on this is a plain tensor, whoever keeps it.
    """

    # torch has a private function that does the same. Its C++ code recognises that function and saves the call.
    __torch_function__: Any = getattr(torch._C, "_disabled_torch_function_impl", staticmethod(_as_plain))

    loop: StockLoop

    @staticmethod
    def of(logits: Tensor, loop: StockLoop) -> ModelLogits:
        """The same values in a new tensor object, which nobody else holds."""
        marked = logits.as_subclass(ModelLogits)
        marked.loop = loop
        return marked

    def __getitem__(self, index: Any) -> Any:
        if not is_of_last(index):
            return super().__getitem__(index)
        loop = self.loop
        if not loop.is_in(sys._getframe(1)):
            return super().__getitem__(index)
        del self.loop
        self.__class__ = Tensor  # type: ignore[assignment]
        # select() takes half the time of indexing.
        return LastLogits(self.select(1, -1), self, loop)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied: Tensor = self.as_subclass(Tensor).__deepcopy__(memo)  # type: ignore[no-untyped-call]
        return copied


# The indices of x[:, -1] and x[:, -1, :].
_LAST = ((slice(None), -1), (slice(None), -1, slice(None)))


def is_of_last(index: Any) -> bool:
    """Whether a loop takes the last row of each text by that index."""
    # `in` compares, and a tensor in an index would compare elementwise. So the types come first.
    is_simple = type(index) is tuple and len(index) in (2, 3) and type(index[1]) is int and type(index[0]) is slice
    return is_simple and (len(index) == 2 or type(index[2]) is slice) and index in _LAST


class LastLogits(StandIn):
    """The last rows [R, V] of the logits, as the model computed them."""

    __slots__ = ("_loop", "_of", "_rows")

    def __init__(self, rows: Tensor, of: Tensor, loop: StockLoop) -> None:
        self._rows = rows
        self._of = of
        self._loop = loop

    def dense(self, reason: str) -> Tensor:
        return self._rows

    def to(self, *args: Any, **kwargs: Any) -> Any:
        rows = self._rows
        # All loops of transformers write .to(copy=True, dtype=torch.float32, device=...).
        if args or kwargs.get("dtype") is not torch.float32 or kwargs.get("copy") is not True:
            return rows.to(*args, **kwargs)
        device = kwargs.get("device")
        return self._loop.take(rows if device is None or device == rows.device else rows.to(device), self._of)
