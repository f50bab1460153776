# SPDX-License-Identifier: Apache-2.0
"""The public functions. They check their arguments, and run a plan of :mod:`fused_topk.operators`, or the operator where torch
must see the call.
"""

from .full_rows import log_softmax, logsumexp, softmax
from .linear import linear_log_softmax_topk, linear_softmax_topk, linear_token_logprobs, linear_topk
from .linear_sampling import linear_sample
from .merging import merge_states, merge_topk, topk_state
from .routing import router_topk
from .row_topk import beam_topk, log_softmax_topk, softmax_topk, topk
from .sampling import sample
from .tokens import token_logprobs
from .warming import warm_up

__all__ = [
    "beam_topk",
    "linear_log_softmax_topk",
    "linear_sample",
    "linear_softmax_topk",
    "linear_token_logprobs",
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
    "token_logprobs",
    "topk",
    "topk_state",
    "warm_up",
]
