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
    """The logits [R, length, V] that a model has returned. Where a loop takes the last rows [R, V] in float32, it gets
    what `on_last(rows, these logits)` makes of them.

    At every step of a decoding loop all of this code is cold: it is short, and calls little.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    on_last: Callable[[Tensor, Tensor], Any]

    def __getitem__(self, index: Any) -> Tensor:
        # Only with the types known: a tensor in an index compares elementwise.
        is_simple = type(index) is tuple and len(index) in (2, 3) and type(index[1]) is int and type(index[0]) is slice
        if not is_simple or (len(index) == 3 and type(index[2]) is not slice) or index not in _LAST:
            return super().__getitem__(index)
        # Half the time of indexing.
        rows = self.select(1, -1)
        last = rows.as_subclass(_LastLogits)
        last.rows = rows
        last.of = self
        return last


class _LastLogits(Tensor):
    """The last of them, [R, V], as the model computed them."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    rows: Tensor
    of: ModelLogits

    def to(self, *args: Any, **kwargs: Any) -> Any:
        # As all loops write it, with keywords.
        if args or kwargs.get("dtype") is not torch.float32 or kwargs.get("copy") is not True:
            return super().to(*args, **kwargs)
        device = kwargs.get("device")
        rows = self.rows
        return self.of.on_last(rows if device is None or device == rows.device else rows.to(device), self.of)


# Those of x[:, -1] and x[:, -1, :].
_LAST = ((slice(None), -1), (slice(None), -1, slice(None)))
