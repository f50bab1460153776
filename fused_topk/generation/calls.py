# SPDX-License-Identifier: Apache-2.0
"""The running generate() calls, and the attributes that a model carries so that its calls are noticed.

A model carries methods and a forward hook (:mod:`hooks`). They hold no state of a call: each asks this module for the running call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList

from ..problem import TopK
from ..tracing import is_traced
from .frames import caller_of_module, is_of_a_loop

# A private method of transformers. It takes a loop's configuration and returns its processors.
LOOKUP = "_get_logits_processor"
# A private name of torch: model.compile() sets it. Before that it is None or missing.
COMPILED = "_compiled_call_impl"
# The methods of a model that :mod:`hooks` puts its own methods in front of.
METHODS = ("generate", LOOKUP, "get_compiled_call", COMPILED, "__getstate__")
HOOKS = "_fused_topk_hooks"
# The attribute in which whole steps keep what they need for a model.
KEPT = "_fused_topk_whole_step"
# Attributes of a model that are this package's.
OWN = frozenset({*METHODS, HOOKS, KEPT})


class Call:
    """A generate() call of one model. This base class changes nothing in the call.

    has_begun: whether its loop has begun. If generate() is called again before that, it is still the same call: somebody has
        wrapped our method, and another method of ours stands in front of the wrapper.
    has_parts: whether parts of the model have run calls of their own during this one.
    topk: the record of its steps, for the user.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.has_begun = False
        self.is_open = True
        self.has_parts = False
        self.topk: list[TopK] = []

    def begin(self, config: GenerationConfig, processors: LogitsProcessorList) -> LogitsProcessorList:
        """Called before a loop with that configuration. Returns the processors for the loop to use."""
        self.has_begun = True
        return processors

    def after_forward(self, output: Any, is_asked_by_loop: bool = True) -> Any:
        """What the model's forward pass returns instead of this output."""
        return output

    def columns_of(self, head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> Any:
        """What the forward pass of a tensor-parallel model's LM head returns instead of gathered logits; None where it gathers.

        Args:
            args, kwargs: of forward().
            caller: who has called the head.
        """
        return None

    def close(self) -> None:
        self.is_open = False


# The call that this thread is in.
_current: ContextVar[Call | None] = ContextVar("fused_topk_call", default=None)


@contextmanager
def running(call: Call) -> Iterator[None]:
    """A with block in which the call is the current one of this thread."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)
        call.close()


def running_call() -> Call | None:
    """The call that this thread is in, of any model."""
    return _current.get()


def call_of(model: nn.Module) -> Call | None:
    """The running call of that model, if this thread is in one.

    A task that was started in a call may outlive it: a closed call does not count.
    """
    call = _current.get()
    return call if call is not None and call.model is model and call.is_open else None


def after_forward(module: nn.Module, args: Any, output: Tensor) -> Any:
    """The forward hook that a model carries."""
    # In a compiled model the logits are marked where they leave the graph, not inside.
    if is_traced():
        return output
    call = call_of(module)
    return output if call is None else call.after_forward(output, is_of_a_loop(caller_of_module()))
