# SPDX-License-Identifier: Apache-2.0
"""Logits of which each process of a group has some columns, in one tensor object that stands for all of them.

The decoding loop chooses tokens from the columns (:mod:`sharded_rows`). For any other use the whole logits are gathered. A
gather is a collective, so all processes of the group must take part. They do: all run the same Python on the same tokens, and
decide from values that are the same on all of them (:mod:`sharded_head`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...distributed.collective import all_gather
from ..statistics import count_gathered


class Columns(NamedTuple):
    """The columns of this process. All processes but the last ones have `block` of them."""

    group: Any
    processes: int
    start: int
    length: int
    block: int
    vocab_size: int

    @staticmethod
    def of(group: Any, rank: int, processes: int, vocab_size: int) -> Columns:
        """The columns of a rank, cut as DTensor and torch.chunk cut a dimension."""
        block = -(-vocab_size // processes)
        start = min(rank * block, vocab_size)
        return Columns(group, processes, start, min(block, vocab_size - start), block, vocab_size)

    def gathered(self, local: Tensor) -> Tensor:
        """The whole tensor (..., V), of which each process has the columns (..., length). A collective."""
        padded = torch.nn.functional.pad(local, (0, self.block - self.length)).contiguous()
        everywhere = all_gather(padded.view(1, -1), self.group).view(self.processes, *padded.shape)
        return everywhere.movedim(0, -2).flatten(-2)[..., : self.vocab_size]


class Taker(Protocol):
    """The decoding loop that the logits are for."""

    def taken(self, logits: ShardedLogits, index: Any, frame: FrameType) -> Any:
        """What the function in the frame gets by that index, if it is the loop and takes the last rows; else None."""
        raise NotImplementedError


class ShardedLogits(Tensor):
    """Logits [R, length, V], or the last of them [R, V].

    It has the shape, dtype and device of the whole tensor, and no memory. What a model does to logits element by element, such
    as a soft cap, is done to the columns. Every other operation runs on the whole tensor.
    """

    local: Tensor  # (..., length of the columns)
    columns: Columns
    # The decoding loop that the logits are for, once the model has returned them.
    loop: Taker | None
    _whole: Tensor | None

    @staticmethod
    def of(local: Tensor, columns: Columns) -> ShardedLogits:
        # An operation that reads the memory by mistake finds NaN.
        nothing = torch.full((), torch.nan, dtype=local.dtype, device=local.device)
        logits = nothing.expand(*local.shape[:-1], columns.vocab_size).as_subclass(ShardedLogits)
        logits.local, logits.columns = local, columns
        logits.loop = logits._whole = None
        return logits

    @property
    def is_gathered(self) -> bool:
        return self._whole is not None

    def whole(self, reason: str) -> Tensor:
        """The whole logits. The same tensor each time, so that a change in place is a change of the logits. The first time a collective.

        Args:
            reason: why they are gathered, for :func:`stats`.
        """
        if self._whole is None:
            count_gathered(reason)
            self._whole = self.columns.gathered(self.local)
        return self._whole

    def last(self) -> ShardedLogits:
        """The last logits [R, V] of each text."""
        logits = ShardedLogits.of(self.local.select(1, -1), self.columns)
        if self._whole is not None:
            logits._whole = self._whole.select(1, -1)
        return logits

    def __getitem__(self, index: Any) -> Any:
        is_open = self.loop is not None and not self.is_gathered
        taken = self.loop.taken(self, index, sys._getframe(1)) if is_open else None  # type: ignore[union-attr]
        if taken is None:
            return super().__getitem__(index)
        self.loop = None
        return taken

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            # An attribute, such as the shape.
            name = getattr(func.__self__, "__name__", name)
            if name in _ATTRIBUTES:
                return Tensor.__torch_function__(func, (), args, kwargs)  # type: ignore[no-untyped-call]
        elif func in _OF_THE_SHAPE:
            return Tensor.__torch_function__(func, (), args, kwargs)  # type: ignore[no-untyped-call]
        elif func in _ELEMENTWISE and not kwargs and type(args[0]) is cls and not args[0].is_gathered:
            logits, *rest = args
            if all(isinstance(x, (int, float, torch.dtype)) for x in rest):
                return ShardedLogits.of(func(logits.local, *rest), logits.columns)
        reason = f"operation {name} on the logits of a tensor-parallel model"
        return func(*_whole(args, reason), **_whole(kwargs, reason))


def _whole(value: Any, reason: str) -> Any:
    if isinstance(value, ShardedLogits):
        return value.whole(reason)
    if isinstance(value, dict):
        return {key: _whole(each, reason) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_whole(each, reason) for each in value)
    return value


def _named(owners: Sequence[Any], names: str) -> frozenset[Any]:
    found = (getattr(owner, name, None) for owner in owners for name in names.split())
    # Of the two owners torch.float is a dtype, and Tensor.float a method.
    return frozenset(each for each in found if callable(each))


_ATTRIBUTES = frozenset({"device", "dtype", "is_cpu", "is_cuda", "is_meta", "layout", "ndim", "requires_grad", "shape"})
_OF_THE_SHAPE = _named((torch, Tensor), "size dim numel __len__ is_floating_point")
# Operations that act on each element by itself, if their further arguments are numbers.
_ELEMENTWISE = _named(
    (torch, Tensor), "tanh mul div true_divide add sub clamp float half bfloat16 to __rmul__ __truediv__ __div__"
)
