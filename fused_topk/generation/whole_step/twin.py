# SPDX-License-Identifier: Apache-2.0
"""The twin of a model: a second one with the same weights and our attention. The user's model stays as it is.

The twin's modules are copies. The copies share all parameters and buffers. Only the configuration and the submodule tables are
their own. So other threads that run the first meanwhile do not see our attention, and neither does anybody after an exception.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def twin_of(model: Any, attention: str | None, state_of_root: Callable[[Any], dict[str, Any]]) -> Any:
    """The twin of a model.

    Args:
        attention: the name of its attention implementation; None for that of the model.
        state_of_root: the attributes of the model itself, without what is not to be copied.
    """
    # One copy of a configuration, and of each that is a part of it, for all modules that share it.
    configs: dict[int, Any] = {}
    modules: dict[int, nn.Module] = {}

    def copied(module: nn.Module, state: dict[str, Any]) -> nn.Module:
        twin: nn.Module = modules.get(id(module)) or object.__new__(type(module))
        if id(module) in modules:
            return twin
        modules[id(module)] = twin
        twin.__dict__.update(state)
        # A forward method among a module's attributes would be bound to the first module: see reasons.of_model.
        twin.__dict__.pop("forward", None)
        config = state.get("config")
        if config is not None:
            twin.__dict__["config"] = copy.deepcopy(config, configs)
        twin.__dict__["_modules"] = {
            name: child if child is None else copied(child, vars(child)) for name, child in module._modules.items()
        }
        return twin

    twin = copied(model, state_of_root(model))
    if attention is not None:
        twin.set_attn_implementation(attention)  # type: ignore[operator]
    return twin


class Snapshot:
    """What a model was made of when its twin was: attributes, parts and weights."""

    def __init__(self, model: nn.Module, skipped: frozenset[str]) -> None:
        self._skipped = skipped
        self._seen = list(self._values(model))

    def is_of(self, model: nn.Module) -> bool:
        found = list(self._values(model))
        return len(found) == len(self._seen) and all(map(_are_same, found, self._seen))

    def _values(self, model: nn.Module) -> Iterator[tuple[Any, ...]]:
        configs: dict[int, Any] = {}
        for module in model.modules():
            state = vars(module)
            skipped = self._skipped if module is model else ()
            yield tuple(value for name, value in state.items() if name != "forward" and name not in skipped)
            for name in ("_modules", "_parameters", "_buffers"):
                yield tuple(state[name].values())
            if "config" in state:
                configs[id(state["config"])] = state["config"]
        for config in configs.values():
            yield tuple(vars(config).values())


def _are_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and (all(map(operator.is_, one, other)) or all(map(_is_same, one, other)))


def _is_same(one: Any, other: Any) -> bool:
    # Numbers and names that compare equal do the same, whether or not they are one object.
    return one is other or (type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other)
