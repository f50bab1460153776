# SPDX-License-Identifier: Apache-2.0
"""Scores that a loop keeps for the user. The choice from them is fused all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Recorded(Tensor):
    """Scores [R, V] as stock operations give them, in a real tensor.

    Greedy decoding and sampling keep the tensor that they choose from. Here the choice is made from `lazy` instead. At the choice,
    or at any other operation, this becomes a plain tensor. So the user gets a plain tensor.
    """

    lazy: Any

    @staticmethod
    def of(tensor: Tensor, lazy: Any) -> Recorded:
        """The same tensor, not a copy."""
        tensor.__class__ = Recorded
        tensor.lazy = lazy  # type: ignore[attr-defined]
        return tensor  # type: ignore[return-value]

    def end(self) -> Any:
        """Becomes a plain tensor and returns `lazy`."""
        lazy = self.__dict__.pop("lazy")
        self.__class__ = Tensor  # type: ignore[assignment]
        return lazy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CHOICES and args and type(args[0]) is cls:
            return func(args[0].end(), *args[1:], **kwargs)
        # Attributes, such as the shape, change nothing.
        if func.__name__ != "__get__":
            for value in (*args, *kwargs.values()):
                if type(value) is cls:
                    value.end().dense(f"operation {func.__name__}")
        # The operation runs as on a plain tensor.
        return Tensor.__torch_function__(func, (), args, kwargs)  # type: ignore[no-untyped-call]


_CHOICES: tuple[Callable[..., Any], ...] = (torch.argmax, F.softmax)
