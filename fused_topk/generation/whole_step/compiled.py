# SPDX-License-Identifier: Apache-2.0
"""Compiled code of a function whose arguments stay where they are: one piece, which is called without any check before it.

Code is made once for all steps that differ only in sizes that vary. It is kept when the steps are dropped: a process never gives
back the memory that it has taken to compile.
"""

from __future__ import annotations

import importlib
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...tracing import is_traced_by_dynamo


class Code:
    """The compiled code of a function, in one piece. It also serves other arguments, which may differ in the sizes that vary. `number` says
    how many pieces have been made."""

    def __init__(self, function: Any) -> None:
        self.number = 0
        # The piece that has run last, its inputs and its outputs.
        self._ran: tuple[Callable[..., Any], tuple[Any, ...], Any] | None = None
        self._lock = threading.RLock()
        # dynamo keeps a backend, and what the backend returns, as long as the process runs. They must not hold the model's weights.
        ref = weakref.ref(self)

        def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
            piece = _inductor(graph, inputs)
            if (code := ref()) is not None:
                code.number += 1

            def run(*inputs: Any) -> Any:
                outputs = piece(*inputs)
                if (code := ref()) is not None:
                    code._ran = piece, inputs, outputs
                return outputs

            return run

        # dynamo compiles one code object at most eight times. So each Code has a function of its own.
        own = types.FunctionType(
            function.__code__.replace(co_name=f"{function.__name__}_{id(self)}"), function.__globals__
        )
        self._call: Any = torch.compile(own, backend=backend, dynamic=False, fullgraph=True)

    def run(self, args: tuple[Any, ...]) -> tuple[Any, Callable[..., Any], tuple[Any, ...], Any]:
        """What the function returns, and the piece that computed it, with its inputs and all its outputs."""
        from torch._inductor import config

        # Weights are inputs of the code, also where a user asks for frozen ones: they may change in place.
        with self._lock, config.patch(freezing=False):
            try:
                with _without_a_trial_of_instructions():
                    result = self._call(*args)
            except Exception as error:
                if "C++ compile error" not in str(error):
                    raise
                # The C++ compiler may not know all instructions of this CPU.
                result = self._call(*args)
            if self._ran is None:
                raise RuntimeError("torch.compile is switched off (TORCH_COMPILE_DISABLE, set_stance), or has given up")
            ran, self._ran = self._ran, None
        return result, *ran


@contextmanager
def _without_a_trial_of_instructions() -> Iterator[None]:
    """A with block in which inductor compiles nothing to see which instructions the C++ compiler knows. That takes 6 s of 9.

    What inductor keeps of that is as before.
    """
    from torch._inductor import config

    module = vars(importlib.import_module("torch._inductor.cpu_vec_isa"))
    found = module["valid_vec_isa_list"]
    if found.cache_info().currsize:
        yield
        return
    try:
        with config.patch({"cpp.vec_isa_ok": True}):
            yield
    finally:
        for kept in (found, *(type(each).__bool__ for each in module["supported_vec_isa_list"])):
            # Some classes of instructions keep nothing.
            getattr(kept, "cache_clear", lambda: None)()


class Codes:
    """The compiled code of functions, shared by the steps that run them."""

    def __init__(self) -> None:
        self._of: dict[Hashable, Code] = {}

    def __len__(self) -> int:
        # A copy: other threads may add to the dict.
        return sum(code.number for code in [*self._of.values()])

    def of(self, function: Any, key: Hashable) -> Code:
        """The code of the function. key: what decides which code is made: the function, and more."""
        return self._of.get(key) or self._of.setdefault(key, Code(function))


def is_in_code_of_a_cpu(tensor: Tensor) -> bool:
    """Whether compiled code of a CPU works with the tensor. There each operation that tells beams from batches is an operator of its
    own, so the code is the same for any number of both."""
    return is_traced_by_dynamo() and not tensor.is_cuda


def let_vary(tensor: Tensor, dims: tuple[int, ...]) -> None:
    """Makes code that is compiled for the tensor serve any size of those dimensions, from 2 on."""
    torch._dynamo.maybe_mark_dynamic(tensor, dims)


def hide(tensor: Tensor, dims: tuple[int, ...]) -> None:
    """The same for dimensions, of any size, that nothing but operators looks at."""
    torch._dynamo.decorators.mark_unbacked(tensor, dims)


def _inductor(graph: Any, inputs: Any) -> Callable[..., Any]:
    compile: Any = torch._dynamo.lookup_backend("inductor")
    run: Callable[..., Any] = compile(graph, inputs)
    return run


class OneGraph:
    """A function on its arguments, compiled in one piece: from the second call on that piece alone, on the tensors of the first.

    The arguments are the same objects in each call, and their contents are written in place. So torch.compile need not check them
    before each call, which takes 0.2 ms where a model's modules are among them. The model is checked once in each call of
    generate() (:func:`entry.checked`).
    """

    def __init__(self, code: Code, args: tuple[Any, ...]) -> None:
        self._code, self._args = code, args
        self._piece: Callable[..., Any] | None = None
        self._inputs: tuple[Any, ...] = ()
        # Which of the piece's outputs the function returns.
        self._returned = 0

    def __call__(self) -> Any:
        if self._piece is not None:
            return self._piece(*self._inputs)[self._returned]
        result, self._piece, self._inputs, outputs = self._code.run(self._args)
        self._returned = next(i for i, output in enumerate(outputs) if output is result)
        return result
