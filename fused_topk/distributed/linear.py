# SPDX-License-Identifier: Apache-2.0
"""LM heads of which each process has some rows of the weight: pieces of the product within a process, then one collective.

With p the softmax of a whole row, the gradient of a process's columns needs only the m and d of the whole row, which every process
has from the forward pass. The gradient of the hidden states is a sum over all columns, so the backward pass sums it over the
processes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..arguments import (
    check_backend,
    check_common_normalize,
    check_flags,
    check_head,
    check_hidden,
    check_k,
    check_list,
    check_normalize,
    check_start,
    logits_of_head,
)
from ..functional import autocast
from ..functional.tokens import check_tokens
from ..gone import refuse
from ..operators import linear, merging
from ..operators.gradients import save_rows, saved_rows
from ..operators.linear_pieces import Wanted
from ..problem import LinearProblem, TokenLogprobs, TopK, TopKLogits, result_dtype
from ..row_arguments import check_rows
from ..rows import ROWS_FIELDS, LogitRows
from ..token_sums import TokenSums, empty_sums
from .collective import group_of
from .functions import exchange_state, padded

_NO_TOKEN = -1
_OTHER_SUMS = len(TokenSums._fields) - 2  # all but m and d


def linear_softmax_topk(
    hidden: Tensor,
    local_weight: Tensor,
    k: int,
    local_bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    normalize: str = "allowed",
    backend: str | None = None,
    group: Any = None,
    **gone: NoReturn,
) -> TopK:
    """The k largest probabilities of an LM head whose rows are spread over the processes of a group, the same on every process.

    >>> linear_softmax_topk(hidden, local_weight, k=8).indices  # doctest: +SKIP

    As :func:`fused_topk.linear_softmax_topk` of the weights of all processes in the order of their ranks. Each process computes
    the logits of its own rows of the weight in pieces, and keeps none. One all-gather of the states (m, d, T) follows. Every
    process of the group must make the call.

    The other arguments are those of :func:`softmax_topk`, for this process's logits of shape (..., V_local). The errors are those of
    :func:`softmax_topk` and of :func:`fused_topk.linear_softmax_topk`.

    Args:
        hidden: shape (..., H), the same on all processes.
        local_weight: shape (V_local, H), this process's rows of the weight, such as `weight.to_local()` of a DTensor that is
            sharded over its first dimension. Processes may have different numbers of rows, also none.
        k: the number of results per row, 1 <= k <= V, the sum of all V_local.
        local_bias: shape (V_local,), this process's part of the bias. None on all processes, or on none.

    Returns:
        TopK, as :func:`fused_topk.linear_softmax_topk` returns it for the whole weight.

    Contract:
        Order, ties and special values: those of :func:`fused_topk.softmax_topk` for the logits that the processes compute. The
        collective takes at most 8 + 12 k bytes a row from each process, and 16 bytes a call, rounded up on a CPU as
        :func:`softmax_topk` has it.
        Values and logsumexp are differentiable, once, with respect to hidden, local_weight and local_bias. The gradients are those
        of a loss that every process computes alike from the result. The backward pass sums the gradient of `hidden` over the
        processes, in one all-reduce.
    """
    if gone:
        refuse("linear_softmax_topk", gone)
    settings = _Settings(k, "softmax", normalize, backend, group_of(group))
    found = _linear(settings, hidden, local_weight, local_bias, temperature, mask)
    return TopK(*found[:3])


def linear_log_softmax_topk(
    hidden: Tensor,
    local_weight: Tensor,
    k: int,
    local_bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    normalize: str = "allowed",
    backend: str | None = None,
    group: Any = None,
    **gone: NoReturn,
) -> TopK:
    """The k largest log-probabilities of an LM head whose rows are spread over the processes of a group.

    >>> linear_log_softmax_topk(hidden, local_weight, k=8).indices  # doctest: +SKIP

    Arguments, result and contract are those of :func:`linear_softmax_topk`.
    """
    if gone:
        refuse("linear_log_softmax_topk", gone)
    settings = _Settings(k, "log_softmax", normalize, backend, group_of(group))
    found = _linear(settings, hidden, local_weight, local_bias, temperature, mask)
    return TopK(*found[:3])


def linear_topk(
    hidden: Tensor,
    local_weight: Tensor,
    k: int,
    local_bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    backend: str | None = None,
    group: Any = None,
    **gone: NoReturn,
) -> TopKLogits:
    """The k largest logits themselves of an LM head whose rows are spread over the processes of a group.

    >>> linear_topk(hidden, local_weight, k=8).indices  # doctest: +SKIP

    Arguments, errors and contract are those of :func:`linear_softmax_topk`, the result is that of :func:`fused_topk.linear_topk`.
    """
    if gone:
        refuse("linear_topk", gone)
    settings = _Settings(k, "logits", "allowed", backend, group_of(group))
    found = _linear(settings, hidden, local_weight, local_bias, 1.0, mask)
    return TopKLogits(*found[:2])


def linear_token_logprobs(
    hidden: Tensor,
    local_weight: Tensor,
    tokens: Tensor,
    local_bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    normalize: str = "allowed",
    start: int,
    k: int = 0,
    entropy: bool = False,
    tail: bool = False,
    backend: str | None = None,
    group: Any = None,
) -> TokenLogprobs:
    """The log-probabilities of given tokens, of an LM head whose rows are spread over the processes of a group.

    >>> linear_token_logprobs(hidden, local_weight, tokens, start=rank * len(local_weight)).logprobs  # doctest: +SKIP

    The other arguments, errors and contract are those of :func:`linear_softmax_topk`, the result is that of
    :func:`fused_topk.linear_token_logprobs`, without ranks: to count the tokens before a given one, each process would need its
    logit ahead, which takes a collective of its own.

    Args:
        tokens: int64 (...) or (..., n), tokens of the whole vocabulary, the same on all processes. A negative number stands for
            none.
        normalize: "allowed" or "all".
        start: the token of this process's first row: how many rows the processes before it have. Nothing compares it with their
            numbers of rows.
        k: how many of the row's best tokens to return as well; 0 for none.
        entropy: whether to compute the entropy, as :func:`fused_topk.linear_token_logprobs` does.
        tail: whether to compute the tail, likewise.

    Contract:
        The collective takes a logit for each token as well, and for entropy and tail three numbers a row. Tokens of V or more are not
        looked for: their log-probability is NaN. Entropy and tail are differentiable, too. The backward pass computes the logits again.
    """
    check_common_normalize(normalize, "linear_token_logprobs")
    check_flags(entropy=entropy, tail=tail)
    check_list("k", k, 2**31 - 1, "what an exchange takes")
    settings = _Settings(k or 1, "log_softmax", normalize, backend, group_of(group), start, entropy, tail)
    found = _linear(settings, hidden, local_weight, local_bias, temperature, mask, tokens)
    best, indices, logsumexp, logprobs, of_entropy, of_tail = found
    if tokens.dim() < hidden.dim():
        logprobs = logprobs.squeeze(-1)
    topk = TopK(best, indices, logsumexp) if k else None
    return TokenLogprobs(logprobs, logsumexp, None, of_entropy if entropy else None, of_tail if tail else None, topk)


class _Settings(NamedTuple):
    """What a call asks for besides its tensors."""

    k: int
    values: str
    normalize: str
    backend: str | None
    group: Any
    start: int = 0
    entropy: bool = False
    tail: bool = False

    @property
    def has_spread(self) -> bool:
        return self.entropy or self.tail


def _linear(
    settings: _Settings,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    mask: Tensor | None,
    tokens: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The results of :class:`_Head`."""
    check_hidden(hidden)
    hidden, weight, bias = autocast.as_multiplied(hidden, weight, bias)
    check_head(weight, bias, hidden, is_part=True)
    check_k(settings.k, 2**31 - 1, "what an exchange takes")
    check_normalize(settings.normalize)
    check_backend(settings.backend)
    logits = logits_of_head(hidden, weight)
    rows = check_rows(logits, temperature, mask, may_be_empty=True).with_logits(hidden)
    check_start(settings.start)
    if tokens is not None:
        check_tokens(tokens, logits, is_part=True)
        if tokens.dim() < hidden.dim():
            tokens = tokens.unsqueeze(-1)
    _, *of_rows = rows
    found: tuple[Tensor, ...] = _Head.apply(hidden, weight, bias, tokens, settings, *of_rows)  # type: ignore[no-untyped-call]
    return found


class _Head(torch.autograd.Function):
    """The values (..., k), indices, logsumexp (...), the targets' log-probabilities (..., n), the entropy and the tail (...)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor | None,
        settings: _Settings,
        *of_rows: Any,
    ) -> tuple[Tensor, ...]:
        k, values, normalize, backend, group, start, *_ = settings
        rows = LogitRows(hidden, *of_rows)
        length = weight.shape[0]
        own_targets = None
        if targets is not None:
            place = targets - start
            own_targets = place.where((targets >= 0) & (place >= 0) & (place < length), _NO_TOKEN)
        head = LinearProblem(rows, weight, bias, own_targets, normalize)
        state, beside = _state(head, settings)
        parts, logits = exchange_state(state, length, normalize, group, beside)
        scale = rows.scale()
        best, indices, logsumexp = merging.merge_parts(*parts, k, *scale, values, normalize, backend)
        normalizer = merging.merge_parts(*parts, 1, *scale, "state", normalize, backend)[2]
        entropy = tail = hidden.new_empty(0, dtype=result_dtype(hidden.dtype))
        if settings.has_spread and logits is not None:
            logits, others = logits[..., :-_OTHER_SUMS], logits[..., -_OTHER_SUMS:]
            of_parts = torch.cat((torch.stack((parts.m, parts.d), -1), others), -1).unbind(0)
            sums = functools.reduce(lambda a, b: a.merged(b, scale), map(TokenSums.of, of_parts))
            normalizer, entropy, tail = torch.stack(sums), sums.entropy(), sums.tail(scale)
        ends = parts.lengths.cumsum(0)
        logprobs = hidden.new_empty(0, dtype=result_dtype(hidden.dtype))
        if targets is not None and logits is not None:
            # The first process whose tokens end behind the target.
            owner = torch.searchsorted(ends, targets.contiguous(), right=True)
            has_target = (targets >= 0) & (owner < len(ends))
            of_owner = logits.gather(0, owner.clamp_(max=len(ends) - 1).unsqueeze(0)).squeeze(0)
            m, d = normalizer[:2].unsqueeze(-1).unbind(0)
            is_known = has_target & m.isfinite() & d.log().isfinite()
            logprobs = (scale.log_weight(of_owner.to(m.dtype), m) - d.log()).where(is_known, torch.nan)
        ctx.mark_non_differentiable(indices)
        ctx.settings = settings
        own = indices - (ends[dist.get_rank(group)] - length)
        save_rows(ctx, rows, weight, bias, own_targets, best, own, normalizer, logprobs)
        return best, indices, logsumexp, logprobs, entropy, tail

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_values, _, grad_normalizer, grad_logprobs, grad_entropy, grad_tail = gradients
        rows, (weight, bias, targets, best, own, normalizer, logprobs) = saved_rows(ctx)
        _, values, normalize, backend, group, _, has_entropy, has_tail = ctx.settings
        # A token that is not allowed has the constant value -inf or 0.
        chosen = grad_values * best if values == "softmax" else grad_values.where(best != -torch.inf, 0.0)
        chosen = chosen.to(normalizer.dtype)
        if normalize == "topk":
            p = best if values == "softmax" else best.exp()
            chosen = chosen - p * chosen.sum(-1, keepdim=True)
        elif values != "logits":
            grad_normalizer = grad_normalizer - chosen.sum(-1)
        of_targets = None
        if targets is not None:
            of_targets = grad_logprobs.where(logprobs.isfinite(), 0.0)
            grad_normalizer = grad_normalizer - of_targets.sum(-1)
        of_entropy, of_tail = grad_entropy if has_entropy else None, grad_tail if has_tail else None
        if has_entropy or has_tail:
            of_whole_rows = TokenSums(*normalizer)
            grad_normalizer, of_tail = linear.with_spread(grad_normalizer, of_entropy, of_tail, of_whole_rows)
        wanted = [bool(x) for x in ctx.needs_input_grad[:3]]
        hidden = rows.logits
        head = (*rows, weight, bias, targets, normalize)
        state = normalizer.movedim(0, -1).contiguous()
        if weight.shape[0]:
            found = linear.linear_topk_backward(
                *head, own, state, chosen, of_targets, grad_normalizer, of_entropy, of_tail, backend, wanted
            )
        else:
            # Contiguous, as the gradients of the other processes are: a sum over processes adds elements by their places in memory.
            found = tuple(
                None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format)
                for x in (hidden, weight, bias)
            )
        if wanted[0]:
            dist.all_reduce(found[0], group=group)
        return *(x if is_wanted else None for x, is_wanted in zip(found, wanted, strict=True)), *(None,) * (
            1 + ROWS_FIELDS
        )


def _state(head: LinearProblem, settings: _Settings) -> tuple[TopK, Tensor | None]:
    """The state of this process's tokens, with k entries a row. And what goes beside it: the logits of its targets (..., n), for
    entropy and tail followed by the other three sums of the row."""
    hidden, length = head.hidden, head.weight.shape[0]
    held = min(settings.k, length)
    dtype = result_dtype(hidden.dtype)
    beside = None
    if held:
        rows, weight, bias, targets, normalize = head
        wanted = Wanted(held, "state", settings.backend, keeps_state=True, tail=settings.tail)
        logits, indices, _, of_targets, _, sums, *_ = linear.linear_topk(
            *rows, weight, bias, targets, normalize, *wanted
        )
        if targets is not None:
            beside = of_targets
    else:
        logits, indices = hidden[..., :0], hidden[..., :0].long()
        sums = empty_sums(hidden.shape[:-1], dtype, hidden.device)
        if head.targets is not None:
            beside = torch.zeros(head.targets.shape, dtype=dtype, device=hidden.device)
    if beside is not None:
        # A logit has the dtype of the hidden states: its copy is exact.
        beside = torch.cat((beside, sums[..., 2:]), -1) if settings.has_spread else beside.to(hidden.dtype)
    return padded(TopK(logits, indices, sums[..., :2].movedim(-1, 0)), settings.k), beside
