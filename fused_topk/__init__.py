# SPDX-License-Identifier: Apache-2.0
"""Softmax + top-k that reads the logits once, on CUDA and CPU tensors."""

from .functional import (
    beam_topk,
    linear_log_softmax_topk,
    linear_sample,
    linear_softmax_topk,
    linear_topk,
    log_softmax,
    log_softmax_topk,
    logsumexp,
    merge_states,
    merge_topk,
    router_topk,
    sample,
    softmax,
    softmax_topk,
    topk,
    topk_state,
    warm_up,
)
from .problem import Kept, RouterTopK, Sample, TargetTopK, TopK, TopKState

__version__ = "0.1.0"

__all__ = [
    "Kept",
    "RouterTopK",
    "Sample",
    "TargetTopK",
    "TopK",
    "TopKState",
    "__version__",
    "beam_topk",
    "linear_log_softmax_topk",
    "linear_sample",
    "linear_softmax_topk",
    "linear_topk",
    "log_softmax",
    "log_softmax_topk",
    "logsumexp",
    "merge_states",
    "merge_topk",
    "router_topk",
    "sample",
    "softmax",
    "softmax_topk",
    "topk",
    "topk_state",
    "warm_up",
]
