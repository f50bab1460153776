# SPDX-License-Identifier: Apache-2.0
"""Puts the emulated machine in the GPU's place: what fused_topk/cuda_runtime/driver.py launches runs there, packed as it packs it."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fused_topk.cuda_runtime import driver, kernel_source, tickets

from .build import Kernel
from .launch import Array, Outcome, launch


@contextmanager
def emulated(
    arrays: Sequence[Array],
    *,
    edit: Callable[[str], str] | None = None,
    architecture: int = 90,
    address_sanitizer: bool = False,
    debug: bool = False,
    is_public: bool = False,
    **how: Any,
) -> Iterator[list[Outcome]]:
    """Within it, launches of CPU tensors run at once, and append their outcomes to the list that it yields.

    Args:
        arrays: what the caller of cuda.py gives to the kernel. What cuda.py allocates itself need not be named.
        edit: makes the text to compile from that of csrc/.
        architecture, address_sanitizer, debug: see Kernel.
        is_public: whether the caller is a public function, which allocates results, and may give those of one launch to the next.
        how: see launch().
    """
    outcomes: list[Outcome] = []
    allocations = _Allocations(is_public)
    tickets: list[Array] = []
    call = inspect.signature(driver.call)

    def kernel_of(_device: int, name: str) -> Kernel:
        source = kernel_source.translation_unit(name)
        return Kernel(edit(source) if edit else source, name, architecture, address_sanitizer, debug)

    def launch_here(*args: Any, **kwargs: Any) -> None:
        given = call.bind(*args, **kwargs).arguments
        # The blocks of a cooperative launch wait for each other.
        together = {"max_blocks": math.prod(given["grid"])} if given.get("is_cooperative") else {}
        outcomes.append(
            launch(
                given["kernel"], given["grid"], given["threads"], given["arguments"],
                [*arrays, *allocations.arrays, *tickets], shared_bytes=given.get("shared_bytes", 0),
                **{**together, **how},
            )
        )  # fmt: skip

    def zeroed(_device: int, count: int) -> int:
        counters = torch.zeros(count, dtype=torch.int32)
        tickets.append(Array("tickets", counters, "zeros"))
        return counters.data_ptr()

    with _in_place_of_the_driver(kernel_of, launch_here, zeroed), allocations:
        yield outcomes


def replacing(old: str, new: str) -> Callable[[str], str]:
    """An `edit` of emulated() that plants a fault: `new` in the place of `old`, which the text has once."""

    def edit(source: str) -> str:
        # Not an AssertionError, which a test takes for the fault's own.
        if source.count(old) != 1:
            raise ValueError(f"found {source.count(old)} times: {old}")
        return source.replace(old, new)

    return edit


def replacing_each(pattern: str, new: str) -> Callable[[str], str]:
    """As replacing(), of all that a regular expression finds."""

    def edit(source: str) -> str:
        changed, count = re.subn(pattern, new, source)
        if not count:
            raise LookupError(f"csrc/ has no {pattern!r}: plant this fault elsewhere")
        return changed

    return edit


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Within it, launches do nothing but append the names of their kernels to the list that it yields."""
    names: list[str] = []

    def record(_device: int, name: str) -> None:
        names.append(name)

    with _in_place_of_the_driver(record, lambda *args, **kwargs: None, lambda *args: 0):
        yield names


@contextmanager
def _in_place_of_the_driver(function: Callable, call: Callable, zeroed: Callable) -> Iterator[None]:
    in_place = mock.patch.multiple(driver, function=function, call=call)
    with in_place, mock.patch.object(tickets, "zeroed", zeroed):
        yield


class _Allocations(TorchDispatchMode):
    """The tensors that the launching code makes for itself: copies of inputs, scratch, and tensors that torch writes into."""

    def __init__(self, is_public: bool) -> None:
        super().__init__()
        self._is_public = is_public
        self.arrays: list[Array] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        known = [_memory(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if isinstance(out := kwargs.get("out"), Tensor):
            self.arrays = [
                array._replace(role="inout") if _memory(array.tensor) == _memory(out) else array
                for array in self.arrays
            ]
        for made in result if isinstance(result, tuple) else (result,):
            if isinstance(made, Tensor) and made.numel() and _memory(made) not in known:
                name = function.overloadpacket.__name__
                role = "scratch" if name in ("empty", "new_empty") else "input"
                if self._is_public and name.startswith(("empty", "new_empty", "zeros", "new_zeros")):
                    role = "inout"
                self.arrays.append(Array(f"{name} #{len(self.arrays)}", made, role))
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
