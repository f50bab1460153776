# SPDX-License-Identifier: Apache-2.0
"""What users call: functions that check their arguments and hand the rows on to :mod:`fused_topk.operators`."""

from .full_rows import log_softmax, logsumexp, softmax
from .row_topk import beam_topk, log_softmax_topk, softmax_topk, topk
from .warming import warm_up

__all__ = [
    "beam_topk",
    "log_softmax",
    "log_softmax_topk",
    "logsumexp",
    "softmax",
    "softmax_topk",
    "topk",
    "warm_up",
]
