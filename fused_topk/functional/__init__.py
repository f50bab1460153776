# SPDX-License-Identifier: Apache-2.0
"""The public functions. They check their arguments and call :mod:`fused_topk.operators`."""

from .full_rows import log_softmax, logsumexp, softmax
from .row_topk import beam_topk, log_softmax_topk, softmax_topk, topk
from .sampling import sample
from .warming import warm_up

__all__ = [
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
