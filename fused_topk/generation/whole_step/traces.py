# SPDX-License-Identifier: Apache-2.0
"""Whether a forward pass of a model leaves a trace, and a trial that leaves none.

A user's module may keep what it has seen, count its passes, treat the first pass in a way of its own, or draw. A trial on the twin would
be one of these passes, and whole steps call modules as transformers' loop does not. So such a model is not served.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .twin import is_same

# Modules of these packages are known: what they keep of a pass, as a table of positions, is made anew where it is needed.
_KNOWN = ("transformers.", "torch.", "fused_topk.")
# What operations call the share of elements that they drop.
_SHARES = ("dropout_p", "dropout")


class LeavesTraces(BaseException):
    """Raised where a forward pass leaves a trace. The message says which. No Exception, because a trial catches those of the model."""


class SameModules:
    """Whether a model still consists of the modules that it consisted of, whatever these have kept since."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = self._of(model)

    def is_of(self, model: nn.Module) -> bool:
        return self._of(model) == self._modules

    @staticmethod
    def _of(model: nn.Module) -> list[tuple[int, type, bool]]:
        return [(id(each), type(each), each.training) for each in model.modules()]


@contextmanager
def no_traces(model: nn.Module) -> Iterator[Traces]:
    """A block in which forward passes of the model's twins leave no trace in the process: not in weights, containers and generators.

    Raises:
        LeavesTraces: a forward pass in the block was about to draw or to write to a weight, or has left a trace that is undone.
    """
    traces = Traces(model)
    try:
        with _Watched(traces.storages):
            yield traces
    finally:
        found = traces.undo()
    if found is not None:
        raise LeavesTraces(found)


class Traces:
    """What could tell that a model's forward pass has run."""

    def __init__(self, model: nn.Module) -> None:
        # Each weight and buffer, and its values: a module may give the parameter others.
        self._tensors = [
            (each, each.detach(), each.data_ptr())
            for each in {id(each): each for each in (*model.parameters(), *model.buffers())}.values()
            if type(each) in (Tensor, nn.Parameter)
        ]
        self.storages = {each.untyped_storage().data_ptr() for each, *_ in self._tensors} - {0}
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []

    def watch(self, twin: nn.Module) -> None:
        """From now on the attributes of the twin's modules count. The contents of containers are those of the model itself."""
        for module in twin.modules():
            if not type(module).__module__.startswith(_KNOWN):
                state = dict(vars(module))
                self._attributes.append((module, state))
                self._contents += [
                    (each, copy.copy(each)) for each in state.values() if isinstance(each, (list, dict, set, deque))
                ]

    def undo(self) -> str | None:
        """Takes back what can be taken back. Returns what the forward pass has changed; None for nothing."""
        found = None
        for tensor, values, address in self._tensors:
            if tensor.data_ptr() != address:
                tensor.data = values
                found = "gives a weight other values"
        for container, before in self._contents:
            if not _are_same(container, before):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(before)
                found = "changes a container"
        for module, state in self._attributes:
            now = vars(module)
            changed = [name for name in {*now, *state} if not is_same(now.get(name, now), state.get(name, state))]
            if changed:
                found = f"sets {sorted(changed)[0]} of a {type(module).__name__}"
        return None if found is None else f"a forward pass that {found}"


def _are_same(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        return all(is_same(container.get(key, container), value) for key, value in before.items())
    return container == before if isinstance(container, set) else all(map(is_same, container, before))


class _Watched(TorchDispatchMode):
    """Raises where an operation of this thread would draw, or write to one of these storages.

    Generators are not compared before and after: other threads may draw at the same time.
    """

    def __init__(self, storages: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        if may_draw or func._schema.is_mutable:
            names = [each.name for each in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            # Attention and recurrences draw only where they drop something.
            shares = [given.get(name, 0.0) for name in _SHARES if name in names]
            if may_draw and (not shares or any(shares)):
                raise LeavesTraces(f"a forward pass that draws random numbers, as dropout does ({func.overloadpacket})")
            for each in func._schema.arguments:
                tensor: Any = given.get(each.name)
                is_written = each.alias_info is not None and each.alias_info.is_write
                is_tensor = is_written and type(tensor) in (Tensor, nn.Parameter)
                if is_tensor and tensor.untyped_storage().data_ptr() in self._storages:
                    raise LeavesTraces(f"a forward pass that writes to a weight or a buffer ({func.overloadpacket})")
        return func(*args, **kwargs)
