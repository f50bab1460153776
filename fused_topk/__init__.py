# SPDX-License-Identifier: Apache-2.0
"""Softmax + top-k that reads the logits once, on CUDA and CPU tensors."""

from .functional import (
    beam_topk,
    log_softmax,
    log_softmax_topk,
    logsumexp,
    sample,
    softmax,
    softmax_topk,
    topk,
    warm_up,
)
from .problem import Sample, TopK

__version__ = "0.1.0"

__all__ = [
    "Sample",
    "TopK",
    "__version__",
    "beam_topk",
    "log_softmax",
    "log_softmax_topk",
    "logsumexp",
    "sample",
    "softmax",
    "softmax_topk",
    "topk",
    "warm_up",
]
