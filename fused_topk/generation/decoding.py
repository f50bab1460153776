# SPDX-License-Identifier: Apache-2.0
"""Makes a model's generate() calls take the fused path: until disabled, or in a with block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from ..problem import TopK
from .session import Options, Session, running, session_of
from .statistics import tell_once

# The one private name of transformers: gives the processors of a loop, and is given its configuration.
_LOOKUP = "_get_logits_processor"


class FusedDecoding:
    """What :func:`fused_decoding` gives.

    topk: with topk_per_step=k, the steps of the last generate() call, each a TopK without any tensor of the vocabulary's
        size. values: float32 [rows, k], log-probabilities of the model's own distribution, before processors and
        warpers. indices: int64 [rows, k], their tokens, most probable first. logsumexp: float32 [rows], of the logits.
        Rows are those of the model's input in that step: sequences, or with beams sequence * beams + beam, as in
        `beam_indices`. Empty where a mode is not served.
    """

    def __init__(self) -> None:
        self.topk: list[TopK] = []


class _Hooks:
    """The hooks of one module that can generate."""

    def __init__(self, module: Any, options: Options, given: FusedDecoding) -> None:
        self.options = options
        self.given = given
        self._module = module
        self._generate: Callable[..., Any] = module.generate
        self._get_logits_processor: Callable[..., Any] = getattr(module, _LOOKUP)
        self._get_compiled_call: Callable[..., Any] | None = getattr(module, "get_compiled_call", None)
        replacing = {"generate": _Generate(self, module.generate), _LOOKUP: self._wrapped_processors}
        if self._get_compiled_call is not None:
            replacing["get_compiled_call"] = self._wrapped_compiled_call
        # Methods of the instance, in front of those of its class or of whoever replaced them before.
        self._replaced = {name: module.__dict__.get(name) for name in replacing}
        for name, method in replacing.items():
            setattr(module, name, method)
        self._handle = module.register_forward_hook(self._after_forward)

    def remove(self) -> None:
        self._handle.remove()
        for name, method in self._replaced.items():
            if method is None:
                del self._module.__dict__[name]
            else:
                setattr(self._module, name, method)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        reason = next((name for name in ("custom_generate", "assistant_model") if kwargs.get(name) is not None), None)
        session = Session(self._module, self.options, reason)
        with running(session):
            result = self._generate(*args, **kwargs)
        self.given.topk = session.topk
        return result

    def _wrapped_processors(self, *args: Any, **kwargs: Any) -> Any:
        processors = self._get_logits_processor(*args, **kwargs)
        session = session_of(self._module)
        config = kwargs["generation_config"] if "generation_config" in kwargs else args[0]
        return processors if session is None else session.begin(config, processors)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        # In a compiled model the logits are not marked inside the graph but where they come out: _wrapped_compiled_call.
        if torch.compiler.is_compiling():
            return output
        session = session_of(module)
        return output if session is None else session.after_forward(output)

    def _wrapped_compiled_call(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        assert self._get_compiled_call is not None
        compiled = self._get_compiled_call(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            session = session_of(self._module)
            output = compiled(*args, **kwargs)
            return output if session is None else session.after_forward(output)

        return call


class _Generate:
    """The instance's generate(), with the signature and the docstring of the original."""

    def __init__(self, hooks: _Hooks, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._hooks = hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hooks.generate(*args, **kwargs)


_ATTRIBUTE = "_fused_topk_hooks"


def _generators(model: Any) -> list[Any]:
    """The model and the parts of it that can generate by themselves."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a transformers model, got {type(model).__name__}; pass the model itself")
    found = [module for module in model.modules() if isinstance(module, GenerationMixin)]
    if not found:
        raise TypeError(
            f"`model` must have a generate() of transformers, in itself or in a part, got {type(model).__name__}; "
            "load it with a class for generation, such as AutoModelForCausalLM"
        )
    return found


def enable(model: nn.Module, *, sampling: bool = False) -> None:
    """Makes the model's generate() calls take the fused path, until :func:`disable`.

    Beam search and greedy decoding give the sequences of the stock path; where logits tie, the smaller index. Calls of
    the model outside generate() and other models are not touched. Can be called again to change the option.

    Args:
        model: a transformers model, or one with such models as parts: each part that can generate is enabled.
        sampling: also fuse do_sample=True with top-k, top-p or min-p, and beam sampling. The distribution is that of
            the stock path; the random numbers are used otherwise, so that a seed gives other draws.

    Raises:
        TypeError: an argument of the wrong kind.

    Example:
        >>> enable(model)  # doctest: +SKIP
        >>> model.generate(**inputs, num_beams=4)  # doctest: +SKIP
    """
    _enable(_generators(model), Options.checked(sampling, 0), FusedDecoding())


def disable(model: nn.Module) -> None:
    """Undoes :func:`enable`. Does nothing to a model that is not enabled.

    Raises:
        TypeError: not a model that can generate.
    """
    _disable(_generators(model))


@contextmanager
def fused_decoding(model: nn.Module, *, sampling: bool = False, topk_per_step: int = 0) -> Iterator[FusedDecoding]:
    """Makes the model's generate() calls in a with block take the fused path.

    Args:
        model: see :func:`enable`.
        sampling: also fuse sampling: the same distribution, other draws for a seed.
        topk_per_step: record for each step the k most probable tokens; 0 for no record.

    Yields:
        FusedDecoding, whose `topk` has the record of the last call, also after the block.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or a negative topk_per_step.

    Example:
        >>> with fused_decoding(model):  # doctest: +SKIP
        ...     model.generate(**inputs, num_beams=4)
    """
    options = Options.checked(sampling, topk_per_step)
    modules = _generators(model)
    hooks_of = {module: module.__dict__.get(_ATTRIBUTE) for module in modules}
    before = {module: (hooks.options, hooks.given) for module, hooks in hooks_of.items() if hooks is not None}
    given = FusedDecoding()
    _enable(modules, options, given)
    try:
        yield given
    finally:
        _disable(modules)
        for module, its in before.items():
            setattr(module, _ATTRIBUTE, _Hooks(module, *its))


def _enable(modules: list[Any], options: Options, given: FusedDecoding) -> None:
    _disable(modules)
    for module in modules:
        if hasattr(module, _LOOKUP):
            setattr(module, _ATTRIBUTE, _Hooks(module, options, given))
        else:
            tell_once(f"generate() stays stock: this version of transformers has no {_LOOKUP}")


def _disable(modules: list[Any]) -> None:
    for module in modules:
        hooks = module.__dict__.pop(_ATTRIBUTE, None)
        if hooks is not None:
            hooks.remove()
