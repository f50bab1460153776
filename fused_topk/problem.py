# SPDX-License-Identifier: Apache-2.0
"""The types that all layers share: a checked request, and its result."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TopK(NamedTuple):
    """The result of every function of the package.

    Attributes:
        values: float32 probabilities, log-probabilities or scores, greatest first, shape (..., k). For :func:`topk` the
            logits themselves, bit for bit, in their own dtype.
        indices: int64 positions along the vocabulary, shape (..., k).
        logsumexp: float32 log of the sum of the exponentials of the (temperature-scaled) logits, shape (...).
    """

    values: Tensor
    indices: Tensor
    logsumexp: Tensor


class Problem(NamedTuple):
    """A checked top-k request. A backend writes its result into a :class:`TopK` of the caller's contiguous tensors."""

    logits: Tensor  # (..., V), any strides
    k: int  # 1 <= k <= V
    temperature: float  # positive and finite; ignored where row_temperature is given
    row_temperature: Tensor | None  # logits.shape[:-1], float32, any strides
    mask: Tensor | None  # bool of logits.shape, or int32 of logits.shape[:-1] + (ceil(V / 32),), any strides
    values: str  # "softmax", "log_softmax" or "logits"
    normalize: str  # "allowed", "all" or "topk"

    def at(self, logits: Tensor, mask: Tensor | None, row_temperature: Tensor | None) -> Problem:
        """This request with these tensors in place of its own, which may be meta tensors.

        A tensor that the request has broadcast is broadcast again, to the same shape and strides.
        """
        return self._replace(
            logits=logits, mask=_at(self.mask, mask), row_temperature=_at(self.row_temperature, row_temperature)
        )


class FullRowProblem(NamedTuple):
    """A checked request for full rows. A backend writes its result into a contiguous tensor from the caller."""

    logits: Tensor  # (..., V), any strides
    temperature: float  # positive and finite; ignored where row_temperature is given
    row_temperature: Tensor | None  # logits.shape[:-1], float32, any strides
    values: str  # "softmax" or "log_softmax": the result has logits.shape; "logsumexp": it has logits.shape[:-1]

    def at(self, logits: Tensor, row_temperature: Tensor | None) -> FullRowProblem:
        """This request with these tensors in place of its own. See :meth:`Problem.at`."""
        return self._replace(logits=logits, row_temperature=_at(self.row_temperature, row_temperature))


def result_dtype(logits_dtype: torch.dtype) -> torch.dtype:
    """The dtype of probabilities and logsumexp: float64 for float64 logits, else float32."""
    return torch.float64 if logits_dtype == torch.float64 else torch.float32


def _at(like: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    """A view of `tensor` with the shape and the strides of `like`, which may be a broadcast view of the same layout."""
    if like is None or tensor is None:
        return None
    is_alike = tensor.shape == like.shape and tensor.stride() == like.stride()
    return tensor if is_alike else tensor.as_strided(like.shape, like.stride())
