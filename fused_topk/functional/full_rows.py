# SPDX-License-Identifier: Apache-2.0
"""The public functions of full rows. They check the arguments, move the vocabulary last and call the operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import plans
from ..operators import full_rows, transforms
from ..operators.dispatch import need_dispatcher
from ..plans import FullRowPlan, Like
from ..problem import result_dtype
from ..tracing import is_traced_by_dynamo
from . import short_calls
from .arguments import (
    check_backend,
    check_dim,
    check_logits,
    check_row_temperature,
    check_temperature,
    check_vocabulary,
    is_distributed,
)

# These are looked up once, not at every call.
_full_rows = torch.ops.fused_topk.full_rows.default


def softmax(
    logits: Tensor,
    dim: int = -1,
    *,
    temperature: float | Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """The probabilities `softmax(logits / temperature)` of full rows.

    Each logit is read once. In rows longer than the chip can hold, some logits are read twice.

    Online normalizer: Milakov & Gimelshein 2018, Algorithm 3 (https://arxiv.org/abs/1805.02867).

    Args:
        logits: shape (..., V), float32, float16, bfloat16 or float64, any strides, any device. Rows with adjacent
            elements are read in place, others are copied first.
        dim: the dimension that sums to 1.
        temperature: divides the logits. A positive number, or a floating-point tensor with one number per row,
            broadcastable to the shape of `logits` without `dim`. The values of a CPU tensor are checked. Those of a
            CUDA tensor are not: a row whose temperature is not positive has NaN results.
        dtype: the dtype of the result: None for the dtype of `logits`, or torch.float32.
        backend: None picks the fastest backend that works, and falls back to torch operations. "cuda", "cpu" (native)
            and "reference" (torch operations) name one; if it does not work, the call raises.

    Returns:
        A tensor of the shape of `logits`.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: a value, shape or device that breaks a rule above.
        RuntimeError: the requested backend does not work here, or a kernel does not compile.

    Contract:
        Sums are float32 or more precise for every dtype. The result is rounded once, to its dtype. A row with a NaN or
        a +inf, or of only -inf, is NaN, as in torch. Deterministic: the same row gives the same bits in every call and
        in every batch. A call does not wait for the device, except the first call of a kernel on a GPU (see
        :func:`warm_up`). Can be captured in a CUDA graph and compiled with fullgraph=True. Differentiable with respect
        to the logits.

    Example:
        >>> import torch, fused_topk
        >>> fused_topk.softmax(torch.tensor([0.0, 0.0]))
        tensor([0.5000, 0.5000])
    """
    if not is_traced_by_dynamo():
        served: Tensor | None = short_calls.full_rows("softmax", logits, dim, temperature, dtype, backend)
        if served is not None:
            return served
    return _values("softmax", logits, dim, temperature, dtype, backend)


def log_softmax(
    logits: Tensor,
    dim: int = -1,
    *,
    temperature: float | Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """The log-probabilities `log_softmax(logits / temperature)` of full rows. The contract is that of :func:`softmax`.

    They are computed as (x - m) / T - log d with the row's maximum m. So a large common offset of the logits costs no
    accuracy.

    Args:
        logits: see :func:`softmax`, which describes all arguments.
        dim: the vocabulary dimension.
        temperature: a positive number, or a tensor with one number per row.
        dtype: None, or torch.float32.
        backend: None, "cuda", "cpu" or "reference".

    Returns:
        A tensor of the shape of `logits`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`softmax`.
    """
    if not is_traced_by_dynamo():
        served: Tensor | None = short_calls.full_rows("log_softmax", logits, dim, temperature, dtype, backend)
        if served is not None:
            return served
    return _values("log_softmax", logits, dim, temperature, dtype, backend)


def logsumexp(
    logits: Tensor,
    dim: int = -1,
    *,
    temperature: float | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`logsumexp(logits / temperature)` of every row, in one read.

    Args:
        logits: see :func:`softmax`, which describes all arguments.
        dim: the vocabulary dimension.
        temperature: a positive number, or a tensor with one number per row.
        backend: None, "cuda", "cpu" or "reference".

    Returns:
        float32 of the shape of `logits` without `dim` (float64 for float64 logits). A row with NaN gives NaN, another
        with +inf gives +inf, and a row of only -inf gives -inf.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`softmax`.
    """
    if not is_traced_by_dynamo():
        served: Tensor | None = short_calls.full_rows("logsumexp", logits, dim, temperature, None, backend)
        if served is not None:
            return served
    planned = _planned("logsumexp", logits, dim, temperature, None, backend)
    if planned is not None:
        return planned
    if is_distributed(logits):
        return _of_dtensor("logsumexp", logits, dim, temperature, None, backend)
    rows, number, row_temperature = _checked(logits, dim, temperature, backend)
    return _run(rows, number, row_temperature, "logsumexp", result_dtype(logits.dtype), backend)


def _values(
    values: str,
    logits: Tensor,
    dim: int,
    temperature: float | Tensor | None,
    dtype: torch.dtype | None,
    backend: str | None,
) -> Tensor:
    planned = _planned(values, logits, dim, temperature, dtype, backend)
    if planned is not None:
        return planned
    if is_distributed(logits):
        return _of_dtensor(values, logits, dim, temperature, dtype, backend)
    rows, number, row_temperature = _checked(logits, dim, temperature, backend)
    result = _run(rows, number, row_temperature, values, checked_dtype(dtype, logits), backend)
    return result if rows is logits else result.movedim(-1, dim)


def _of_dtensor(
    values: str,
    logits: Tensor,
    dim: int,
    temperature: float | Tensor | None,
    dtype: torch.dtype | None,
    backend: str | None,
) -> Tensor:
    # Imported here: plain tensors need no torch.distributed.
    from ..distributed import dtensors

    return dtensors.full_rows(values, logits, dim, temperature, dtype, backend)


def _planned(
    values: str,
    logits: Tensor,
    dim: int,
    temperature: float | Tensor | None,
    dtype: torch.dtype | None,
    backend: str | None,
) -> Tensor | None:
    """Runs the call by a cached plan, without torch's dispatcher. None if an argument may need more than that."""
    if (
        type(logits) is not Tensor
        or type(dim) is not int
        or dim != -1
        or not (backend is None or type(backend) is str)
        or not (dtype is None or type(dtype) is torch.dtype)
        or not (temperature is None or type(temperature) is Tensor)
        or need_dispatcher(logits, temperature)
    ):
        return None
    like = None
    if temperature is not None:
        is_known = temperature.dtype is result_dtype(logits.dtype) and not temperature.requires_grad
        if not is_known or temperature.device != logits.device:
            return None
        like = Like(temperature.dtype, temperature.shape, temperature.stride())
    plan = _plan(values, logits.dtype, logits.device, logits.shape, logits.stride(), backend, dtype, like)
    short_calls.keep_full_rows(plan, values, logits, dim, temperature, dtype, backend)
    if temperature is not None:
        check_row_temperature(temperature)
    return plan.run(logits, temperature)


@functools.lru_cache(maxsize=4096)
def _plan(
    values: str,
    dtype: torch.dtype,
    device: torch.device,
    shape: torch.Size,
    strides: tuple[int, ...],
    backend: str | None,
    dtype_of_result: torch.dtype | None = None,
    row_temperature: Like | None = None,
) -> FullRowPlan:
    """Checks these arguments and plans the call, once for all calls with the same arguments."""
    rows = Like(dtype, shape, strides)
    given = None if row_temperature is None else row_temperature.meta()
    logits, number, of_rows = _checked(rows.meta(), -1, given, backend)
    out_dtype = result_dtype(dtype) if values == "logsumexp" else checked_dtype(dtype_of_result, logits)
    return plans.full_row_plan(device, rows, number, Like.of(of_rows), values, out_dtype, backend)


def checked_dtype(dtype: torch.dtype | None, logits: Tensor) -> torch.dtype:
    """The dtype of the result."""
    if dtype is None:
        return logits.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"`dtype` must be a torch.dtype, got {type(dtype).__name__}; pass torch.float32 or leave it out"
        )
    if dtype not in (logits.dtype, torch.float32):
        raise ValueError(
            f"`dtype` must be torch.float32 or that of `logits`, {logits.dtype}, got {dtype}; convert the result with .to()"
        )
    return dtype


def _run(
    logits: Tensor,
    temperature: float,
    row_temperature: Tensor | None,
    values: str,
    dtype: torch.dtype,
    backend: str | None,
) -> Tensor:
    run: Callable[..., Any]
    if transforms.is_active():
        run = transforms.FullRows.apply
    elif need_dispatcher(logits, row_temperature):
        run = _full_rows
    else:
        run = full_rows.full_rows
    result: Tensor = run(logits, temperature, row_temperature, values, dtype, backend)
    return result


def _checked(
    logits: Tensor, dim: int, temperature: float | Tensor | None, backend: str | None
) -> tuple[Tensor, float, Tensor | None]:
    """(logits with the vocabulary last, and the two results of check_temperature())."""
    check_logits(logits)
    dims = logits.dim()
    dim = check_dim(dim, dims)
    if dim != dims - 1:
        logits = logits.movedim(dim, -1)
    check_vocabulary(logits.shape[-1])
    check_backend(backend)
    return logits, *check_temperature(temperature, logits, result_dtype(logits.dtype))
