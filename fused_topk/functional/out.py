# SPDX-License-Identifier: Apache-2.0
"""The check of `out`: its tensors have the result's shapes and dtypes, and share no memory with another tensor of the call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_tensor
from ..operators.results import Of, Plan, Result
from ..rows import LogitRows
from ..tracing import is_traced

_new = tuple.__new__  # quicker than a named tuple's own, which is written in Python
# Where a result has a logsumexp and topk() has none.
_NO_LOGSUMEXP = torch.empty(0, device="cpu")

# Tells autograd that tensors have changed. Where one of them is kept for a gradient, the backward pass then raises.
have_changed: Callable[[Sequence[Tensor]], None] = torch.autograd.graph.increment_version


def may_be_plain(out: Any, types: Sequence[type], length: int) -> bool:
    """Whether `out` is a tuple of one of these types, with so many tensors that are of no subclass."""
    return type(out) in types and len(out) == length and all(type(x) is Tensor for x in out)


def run_into(planned: Plan[Of], out: Any, rows: LogitRows, *others: Tensor | None) -> Of:
    """Runs a plan into `out`, which may be plain, once it is checked. Returns it as the result's type.

    others: the other tensors of the call.
    """
    kind: Any = planned.result.kind
    expected = planned.result.fields
    written: Of = out if type(out) is kind else _new(kind, out if len(out) == len(expected) else (*out, _NO_LOGSUMEXP))
    is_plain = _is_plain(out, expected, rows, *others)
    if not is_plain:
        check_out(out, expected[: len(out)], rows, kind._fields[: len(out)], *others)
    if is_plain and written[1].dtype is expected[1][1]:
        planned.start(rows, written, *others)
    else:
        planned.run_into(written, rows, *others)
    have_changed(out)
    return written


def copied_into(
    out: Any,
    fields: Sequence[str],
    result: Result[Of],
    compute: Callable[[], Of],
    rows: LogitRows,
    dim: int,
    *others: Tensor | None,
) -> Of:
    """Checks `out`, computes the result, and copies it there. Returns `out` as the result's type.

    fields: those that `out` is to have. dim: the dimension of the vocabulary, which is last in the rows.
    """
    dims = rows.logits.dim()
    dim %= dims
    # Other fields have no dimension of what is chosen.
    expected = [
        ((*shape[:dim], shape[-1], *shape[dim:-1]) if len(shape) == dims else shape, dtype)
        for shape, dtype in result.fields
    ]
    check_out(out, expected[: len(fields)], rows, fields, *others)
    written = list(compute())
    for i, given in enumerate(out):
        written[i] = given.copy_(written[i])
    return result.kind(*written)


def check_out(
    out: Any,
    expected: Sequence[tuple[Sequence[int], torch.dtype]],
    rows: LogitRows,
    fields: Sequence[str],
    bias: Tensor | None = None,
) -> None:
    """Checks that the tensors of `out` have the `expected` shapes and dtypes, in the order of the fields, and overlap no other
    tensor of the call. Indices of a :class:`TopK` may also be int32."""
    if not isinstance(out, (tuple, list)) or len(out) != len(fields):
        got = f"{type(out).__name__}{f' of {len(out)}' if isinstance(out, (tuple, list)) else ''}"
        raise TypeError(f"`out` must be a tuple ({', '.join(fields)}), got {got}; pass {len(fields)} tensors")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*rows, bias, *out) if isinstance(t, Tensor)):
        raise ValueError(
            "`out` must not be used where a gradient is wanted, got requires_grad=True; detach or leave out=None"
        )
    for name, tensor, (shape, dtype) in zip(fields, out, expected, strict=True):
        check_tensor(f"out.{name}", tensor)
        if tensor.dtype is not dtype and (name, tensor.dtype) != ("indices", torch.int32):
            raise TypeError(f"`out.{name}` must have dtype {dtype}, got {tensor.dtype}; allocate it so")
        if tensor.shape != shape:
            raise ValueError(
                f"`out.{name}` must have shape {tuple(shape)}, got {tuple(tensor.shape)}; it is never resized"
            )
        if tensor.device != rows.logits.device:
            raise ValueError(
                f"`out.{name}` must be on {rows.logits.device}, the device of `logits`, got {tensor.device}; allocate it there"
            )
        if not tensor.is_contiguous() and tensor.numel() and _overlaps_itself(tensor):
            raise ValueError(
                f"`out.{name}` must not overlap itself, got strides {tensor.stride()}; use .contiguous() or torch.empty"
            )
    if is_traced():
        # Traced tensors have no addresses.
        return
    for name, tensor in zip(fields, out, strict=True):
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"`out.{name}` must not be a tensor of inference mode outside of it, got one; allocate it outside, too"
            )
        if tensor.is_neg():
            raise ValueError(f"`out.{name}` must not be a negative view, got one; pass a tensor of its own")
    read = {name.removeprefix("row_"): t for name, t in zip(LogitRows._fields, rows, strict=True)} | {"bias": bias}
    places = [(name, t, _bytes(t)) for name, t in read.items() if isinstance(t, Tensor)]
    for name, tensor in zip(fields, out, strict=True):
        first, end = _bytes(tensor)
        for other_name, other, (other_first, other_end) in places:
            if first < other_end and other_first < end and _may_share_memory(tensor, other):
                raise ValueError(
                    f"`out.{name}` must not overlap `{other_name}` in memory; allocate a tensor of its own"
                )
        places.append((f"out.{name}", tensor, (first, end)))


def _is_plain(
    out: Sequence[Tensor],
    expected: Sequence[tuple[Sequence[int], torch.dtype]],
    rows: LogitRows,
    bias: Tensor | None = None,
) -> bool:
    """A quick sufficient test: whether every tensor is as check_out() expects it, contiguous, and overlaps no other.

    Where this is False, check_out() decides. It is slower, which counts for a call at every step of an inference engine.
    """
    device = rows.logits.device
    ranges = [_bytes(tensor) for tensor in rows.tensors()]
    if bias is not None:
        ranges.append(_bytes(bias))
    for tensor, (shape, dtype) in zip(out, expected):
        is_of_dtype = tensor.dtype is dtype or (dtype is torch.int64 and tensor.dtype is torch.int32)
        if not is_of_dtype or tensor.shape != shape or tensor.device != device or not tensor.is_contiguous():
            return False
        if tensor.is_inference():
            return False
        ranges.append(_bytes(tensor))
    # Sorted by start, each range must end before the next begins.
    ranges.sort()
    end_of_last = 0
    for start, end in ranges:
        if start < end_of_last:
            return False
        end_of_last = end
    return True


def _overlaps_itself(tensor: Tensor) -> bool:
    # Sorted by stride, each dimension's stride must exceed the extent of all dimensions before it.
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _may_share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose address ranges overlap may have a byte in common.

    They may be interleaved, as the columns of one buffer are. The dimensions are divided into inner ones and outer
    ones, by a least outer stride. Let g be the greatest common divisor of all outer strides. Then an element's address
    modulo g depends on its inner dimensions only. So the tensors are disjoint if their inner extents are disjoint
    modulo g. Every division is tried.
    """
    if a.device != b.device:
        return False
    steps_of_a, steps_of_b = _steps(a), _steps(b)
    distance = b.data_ptr() - a.data_ptr()
    for least_outer in {step for step, _ in (*steps_of_a, *steps_of_b)}:
        g = math.gcd(*(step for step, _ in (*steps_of_a, *steps_of_b) if step >= least_outer))
        stretch_of_a = a.element_size() + sum(step * (n - 1) for step, n in steps_of_a if step < least_outer)
        stretch_of_b = b.element_size() + sum(step * (n - 1) for step, n in steps_of_b if step < least_outer)
        if stretch_of_a <= distance % g <= g - stretch_of_b:
            return False
    return True


def _steps(tensor: Tensor) -> list[tuple[int, int]]:
    """(stride in bytes, size) of each dimension along which the address changes."""
    size = tensor.element_size()
    return [(s * size, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and s]


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the byte after its last. (0, 0) for a tensor without memory."""
    start = tensor.data_ptr()
    if not start:
        return 0, 0
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    return start, start + tensor.element_size() + sum(step * (n - 1) for step, n in _steps(tensor))
