# SPDX-License-Identifier: Apache-2.0
"""Objects that stand in for a tensor in a decoding loop. At an operation that they do not know, they become the tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class StandIn:
    """Can become a tensor. An operation that a subclass does not define runs on that tensor."""

    __slots__ = ()
    # As with a tensor, an operation of a NumPy scalar and this object is this object's.
    __array_priority__ = Tensor.__array_priority__

    def dense(self, reason: str) -> Tensor:
        """The tensor. reason: the operation that needs it."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dense(f"Tensor.{name}"), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reason = f"operation {getattr(func, '__name__', func)}"
        return func(*_dense(args, reason), **_dense(kwargs or {}, reason))


def _dense(value: Any, reason: str) -> Any:
    if isinstance(value, StandIn):
        return value.dense(reason)
    if isinstance(value, dict):
        return {key: _dense(each, reason) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_dense(each, reason) for each in value)
    return value


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: StandIn, *args: Any, **kwargs: Any) -> Any:
        reason = f"operation {name}"
        return getattr(self.dense(reason), name)(*_dense(args, reason), **kwargs)

    operate.__name__ = name
    return operate


# Python looks operators up on the class, where __getattr__ does not see them.
_OPERATORS = (
    "__len__ __getitem__ __setitem__ __delitem__ __iter__ __reversed__ __contains__ __array__ __array_wrap__",
    "__bool__ __float__ __int__ __complex__ __index__ __neg__ __pos__ __abs__ __invert__",
    "__lt__ __le__ __gt__ __ge__ __eq__ __ne__",
    *(
        f"__{name}__ __r{name}__ __i{name}__"
        for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
    ),
    "__matmul__ __rmatmul__",
    # A copy is a copy of the tensor.
    "__reduce_ex__",
)
for _name in " ".join(_OPERATORS).split():
    setattr(StandIn, _name, _operator(_name))
StandIn.__hash__ = object.__hash__  # type: ignore[method-assign]
