# SPDX-License-Identifier: Apache-2.0
"""A model's logits that tell where a decoding loop takes the last of them.

Both classes are real tensors for whatever else is done with them, and every operation on them gives plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ModelLogits(Tensor):
    """The logits [R, length, V] that a model has returned."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _logits: Tensor
    _on_last: Callable[[Tensor], Any]

    @staticmethod
    def mark(logits: Tensor, on_last: Callable[[Tensor], Any]) -> ModelLogits:
        """The same tensor. Where a loop takes the last rows [R, V] in float32, it gets what `on_last` makes of them."""
        marked = logits.as_subclass(ModelLogits)
        marked._logits = logits
        marked._on_last = on_last
        return marked

    def __getitem__(self, index: Any) -> Tensor:
        # Half the time of indexing, at every step.
        return _LastLogits.mark(self._logits.select(1, -1), self._on_last) if _is_last(index) else self._logits[index]


class _LastLogits(Tensor):
    """The last of them, [R, V], as the model computed them."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _rows: Tensor
    _on_last: Callable[[Tensor], Any]

    @staticmethod
    def mark(rows: Tensor, on_last: Callable[[Tensor], Any]) -> _LastLogits:
        marked = rows.as_subclass(_LastLogits)
        marked._rows = rows
        marked._on_last = on_last
        return marked

    def to(self, *args: Any, **kwargs: Any) -> Any:
        # As all loops write it, with keywords.
        if args or kwargs.get("dtype") is not torch.float32 or kwargs.get("copy") is not True:
            return super().to(*args, **kwargs)
        device = kwargs.get("device")
        rows = self._rows
        return self._on_last(rows if device is None or device == rows.device else rows.to(device))


# Those of x[:, -1] and x[:, -1, :].
_LAST = ((slice(None), -1), (slice(None), -1, slice(None)))


def _is_last(index: Any) -> bool:
    # Only with the types known: a tensor in an index compares elementwise.
    is_simple = type(index) is tuple and len(index) in (2, 3) and type(index[1]) is int and type(index[0]) is slice
    return is_simple and (len(index) == 2 or type(index[2]) is slice) and index in _LAST
