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
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attribute import KEPT


def twin_of(model: Any, attention: str | None, is_steady: bool = True) -> Any:
    """The twin of a model, with an attention implementation of that name; None for that of the model. `is_steady` says whether
    rotary embeddings stay as they are for short texts: see :func:`_part_rotary`."""
    # One copy of a configuration, and of each that is a part of it, for all modules that share it.
    configs: dict[int, Any] = {}
    modules: dict[int, nn.Module] = {}
    twin = _copied(model, modules, configs)
    for module in modules.values():
        _part_rotary(module, is_steady)
    if attention is not None:
        _set_attention(twin, attention)
    return twin


def _copied(module: nn.Module, modules: dict[int, nn.Module], configs: dict[int, Any]) -> nn.Module:
    """The twin of a module and of its submodules. `modules` has those that there are, by the id() of the model's."""
    twin: nn.Module = modules.get(id(module)) or object.__new__(type(module))
    if id(module) in modules:
        return twin
    modules[id(module)] = twin
    # A forward method among a module's attributes would be bound to the model's module: see reasons.of_model.
    twin.__dict__.update({name: each for name, each in vars(module).items() if name not in ("forward", KEPT)})
    config = twin.__dict__.get("config")
    if config is not None:
        twin.__dict__["config"] = copy.deepcopy(config, configs)
    twin.__dict__["_modules"] = {
        name: child if child is None else _copied(child, modules, configs) for name, child in module._modules.items()
    }
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

    The contents of containers and configurations are looked at, too, at any depth, because they may be changed in place. Modules and
    tensors are not held. Tensors have no weak references here, which torch.utils.swap_tensors does not allow: another one in the same
    place has another id, or as the old one is gone, the same memory and layout, and nothing that is kept depends on more.

    Args:
        forget: called once a module is gone, at any time.
    """

    def __init__(self, model: nn.Module, forget: Callable[[], object] = lambda: None) -> None:
        self._is_whole = True
        self._refs: dict[int, weakref.ref[Any]] = {}
        me = weakref.ref(self)

        def gone(_: Any) -> None:
            snapshot = me()
            if snapshot is not None and snapshot._is_whole:
                snapshot._is_whole = False
                forget()

        self._gone = gone
        names = _names_read_by(model)
        self._refs[id(model)] = weakref.ref(model, gone)
        # Each function that looks at a part, the part or a weak reference to it, and what has been found.
        self._held: list[tuple[_Look, Any, _Parts]] = []
        kinds, known = set(), set()
        pending: list[tuple[_Look | None, Any]] = [(_look_at(model, names), model)]
        while pending:
            look, part = pending.pop()
            if id(part) in known or look is None:
                continue
            known.add(id(part))
            kinds.add(type(part))
            parts = look(part)
            self._held.append((look, self._refs.get(id(part), part), self._noted(parts)))
            pending += _looks(part, parts, names)
        self._kinds = [kind for kind in kinds if issubclass(kind, nn.Module)]
        self._forwards = self._defined_forwards()

    def _noted(self, parts: tuple[Any, ...]) -> _Parts:
        values, layouts = [], []
        for number, part in enumerate(parts):
            if isinstance(part, nn.Module) and id(part) not in self._refs:
                self._refs[id(part)] = weakref.ref(part, self._gone)
            layout = _layout_of(part)
            if layout is not None:
                layouts.append((number, layout))
            values.append(_OTHER if isinstance(part, (nn.Module, Tensor)) else part)
        return _Parts(tuple(map(id, parts)), tuple(values), tuple(layouts))

    def is_of(self, model: nn.Module) -> bool:
        """Whether the model, whose snapshot this is, still consists of that."""
        if not self._is_whole or self._defined_forwards() != self._forwards:
            return False
        now = ((look, part() if isinstance(part, weakref.ref) else part, parts) for look, part, parts in self._held)
        try:
            return all(parts.are_those_of(look(part)) for look, part, parts in now)
        except (KeyError, AttributeError):
            # An attribute has gone, or, in this moment, a part.
            return False

    def _defined_forwards(self) -> tuple[Any, ...]:
        """The forward methods of the modules' classes, as the classes define them."""
        return tuple(vars(base).get("forward") for kind in self._kinds for base in kind.__mro__)


# Equal to nothing else: in the place of what is not held.
_OTHER = object()


class _Parts(NamedTuple):
    """The parts of an object when it was looked at."""

    ids: tuple[int, ...]
    values: tuple[Any, ...]  # _OTHER for modules and tensors
    layouts: tuple[tuple[int, Any], ...]  # those of tensors, by their places

    def are_those_of(self, now: tuple[Any, ...]) -> bool:
        ids = tuple(map(id, now))
        if ids != self.ids and (
            len(ids) != len(self.ids)
            or not all(
                one == other or is_same(value, part)
                for one, other, value, part in zip(ids, self.ids, self.values, now, strict=True)
            )
        ):
            return False
        return all(_layout_of(now[number]) == layout for number, layout in self.layouts)


def _names_read_by(model: nn.Module) -> frozenset[str] | None:
    """All names in the files in which the classes of a model's modules are defined. A number of another name is read by no code of these
    modules, such as a trainer's count of steps.

    None where a class is of another package than transformers and torch, or runs a function of another package: any name may be read.
    """
    kinds = {base for module in model.modules() for base in type(module).__mro__ if base is not object}
    files = {kind.__module__ for kind in kinds}
    return frozenset().union(*map(_names_in, files)) if all(map(_is_known, files)) else None


_FOLDERS = tuple(str(Path(str(package.__file__)).parent) for package in (torch, transformers))


def _is_known(file: str) -> bool:
    """Whether a module of Python runs no code but that of torch and transformers."""
    if not file.startswith(("transformers.", "torch.")) or file not in sys.modules:
        return False
    if not file.startswith("transformers.models."):
        return True
    of_file = vars(sys.modules[file])
    kinds = [each for each in of_file.values() if isinstance(each, type) and issubclass(each, nn.Module)]
    of_kinds = [each for kind in kinds if kind.__module__ == file for each in vars(kind).values()]
    # A function of another package that the file imports has its own name there.
    replaced = [each for name, each in of_file.items() if getattr(each, "__name__", name) != name]
    codes = [getattr(each, "__code__", None) for each in (*of_kinds, *replaced)]
    return all(code is None or code.co_filename.startswith(_FOLDERS) for code in codes)


@functools.cache
def _names_in(file: str) -> frozenset[str]:
    """All names and strings in the code of a module of Python."""
    loader: Any = sys.modules[file].__loader__
    found: set[str] = set()
    pending = [loader.get_code(file)]
    while pending:
        each = pending.pop()
        if isinstance(each, types.CodeType):
            found.update(each.co_names, each.co_freevars)
            pending += each.co_consts
        elif isinstance(each, (tuple, frozenset)):
            pending += each
        elif isinstance(each, str):
            found.add(each)
    return frozenset(found)


# Gives the parts of an object: all that it holds, in order.
_Look = Callable[[Any], tuple[Any, ...]]

# Attributes of what can generate that do not change what it computes, or that this package puts there.
_OF_GENERATION = frozenset({KEPT, "generation_config", "generate"})
_EVAL_CAPACITY = "moe_eval_capacity_token_fraction"
# Attributes of a module that are not looked at. reasons.of_model looks for hooks and replaced forward methods. `rope_deltas` is what
# models such as Qwen-VL keep of the last prompt.
_NO_PARTS = frozenset({*vars(nn.Module()), "forward", "rope_deltas"}) - {"training"}


def _looks(holder: Any, parts: tuple[Any, ...], names: frozenset[str] | None) -> Iterator[tuple[_Look | None, Any]]:
    """The parts, each with a function that gives its own parts; None for one that has none, or is not looked into."""
    for part in parts:
        look: _Look | None = None
        if isinstance(part, nn.Module):
            # A ScriptModule has no such attributes.
            look = _look_at(part, names) if "_modules" in vars(part) else None
        elif isinstance(part, dict):
            look = _of_dict
        elif isinstance(part, (list, tuple, set, frozenset, deque)):
            look = tuple
        elif hasattr(part, "__dict__") and (
            isinstance(part, (PretrainedConfig, types.SimpleNamespace)) or is_dataclass(type(part))
        ):
            look = _of_config
        yield look, part
    # The twin has a copy of the configuration, whatever its class.
    config = vars(holder).get("config") if isinstance(holder, nn.Module) else None
    if hasattr(config, "__dict__"):
        yield _of_config, config


def _look_at(module: nn.Module, read: frozenset[str] | None) -> _Look:
    state = vars(module)
    skipped = set(_OF_GENERATION) if isinstance(module, GenerationMixin) else set()
    if read is not None:
        skipped |= {name for name, value in state.items() if type(value) in (int, float) and name not in read}
    # NLLB-MoE's routers set this attribute anew in each pass.
    counted = {"expert_capacity"} if _EVAL_CAPACITY in state else set()
    names = [name for name in state if name not in _NO_PARTS and name not in skipped and name not in counted]
    # itemgetter() of a single name gives no tuple. So `training`, which is among the names, is there once more.
    return functools.partial(_of_module, operator.itemgetter("training", *names), skipped)


def _of_module(attributes: _Look, skipped: set[str], module: nn.Module) -> tuple[Any, ...]:
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


def _layout_of(part: Any) -> tuple[Any, ...] | None:
    """What a kept step depends on of a tensor beside its values; None for anything else."""
    # A tensor that is spread over processes has one.
    part = getattr(part, "_local_tensor", part) if isinstance(part, Tensor) else None
    # Other kinds of tensors need not have a memory.
    if type(part) not in (Tensor, nn.Parameter) or part.layout is not torch.strided or part.is_nested:
        return None
    # A captured graph reads weights at their old addresses. All other code looks the addresses up in each call.
    address = part.data_ptr() if part.is_cuda else None
    return part.dtype, part.device, part.shape, part.stride(), address


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or numbers or names that compare equal."""
    return one is other or (type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other)
