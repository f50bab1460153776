# SPDX-License-Identifier: Apache-2.0
"""Softmax + top-k that reads the logits once, on CUDA and CPU tensors."""

from .functional import beam_topk, log_softmax, log_softmax_topk, logsumexp, softmax, softmax_topk, topk, warm_up
from .problem import TopK

__version__ = "0.1.0"

__all__ = [
    "TopK",
    "__version__",
    "beam_topk",
    "log_softmax",
    "log_softmax_topk",
    "logsumexp",
    "softmax",
    "softmax_topk",
    "topk",
    "warm_up",
]
