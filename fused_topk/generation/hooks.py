# SPDX-License-Identifier: Apache-2.0
"""The methods and the forward hook that a model carries while its generate() calls can be fused.

Such a method does what the model's own method does, except within a call that is to be fused. So it may be wrapped again, or
kept by somebody, without harm. A model carries the methods while it is enabled, a with block is open, or a call runs. After
that they are removed without a trace. The state of a call is kept in a `calls.Call`, never in the model.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

from torch import Tensor

from ..tracing import is_traced
from .calls import COMPILED, HOOKS, KEPT, LOOKUP, METHODS, Call, after_forward, call_of, running_call
from .frames import caller_of_module
from .lm_head import sharded_head_of
from .request import Request
from .statistics import count_fallback
from .ways import run_call
from .whole_step import Asked, Loop, cache_of, decline_for, of_arguments, release, with_stop_strings

# torch's private name of a module's forward hooks. If torch changes it, hooks that a user adds later get marked logits.
_FORWARD_HOOKS = "_forward_hooks"

# The method of a tensor-parallel model's LM head that a method of ours stands in front of.
_FORWARD = "forward"

# One lock for all models. It is reentrant: the garbage collector may close a block at any line.
_lock = threading.RLock()


# The blocks that this thread or task has entered. Another thread or task may have closed some of them.
_entered: ContextVar[tuple[Request, ...]] = ContextVar("fused_topk_blocks", default=())


class Hooks:
    """The methods and the forward hook on one module that can generate."""

    def __init__(self, module: Any) -> None:
        self.enabled: Request | None = None
        self.blocks: list[Request] = []
        self.num_calls = 0
        self._module = module
        # The LM head of a tensor-parallel model, while it has a method of ours.
        self._head: Any = None
        self._handle = module.register_forward_hook(after_forward)
        self.put()

    def put(self) -> None:
        """Puts the methods in front of the module's own methods, and of any that somebody has put there since."""
        for name in METHODS:
            _put(self._module, name)
        self._put_head()

    def _put_head(self) -> None:
        head = sharded_head_of(self._module)
        if head is not self._head:
            self._leave_head()
        if head is not None:
            self._head = head
            _put(head, _FORWARD)

    def begin_call(self) -> None:
        self.num_calls += 1
        # model.compile() may have been called since.
        _put(self._module, COMPILED)
        self._put_head()
        # The hook must be the last one, so that other hooks get unmarked logits. Somebody may also have removed it.
        hooks = getattr(self._module, _FORWARD_HOOKS, None)
        if hooks is not None and self._handle.id not in hooks:
            self._handle = self._module.register_forward_hook(after_forward)
        elif hooks is not None and next(reversed(hooks)) != self._handle.id:
            hooks.move_to_end(self._handle.id)

    def remove_unused(self) -> None:
        if self.enabled is None and not self.blocks and not self.num_calls:
            self._handle.remove()
            self._leave(self._module.__dict__)
            self._leave_head()
            release(self._module)

    def _leave_head(self) -> None:
        if self._head is not None:
            _remove(self._head.__dict__, _FORWARD)
            self._head = None

    def stripped(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of the module's attributes without the hooks."""
        state = dict(state)
        self._leave(state)
        state.pop(KEPT, None)
        if _FORWARD_HOOKS in state:
            state[_FORWARD_HOOKS] = OrderedDict(state[_FORWARD_HOOKS])
            state[_FORWARD_HOOKS].pop(self._handle.id, None)
        return state

    @staticmethod
    def _leave(state: dict[str, Any]) -> None:
        for name in METHODS:
            _remove(state, name)
        state.pop(HOOKS, None)


def _put(module: Any, name: str) -> None:
    state = module.__dict__
    if getattr(module, name, None) is not None and type(state.get(name)) is not _Method:
        state[name] = _Method(module, name)


def _remove(state: dict[str, Any], name: str) -> None:
    # If somebody has wrapped our method, the wrapper and our method stay. Our method then only calls the original.
    while type(method := state.get(name)) is _Method:
        if method.replaced is None:
            del state[name]
        else:
            state[name] = method.replaced


class _Method:
    """Stands in front of a method of one module."""

    def __init__(self, module: Any, name: str) -> None:
        # It has the signature and the docstring of the original.
        functools.update_wrapper(self, getattr(module, name))
        self._module = module
        self._name = name
        # The method that somebody has set on the instance before, if any.
        self.replaced: Callable[..., Any] | None = module.__dict__.get(name)

    def _original(self) -> Callable[..., Any]:
        if self.replaced is not None:
            return self.replaced
        # The class's method is looked up at each call, as Python does: somebody may patch the class later.
        found: Callable[..., Any] = getattr(type(self._module), self._name)
        return MethodType(found, self._module) if hasattr(found, "__get__") else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _RUN[self._name](self._module, self._original(), *args, **kwargs)

    def __reduce__(self) -> Any:
        """A copy is the original method."""
        return functools.partial, (self._original(),)


def _generate(module: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if is_traced():
        count_fallback("torch.compile around generate()")
        return original(*args, **kwargs)
    outer = call_of(module)
    # A call that has not begun is this same call: this method stands in front of another method of ours.
    request = _asked_for(module) if outer is None or outer.has_begun else None
    if request is None:
        return original(*args, **kwargs)

    def run(call: Call, loop: Loop | None, streamer: Any) -> Any:
        given = dict(kwargs)
        if streamer is not None:
            given["streamer"] = streamer
        if loop is not None:
            decline_for(of_arguments(module, original, args, kwargs))
            given = with_stop_strings(module, args, given)
            given["custom_generate"] = loop
            if "encoder_outputs" in given:
                # generate() writes to it, and runs again where the loop declines.
                given["encoder_outputs"] = copy.copy(given["encoder_outputs"])
        return original(*args, **given)

    reason = next((name for name in ("custom_generate", "assistant_model") if kwargs.get(name) is not None), None)
    with held(module):
        asked, has_cache = _asked_of(module, args, kwargs), cache_of(kwargs) is not None
        result, request.given.topk = run_call(
            module, request.options, run, kwargs.get("streamer"), asked, has_cache, reason
        )
    return result


def _asked_of(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
    """What the call asks for, as far as can be seen before generate() merges its arguments into one configuration."""
    # generate(inputs, generation_config)
    of_call = kwargs.get("generation_config", args[1] if len(args) > 1 else None)

    def given(name: str, kind: type, default: Any) -> Any:
        of_configs = (getattr(each, name, None) for each in (of_call, module.generation_config))
        return next((each for each in (kwargs.get(name), *of_configs) if isinstance(each, kind)), default)

    names = ("inputs", module.main_input_name, "input_ids", "inputs_embeds")
    found = next((each for each in (*args[:1], *map(kwargs.get, names)) if isinstance(each, Tensor)), None)
    prompts = None if found is None or found.dim() == 0 else len(found)
    return Asked(given("do_sample", bool, False), given("num_beams", int, 1), prompts)


def _processors(module: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    processors = original(*args, **kwargs)
    call = call_of(module)
    config = kwargs["generation_config"] if "generation_config" in kwargs else args[0]
    return processors if call is None else call.begin(config, processors)


def _compiled_call(module: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    return functools.partial(_call_compiled, module, original(*args, **kwargs))


def _call_compiled(module: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = original(*args, **kwargs)
    return after_forward(module, args, output)


def _state(module: Any, original: Callable[..., Any]) -> Any:
    """The state that copy, pickle and torch.save take. It has no hooks, so a copy is not enabled."""
    state = original()
    hooks = module.__dict__.get(HOOKS)
    if hooks is None or not isinstance(state, dict):
        return state
    with _lock:
        return hooks.stripped(state)


def _of_head(head: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = None if is_traced() else running_call()
    columns = None if call is None else call.columns_of(head, args, kwargs, caller_of_module())
    return original(*args, **kwargs) if columns is None else columns


_RUN: dict[str, Callable[..., Any]] = {
    "generate": _generate,
    LOOKUP: _processors,
    "get_compiled_call": _compiled_call,
    COMPILED: _call_compiled,
    "__getstate__": _state,
    _FORWARD: _of_head,
}


def _asked_for(module: Any) -> Request | None:
    """The request that a new call follows; None for a stock call."""
    hooks: Hooks | None = module.__dict__.get(HOOKS)
    if hooks is None:
        return None
    with _lock:
        for block in reversed(_entered.get()):
            if block in hooks.blocks:
                return block
        if hooks.enabled is not None or not hooks.blocks:
            return hooks.enabled
        # This thread has entered no block; perhaps the thread that started it has. It takes the options of the newest
        # block, but its calls are not recorded there: the block may belong to another thread.
        return Request(hooks.blocks[-1].options)


def set_enabled(modules: Sequence[Any], request: Request | None) -> None:
    """Sets the request that calls outside every block follow; None for stock calls."""
    with _lock:
        for module in modules:
            hooks = module.__dict__.get(HOOKS) if request is None else _hooks(module)
            if hooks is not None:
                hooks.enabled = request
                hooks.remove_unused()


@contextmanager
def entered(modules: Sequence[Any], block: Request) -> Iterator[None]:
    """A with block: calls of the modules within it follow the request `block`."""
    with _lock:
        found = [_hooks(module) for module in modules]
        for hooks in found:
            hooks.blocks.append(block)
    _entered.set((*_entered.get(), block))
    try:
        yield
    finally:
        # ContextVar.reset() does not serve here: the block may be left in another task, or before a block entered later.
        _entered.set(tuple(each for each in _entered.get() if each is not block))
        with _lock:
            for hooks in found:
                hooks.blocks.remove(block)
                hooks.remove_unused()


@contextmanager
def held(module: Any) -> Iterator[None]:
    """A with block around a call: the module keeps its hooks until the call ends."""
    with _lock:
        hooks = module.__dict__.get(HOOKS) or _hooks(module)
        hooks.begin_call()
    try:
        yield
    finally:
        with _lock:
            hooks.num_calls -= 1
            hooks.remove_unused()


def _hooks(module: Any) -> Hooks:
    hooks: Hooks | None = module.__dict__.get(HOOKS)
    if hooks is None:
        hooks = module.__dict__[HOOKS] = Hooks(module)
    else:
        hooks.put()
    return hooks
