# SPDX-License-Identifier: Apache-2.0
"""Softmax + top-k that reads the logits once, on CUDA and CPU tensors."""

from .full_rows import log_softmax, logsumexp, softmax
from .functional import beam_topk, log_softmax_topk, softmax_topk, topk
from .problem import TopK
from .warming import warm_up

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
