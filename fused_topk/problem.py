# SPDX-License-Identifier: Apache-2.0
"""What the public functions hand to a backend, once every argument has been checked."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TopK(NamedTuple):
    """The result of every function of the package.

    values: float32 probabilities, log-probabilities or scores, greatest first, shape (..., k). For :func:`topk` the
        logits themselves, bit for bit, in their own dtype.
    indices: int64 positions along the vocabulary, shape (..., k).
    logsumexp: float32 log of the sum of the exponentials of the (temperature-scaled) logits, shape (...).
    """

    values: Tensor
    indices: Tensor
    logsumexp: Tensor


class Problem(NamedTuple):
    """A checked request. A backend reads it and writes a :class:`TopK` of contiguous tensors that the caller allocated."""

    logits: Tensor  # (..., V), any strides
    k: int  # 1 <= k <= V
    temperature: float  # positive and finite; ignored where row_temperature is given
    row_temperature: Tensor | None  # logits.shape[:-1], float32, any strides
    mask: Tensor | None  # bool of logits.shape, or int32 of logits.shape[:-1] + (ceil(V / 32),), any strides
    values: str  # "softmax", "log_softmax" or "logits"
    normalize: str  # "allowed", "all" or "topk"


class FullRowProblem(NamedTuple):
    """A checked request for full rows. A backend reads it and writes the contiguous tensor that the caller allocated."""

    logits: Tensor  # (..., V), any strides
    temperature: float  # positive and finite; ignored where row_temperature is given
    row_temperature: Tensor | None  # logits.shape[:-1], float32, any strides
    values: str  # "softmax" or "log_softmax", each for a result of logits.shape; "logsumexp", of logits.shape[:-1]
