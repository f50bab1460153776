# SPDX-License-Identifier: Apache-2.0
"""What results are: the shapes and dtypes of their tensors, and new tensors of these. No request for a result has memory of its own."""

from __future__ import annotations

import math
from typing import NamedTuple

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
_memory = {dtype: empty(size=(_FEW_ELEMENTS,), dtype=dtype, device="cpu") for dtype in (*DTYPES, torch.int64)}


class Result(NamedTuple):
    """The shape and the dtype of each field of a :class:`TopK`."""

    values: tuple[tuple[int, ...], torch.dtype]
    indices: tuple[tuple[int, ...], torch.dtype]
    logsumexp: tuple[tuple[int, ...], torch.dtype]

    @staticmethod
    def of(shape: tuple[int, ...], value_dtype: torch.dtype, rows: tuple[int, ...], dtype: torch.dtype) -> Result:
        """`shape`: of the values and indices. `rows`: of the logsumexp."""
        return Result((shape, value_dtype), (shape, torch.int64), (rows, dtype))

    def empty(self, device: torch.device) -> TopK:
        """New uninitialised tensors of these shapes and dtypes."""
        (shape, value_dtype), _, (rows, dtype) = self
        # The size is passed by keyword because torch parses a positional tuple more slowly.
        values = empty(size=shape, dtype=value_dtype, device=device)
        indices = empty(size=shape, dtype=torch.int64, device=device)
        return _new(TopK, (values, indices, empty(size=rows, dtype=dtype, device=device)))


def row_result(logits: Tensor, k: int, values: str) -> Result:
    """The shapes and dtypes for the k best of each row."""
    result = merge_result(logits, k, values)
    return result._replace(logsumexp=((0,), result.logsumexp[1])) if values == "logits" else result


def merge_result(logits: Tensor, k: int, values: str) -> Result:
    """Likewise of a merge of rows like these, which has a logsumexp whatever the values are."""
    rows, dtype = tuple(logits.shape[:-1]), result_dtype(logits.dtype)
    if values == "state":
        return Result.of((*rows, k), logits.dtype, (2, *rows), dtype)
    return Result.of((*rows, k), logits.dtype if values == "logits" else dtype, rows, dtype)


def beam_result(logits: Tensor, k: int) -> Result:
    """The shapes and dtypes for the k best over all beams of each batch entry."""
    batch, beams, _ = logits.shape
    dtype = result_dtype(logits.dtype)
    return Result.of((batch, k), dtype, (batch, beams), dtype)


def few_like(result: Result) -> tuple[Tensor, ...] | None:
    """Tensors of a short result's shapes and dtypes, without memory of their own. None for a long result."""
    if math.prod(result.values[0]) > _FEW_ELEMENTS or math.prod(result.logsumexp[0]) > _FEW_ELEMENTS:
        return None
    like = tuple(_memory[dtype][: math.prod(shape)].view(shape) for shape, dtype in result)
    # In a mode of torch, such as that of fake tensors, a view may be no plain tensor.
    return like if all(type(x) is Tensor and x.is_cpu for x in like) else None
