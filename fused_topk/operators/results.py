# SPDX-License-Identifier: Apache-2.0
"""What results are: the shapes and dtypes of their tensors, and new tensors of these. And plans: prepared requests for results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..problem import TopK, result_dtype
from ..rows import DTYPES

# The functions of torch at import. accelerate's init_empty_weights() puts others in their places, which make meta tensors.
empty, empty_like = torch.empty, torch.empty_like
_new = tuple.__new__
# A result on the CPU of at most this many elements is made by torch.empty_like, in three quarters of the time of torch.empty. The
# tensors that it is made like are views of these, one for each dtype.
_FEW_ELEMENTS = 1024
_memory = {
    dtype: empty(size=(_FEW_ELEMENTS,), dtype=dtype, device="cpu") for dtype in (*DTYPES, torch.int64, torch.int32)
}

# Runs a prepared request on tensors of the layout that it was prepared for: given what is read, the contiguous result that it writes,
# and the request's other tensors. What is read is the rows, or a whole request, of which it takes the tensors, the seeds and the noise.
Start = Callable[..., None]

Of = TypeVar("Of", bound=tuple[Any, ...])


class Result(Generic[Of]):
    """The type of a result, a named tuple, and the shape and the dtype of each of its tensors."""

    def __init__(self, kind: type[Of], *fields: tuple[tuple[int, ...], torch.dtype]) -> None:
        self.kind, self.fields = kind, fields

    def empty(self, device: torch.device) -> Of:
        """New uninitialised tensors of these shapes and dtypes."""
        # The size is passed by keyword because torch parses a positional tuple more slowly.
        made = (empty(size=shape, dtype=dtype, device=device) for shape, dtype in self.fields)
        return _new(self.kind, made)


class Plan(Generic[Of]):
    """A checked and prepared request. It lacks only the tensors, and holds no device memory."""

    def __init__(self, result: Result[Of], device: torch.device, start: Start | None) -> None:
        """start: None where there are no rows."""
        self.result, self.start, self._device = result, start or do_nothing, device
        # Tensors like those of a short result on the CPU, else None.
        self.like = few_like(result) if device.type == "cpu" else None

    def empty(self) -> Of:
        """New uninitialised tensors for the result."""
        like = self.like
        # tuple.__new__ avoids the named tuple's own __new__, which is written in Python.
        return self.result.empty(self._device) if like is None else _new(self.result.kind, map(empty_like, like))

    def run(self, read: Any, *others: Tensor | None) -> Of:
        """Computes the result into new tensors and returns them."""
        out = self.empty()
        self.start(read, out, *others)
        return out

    def run_into(self, out: Of, read: Any, *others: Tensor | None) -> None:
        """Computes the result into `out`: contiguous tensors of the result's dtypes are written in place, others are copies."""
        made = [
            x if x.is_contiguous() and x.dtype is dtype else empty(size=shape, dtype=dtype, device=self._device)
            for x, (shape, dtype) in zip(out, self.result.fields)
        ]
        self.start(read, _new(self.result.kind, made), *others)
        for given, computed in zip(out, made):
            if given is not computed:
                given.copy_(computed)


def do_nothing(*arguments: Any) -> None:
    """Runs a request that has no rows."""


def row_result(logits: Tensor, k: int, values: str) -> Result[TopK]:
    """The shapes and dtypes for the k best of each row."""
    result = merge_result(logits, k, values)
    *best, (_, dtype) = result.fields
    return Result(TopK, *best, ((0,), dtype)) if values == "logits" else result


def merge_result(logits: Tensor, k: int, values: str) -> Result[TopK]:
    """Likewise of a merge of rows like these, which has a logsumexp whatever the values are."""
    rows, dtype = tuple(logits.shape[:-1]), result_dtype(logits.dtype)
    of_values = logits.dtype if values in ("logits", "state") else dtype
    normalizer = (2, *rows) if values == "state" else rows
    return Result(TopK, ((*rows, k), of_values), ((*rows, k), torch.int64), (normalizer, dtype))


def beam_result(logits: Tensor, k: int) -> Result[TopK]:
    """The shapes and dtypes for the k best over all beams of each batch entry."""
    batch, beams, _ = logits.shape
    dtype = result_dtype(logits.dtype)
    return Result(TopK, ((batch, k), dtype), ((batch, k), torch.int64), ((batch, beams), dtype))


def few_like(result: Result[Any]) -> tuple[Tensor, ...] | None:
    """Tensors of a short result's shapes and dtypes, without memory of their own. None for a long result."""
    if any(math.prod(shape) > _FEW_ELEMENTS for shape, _ in result.fields):
        return None
    like = tuple(_memory[dtype][: math.prod(shape)].view(shape) for shape, dtype in result.fields)
    # In a mode of torch, such as that of fake tensors, a view may be no plain tensor.
    return like if all(type(x) is Tensor and x.is_cpu for x in like) else None
