# SPDX-License-Identifier: Apache-2.0
"""The public functions of LM heads: hidden states in, the k best logits out, and no tensor of logits in between."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from ..arguments import check_backend, check_head, check_hidden, check_k, check_normalize, logits_of_head
from ..operators import linear, transforms
from ..operators.dispatch import transform_is_active, way_of_call
from ..problem import TargetTopK, TopK, TopKLogits
from ..row_arguments import check_rows
from ..rows import LogitRows
from . import autocast
from .targets import check_targets

_linear_topk = torch.ops.fused_topk.linear_topk.default


@overload
def linear_softmax_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    normalize: str = "allowed",
    targets: None = None,
    backend: str | None = None,
) -> TopK: ...


@overload
def linear_softmax_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    normalize: str = "allowed",
    targets: Tensor,
    backend: str | None = None,
) -> TargetTopK: ...


def linear_softmax_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    normalize: str = "allowed",
    targets: Tensor | None = None,
    backend: str | None = None,
) -> TopK | TargetTopK:
    """The k largest probabilities of the logits `hidden @ weight.T + bias`, which are never all in memory.

    >>> linear_softmax_topk(torch.tensor([[2.0, 3.0]]), torch.eye(2), k=1).indices
    tensor([[1]])

    As `softmax_topk(torch.nn.functional.linear(hidden, weight, bias), k)`. The logits are computed in pieces, and the pieces'
    states (m, d, T) are merged: Milakov & Gimelshein 2018, equations 6 and 7 and Algorithm 4
    (https://arxiv.org/abs/1805.02867).

    Args:
        hidden: shape (..., H), float32, float16, bfloat16 or float64, any strides, any device.
        weight: shape (V, H), the dtype and the device of `hidden`, any strides: that of `torch.nn.Linear`.
        k: the number of results per row, 1 <= k <= V.
        bias: shape (V,), the dtype and the device of `hidden`, or None.
        temperature: divides the logits. A positive number, or a tensor with one number per row. This and the next two
            arguments are those of :func:`softmax_topk`, for the head's logits of shape (..., V).
        mask: the tokens that may be chosen, bool or packed int32.
        normalize: "allowed", "all" or "topk".
        targets: int64 (...), one token for each row; or (..., n), n tokens for each row, such as a teacher's best ones. A
            negative number, such as -100, stands for no target. None: no targets.
        backend: None, "cuda", "cpu" or "reference".

    Returns:
        TopK with values float32 (..., k), indices int64 (..., k) and logsumexp float32 (...). With targets TargetTopK, which
        also has target_logprobs, float32 of the targets' shape, NaN where there is no target, and target_ranks int64 (...),
        1 for the best token, 0 where there is no target; None for targets of shape (..., n). float64 hidden states give
        float64.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: a value, shape or device that breaks a rule above.
        RuntimeError: the requested backend does not work here; or a second derivative is asked for.

    Contract:
        Logits: summed in float32 (float64 for float64), with the bias, and rounded to the dtype of `hidden`, as a linear layer
        gives them. The order of the sums is the library's. On the CPU a native kernel multiplies up to 32 rows of float32 or
        bfloat16 if rows * k <= 4096 and no targets are given. It sums every row in one order, so
        that a row's results do not depend on the rows beside it. Otherwise sums may differ in the last place with the number
        of rows, and logits that are nearly equal may change places.
        Order, ties, special values: those of :func:`softmax_topk`, for these logits.
        Memory: at most 64 MB beyond the result, whatever the rows and the vocabulary; in the backward pass, too.
        Targets: their log-probabilities are relative to the allowed tokens, or with normalize="all" to all tokens. A target that
        is not allowed has -inf. A rank is 1 + the number of allowed tokens that come before the target. Where the logits do not fit
        into one piece, a token whose logit differs from the target's by no more than the rounding of their sums may be
        counted either way. In a row with NaN ranks mean nothing. Targets of V or more raise on the CPU, and must not occur on
        a GPU.
        Does not wait for the device. Can be captured in a CUDA graph and compiled with fullgraph=True.
        torch.autocast: hidden, weight and bias are converted as for a linear layer, at each call. A converted copy counts as an
        argument, not towards the 64 MB.
        Values, logsumexp and target_logprobs are differentiable, once, with respect to hidden, weight and bias. The logits are
        computed again in the backward pass. A weight of 16 bits has its gradient rounded once for each 256 rows (2048 on a
        GPU), or fewer where H, or k and the number of targets, are large.
    """
    return _linear("softmax", hidden, weight, k, bias, temperature, mask, normalize, targets, backend)


@overload
def linear_log_softmax_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    normalize: str = "allowed",
    targets: None = None,
    backend: str | None = None,
) -> TopK: ...


@overload
def linear_log_softmax_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    normalize: str = "allowed",
    targets: Tensor,
    backend: str | None = None,
) -> TargetTopK: ...


def linear_log_softmax_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    normalize: str = "allowed",
    targets: Tensor | None = None,
    backend: str | None = None,
) -> TopK | TargetTopK:
    """The k largest log-probabilities of the logits `hidden @ weight.T + bias`, which are never all in memory.

    >>> linear_log_softmax_topk(torch.tensor([[2.0, 3.0]]), torch.eye(2), k=1).values
    tensor([[-0.3133]])

    The contract is that of :func:`linear_softmax_topk`.

    Args:
        hidden: (..., H); see :func:`linear_softmax_topk`, which describes all arguments.
        weight: (V, H).
        k: the number of results per row, 1 <= k <= V.
        bias: (V,) or None.
        temperature: a positive number, or a tensor with one number per row.
        mask: the tokens that may be chosen, bool or packed int32.
        normalize: "allowed", "all" or "topk".
        targets: int64 (...) or (..., n), tokens whose log-probabilities are wanted, or None.
        backend: None, "cuda", "cpu" or "reference".

    Returns:
        TopK, or with targets TargetTopK.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`linear_softmax_topk`.
    """
    return _linear("log_softmax", hidden, weight, k, bias, temperature, mask, normalize, targets, backend)


def linear_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> TopKLogits:
    """The k largest of the logits `hidden @ weight.T + bias` themselves, which are never all in memory.

    >>> linear_topk(torch.tensor([[2.0, 3.0]]), torch.eye(2), k=1).values
    tensor([[3.]])

    The contract is that of :func:`linear_softmax_topk`.

    Args:
        hidden: (..., H); see :func:`linear_softmax_topk`, which describes all arguments.
        weight: (V, H).
        k: the number of results per row, 1 <= k <= V.
        bias: (V,) or None.
        mask: the tokens that may be chosen; the others have the value -inf.
        backend: None, "cuda", "cpu" or "reference".

    Returns:
        TopKLogits with values (..., k) in the dtype of `hidden` and indices int64 (..., k).

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`linear_softmax_topk`.
    """
    values, indices, *_ = _linear("logits", hidden, weight, k, bias, 1.0, mask, "allowed", None, backend)
    return TopKLogits(values, indices)


def _linear(
    values: str,
    hidden: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None,
    temperature: float | Tensor,
    mask: Tensor | None,
    normalize: str,
    targets: Tensor | None,
    backend: str | None,
) -> TopK | TargetTopK:
    check_hidden(hidden)
    hidden, weight, bias = autocast.as_multiplied(hidden, weight, bias)
    check_head(weight, bias, hidden)
    check_k(k, weight.shape[0])
    check_normalize(normalize)
    check_backend(backend)
    rows = LogitRows(hidden)
    # Without these arguments their checks are skipped, because they take a good part of the time of a call of one row.
    logits = hidden
    if type(temperature) is not float or temperature != 1.0 or mask is not None or targets is not None:
        logits = logits_of_head(hidden, weight)
        rows = check_rows(logits, temperature, mask).with_logits(hidden)
    has_ranks = False
    if targets is not None:
        check_targets(targets, logits)
        has_ranks = targets.dim() == hidden.dim() - 1
        if has_ranks:
            targets = targets.unsqueeze(-1)
    run = way_of_call(
        linear.linear_topk, _linear_topk, transforms.LinearTopk.apply, *rows.tensors(), weight, bias, targets
    )
    learned = (hidden, weight) if bias is None else (hidden, weight, bias)
    keeps_state = transform_is_active() or (torch.is_grad_enabled() and any(x.requires_grad for x in learned))
    head = (*rows, weight, bias, targets, normalize)
    best, indices, logsumexp, logprobs, ranks, _ = run(*head, k, values, backend, has_ranks, keeps_state)
    if targets is None:
        return TopK(best, indices, logsumexp)
    if has_ranks:
        return TargetTopK(best, indices, logsumexp, logprobs.squeeze(-1), ranks.squeeze(-1))
    return TargetTopK(best, indices, logsumexp, logprobs, None)
