# SPDX-License-Identifier: Apache-2.0
"""The checks of what a call reads: logits, temperature, mask and lengths. The errors are as in arguments.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .arguments import (
    check_dim,
    check_logits,
    check_no_tangent,
    check_same_device,
    check_tensor,
    check_vocabulary,
    is_readable,
    number_outside,
)
from .operators.dispatch import is_seen_by_torch, need_dispatcher
from .problem import result_dtype
from .rows import LogitRows, RowsLayout
from .scale import Scale

# The kernels scale by 1 / T in float32. All backends have the limits of the CPU's kernel (csrc/cpu/row_state.h).
TEMPERATURES = 2.0**-120, 2.0**126
_LENGTHS = (torch.int32, torch.int64)
PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def check_rows(
    logits: Any,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    dim: int = -1,
    *,
    may_be_empty: bool = False,
) -> LogitRows:
    """The checked rows of a call, whatever it wants of them. The vocabulary, at the dimension `dim` of the logits, is last in them. Where
    it is last already they have the logits as they are given. may_be_empty: whether the vocabulary may have no token, as a process's share
    of a vocabulary may."""
    check_logits(logits)
    dims = logits.dim()
    dim = check_dim(dim, dims)
    if dim != dims - 1:
        logits = logits.movedim(dim, -1)
        # A packed mask already has its words last. A bool one moves with the logits, once it has their dimensions.
        if (
            isinstance(mask, Tensor)
            and mask.dtype == torch.bool
            and mask.dim() <= dims
            and mask.layout == torch.strided
        ):
            mask = mask.reshape((1,) * (dims - mask.dim()) + mask.shape).movedim(dim, -1)
    # A comparison, because torch.compile of torch 2.6 makes a size a constant if its truth value is asked.
    if not may_be_empty or logits.shape[-1] > 0:
        check_vocabulary(logits.shape[-1])
    scale = check_temperature(temperature, logits, result_dtype(logits.dtype))
    return LogitRows(logits, *scale, mask=check_mask(mask, logits), lengths=check_lengths(lengths, logits))


def check_layout(layout: RowsLayout) -> LogitRows:
    """The checked rows of a layout, without memory: what a plan is made of."""
    rows = check_rows(*layout.given())
    given, wanted = layout.row_temperature, rows.row_temperature
    # A backend reads the temperatures in place, so it cannot convert them.
    if given is not None and wanted is not None and given.dtype is not wanted.dtype:
        raise TypeError(f"`row_temperature` must be {wanted.dtype}, got {given.dtype}; convert it")
    return rows


def plain_rows(
    logits: Any,
    temperature: Any = 1.0,
    mask: Any = None,
    lengths: Any = None,
    others: Sequence[Any] = (),
    dim: int = -1,
    *,
    may_learn: bool = False,
) -> LogitRows | None:
    """The rows of a call that needs no dispatcher of torch, by quick checks: the plan of their layout makes all other checks. The
    tensors are as the user gives them, and not broadcast. None if an argument may need more than that; check_rows() then decides.
    others: the other tensors of the call. dim: the dimension of the vocabulary, which is last in the result. may_learn: whether the
    caller also serves logits that autograd must see."""
    if type(logits) is not Tensor:
        return None
    if dim != -1:
        dims = logits.dim()
        if mask is not None or not -dims <= dim < dims:
            return None
        logits = logits.movedim(dim, -1)
    need = is_seen_by_torch if may_learn else need_dispatcher
    if type(temperature) is float and temperature == 1.0 and mask is None and lengths is None:
        # The plainest call has a path of its own: for a short row, looking at the optional arguments would show.
        return None if need(logits, *others) else tuple.__new__(LogitRows, (logits, 1.0, None, None, None))
    number, row_temperature = 1.0, temperature if isinstance(temperature, Tensor) else None
    # A loop, because any() of a generator would show.
    for tensor in (row_temperature, mask, lengths):
        if tensor is not None and (type(tensor) is not Tensor or tensor.device != logits.device):
            return None
    if need(logits, row_temperature, mask, lengths, *others) or logits.dim() == 0:
        return None
    if row_temperature is not None:
        if row_temperature.dtype is not result_dtype(logits.dtype) or row_temperature.requires_grad:
            return None
        check_row_values("temperature", row_temperature, TEMPERATURES)
    elif type(temperature) in (float, int) and TEMPERATURES[0] <= temperature <= TEMPERATURES[1]:
        number = float(temperature)
    else:
        return None
    if lengths is not None:
        if lengths.dtype not in _LENGTHS:
            return None
        check_row_values("lengths", lengths, (0, logits.shape[-1]))
    return tuple.__new__(LogitRows, (logits, number, row_temperature, mask, lengths))


def is_plain(value: Any, logits: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Whether a plan can take another tensor beside the logits as it is: of that dtype and shape, on their device, and without a
    dispatcher of torch."""
    return (
        type(value) in PLAIN_TYPES
        and not need_dispatcher(value)
        and value.dtype is dtype
        and value.shape == shape
        and value.device == logits.device
    )


def check_temperature(temperature: Any, logits: Tensor, dtype: torch.dtype) -> Scale:
    """The temperature of all rows, or that of each row with shape logits.shape[:-1]."""
    best = "for the best token use k=1"
    number, of_rows = check_row_numbers("temperature", temperature, logits, dtype, TEMPERATURES, remedy=best)
    if of_rows is None:
        return Scale(number)
    if temperature.requires_grad:
        raise ValueError("`temperature` must not require a gradient, got requires_grad=True; use .detach()")
    return Scale(row_temperature=of_rows)


def check_row_numbers(
    name: str,
    value: Any,
    logits: Tensor,
    dtype: torch.dtype,
    limits: tuple[float, float],
    or_zero: bool = False,
    remedy: str = "clamp it",
) -> tuple[Any, Tensor | None]:
    """A number of all rows, or one a row: (the number, None), or (0, those of the rows (...), of `dtype`).

    limits: the least and the greatest value. or_zero: whether 0 is allowed besides. remedy: for another number of all rows.
    """
    least, greatest = limits
    is_floating = dtype.is_floating_point
    if isinstance(value, Tensor):
        check_tensor(name, value)
        if value.is_floating_point() != is_floating or value.dtype == torch.bool or value.is_complex():
            kind = "a floating-point" if is_floating else "an integer"
            raise TypeError(f"`{name}` must be {kind} tensor, got {value.dtype}; use .to({dtype})")
        check_no_tangent(name, value)
        _check_is_one_a_row(name, value, logits)
        numbers = value.to(dtype)
        check_row_values(name, numbers, limits, or_zero)
        return 0, numbers.expand(logits.shape[:-1])
    kinds: tuple[Any, ...] = (int, float, np.number) if is_floating else (int, np.integer)
    if isinstance(value, bool) or not isinstance(value, kinds):
        a_number = "a number" if is_floating else "an int"
        raise TypeError(
            f"`{name}` must be {a_number} or a tensor, got {type(value).__name__}; convert it, or leave it out"
        )
    # Compared before it is converted: a float cannot hold every int.
    if not (least <= value <= greatest or (or_zero and value == 0)):
        raise ValueError(f"`{name}` must {_rule(name, limits, or_zero)}, got {value}; {remedy}")
    return float(value) if is_floating else int(value), None


def check_row_values(name: str, numbers: Tensor, limits: tuple[float, float], or_zero: bool = False) -> None:
    """Checks numbers of rows, where they can be read."""
    wrong = number_outside(numbers, *limits, or_zero) if is_readable(numbers) else None
    if wrong is not None:
        raise ValueError(f"`{name}` must {_rule(name, limits, or_zero)} in every row, got {wrong}; clamp it")


def _rule(name: str, limits: tuple[float, float], or_zero: bool) -> str:
    least, greatest = (f"{limit:.10g}" for limit in limits)
    return f"satisfy {least} <= {name} <= {greatest}{' or be 0' if or_zero else ''}"


def check_mask(mask: Tensor | None, logits: Tensor) -> Tensor | None:
    """The mask broadcast to the logits' leading shape, without a copy."""
    if mask is None:
        return None
    check_tensor("mask", mask)
    if mask.dtype not in (torch.bool, torch.int32):
        remedy = "mask.bool()"
        if mask.is_floating_point():
            remedy = (
                "mask == 0 if it is added to logits (0 and -inf), mask.bool() if it has ones for the allowed tokens"
            )
        elif mask.dtype == torch.uint32:
            remedy = "mask.view(torch.int32)"
        raise TypeError(
            f"`mask` must be bool (one a token) or int32 (32 tokens a word), got {mask.dtype}; use {remedy}"
        )
    check_same_device("mask", mask, logits)
    *rows, vocab_size = logits.shape
    if mask.dtype == torch.bool:
        if not _broadcasts(mask.shape, logits.shape):
            raise ValueError(
                f"`mask` of bool must broadcast to {tuple(logits.shape)}, the shape of `logits` with the vocabulary last, got "
                f"{tuple(mask.shape)} in that order; use True for the tokens that are allowed"
            )
        return mask.expand(logits.shape)
    words = (vocab_size + 31) // 32
    if mask.dim() == 0 or mask.shape[-1] != words or not _broadcasts(mask.shape[:-1], rows):
        raise ValueError(
            f"`mask` of int32 must broadcast to {(*rows, words)}, 32 tokens a word, got {tuple(mask.shape)}; "
            "bit j of word i stands for token 32 i + j"
        )
    return mask.expand(*rows, words)


def check_lengths(lengths: Tensor | None, logits: Tensor) -> Tensor | None:
    """The lengths broadcast to the logits' leading shape, without a copy."""
    if lengths is None:
        return None
    check_tensor("lengths", lengths)
    if lengths.dtype not in _LENGTHS:
        raise TypeError(f"`lengths` must be int32 or int64, got {lengths.dtype}; use .long()")
    _check_is_one_a_row("lengths", lengths, logits)
    check_row_values("lengths", lengths, (0, logits.shape[-1]))
    return lengths.expand(logits.shape[:-1])


def _check_is_one_a_row(name: str, tensor: Tensor, logits: Tensor) -> None:
    check_same_device(name, tensor, logits)
    rows = logits.shape[:-1]
    if not _broadcasts(tensor.shape, rows):
        raise ValueError(
            f"`{name}` must be one number a row, broadcastable to {tuple(rows)}, got shape {tuple(tensor.shape)}; "
            "drop its vocabulary dimension if it has one"
        )


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    offset = len(to) - len(shape)
    return offset >= 0 and all(s in (1, to[offset + i]) for i, s in enumerate(shape))
