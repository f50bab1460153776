# SPDX-License-Identifier: Apache-2.0
"""A function on arguments that stay where they are, as compiled code: one piece that is called and nothing else.

Code is made once for all that differ in sizes that vary, and kept where what it runs on is not: a process never gives back what it
has taken to compile.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


class NothingCompiled(Exception):
    """Raised by the first run of what is to be compiled, where torch.compile has made nothing of it."""

    def __init__(self) -> None:
        super().__init__("torch.compile is switched off (TORCH_COMPILE_DISABLE, set_stance), or has given up")


class Code:
    """The compiled code of a function. It serves arguments that are not those that it was made with, but for sizes that vary.

    Args:
        is_whole: whether it is to be one piece.

    Attributes:
        number: of the pieces that have been made.
    """

    def __init__(self, function: Any, is_whole: bool) -> None:
        self.number = 0
        # What has run last, on what, and what that gave.
        self._ran: tuple[Callable[..., Any], tuple[Any, ...], Any] | None = None
        self._lock = threading.RLock()
        # dynamo keeps a backend, and what that returns, as long as the process runs. They may not hold the model's weights.
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

            return run if is_whole else piece

        # Compiled code is kept by the code of the function, at most eight of one. This is a function of its own.
        own = types.FunctionType(
            function.__code__.replace(co_name=f"{function.__name__}_{id(self)}"), function.__globals__
        )
        self.call: Any = torch.compile(own, backend=backend, dynamic=False, fullgraph=is_whole)

    def run(self, args: tuple[Any, ...]) -> tuple[Any, Callable[..., Any], tuple[Any, ...], Any]:
        """What the function gives; the piece that gave it, what that ran on, and all that it gave."""
        with self._lock:
            result = self.call(*args)
            if self._ran is None:
                raise NothingCompiled
            ran, self._ran = self._ran, None
        return result, *ran


class Codes:
    """The compiled code of functions, for the steps that are made of them."""

    def __init__(self) -> None:
        self._of: dict[Hashable, list[Code]] = {}

    def __len__(self) -> int:
        # Of a list: other threads may add to it.
        return sum(code.number for codes in [*self._of.values()] for code in codes)

    def ways(self, function: Any, args: tuple[Any, ...], key: Hashable) -> list[Callable[[], Any]]:
        """Ways to run it on the arguments as compiled code, of which the first that works is to be taken.

        Args:
            key: the function, and whatever else makes other code of it.
        """
        codes = self._of.get(key)
        if codes is None:
            codes = self._of.setdefault(key, [Code(function, True), Code(function, False)])
        return [_OneGraph(codes[0], args), _Pieces(codes[1], args)]


def let_vary(tensor: Tensor, dims: tuple[int, ...]) -> None:
    """Makes code that is compiled for the tensor serve any size of those dimensions, from 2 on."""
    torch._dynamo.maybe_mark_dynamic(tensor, dims)


def _inductor(graph: Any, inputs: Any) -> Callable[..., Any]:
    """torch.compile's default."""
    compile: Any = torch._dynamo.lookup_backend("inductor")
    run: Callable[..., Any] = compile(graph, inputs)
    return run


class _Pieces:
    """A function on its arguments, compiled in as many pieces as it takes."""

    def __init__(self, code: Code, args: tuple[Any, ...]) -> None:
        self._code, self._args = code, args

    def __call__(self) -> Any:
        result = self._code.call(*self._args)
        if not self._code.number:
            raise NothingCompiled
        return result


class _OneGraph:
    """A function on its arguments, compiled in one piece: from the second call on that piece alone, on the tensors of the first.

    The arguments are the same objects in each call, and what they hold is written in place. So there is nothing that
    torch.compile would have to look at before each call, for which it takes 0.2 ms where a model's modules are among them.
    The model is looked at once a call of generate() (entry.Checked).
    """

    def __init__(self, code: Code, args: tuple[Any, ...]) -> None:
        self._code, self._args = code, args
        self._piece: Callable[..., Any] | None = None
        self._inputs: tuple[Any, ...] = ()
        # Which of the piece's outputs the function returns; None for none.
        self._returned: int | None = None

    def __call__(self) -> Any:
        if self._piece is not None:
            outputs = self._piece(*self._inputs)
            return None if self._returned is None else outputs[self._returned]
        result, self._piece, self._inputs, outputs = self._code.run(self._args)
        if result is not None:
            self._returned = next(i for i, output in enumerate(outputs) if output is result)
        return result
