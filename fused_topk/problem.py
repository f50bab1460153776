# SPDX-License-Identifier: Apache-2.0
"""The words that all layers share: what a call asks for, once every argument has been checked, and what it gives."""

from __future__ import annotations

from typing import NamedTuple

import torch
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

    def at(self, logits: Tensor, mask: Tensor | None, row_temperature: Tensor | None) -> Problem:
        """The same request where these tensors lie: its own may be meta tensors that only show shapes and strides."""
        return self._replace(
            logits=logits, mask=_at(self.mask, mask), row_temperature=_at(self.row_temperature, row_temperature)
        )


class FullRowProblem(NamedTuple):
    """A checked request for full rows. A backend reads it and writes the contiguous tensor that the caller allocated."""

    logits: Tensor  # (..., V), any strides
    temperature: float  # positive and finite; ignored where row_temperature is given
    row_temperature: Tensor | None  # logits.shape[:-1], float32, any strides
    values: str  # "softmax" or "log_softmax", each for a result of logits.shape; "logsumexp", of logits.shape[:-1]

    def at(self, logits: Tensor, row_temperature: Tensor | None) -> FullRowProblem:
        """The same request where these tensors lie, as :meth:`Problem.at`."""
        return self._replace(logits=logits, row_temperature=_at(self.row_temperature, row_temperature))


def result_dtype(logits_dtype: torch.dtype) -> torch.dtype:
    """dtype of probabilities and logsumexp: float32, and float64 for float64 logits."""
    return torch.float64 if logits_dtype == torch.float64 else torch.float32


def _at(like: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    """The tensor, seen with the shape and the strides of `like`, which broadcasting may have given it."""
    if like is None or tensor is None:
        return None
    is_alike = tensor.shape == like.shape and tensor.stride() == like.stride()
    return tensor if is_alike else tensor.as_strided(like.shape, like.stride())
