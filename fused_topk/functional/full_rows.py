# SPDX-License-Identifier: Apache-2.0
"""The public functions of full rows. They check the arguments and run a plan, or the operator where torch must see the call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import check_backend, check_result_dtype, check_whole_rows, is_distributed
from ..backends import REQUESTS
from ..operators.full_rows import full_rows, plain_full_rows
from ..problem import result_dtype
from ..row_arguments import check_rows, plain_rows


def softmax(
    logits: Tensor,
    dim: int = -1,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """The probabilities `softmax(logits / temperature)` of full rows.

    >>> softmax(torch.tensor([0.0, 0.0]))
    tensor([0.5000, 0.5000])

    Each logit is read once. In rows longer than the chip can hold, some logits are read twice.

    Online normalizer: Milakov & Gimelshein 2018, Algorithm 3 (https://arxiv.org/abs/1805.02867).

    The other arguments, and the errors, are those of :func:`softmax_topk`.

    Args:
        dim: the dimension that sums to 1.
        mask: the tokens that count. The others have the probability 0, in one more pass over the logits.
        dtype: the dtype of the result: None for the dtype of `logits`, or torch.float32.

    Returns:
        A tensor of the shape of `logits`.

    Contract:
        Sums are float32 or more precise for every dtype. The result is rounded once, to its dtype. A row with a NaN or
        a +inf, or of only -inf, is NaN, as in torch. The rest is in docs/promises.md. Differentiable with respect to the logits.
    """
    return _values("softmax", logits, dim, temperature, mask, lengths, dtype, backend)


def log_softmax(
    logits: Tensor,
    dim: int = -1,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """The log-probabilities `log_softmax(logits / temperature)` of full rows.

    >>> log_softmax(torch.tensor([0.0, 0.0]))
    tensor([-0.6931, -0.6931])

    Arguments, result, errors and contract are those of :func:`softmax`.
    """
    return _values("log_softmax", logits, dim, temperature, mask, lengths, dtype, backend)


def logsumexp(
    logits: Tensor,
    dim: int = -1,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`logsumexp(logits / temperature)` of every row, in one read.

    >>> logsumexp(torch.tensor([0.0, 0.0]))
    tensor(0.6931)

    Arguments and errors are those of :func:`softmax`.

    Returns:
        float32 of the shape of `logits` without `dim` (float64 for float64 logits). A row with NaN gives NaN, another
        with +inf gives +inf, and a row of only -inf gives -inf.
    """
    return _values("logsumexp", logits, dim, temperature, mask, lengths, None, backend)


def _values(
    values: str,
    logits: Tensor,
    dim: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    dtype: torch.dtype | None,
    backend: str | None,
) -> Tensor:
    if type(dim) is int and mask is None and backend in REQUESTS and (dtype is None or type(dtype) is torch.dtype):
        rows = plain_rows(logits, temperature, lengths=lengths, dim=dim, may_learn=True)
        if rows is not None:
            result = plain_full_rows(rows, values, dtype, backend)
            return result if dim == -1 or values == "logsumexp" else result.movedim(-1, dim)
    check_backend(backend)
    if is_distributed(logits):
        # Imported here: plain tensors need no torch.distributed.
        from ..distributed import dtensors

        check_whole_rows("lengths", lengths, "set the logits to -inf there")
        return dtensors.full_rows(values, logits, dim, temperature, mask, dtype, backend)
    rows = check_rows(logits, temperature, mask, lengths, dim)
    out_dtype = result_dtype(logits.dtype) if values == "logsumexp" else check_result_dtype(dtype, logits)
    result = full_rows(rows, values, out_dtype, backend)
    return result if rows.logits is logits or values == "logsumexp" else result.movedim(-1, dim)
