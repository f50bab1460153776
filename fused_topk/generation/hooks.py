# SPDX-License-Identifier: Apache-2.0
"""What is put on a model so that its generate() calls can be fused, and taken away without a trace.

The methods that are put on a model do what the model's own ones do, except within a call that is to be fused. So it does
not matter how often they are wrapped, nor whether somebody keeps them. They are on a model as long as it is enabled, a
with block is open or a call runs, whoever began: what a call does is its session's, never the model's.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..problem import TopK
from . import whole_step
from .model_logits import is_of_a_loop
from .session import Options, Session, running, session_of
from .statistics import count_fallback, count_not_whole

# The one private name of transformers: gives the processors of a loop, and is given its configuration.
LOOKUP = "_get_logits_processor"
# What torch calls a module's forward hooks; where that changes, hooks that are added later see marked logits.
_HOOKS = "_forward_hooks"
_ATTRIBUTE = "_fused_topk_hooks"

# Of all models. Reentrant: the garbage collector may close a block at any line.
_lock = threading.RLock()


class FusedDecoding:
    """What :func:`fused_decoding` gives.

    Attributes:
        topk: with topk_per_step=k, the steps of the last generate() call, each a TopK without any tensor of the vocabulary's
            size. values: float32 [rows, k], log-probabilities of the model's own distribution, before processors and
            warpers. indices: int64 [rows, k], their tokens, most probable first. logsumexp: float32 [rows], of the logits.
            Rows are those of the model's input in that step: sequences, or with beams sequence * beams + beam, as in
            `beam_indices`. Empty where a mode is not served.
    """

    def __init__(self) -> None:
        self.topk: list[TopK] = []


class Request:
    """What enable() or a with block asks for."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.given = FusedDecoding()


# The blocks that this thread or task is in; some may have been closed elsewhere.
_entered: ContextVar[tuple[Request, ...]] = ContextVar("fused_topk_blocks", default=())


class Hooks:
    """Those of one module that can generate."""

    def __init__(self, module: Any) -> None:
        self.enabled: Request | None = None
        self.blocks: list[Request] = []
        self.num_calls = 0
        self._module = module
        self._handle = module.register_forward_hook(_after_forward)
        self.put()

    def put(self) -> None:
        """Puts the methods in front of the module's own ones and of those that somebody has put there since."""
        for name in _RUN:
            self._put(name)

    def _put(self, name: str) -> None:
        state = self._module.__dict__
        if getattr(self._module, name, None) is not None and type(state.get(name)) is not _Method:
            state[name] = _Method(self._module, name)

    def begin_call(self) -> None:
        self.num_calls += 1
        # model.compile() may have been called since.
        self._put(_COMPILED)
        # So may register_forward_hook: other hooks get the logits unmarked. Or somebody has removed all of them.
        hooks = getattr(self._module, _HOOKS, None)
        if hooks is not None and self._handle.id not in hooks:
            self._handle = self._module.register_forward_hook(_after_forward)
        elif hooks is not None and next(reversed(hooks)) != self._handle.id:
            hooks.move_to_end(self._handle.id)

    @property
    def hook_id(self) -> int:
        return int(self._handle.id)

    def remove_unused(self) -> None:
        if self.enabled is None and not self.blocks and not self.num_calls:
            self._handle.remove()
            self._leave(self._module.__dict__)

    def stripped(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of the module's attributes without the hooks."""
        state = dict(state)
        self._leave(state)
        if _HOOKS in state:
            state[_HOOKS] = OrderedDict(state[_HOOKS])
            state[_HOOKS].pop(self._handle.id, None)
        return state

    @staticmethod
    def _leave(state: dict[str, Any]) -> None:
        for name in _RUN:
            # What somebody has put in front of it stays, and with it the method, which from now on does nothing.
            while type(method := state.get(name)) is _Method:
                if method.replaced is None:
                    del state[name]
                else:
                    state[name] = method.replaced
        state.pop(_ATTRIBUTE, None)


class _Method:
    """In front of a method of one module."""

    def __init__(self, module: Any, name: str) -> None:
        # For the signature and the docstring.
        functools.update_wrapper(self, getattr(module, name))
        self._module = module
        self._name = name
        # That of the instance, which somebody has put there before.
        self.replaced: Callable[..., Any] | None = module.__dict__.get(name)

    def _original(self) -> Callable[..., Any]:
        if self.replaced is not None:
            return self.replaced
        # Looked up at each call, as Python does: a class may be patched, too.
        found: Callable[..., Any] = getattr(type(self._module), self._name)
        return MethodType(found, self._module) if hasattr(found, "__get__") else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _RUN[self._name](self._module, self._original(), *args, **kwargs)

    def __reduce__(self) -> Any:
        """Whoever copies it gets the original."""
        return functools.partial, (self._original(),)


def _generate(module: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        count_fallback("torch.compile around generate()")
        return original(*args, **kwargs)
    outer = session_of(module)
    # Else this one is wrapped by another that has begun the same call.
    request = _asked_for(module) if outer is None or outer.has_begun else None
    if request is None:
        return original(*args, **kwargs)
    if request.options.whole_step:
        try:
            return _generate_whole(module, original, request, *args, **kwargs)
        except whole_step.Declined as declined:
            count_not_whole(str(declined))
    reason = next((name for name in ("custom_generate", "assistant_model") if kwargs.get(name) is not None), None)
    session = Session(module, request.options, reason)
    with held(module), running(session):
        result = original(*args, **kwargs)
    request.given.topk = session.topk
    return result


def _generate_whole(module: Any, original: Callable[..., Any], request: Request, *args: Any, **kwargs: Any) -> Any:
    reason = whole_step.of_arguments(args, kwargs)
    if reason is None and request.options.topk_per_step:
        reason = "topk_per_step"
    if reason is not None:
        raise whole_step.Declined(reason)
    with held(module), running(Session(module, request.options)):
        result = original(*args, custom_generate=whole_loop(module, request.options), **kwargs)
    request.given.topk = []
    return result


def whole_loop(module: Any, options: Options) -> whole_step.Loop:
    """For a module that has hooks."""
    hook = module.__dict__[_ATTRIBUTE].hook_id
    return whole_step.Loop(frozenset({*_RUN, _ATTRIBUTE}), hook, options.whole_step == "compiled")


def _processors(module: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    processors = original(*args, **kwargs)
    session = session_of(module)
    config = kwargs["generation_config"] if "generation_config" in kwargs else args[0]
    return processors if session is None else session.begin(config, processors)


def _compiled_call(module: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    return functools.partial(_call_compiled, module, original(*args, **kwargs))


def _call_compiled(module: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = original(*args, **kwargs)
    return _after_forward(module, args, output)


def _state(module: Any, original: Callable[..., Any]) -> Any:
    """What copy, pickle and torch.save take: copies are not enabled."""
    state = original()
    hooks = module.__dict__.get(_ATTRIBUTE)
    if hooks is None or not isinstance(state, dict):
        return state
    with _lock:
        return hooks.stripped(state)


# What model.compile() sets. The second private name, of torch; None or missing where that was not called.
_COMPILED = "_compiled_call_impl"
_RUN: dict[str, Callable[..., Any]] = {
    "generate": _generate,
    LOOKUP: _processors,
    "get_compiled_call": _compiled_call,
    _COMPILED: _call_compiled,
    "__getstate__": _state,
}


def _after_forward(module: nn.Module, args: Any, output: Any) -> Any:
    # In a compiled model the logits are not marked inside the graph but where they come out: _call_compiled.
    if torch.compiler.is_compiling():
        return output
    session = session_of(module)
    if session is None:
        return output
    frame: Any = sys._getframe(1)
    while frame.f_globals is nn.modules.module.__dict__ or frame.f_globals is globals():
        frame = frame.f_back
    return session.after_forward(output, is_of_a_loop(frame))


def _asked_for(module: Any) -> Request | None:
    """What the call that begins is to be: None for stock."""
    hooks: Hooks | None = module.__dict__.get(_ATTRIBUTE)
    if hooks is None:
        return None
    with _lock:
        for block in reversed(_entered.get()):
            if block in hooks.blocks:
                return block
        if hooks.enabled is not None or not hooks.blocks:
            return hooks.enabled
        # A thread that was started in a block does not know of it. Nor does the block of its calls, which may be others'.
        return Request(hooks.blocks[-1].options)


def set_enabled(modules: Sequence[Any], request: Request | None) -> None:
    """What the calls of the modules are that no block asks for; None for stock."""
    with _lock:
        for module in modules:
            hooks = module.__dict__.get(_ATTRIBUTE) if request is None else _hooks(module)
            if hooks is not None:
                hooks.enabled = request
                hooks.remove_unused()


@contextmanager
def entered(modules: Sequence[Any], block: Request) -> Iterator[None]:
    """Within it the calls of the modules are what the block asks for."""
    with _lock:
        found = [_hooks(module) for module in modules]
        for hooks in found:
            hooks.blocks.append(block)
    _entered.set((*_entered.get(), block))
    try:
        yield
    finally:
        # Not by a token: the block may be left in another task, and before one that was entered later.
        _entered.set(tuple(each for each in _entered.get() if each is not block))
        with _lock:
            for hooks in found:
                hooks.blocks.remove(block)
                hooks.remove_unused()


@contextmanager
def held(module: Any) -> Iterator[None]:
    """Within it the hooks stay on the module: a call runs."""
    with _lock:
        hooks = module.__dict__.get(_ATTRIBUTE) or _hooks(module)
        hooks.begin_call()
    try:
        yield
    finally:
        with _lock:
            hooks.num_calls -= 1
            hooks.remove_unused()


def _hooks(module: Any) -> Hooks:
    hooks: Hooks | None = module.__dict__.get(_ATTRIBUTE)
    if hooks is None:
        hooks = module.__dict__[_ATTRIBUTE] = Hooks(module)
    else:
        hooks.put()
    return hooks
