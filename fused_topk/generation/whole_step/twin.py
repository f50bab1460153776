# SPDX-License-Identifier: Apache-2.0
"""The twin of a model: a second one with the same weights and our attention. The user's model stays as it is.

The twin's modules are copies. The copies share all parameters and buffers. Only the configuration and the submodule tables are
their own. So other threads that run the first meanwhile do not see our attention, and neither does anybody after an exception.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def twin_of(
    model: Any, attention: str | None, state_of: Callable[[Any], dict[str, Any]], is_steady: bool = True
) -> Any:
    """The twin of a model.

    Args:
        attention: the name of its attention implementation; None for that of the model.
        state_of: gives the attributes of a module, without what is not to be copied.
        is_steady: whether rotary embeddings stay as they are for short texts.
    """
    # One copy of a configuration, and of each that is a part of it, for all modules that share it.
    configs: dict[int, Any] = {}
    modules: dict[int, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        twin: nn.Module = modules.get(id(module)) or object.__new__(type(module))
        if id(module) in modules:
            return twin
        modules[id(module)] = twin
        twin.__dict__.update(state_of(module))
        # A forward method among a module's attributes would be bound to the first module: see reasons.of_model.
        twin.__dict__.pop("forward", None)
        config = twin.__dict__.get("config")
        if config is not None:
            twin.__dict__["config"] = copy.deepcopy(config, configs)
        twin.__dict__["_modules"] = {
            name: child if child is None else copied(child) for name, child in module._modules.items()
        }
        return twin

    twin = copied(model)
    for module in modules.values():
        _part_rotary(module, is_steady)
    if attention is not None:
        _set_attention(twin, attention)
    return twin


def _part_rotary(module: nn.Module, is_steady: bool) -> None:
    """Gives rotary embeddings that change with the length of texts numbers of their own, since they write to them.

    Steady ones stay as they are for short texts. Else they ask the device, at each step, how long texts are.
    :func:`reasons.steady_length` says which texts are short.
    """
    state = vars(module)
    if state.get("rope_type") not in ("dynamic", "longrope"):
        return
    of_short: Any = module.inv_freq
    if is_steady:
        # As transformers has it: the first kind keeps what it has until it has been changed for a long text.
        if state["rope_type"] == "longrope" or module.max_seq_len_cached != module.original_max_seq_len:
            of_short = module.original_inv_freq
        state["rope_type"] = "default"
    state["_buffers"] = {**state["_buffers"], "inv_freq": of_short.to(module.inv_freq.device, copy=True)}


def _set_attention(twin: Any, attention: str) -> None:
    text = text_config(twin.config)
    if text is twin.config:
        twin.set_attn_implementation(attention)
        return
    # Of the text alone: what reads images keeps its own. A part may have a configuration of its own that is equal.
    configs = [getattr(module, "config", None) for module in twin.modules()]
    for config in [text, *(each for each in configs if type(each) is type(text))]:
        config._attn_implementation = attention


def text_config(config: Any) -> Any:
    """The configuration of what reads and writes text: of a multimodal model a part."""
    return config if config.is_encoder_decoder else config.get_text_config(decoder=True)


class Snapshot:
    """What a model was made of when its twin was: classes, attributes, parts, and weights but for their numbers.

    Containers and configurations are looked into, as deep as they go: they may be changed in place.
    """

    def __init__(self, model: nn.Module, skipped: frozenset[str]) -> None:
        """Args: skipped: attributes that do not count, of the model and of parts of it that can generate by themselves."""
        # The model itself is not held here: it goes without a collection of garbage where nothing else refers to it.
        self._look = _look_at(model, skipped)
        self._parts = self._look(model)
        self._held: list[tuple[_Look, Any, tuple[Any, ...]]] = []
        self._tensors: list[Tensor] = []
        # Those of which the processes of a group have a part each.
        self._spread: list[Any] = []
        kinds, known = {type(model)}, {id(model)}
        pending = [*_looks(model, self._parts, skipped)]
        while pending:
            look, part = pending.pop()
            if id(part) in known:
                continue
            known.add(id(part))
            if look is not None:
                parts = look(part)
                self._held.append((look, part, parts))
                pending += _looks(part, parts, skipped)
                kinds.add(type(part))
            elif type(part) in (Tensor, nn.Parameter) and part.layout is torch.strided and not part.is_nested:
                self._tensors.append(part)
            elif hasattr(part, "_local_tensor"):
                self._spread.append(part)
        self._layouts = self._all_layouts()
        self._kinds = [kind for kind in kinds if issubclass(kind, nn.Module)]
        self._forwards = self._defined_forwards()

    def is_of(self, model: nn.Module) -> bool:
        try:
            return (
                _are_same(self._look(model), self._parts)
                and all(_are_same(look(part), parts) for look, part, parts in self._held)
                and self._all_layouts() == self._layouts
                and _are_same(self._defined_forwards(), self._forwards)
            )
        except KeyError:
            # An attribute has gone.
            return False

    def _all_layouts(self) -> list[tuple[Any, ...]]:
        return [*map(_layout, self._tensors), *(_layout(each._local_tensor) for each in self._spread)]

    def _defined_forwards(self) -> tuple[Any, ...]:
        """The forward methods of the modules' classes, as the classes define them."""
        return tuple(vars(base).get("forward") for kind in self._kinds for base in kind.__mro__)


# Gives the parts of something: what it holds, in its order.
_Look = Callable[[Any], tuple[Any, ...]]

_EVAL_CAPACITY = "moe_eval_capacity_token_fraction"
# Attributes of any module that are no part of it. reasons.of_model asks for hooks, and about a forward method.
# Nor is what models of Qwen-VL's kind keep of the last prompt.
_NO_PARTS = frozenset({*vars(nn.Module()), "forward", "rope_deltas"}) - {"training"}


def _looks(holder: Any, parts: tuple[Any, ...], skipped: frozenset[str]) -> Iterator[tuple[_Look | None, Any]]:
    """The parts, each with what gives the parts of it; None for what has none, or is not looked into."""
    for part in parts:
        look: _Look | None = None
        if isinstance(part, nn.Module):
            # A ScriptModule has no such attributes.
            own = skipped if isinstance(part, GenerationMixin) else frozenset()
            look = _look_at(part, own) if "_modules" in vars(part) else None
        elif isinstance(part, dict):
            look = _of_dict
        elif isinstance(part, (list, tuple, set, frozenset, deque)):
            look = tuple
        elif hasattr(part, "__dict__") and (isinstance(part, PretrainedConfig) or is_dataclass(type(part))):
            look = _of_config
        yield look, part
    # The twin has a copy of it, whatever it is.
    config = vars(holder).get("config") if isinstance(holder, nn.Module) else None
    if hasattr(config, "__dict__"):
        yield _of_config, config


def _look_at(module: nn.Module, skipped: frozenset[str]) -> _Look:
    state = vars(module)
    # NLLB-MoE's routers count it anew in each pass.
    counted = {"expert_capacity"} if _EVAL_CAPACITY in state else set()
    names = [name for name in state if name not in _NO_PARTS and name not in skipped and name not in counted]
    # Of one name it would give no tuple.
    return functools.partial(_of_module, operator.itemgetter("training", *names), skipped)


def _of_module(attributes: _Look, skipped: frozenset[str], module: nn.Module) -> tuple[Any, ...]:
    # This runs for each module in each call of generate(): 0.7 us.
    state = module.__dict__
    # All of the attributes that there were, and their number: no other one has come.
    number = len(state) - ("forward" in state) - ("rope_deltas" in state)
    for name in skipped:
        number -= name in state
    tables = state["_modules"], state["_parameters"], state["_buffers"]
    own = attributes(state)
    return (type(module), number, *own, *tables[0].values(), *tables[1].values(), *tables[2].values())


def _of_dict(holder: dict[Any, Any]) -> tuple[Any, ...]:
    return (*dict.keys(holder), *dict.values(holder))


def _of_config(config: Any) -> tuple[Any, ...]:
    attention = getattr(config, "_attn_implementation", None)
    function = ALL_ATTENTION_FUNCTIONS.get(attention) if isinstance(attention, str) else None
    return (*_of_dict(vars(config)), function)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    # A captured graph reads weights at their addresses; all else asks for these at each call.
    address = tensor.data_ptr() if tensor.is_cuda else None
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), address


def _are_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and (all(map(operator.is_, one, other)) or all(map(_is_same, one, other)))


def _is_same(one: Any, other: Any) -> bool:
    # Numbers and names that compare equal do the same, whether or not they are one object.
    return one is other or (type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other)
