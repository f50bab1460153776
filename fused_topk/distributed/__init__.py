# SPDX-License-Identifier: Apache-2.0
"""Top-k, sampling and LM heads of a vocabulary that is spread over the processes of a group. Each process has some columns of the
logits, or rows of the head's weight. All processes get the result.

Top-k takes one collective a call: the k candidates and (m, d) of every row travel, never the logits. On GPUs a second collective
compares the calls of the processes, the first time that a group has this k, number of rows, dtype and normalize. Sampling takes
one or two collectives, and gathers the logits where no list of candidates suffices. `torch.distributed` carries the collectives,
with NCCL on GPUs and Gloo on CPUs.
"""

from .functions import beam_topk, log_softmax_topk, softmax_topk, topk
from .linear import linear_log_softmax_topk, linear_softmax_topk, linear_token_logprobs, linear_topk
from .sampling import sample

__all__ = [
    "beam_topk",
    "linear_log_softmax_topk",
    "linear_softmax_topk",
    "linear_token_logprobs",
    "linear_topk",
    "log_softmax_topk",
    "sample",
    "softmax_topk",
    "topk",
]
