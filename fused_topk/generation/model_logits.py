# SPDX-License-Identifier: Apache-2.0
"""A model's logits that tell where a decoding loop takes the last of them.

At every step of a loop this code is cold, and what a tensor's subclass costs to make and to drop is most of it: so there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from .stand_in import StandIn


def _as_plain(
    func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    return Tensor.__torch_function__(func, (), args, kwargs)  # type: ignore[no-untyped-call]


class Loop(Protocol):
    """The decoding loop that the logits are for."""

    def is_in(self, frame: FrameType) -> bool:
        """Whether it is the loop's function: others may look at the logits before it does."""
        raise NotImplementedError

    def take(self, rows: Tensor, of: Tensor) -> Any:
        """What the loop computes on, for the last rows [R, V] of the logits."""
        raise NotImplementedError


class ModelLogits(Tensor):
    """The logits [R, length, V] that a model has returned to a loop: a real tensor, every operation on which gives plain
    tensors. Where the loop takes the last rows [R, V], it gets a stand-in, which becomes what `loop.take(rows, these logits)`
    gives where it is taken in float32. From then on this is a plain tensor, whoever keeps it.
    """

    # The same under a private name of torch, by which its C++ code knows it and saves the call.
    __torch_function__: Any = getattr(torch._C, "_disabled_torch_function_impl", staticmethod(_as_plain))

    loop: Loop

    @staticmethod
    def of(logits: Tensor, loop: Loop) -> ModelLogits:
        """The same values, in a tensor that others do not have."""
        marked = logits.as_subclass(ModelLogits)
        marked.loop = loop
        return marked

    def __getitem__(self, index: Any) -> Any:
        # Only with the types known: a tensor in an index compares elementwise.
        is_simple = type(index) is tuple and len(index) in (2, 3) and type(index[1]) is int and type(index[0]) is slice
        if not is_simple or (len(index) == 3 and type(index[2]) is not slice) or index not in _LAST:
            return super().__getitem__(index)
        loop = self.loop
        if not loop.is_in(sys._getframe(1)):
            return super().__getitem__(index)
        del self.loop
        self.__class__ = Tensor  # type: ignore[assignment]
        # Half the time of indexing.
        return _LastLogits(self.select(1, -1), self, loop)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied: Tensor = self.as_subclass(Tensor).__deepcopy__(memo)  # type: ignore[no-untyped-call]
        return copied


# Those of x[:, -1] and x[:, -1, :].
_LAST = ((slice(None), -1), (slice(None), -1, slice(None)))


class _LastLogits(StandIn):
    """The last of them, [R, V], as the model computed them."""

    __slots__ = ("_loop", "_of", "_rows")

    def __init__(self, rows: Tensor, of: Tensor, loop: Loop) -> None:
        self._rows = rows
        self._of = of
        self._loop = loop

    def dense(self, reason: str) -> Tensor:
        return self._rows

    def to(self, *args: Any, **kwargs: Any) -> Any:
        rows = self._rows
        # As all loops write it, with keywords.
        if args or kwargs.get("dtype") is not torch.float32 or kwargs.get("copy") is not True:
            return rows.to(*args, **kwargs)
        device = kwargs.get("device")
        return self._loop.take(rows if device is None or device == rows.device else rows.to(device), self._of)


# By its id, the code of functions that are_of_a_loop; kept, so that the id is not another's. Codes compare by all their bytes.
_codes: dict[int, CodeType] = {}


def is_of_a_loop(frame: FrameType) -> bool:
    """Whether a function of transformers is in the frame that runs a decoding loop, or a part of one: they are given a
    `generation_config`. What users write, or transformers' processors and criteria, which loops call, is not.
    """
    code = frame.f_code
    if id(code) in _codes:
        return True
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    is_own = str(frame.f_globals.get("__name__")).startswith("transformers.") and "generation_config" in parameters
    if is_own:
        _codes[id(code)] = code
    return is_own


def variables(frame: FrameType) -> dict[str, Any]:
    """The local variables of the function in the frame."""
    found = frame.f_locals
    copied = dict(found)
    # Before Python 3.13 a copy, which the frame keeps, and with it the tensors that the function drops.
    if type(found) is dict:
        found.clear()
    return copied
