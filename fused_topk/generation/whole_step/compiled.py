# SPDX-License-Identifier: Apache-2.0
"""A function on arguments that stay where they are, as compiled code: one piece that is called and nothing else."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch


class NothingCompiled(Exception):
    """Raised by the first run of what is to be compiled, where torch.compile has made nothing of it."""

    def __init__(self) -> None:
        super().__init__("torch.compile is switched off (TORCH_COMPILE_DISABLE, set_stance), or has given up")


class Bound:
    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args

    def __call__(self) -> Any:
        return self._function(*self._args)


def ways(function: Any, args: tuple[Any, ...], number: int) -> list[Callable[[], Any]]:
    """Ways to run it on the arguments as compiled code, of which the first that works is to be taken."""

    def own() -> Any:
        # Compiled code is kept by the code of the function, at most eight of one. This is a function of its own.
        code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
        return types.FunctionType(code, function.__globals__)

    return [_OneGraph(own(), args), _Pieces(own(), args)]


def _inductor(graph: Any, inputs: Any) -> Callable[..., Any]:
    """torch.compile's default."""
    compile: Any = torch._dynamo.lookup_backend("inductor")
    run: Callable[..., Any] = compile(graph, inputs)
    return run


class _Pieces:
    """A function on its arguments, compiled in as many pieces as it takes."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        ref = weakref.ref(self)

        def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
            piece = _inductor(graph, inputs)
            if (pieces := ref()) is not None:
                pieces._number += 1
            return piece

        self._function: Callable[..., Any] = torch.compile(function, backend=backend, dynamic=False)
        self._args = args
        self._number = 0

    def __call__(self) -> Any:
        result = self._function(*self._args)
        if not self._number:
            raise NothingCompiled
        return result


class _OneGraph:
    """A function on its arguments, compiled in one piece: from the second call on that piece alone, on the tensors of the first.

    The arguments are the same objects in each call, and what they hold is written in place. So there is nothing that
    torch.compile would have to look at before each call, for which it takes 0.2 ms where a model's modules are among them.
    The model is looked at once a call of generate() (entry.ready_for).
    """

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        # dynamo keeps a backend, and what that returns, as long as the process runs. They may not hold the model's weights.
        ref = weakref.ref(self)

        def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
            piece = _inductor(graph, inputs)

            def run(*inputs: Any) -> Any:
                outputs = piece(*inputs)
                if (one := ref()) is not None:
                    one._piece, one._inputs, one._outputs = piece, inputs, outputs
                return outputs

            return run

        self._function: Callable[..., Any] = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)
        self._args = args
        self._piece: Callable[..., Any] | None = None
        self._inputs: tuple[Any, ...] = ()
        self._outputs: Any = ()
        # Which of the piece's outputs the function returns; None for none.
        self._returned: int | None = None

    def __call__(self) -> Any:
        if self._piece is not None:
            outputs = self._piece(*self._inputs)
            return None if self._returned is None else outputs[self._returned]
        result = self._function(*self._args)
        if self._piece is None:
            raise NothingCompiled
        if result is not None:
            self._returned = next(i for i, output in enumerate(self._outputs) if output is result)
        self._outputs = ()
        return result
