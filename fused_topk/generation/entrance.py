# SPDX-License-Identifier: Apache-2.0
"""How a user asks for whole steps: of a model until it is disabled, or in a with block.

generate() of an enabled model is the one thing that is replaced. A call is either served in whole steps, or runs stock's generate()
untouched. The class of the model carries a descriptor for that, which gives every other instance its own method. So the model has no
attribute of ours that refers to it, and its copies are not enabled.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from ..arguments import check_flags, check_int
from ..gone import refuse as refuse_gone
from ..problem import TopK
from ..tracing import is_traced
from .statistics import count_reason, count_stock
from .whole_step.choosing import TopKRecord
from .whole_step.criteria import with_stop_strings
from .whole_step.entry import Loop, checked, drop, release
from .whole_step.given_cache import cache_of
from .whole_step.parallel import refuse
from .whole_step.reasons import (
    HAS_CACHE_ARGUMENT,
    OF_FEW_LOGITS,
    Asked,
    Declined,
    decline_for,
    of_arguments,
    reads_few_logits,
)

_NAME = "generate"


class FusedDecoding:
    """The record of a with block: :func:`fused_decoding` yields it.

    Attributes:
        topk: with topk_per_step=k, the steps of the last generate() call, each a TopK without any tensor of the vocabulary's
            size. values: float32 [rows, k], log-probabilities of the model's own distribution, before processors and
            warpers. indices: int64 [rows, k], their tokens, most probable first. logsumexp: float32 [rows], of the logits.
            Rows are sequences, or with beams sequence * beams + beam, as in `beam_indices`. Empty where a call is not served.
    """

    def __init__(self) -> None:
        self.topk: list[TopK] = []


class Request:
    """What enable() or a with block asks for, and its record."""

    def __init__(self, compile: bool, topk_per_step: int, gone: dict[str, Any] | None = None) -> None:
        if gone:
            refuse_gone("fused_decoding", gone)
        check_flags(compile=compile)
        check_int("topk_per_step", topk_per_step)
        if topk_per_step < 0:
            raise ValueError(f"`topk_per_step` must not be negative, got {topk_per_step}; pass 0 for no record")
        self.compile = compile
        self.topk_per_step = topk_per_step
        self.given = FusedDecoding()


class _Uses:
    """What is asked for of one model."""

    def __init__(self) -> None:
        self.enabled: Request | None = None
        self.blocks: list[Request] = []

    @property
    def is_needed(self) -> bool:
        return self.enabled is not None or bool(self.blocks)


# One lock for all models. It is reentrant: the garbage collector may close a block at any line.
_lock = threading.RLock()
_uses: weakref.WeakKeyDictionary[Any, _Uses] = weakref.WeakKeyDictionary()
# The blocks that this thread or task has entered. Another thread or task may have closed some of them.
_entered: ContextVar[tuple[Request, ...]] = ContextVar("fused_topk_blocks", default=())


class _Call:
    """A running call of an enabled model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        # Whether parts of the model have run calls of their own during this one, which are counted.
        self.has_parts = False


_running: ContextVar[_Call | None] = ContextVar("fused_topk_call", default=None)


class _Generate:
    """Stands for generate() in a class of models, some of whose instances are enabled."""

    def __init__(self, of: type) -> None:
        self._of = of
        # What the class itself defines; None where it inherits the method.
        self.own: Any = vars(of).get(_NAME)
        self._function = _wrapped(self._stock(of, of), self._bound)

    def _stock(self, instance: Any, kind: Any) -> Any:
        if self.own is None:
            # Looked up at each call, as Python does: somebody may patch the class later.
            return getattr(super(self._of, instance), _NAME)
        return self.own.__get__(None if instance is kind else instance, kind)

    def _bound(self, model: Any) -> Any:
        return self._stock(model, type(model))

    def __get__(self, instance: Any, kind: Any = None) -> Any:
        if instance is None:
            return self._stock(kind, kind)
        is_served = instance in _uses and self._is_first(type(instance))
        return MethodType(self._function, instance) if is_served else self._bound(instance)

    def _is_first(self, kind: type) -> bool:
        """Whether a class finds this one first. Those of its bases give the method of stock."""
        found = (vars(each).get(_NAME) for each in kind.__mro__)
        return next(each for each in found if isinstance(each, _Generate)) is self


def _wrapped(stock: Any, stock_of: Callable[[Any], Any]) -> Any:
    """A function that serves a model's calls. It has the name, the signature and the docstring of stock's. `stock_of` gives a
    model's own method."""

    @functools.wraps(stock)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = stock_of(self)
        is_old = HAS_CACHE_ARGUMENT and "past_key_values" in kwargs and "cache" not in kwargs
        if is_old and getattr(own, "__func__", None) is GenerationMixin.generate:
            # transformers would name the line that calls it, which is one of this file.
            message = f"`past_key_values` is deprecated for `{type(self).__name__}.generate`. Use `cache` instead."
            warnings.warn(message, FutureWarning, stacklevel=2)
            kwargs["cache"] = kwargs.pop("past_key_values")
        return _run(self, own, args, kwargs)

    # As of stock's method: generate() with gradients.
    generate.__wrapped__ = inspect.unwrap(stock)
    return generate


class _OfInstance(functools.partial[Any]):
    """Stands for a function that somebody has put in the place of a model's generate(). A copy of it is that function."""

    _fused_topk_stock: Any

    def __reduce__(self) -> Any:
        return _same, (self._fused_topk_stock,)


def _same(function: Any) -> Any:
    return function


def _remove(model: Any) -> None:
    _uses.pop(model, None)
    own = vars(model).get(_NAME)
    if hasattr(own, "_fused_topk_stock"):
        vars(model)[_NAME] = own._fused_topk_stock
    _remove_unused(type(model))
    release(model)


def _remove_unused(kind: type) -> None:
    found = vars(kind).get(_NAME)
    if isinstance(found, _Generate) and not any(type(each) is kind for each in list(_uses)):
        if found.own is None:
            delattr(kind, _NAME)
        else:
            setattr(kind, _NAME, found.own)


def _use(model: Any) -> _Uses:
    found = _uses.get(model)
    if found is None:
        found = _uses[model] = _Uses()
        # A model that is gone leaves nothing in its class.
        weakref.finalize(model, _remove_unused, type(model)).atexit = False
    kind, own = type(model), vars(model).get(_NAME)
    if not isinstance(vars(kind).get(_NAME), _Generate):
        setattr(kind, _NAME, _Generate(kind))
    if own is not None and not hasattr(own, "_fused_topk_stock"):
        # Somebody has put a function in the place of the method, which comes before what the class has.
        of_model = _OfInstance(_wrapped(own, lambda _: own), model)
        functools.update_wrapper(of_model, own)
        of_model._fused_topk_stock = own
        vars(model)[_NAME] = of_model
    return found


def _generators(model: Any) -> list[Any]:
    """The model and its parts, as far as they can generate by themselves."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a transformers model, got {type(model).__name__}; pass the model itself")
    found = [module for module in model.modules() if isinstance(module, GenerationMixin)]
    if not found:
        raise TypeError(
            f"`model` must have a generate() of transformers, in itself or in a part, got {type(model).__name__}; "
            "load it with a class for generation, such as AutoModelForCausalLM"
        )
    return found


def enable(model: nn.Module, *, compile: bool = False, **gone: Any) -> None:
    """Makes the model's generate() calls run in whole steps, until :func:`disable`.

    >>> enable(model)  # doctest: +SKIP
    >>> model.generate(**inputs, num_beams=4)  # doctest: +SKIP

    Greedy decoding, sampling, beam search and beam sampling are served, with any processor and criterion. In float32 texts are those of
    stock generate(), of equal logits the smaller index; with sampling they are those of the same seed. In 16 bits a whole step's
    forward pass rounds otherwise, as with another batch size, so that some texts differ. What is not served runs stock's generate(),
    and :func:`stats` says why. Calls of the model outside generate() and other models are not touched. A copy of the model, made with
    copy, pickle or torch.save, is not enabled. Call it again to change an option.

    The first call of a model tries it on a few tokens. On a GPU the first call of a shape (batch, beams, lengths rounded up) captures its
    step as a CUDA graph. A call that is given a cache goes on from it, and leaves there what stock leaves.

    Every process of a tensor-parallel model must enable it, and make the same calls. Disable the model before the process group is
    destroyed: NCCL waits for captured steps.

    Args:
        model: a transformers model, or one with such models as parts: each part that can generate is enabled.
        compile: compile a step with torch.compile in the first call of a shape. That takes seconds to tens of seconds, which are
            logged, and needs a C++ compiler.

    Raises:
        TypeError: an argument of the wrong kind.
    """
    request = Request(compile, 0, gone)
    with _lock:
        for module in _generators(model):
            _use(module).enabled = request


def disable(model: nn.Module) -> None:
    """Undoes :func:`enable`, also within a block, which goes on, and forgets the whole steps that are kept for later calls.

    Does nothing to a model that is not enabled.

    Raises:
        TypeError: not a model that can generate.
    """
    with _lock:
        for module in _generators(model):
            found = _uses.get(module)
            if found is not None:
                found.enabled = None
                if not found.is_needed:
                    _remove(module)
            drop(module)


@contextmanager
def fused_decoding(
    model: nn.Module, *, compile: bool = False, topk_per_step: int = 0, **gone: Any
) -> Iterator[FusedDecoding]:
    """Makes the model's generate() calls in a with block run in whole steps: see :func:`enable`.

    >>> with fused_decoding(model):  # doctest: +SKIP
    ...     model.generate(**inputs, num_beams=4)

    Blocks of several threads or tasks may overlap. A call takes the options of the innermost block that its own thread or
    task is in, else those of :func:`enable`. Without either it takes those of the block that another thread has entered last,
    and is not recorded.

    Args:
        model, compile: see :func:`enable`.
        topk_per_step: record for each step the k most probable tokens; 0 for no record.

    Yields:
        FusedDecoding, whose `topk` has the record of the last call, also after the block.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or a negative topk_per_step.
    """
    block = Request(compile, topk_per_step, gone)
    modules = _generators(model)
    with _lock:
        for module in modules:
            _use(module).blocks.append(block)
    _entered.set((*_entered.get(), block))
    try:
        yield block.given
    finally:
        # ContextVar.reset() does not serve here: the block may be left in another task, or before a block entered later.
        _entered.set(tuple(each for each in _entered.get() if each is not block))
        with _lock:
            for module in modules:
                found = _uses[module]
                found.blocks.remove(block)
                if not found.is_needed:
                    _remove(module)


def _asked_for(model: Any) -> Request | None:
    """The request that a new call follows; None for a stock call."""
    with _lock:
        uses = _uses.get(model)
        if uses is None:
            return None
        for block in reversed(_entered.get()):
            if block in uses.blocks:
                return block
        if uses.enabled is not None or not uses.blocks:
            return uses.enabled
        # This thread has entered no block; perhaps the thread that started it has. It takes the options of the newest
        # block, but its calls are not recorded there: the block may belong to another thread.
        newest = uses.blocks[-1]
        return Request(newest.compile, newest.topk_per_step)


def _run(model: Any, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    request = None if is_traced() else _asked_for(model)
    # The class of the model may have a generate() of its own, which calls this one for each piece of its input.
    if request is None or isinstance(kwargs.get("custom_generate"), Loop):
        return stock(*args, **kwargs)
    outer, call = _running.get(), _Call(model)
    if outer is not None and outer.model is not model and any(each is model for each in outer.model.modules()):
        outer.has_parts = True
    token = _running.set(call)
    try:
        return _served_or_stock(model, stock, args, kwargs, request, call)
    finally:
        _running.reset(token)


def _served_or_stock(
    model: Any, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], request: Request, call: _Call
) -> Any:
    request.given.topk = []
    asked = _asked_of(model, args, kwargs)
    try:
        decline_for(of_arguments(model, stock, args, kwargs, asked))
        if not request.topk_per_step and not request.compile and reads_few_logits(model, asked):
            raise Declined(OF_FEW_LOGITS)
        topk = TopKRecord(request.topk_per_step, request.given.topk) if request.topk_per_step else None
        ready, has_cache = checked(model), cache_of(kwargs) is not None
        given = with_stop_strings(kwargs, asked.configs)
        given["custom_generate"] = Loop(model, ready, request.compile, kwargs.get("streamer"), has_cache, topk)
    except Declined as declined:
        refuse(model)
        reason = str(declined)
    else:
        try:
            return stock(*args, **given)
        except Declined as declined:
            # A mode that is not known to be one of the four, before anything has been drawn or called.
            reason = str(declined)
    result = stock(*args, **kwargs)
    # A model whose generate() calls the generate() of a part writes no text by itself.
    if not call.has_parts:
        count_reason(reason)
        count_stock(_num_new(model, asked, result))
    return result


def _asked_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
    """What the call asks for, as far as can be seen before generate() merges its arguments into one configuration."""
    # generate(inputs, generation_config)
    configs = kwargs.get("generation_config", args[1] if len(args) > 1 else None), model.generation_config

    def given(name: str, kind: type, default: Any) -> Any:
        of_configs = (getattr(each, name, None) for each in configs)
        return next((each for each in (kwargs.get(name), *of_configs) if isinstance(each, kind)), default)

    names = ("inputs", model.main_input_name, "input_ids", "inputs_embeds")
    found = next((each for each in (*args[:1], *map(kwargs.get, names)) if isinstance(each, Tensor)), None)
    prompts = length = None
    if found is not None and found.dim() > 1:
        prompts, is_text = len(found), found.dtype in (torch.int64, torch.int32)
        length = found.shape[1] if is_text and not model.config.is_encoder_decoder else None
    return Asked(given("do_sample", bool, False), given("num_beams", int, 1), prompts, length, configs)


def _num_new(model: Any, asked: Asked, result: Any) -> int:
    """How many tokens stock generate() has written; 0 where its result does not say."""
    texts = getattr(result, "sequences", result)
    if not isinstance(texts, Tensor) or texts.dim() != 2:
        return 0
    if asked.length is not None:
        return max(0, texts.shape[1] - asked.length)
    return texts.shape[1] - 1 if model.config.is_encoder_decoder else texts.shape[1]
