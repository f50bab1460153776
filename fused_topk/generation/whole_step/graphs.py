# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of a step, and the flag that says that a search has ended. The host reads it late, so that nothing waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...cuda_runtime.capture import Graph
from ...distributed.collective import wait_for

__all__ = ["LATENESS", "Bound", "EndFlag", "Graph", "is_cuda"]

# A flag is read this many steps after the step that has set it. A guess: a replay takes far longer on the device than on the host,
# so two would do. Each step more may run in vain at the end of a call.
LATENESS = 4


def is_cuda(device: torch.device) -> bool:
    """Whether the device is a GPU, whose steps are captured."""
    return device.type == "cuda"


class Bound:
    """A function with its arguments, whose operations run one after another and can be captured."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args

    def __call__(self) -> Any:
        with _FilledNumbers():
            return self._function(*self._args)


class _FilledNumbers(TorchFunctionMode):
    """Makes torch.tensor() of a number a fill, because a copy from the host cannot be captured.

    Up to transformers 5.18 models make such tensors in each step, for masks and slopes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_number = func is torch.tensor and len(args) == 1 and type(args[0]) in (bool, int, float)
        if is_number and kwargs.keys() <= {"dtype", "device"}:
            return torch.full((), args[0], **kwargs)
        return func(*args, **kwargs)


class EndFlag:
    """Whether a search goes on, and its new tokens, as the host knows them. On a GPU both are those of LATENESS steps ago.

    Elsewhere only the tokens are late, by a step: if the first step cannot be compiled, the call begins anew, and no user has seen any.

    The lateness is always the same, whatever the device has done by then. Steps in vain draw random numbers, too, so their
    number must not depend on time.

    Args:
        is_late: whether flags are read late, as on a GPU.
        put: gets the tokens of each step in order, as a tensor on the host, but not those of steps after the end.
        group: of the processes of a tensor-parallel model. If one of them dies, a graph waits without end. The host does not.
    """

    def __init__(self, is_late: bool, put: Callable[[Tensor], None] | None = None, group: Any = None) -> None:
        self._is_late = is_late
        self._put = put
        self._group = group
        self._pending: deque[_Copy] = deque()
        self._spare: list[_Copy] = []
        # The last tokens, where the flag is not late.
        self._tokens: Tensor | None = None

    def goes_on(self, flag: Tensor, tokens: Tensor | None = None) -> bool:
        """After each step, with bool [] and the step's tokens on the device: True while the search may go on.

        Args:
            tokens: int64 [batch]; None where nobody asks for them.
        """
        if not self._is_late:
            self._hand_on()
            self._tokens = None if tokens is None else tokens.to("cpu", copy=True)
            return bool(flag)
        copy = self._spare.pop() if self._spare else _Copy(tokens)
        copy.begin(flag, tokens)
        self._pending.append(copy)
        return len(self._pending) <= LATENESS or self._oldest()

    def now(self, flag: Tensor) -> bool:
        """Whether the search goes on after all steps so far. This waits for the device."""
        if self._group is not None and self._is_late:
            copy = _Copy(None)
            copy.begin(flag, None)
            self._wait(copy)
        return bool(flag)

    def finish(self) -> None:
        """Called after the last step. Hands the remaining tokens to `put`."""
        self._hand_on()
        while self._pending and self._oldest():
            pass

    def _hand_on(self) -> None:
        if self._put is not None and self._tokens is not None:
            self._put(self._tokens)

    def _oldest(self) -> bool:
        copy = self._pending.popleft()
        # The device has LATENESS more steps to do. So it does not run out of work while the host waits.
        self._wait(copy)
        if self._put is not None and copy.tokens is not None:
            self._put(copy.tokens.clone())
        self._spare.append(copy)
        goes_on = bool(copy.flag)
        if not goes_on:
            if self._group is not None and self._pending:
                # Next the host reads results, which would wait without end for a process that has died.
                self._wait(self._pending[-1])
            self._pending.clear()
        return goes_on

    def _wait(self, copy: _Copy) -> None:
        if self._group is None:
            copy.event.synchronize()
        else:
            wait_for(copy.event.query, copy.device, self._group)


class _Copy:
    """A flag, and perhaps tokens, on their way to the host from the device."""

    device: torch.device

    def __init__(self, tokens: Tensor | None) -> None:
        # Tensors that a GPU writes to while the host goes on.
        on_host: dict[str, Any] = {"device": "cpu", "pin_memory": True}
        self.event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.flag = torch.empty((), dtype=torch.bool, **on_host)
        self.tokens = None if tokens is None else torch.empty(tokens.shape, dtype=tokens.dtype, **on_host)

    def begin(self, flag: Tensor, tokens: Tensor | None) -> None:
        self.device = flag.device
        self.flag.copy_(flag, non_blocking=True)
        if self.tokens is not None and tokens is not None:
            self.tokens.copy_(tokens, non_blocking=True)
        self.event.record(torch.cuda.current_stream(flag.device))
