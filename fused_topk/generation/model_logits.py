# SPDX-License-Identifier: Apache-2.0
"""A model's logits that tell where a decoding loop takes the last of them.

At every step of a loop this code is cold, and what a tensor's subclass costs to make and to drop is most of it: so there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .stand_in import StandIn


def _as_plain(
    func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    return Tensor.__torch_function__(func, (), args, kwargs)  # type: ignore[no-untyped-call]


class ModelLogits(Tensor):
    """The logits [R, length, V] that a model has returned: a real tensor, every operation on which gives plain tensors. Where
    a loop takes the last rows [R, V] in float32, it gets what `on_last(rows, these logits)` makes of them.
    """

    # The same under a private name of torch, by which its C++ code knows it and saves the call.
    __torch_function__: Any = getattr(torch._C, "_disabled_torch_function_impl", staticmethod(_as_plain))

    on_last: Callable[[Tensor, Tensor], Any]

    def __getitem__(self, index: Any) -> Any:
        # Only with the types known: a tensor in an index compares elementwise.
        is_simple = type(index) is tuple and len(index) in (2, 3) and type(index[1]) is int and type(index[0]) is slice
        if not is_simple or (len(index) == 3 and type(index[2]) is not slice) or index not in _LAST:
            return super().__getitem__(index)
        # Half the time of indexing.
        return _LastLogits(self.select(1, -1), self)


# Those of x[:, -1] and x[:, -1, :].
_LAST = ((slice(None), -1), (slice(None), -1, slice(None)))


class _LastLogits(StandIn):
    """The last of them, [R, V], as the model computed them."""

    __slots__ = ("_of", "_rows")

    def __init__(self, rows: Tensor, of: ModelLogits) -> None:
        self._rows = rows
        self._of = of

    def dense(self, reason: str) -> Tensor:
        return self._rows

    def to(self, *args: Any, **kwargs: Any) -> Any:
        rows = self._rows
        # As all loops write it, with keywords.
        if args or kwargs.get("dtype") is not torch.float32 or kwargs.get("copy") is not True:
            return rows.to(*args, **kwargs)
        device = kwargs.get("device")
        return self._of.on_last(rows if device is None or device == rows.device else rows.to(device), self._of)
