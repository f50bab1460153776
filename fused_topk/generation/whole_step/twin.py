# SPDX-License-Identifier: Apache-2.0
"""The twin of a model: a second model with the same weights and our attention. The user's model stays as it is.

The twin's modules are copies that share all parameters and buffers with the model. Only configurations and tables of submodules are
their own. So other threads that run the model at the same time do not see our attention, and it is not left behind after an
exception.
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
        attention: the name of the twin's attention implementation; None for that of the model.
        state_of: gives the attributes of a module that are to be copied.
        is_steady: whether rotary embeddings stay as they are for short texts: see :func:`_part_rotary`.
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
        # A forward method among a module's attributes would be bound to the model's module: see reasons.of_model.
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
    """Gives rotary embeddings that change with the length of texts a copy of their numbers, because they write to them.

    If `is_steady`, they stay as they are for short texts. Else they ask the device at each step how long texts are.
    :func:`reasons.steady_length` says which texts are short.
    """
    state = vars(module)
    if state.get("rope_type") not in ("dynamic", "longrope"):
        return
    of_short: Any = module.inv_freq
    if is_steady:
        # As in transformers, numbers of the kind `dynamic` are restored only after they have been changed for a long text.
        if state["rope_type"] == "longrope" or module.max_seq_len_cached != module.original_max_seq_len:
            of_short = module.original_inv_freq
        state["rope_type"] = "default"
    state["_buffers"] = {**state["_buffers"], "inv_freq": of_short.to(module.inv_freq.device, copy=True)}


def _set_attention(twin: Any, attention: str) -> None:
    text = text_config(twin.config)
    if text is twin.config:
        twin.set_attn_implementation(attention)
        return
    # Only the part for text gets our attention. A module may have a copy of that part's configuration.
    configs = [getattr(module, "config", None) for module in twin.modules()]
    for config in [text, *(each for each in configs if type(each) is type(text))]:
        config._attn_implementation = attention


def text_config(config: Any) -> Any:
    """The configuration of the part that reads and writes text. Only a multimodal model has other parts."""
    return config if config.is_encoder_decoder else config.get_text_config(decoder=True)


class Snapshot:
    """What a model consisted of when its twin was made: classes, attributes, parts, and weights without their values.

    The contents of containers and configurations are looked at, too, at any depth, because they may be changed in place.
    """

    def __init__(self, model: nn.Module, skipped: frozenset[str]) -> None:
        """Args: skipped: attributes that do not count, of the model and of parts of it that can generate by themselves."""
        # The model itself is not held here: so it is freed without the garbage collector where nothing else refers to it.
        self._look = _look_at(model, skipped)
        self._parts = self._look(model)
        self._held: list[tuple[_Look, Any, tuple[Any, ...]]] = []
        self._tensors: list[Tensor] = []
        # The tensors that are spread over processes.
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


# Gives the parts of an object: all that it holds, in order.
_Look = Callable[[Any], tuple[Any, ...]]

_EVAL_CAPACITY = "moe_eval_capacity_token_fraction"
# Attributes of a module that are not looked at. reasons.of_model looks for hooks and replaced forward methods. `rope_deltas` is what
# models such as Qwen-VL keep of the last prompt.
_NO_PARTS = frozenset({*vars(nn.Module()), "forward", "rope_deltas"}) - {"training"}


def _looks(holder: Any, parts: tuple[Any, ...], skipped: frozenset[str]) -> Iterator[tuple[_Look | None, Any]]:
    """The parts, each with a function that gives its own parts; None for one that has none, or is not looked into."""
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
    # The twin has a copy of the configuration, whatever its class.
    config = vars(holder).get("config") if isinstance(holder, nn.Module) else None
    if hasattr(config, "__dict__"):
        yield _of_config, config


def _look_at(module: nn.Module, skipped: frozenset[str]) -> _Look:
    state = vars(module)
    # NLLB-MoE's routers set this attribute anew in each pass.
    counted = {"expert_capacity"} if _EVAL_CAPACITY in state else set()
    names = [name for name in state if name not in _NO_PARTS and name not in skipped and name not in counted]
    # itemgetter() of a single name gives no tuple. So `training`, which is among the names, is there once more.
    return functools.partial(_of_module, operator.itemgetter("training", *names), skipped)


def _of_module(attributes: _Look, skipped: frozenset[str], module: nn.Module) -> tuple[Any, ...]:
    # This runs for each module in each call of generate(): 0.7 us.
    state = module.__dict__
    # The number of attributes shows whether there is a new one.
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
    # A captured graph reads weights at their old addresses. All other code looks the addresses up in each call.
    address = tensor.data_ptr() if tensor.is_cuda else None
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), address


def _are_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and (all(map(operator.is_, one, other)) or all(map(_is_same, one, other)))


def _is_same(one: Any, other: Any) -> bool:
    # Numbers and names that compare equal do the same, whether or not they are one object.
    return one is other or (type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other)
