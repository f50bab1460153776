# SPDX-License-Identifier: Apache-2.0
"""The types that all layers share: a checked request, and its result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from . import gone
from .rows import LogitRows, cut
from .scale import Scale


class TopK(NamedTuple):
    """The result of every function of top-k but :func:`topk` and its kin.

    Attributes:
        values: float32 probabilities, log-probabilities or scores, greatest first, shape (..., k). For
            `merge_topk(kind="logits")` the logits themselves, bit for bit, in their own dtype.
        indices: int64 positions along the vocabulary, shape (..., k).
        logsumexp: float32 log of the sum of the exponentials of the (temperature-scaled) logits, shape (...).
    """

    values: Tensor
    indices: Tensor
    logsumexp: Tensor


class TopKLogits(NamedTuple):
    """The result of :func:`topk` and :func:`linear_topk`, as `torch.topk` has it.

    Attributes:
        values: the greatest logits themselves, bit for bit, in their own dtype, greatest first, shape (..., k).
        indices: int64 positions along the vocabulary, shape (..., k).
    """

    values: Tensor
    indices: Tensor

    @property
    def logsumexp(self) -> NoReturn:
        gone.refuse_field("TopKLogits.logsumexp")


class TopKState(NamedTuple):
    """What is known of a part of every row: the state (m, d, T) of the paper. The states of a row's parts merge into the
    state of the row.

    Attributes:
        logits: the raw logits of the part's k best, in the logits' dtype, shape (..., k), in the order of
            :func:`softmax_topk`; -inf where a token is not allowed.
        indices: int64 tokens of the whole vocabulary, shape (..., k).
        m: the greatest raw logit that counts for d, shape (...); -inf if none counts. float32 (float64 for float64 logits).
        d: the sum of exp((x - m) / temperature) over the logits x that count, shape (...), in m's dtype; 0 if none counts,
            and NaN if m is NaN or +inf.
    """

    logits: Tensor
    indices: Tensor
    m: Tensor
    d: Tensor


class TokenLogprobs(NamedTuple):
    """The result of :func:`token_logprobs` and its kin. What was not asked for is None.

    Attributes:
        logprobs: float32 log-probabilities of the given tokens, of their shape, (...) or (..., n); NaN where there is none.
        logsumexp: float32 log of the sum of the exponentials of the scaled logits, shape (...).
        ranks: int64 ranks of the tokens, of their shape: 1 for the best token; 0 where there is none.
        entropy: float32 entropy in nats of the distribution that the log-probabilities are of, shape (...).
        tail: float32 log of the probability of all allowed tokens that are not among the row's given ones, shape (...).
        topk: the row's best tokens with their log-probabilities.
    """

    logprobs: Tensor
    logsumexp: Tensor
    ranks: Tensor | None
    entropy: Tensor | None
    tail: Tensor | None
    topk: TopK | None


class TopkProblem(NamedTuple):
    """A checked top-k request. A backend writes its result into a :class:`TopK` of the caller's contiguous tensors."""

    rows: LogitRows
    k: int  # 1 <= k <= V
    # "softmax", "log_softmax", "logits" or "state": logits, and m and d in a first dimension of 2 in place of the logsumexp.
    # For "logits" the logsumexp is empty, the temperature is 1 and `normalize` is "allowed": topk() has none of them.
    values: str
    normalize: str  # "allowed", "all" or "topk"


class MergeProblem(NamedTuple):
    """A checked request to merge the states of a row's parts. A backend writes its result into a :class:`TopK`.

    Each list is in the order of candidates. An index of -1 marks an entry that is no candidate; such entries come last.
    """

    logits: Tensor  # (parts, ..., k of a part); all tensors here may have any strides
    indices: Tensor  # logits.shape, int64
    m: Tensor  # logits.shape[:-1], float32, or float64 for float64 logits
    d: Tensor  # like m
    # (parts,) int32, the number of tokens of each part: indices then count from the part's start. None: from the row's start.
    part_lengths: Tensor | None
    k: int  # 1 <= k <= parts times k of a part
    scale: Scale  # the one that d was summed with, for rows of logits.shape[1:-1]
    values: str  # as in TopkProblem
    normalize: str  # "topk"; "allowed" and "all" both stand for the tokens that the states have summed up

    def flat(self) -> tuple[Any, ...]:
        """The fields as the arguments of an operator, those of `scale` one by one."""
        *others, scale, values, normalize = self
        return *others, *scale, values, normalize

    @staticmethod
    def of(logits: Any, indices: Any, m: Any, d: Any, part_lengths: Any, k: Any, *others: Any) -> MergeProblem:
        """The request that has the fields that :meth:`flat` returns."""
        *scale, values, normalize = others
        return MergeProblem(logits, indices, m, d, part_lengths, k, Scale(*scale), values, normalize)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.logits, self.indices, self.m, self.d, self.part_lengths, self.scale.row_temperature


class LinearProblem(NamedTuple):
    """A checked request for logits that an LM head computes."""

    rows: LogitRows  # with the hidden states (..., H) in the place of the logits
    weight: Tensor  # (V, H), any strides, of the dtype of the hidden states, as bias
    bias: Tensor | None  # (V,)
    targets: Tensor | None  # (..., n), int64
    normalize: str  # "allowed", "all" or "topk"

    def flat(self) -> tuple[Any, ...]:
        """The fields as the arguments of an operator."""
        rows, *others = self
        return *rows, *others

    @property
    def hidden(self) -> Tensor:
        return self.rows.logits

    @property
    def row_count(self) -> int:
        return math.prod(self.hidden.shape[:-1])


class LogitGradientProblem(NamedTuple):
    """A request for the gradient of a loss with respect to some rows' logits x. With z = (x - m) / T it is
    ((coefficient + slope * z) * exp(z) + rest * exp((x - rest_m) / T) + what is listed for the token) / T. Given tokens have no rest."""

    m: Tensor  # (rows,) float32, contiguous, as all up to `rest`
    coefficient: Tensor  # (rows,)
    slope: Tensor | None  # (rows,); None: 0
    rest_m: Tensor | None  # (rows,); None: no rest
    rest: Tensor | None  # (rows,)
    # (rows, length) int64, contiguous, each row sorted: in the upper 32 bits twice the token, and 1 for a given one (negative for none), in
    # the lower ones a float32 amount. A token may be listed several times.
    listed: Tensor

    def some(self, rows: slice) -> LogitGradientProblem:
        return LogitGradientProblem._make(cut(self, rows))


class Kept(NamedTuple):
    """What a row was drawn from, after top-k, top-p and min-p.

    Attributes:
        counts: int64 number of the tokens that may be drawn, shape (...).
        logsumexp: float32 log of the sum of exp(logit / temperature) over them, shape (...). A token's log-probability among
            them is its logit / temperature minus this.
    """

    counts: Tensor
    logsumexp: Tensor


class Sample(NamedTuple):
    """The result of :func:`sample`.

    Attributes:
        tokens: int64 drawn tokens, shape (..., num_samples).
        logprobs: float32 log-probabilities of these tokens, shape (..., num_samples).
        topk: the row's best tokens with their log-probabilities, where asked for.
        kept: how many tokens might be drawn, and the log of their mass, where asked for.
        ranks: int64 ranks of the drawn tokens, shape (..., num_samples), where asked for.
    """

    tokens: Tensor
    logprobs: Tensor
    topk: TopK | None
    kept: Kept | None = None
    ranks: Tensor | None = None

    @property
    def log_probs(self) -> NoReturn:
        gone.refuse_field("Sample.log_probs")


def changed(result: Sample, change: Callable[[Tensor], Tensor]) -> Sample:
    """The result, with `change` applied to each of its tensors."""
    tokens, logprobs, topk, kept, ranks = result
    topk = None if topk is None else TopK(*map(change, topk))
    kept = None if kept is None else Kept(*map(change, kept))
    return Sample(change(tokens), change(logprobs), topk, kept, None if ranks is None else change(ranks))


class SampleProblem(NamedTuple):
    """A checked request for draws. A backend writes its result into a :class:`Sample` of the caller's contiguous tensors.

    A parameter is one number for all rows. If its `row_...` is not None, that tensor has the number of each row instead. Such a
    tensor is contiguous, of shape (R,).
    """

    rows: LogitRows  # of (R, V), R >= 1; the temperature 0 takes the best token, and row_temperature is float64 and contiguous
    top_k: int  # 0 keeps all
    row_top_k: Tensor | None  # int64
    top_p: float  # 1 keeps all
    row_top_p: Tensor | None  # float64
    min_p: float  # 0 keeps all
    row_min_p: Tensor | None  # float64
    seed: int  # rows that share it draw different random numbers, named by the rows' numbers, too
    row_seed: Tensor | None  # int64
    counter: int
    row_counter: Tensor | None  # int64
    num_samples: int
    topk: int  # the length of Sample.topk; 0 for none
    truncated: bool  # whether the log-probabilities are relative to what is kept
    kept: bool = False  # whether there is a Sample.kept
    first_row: int = 0  # the number of the first row among all rows that share `seed`
    # (R, V) float32, contiguous: the token with the greatest log p_i - log noise_i is taken. Then num_samples is 1, and the seeds and
    # counters are not used.
    noise: Tensor | None = None


class RankProblem(NamedTuple):
    """A checked request for the ranks of tokens. A backend writes them into a contiguous int64 tensor of the targets' shape."""

    rows: LogitRows  # at the temperature 1
    # (..., n) int64, contiguous, n >= 1; a negative one is no target, of rank 0; V or more counts as V - 1
    targets: Tensor
    counts_ties: bool  # whether a rank counts all tokens that tie with the target, or those up to its index alone


class TokenSumsProblem(NamedTuple):
    """A checked request for the sums of token_sums.py. A backend adds the rows to a tensor (..., 5) that has the sums of the rows'
    parts before, and writes the logits of the tokens that are here, -inf for a hidden one, into another; both are contiguous."""

    rows: LogitRows
    tokens: Tensor  # (..., n) int64, contiguous; one that is not among the rows' is none
    normalize: str  # "all": m, d and s are of the whole row, whatever the mask hides; else "allowed"
    tail: bool  # whether the sums of the rest are wanted
    start: int = 0  # the rows' logits are those of the tokens from here on


class RouterTopK(NamedTuple):
    """The result of :func:`router_topk`.

    Attributes:
        weights: float32 weights of the chosen experts, in the order of the choice, shape (..., k).
        experts: int64 or int32 numbers of these experts, shape (..., k).
    """

    weights: Tensor
    experts: Tensor


class RouterProblem(NamedTuple):
    """A checked request for experts. A backend writes its result into a :class:`RouterTopK` of the caller's contiguous tensors."""

    rows: LogitRows  # at the temperature 1
    bias: Tensor | None  # (E,), contiguous, float32, or float64 for float64 logits
    k: int  # 1 <= k <= E
    scoring: str  # "softmax", "sigmoid" or "sqrtsoftplus"
    groups: int  # of adjacent experts, of equal size
    topk_groups: int  # groups that are kept; together they have at least k experts
    group_score: str  # "top2" or "max"
    renormalize: bool
    scale: float


class FullRowProblem(NamedTuple):
    """A checked request for full rows. A backend writes its result into a contiguous tensor from the caller."""

    rows: LogitRows
    # "softmax" or "log_softmax": the result has the logits' shape; "logsumexp": that shape without the vocabulary
    values: str


def result_dtype(logits_dtype: torch.dtype) -> torch.dtype:
    """The dtype of probabilities and logsumexp: float64 for float64 logits, else float32."""
    return torch.float64 if logits_dtype == torch.float64 else torch.float32
