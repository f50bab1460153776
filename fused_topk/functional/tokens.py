# SPDX-License-Identifier: Apache-2.0
"""The public function of given tokens: their log-probabilities and ranks, beside a row's k best."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import (
    check_backend,
    check_choice,
    check_common_normalize,
    check_flags,
    check_list,
    check_same_device,
    check_tensor,
    is_readable,
    number_outside,
)
from ..operators.ranks import target_ranks
from ..operators.row_topk import plain_topk, row_topk
from ..operators.token_spread import token_spread
from ..problem import TokenLogprobs
from ..row_arguments import check_rows, plain_rows
from ..rows import LogitRows

_TIES = ("index", "last")


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    k: int = 0,
    ranks: bool = False,
    entropy: bool = False,
    tail: bool = False,
    ties: str = "index",
    backend: str | None = None,
) -> TokenLogprobs:
    """The log-probabilities of given tokens, one or several a row, and what else is asked for, in one read of the logits.

    >>> token_logprobs(torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([1])).logprobs
    tensor([-0.1698])

    For scoring given texts, for training, and to see how the tokens that were drawn fare among the others.

    The other arguments, and the errors, are those of :func:`softmax_topk`.

    Args:
        tokens: int64. One for each row has the shape (...), n for each row have the shape (..., n). A negative number, such as
            -100, stands for none.
        normalize: "allowed": log-probabilities are relative to the allowed tokens. "all": to the whole row, up to its length.
        k: how many of the row's best tokens to return as well, 0 <= k <= V.
        ranks: whether to count the tokens' ranks.
        entropy: whether to compute the entropy of each row.
        tail: whether to compute the log-probability of all tokens but the row's given ones.
        ties: which of the tokens that tie with a given one count in its rank. "index": those up to its own index. The rank is
            then the token's place in the order of :func:`softmax_topk`. "last": all of them, as inference engines count.

    Returns:
        TokenLogprobs with logprobs float32 of the shape of `tokens`, NaN where there is none, and logsumexp float32 (...) of the
        scaled logits. Where asked for, ranks int64 of the shape of `tokens`, 1 for the best token, 0 where there is none; entropy
        and tail float32 (...); and topk, as :func:`log_softmax_topk` returns it. Others are None. float64 logits give float64.

    Contract:
        A token that is not allowed has -inf. A row without probabilities, such as one with NaN, has NaN.
        A rank is the number of tokens whose logit is greater than the token's, and of the equal ones that `ties` counts; NaN is
        greater than all. A token that is not allowed has the rank of a logit of -inf. Ranks need one more read of the row, mostly
        from the cache. Tokens of V or more raise on the CPU, and must not occur on a GPU, where nothing outside the row is read.
        The entropy is that of the distribution that the log-probabilities are of, in nats. A token of probability 0 adds 0, and a
        row with one token has 0. The tail is the log of the probability of all allowed tokens that are not among the row's given
        ones, summed over these tokens: it has all its digits where the given ones have nearly everything. Equal given tokens count
        once. Where nothing is left it is -inf, with a gradient of 0. Both take one more read of the row, mostly from the cache.
        The rest is the contract of :func:`softmax_topk`. The log-probabilities, the logsumexp, the entropy, the tail and the values
        of topk are differentiable with respect to the logits.
    """
    check_common_normalize(normalize, "token_logprobs")
    check_flags(ranks=ranks, entropy=entropy, tail=tail)
    check_ties(ties)
    check_backend(backend)
    is_plain = type(tokens) is Tensor and type(k) is int
    rows = plain_rows(logits, temperature, mask, lengths, (tokens,), may_learn=True) if is_plain else None
    if rows is not None:
        # The plan of the layout checks the rows and k.
        best, rows = plain_topk(rows, k or 1, "log_softmax", normalize, backend), rows.broadcast()
        are_known = check_tokens(tokens, logits)
    else:
        rows = check_rows(logits, temperature, mask, lengths)
        check_list("k", k, logits.shape[-1])
        are_known = check_tokens(tokens, logits)
        best = row_topk(rows, k or 1, "log_softmax", normalize, backend)
    of_row = tokens if tokens.dim() == logits.dim() else tokens.unsqueeze(-1)
    values, indices = (best.values, best.indices) if k <= 1 else (best.values[..., :1], best.indices[..., :1])
    logprobs = _logprobs(rows, of_row, are_known, values, indices)
    counted = target_ranks(rows, of_row, ties == "last", backend) if ranks else None
    of_entropy = of_tail = None
    if entropy or tail:
        of_entropy, of_tail = token_spread(rows, of_row, normalize, tail, backend)
    if of_row is not tokens:
        logprobs, counted = logprobs.squeeze(-1), None if counted is None else counted.squeeze(-1)
    return TokenLogprobs(
        logprobs,
        best.logsumexp,
        counted,
        of_entropy if entropy else None,
        of_tail if tail else None,
        best if k else None,
    )


def check_ties(ties: Any) -> None:
    check_choice("ties", ties, _TIES)


def check_tokens(tokens: Any, logits: Tensor, is_part: bool = False) -> bool:
    """Checks one token a row, or several in a last dimension. Returns whether all are known to be in the row. is_part: whether
    `logits` have only a part of the vocabulary, which tokens may lie outside of."""
    check_tensor("tokens", tokens)
    if tokens.dtype != torch.int64:
        raise TypeError(f"`tokens` must be int64, got {tokens.dtype}; use .long()")
    is_several = tokens.dim() == logits.dim()
    if is_several and tokens.shape[-1] == 0:
        raise ValueError("`tokens` must have at least one token a row, got none; use logsumexp() or log_softmax_topk()")
    if (tokens.shape[:-1] if is_several else tokens.shape) != logits.shape[:-1]:
        raise ValueError(
            f"`tokens` must have the shape {tuple(logits.shape[:-1])} of the positions, got {tuple(tokens.shape)}; "
            "for a causal model drop the last position and the first token"
        )
    check_same_device("tokens", tokens, logits)
    if is_part or not is_readable(tokens):
        return False
    last = logits.shape[-1] - 1
    if number_outside(tokens, 0, last) is None:
        return True
    wrong = number_outside(tokens, -torch.inf, last)
    if wrong is not None:
        raise ValueError(
            f"`tokens` must be below the vocabulary size {last + 1}, got {wrong}; negative ones mark positions without a token"
        )
    return False


def _logprobs(rows: LogitRows, tokens: Tensor, are_known: bool, first: Tensor, index: Tensor) -> Tensor:
    """are_known: whether all tokens are known to be in the row. index, first: the best token, and its log-probability, NaN in a row
    without probabilities."""
    # Computed as a difference to the best token, so a common offset of the logits costs no digits.
    places = tokens if are_known else tokens.clamp(0, rows.logits.shape[-1] - 1)
    best = rows.logits.gather(-1, index).to(first.dtype)
    if rows.hides():
        # -inf - -inf would be NaN. A row whose best allowed logit is -inf has no greater one.
        best = best.masked_fill(best == -torch.inf, 0.0)
    logprobs = first + rows.scale().log_weight(rows.logits.gather(-1, places).to(first.dtype), best)
    counted = rows.counted_at(places)
    if counted is not None:
        logprobs = logprobs.where(counted | first.isnan(), -torch.inf)
    return logprobs if are_known else logprobs.masked_fill(tokens < 0, torch.nan)
