# SPDX-License-Identifier: Apache-2.0
"""The public functions of LM heads: hidden states in, the k best logits out, and no tensor of logits in between."""

from __future__ import annotations

import functools
from typing import NoReturn

import torch
from torch import Tensor

from .. import backends
from ..arguments import (
    check_backend,
    check_common_normalize,
    check_flags,
    check_head,
    check_hidden,
    check_k,
    check_list,
    check_normalize,
    logits_of_head,
)
from ..backends.cpu import have_whole_elements
from ..gone import refuse
from ..operators import linear, linear_pieces
from ..operators.dispatch import transform_is_active, wants_gradient
from ..operators.results import Plan
from ..problem import LinearProblem, TokenLogprobs, TopK, TopKLogits
from ..row_arguments import PLAIN_TYPES, check_rows, plain_rows
from ..rows import Like, LogitRows, RowsLayout, like, like_given
from ..tracing import is_traced
from . import autocast
from .tokens import check_ties, check_tokens


def linear_softmax_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    normalize: str = "allowed",
    backend: str | None = None,
    **gone: NoReturn,
) -> TopK:
    """The k largest probabilities of the logits `hidden @ weight.T + bias`, which are never all in memory.

    >>> linear_softmax_topk(torch.tensor([[2.0, 3.0]]), torch.eye(2), k=1).indices
    tensor([[1]])

    As `softmax_topk(torch.nn.functional.linear(hidden, weight, bias), k)`. The logits are computed in pieces, and the pieces'
    states (m, d, T) are merged: Milakov & Gimelshein 2018, equations 6 and 7 and Algorithm 4
    (https://arxiv.org/abs/1805.02867).

    The other arguments are those of :func:`softmax_topk`, for the head's logits of shape (..., V).

    Args:
        hidden: shape (..., H), float32, float16, bfloat16 or float64, any strides, any device.
        weight: shape (V, H), the dtype and the device of `hidden`, any strides: that of `torch.nn.Linear`.
        bias: shape (V,), the dtype and the device of `hidden`, or None.

    Returns:
        TopK with values float32 (..., k), indices int64 (..., k) and logsumexp float32 (...). float64 hidden states give
        float64.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: a value, shape or device that breaks a rule above.
        RuntimeError: the requested backend does not work here; or a second derivative is asked for.

    Contract:
        Logits: summed in float32 (float64 for float64), with the bias, and rounded to the dtype of `hidden`, as a linear layer
        gives them. The order of the sums is the library's. On the CPU a native kernel multiplies up to 32 rows of float32 or
        bfloat16 if rows * k <= 4096. It sums every row in one order, so
        that a row's results do not depend on the rows beside it. Otherwise sums may differ in the last place with the number
        of rows, and logits that are nearly equal may change places.
        Order, ties, special values: those of :func:`softmax_topk`, for these logits.
        Memory: at most 64 MB beyond the result, whatever the rows and the vocabulary; in the backward pass, too.
        torch.autocast: hidden, weight and bias are converted as for a linear layer, at each call. A converted copy counts as an
        argument, not towards the 64 MB.
        Values and logsumexp are differentiable, once, with respect to hidden, weight and bias. The logits are computed again in
        the backward pass. A weight of 16 bits has its gradient rounded once for each 256 rows (2048 on a GPU), or fewer where H or
        k is large.
    """
    if gone:
        refuse("linear_softmax_topk", gone)
    return _best("softmax", hidden, weight, k, bias, temperature, mask, normalize, backend)


def linear_log_softmax_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    normalize: str = "allowed",
    backend: str | None = None,
    **gone: NoReturn,
) -> TopK:
    """The k largest log-probabilities of the logits `hidden @ weight.T + bias`, which are never all in memory.

    >>> linear_log_softmax_topk(torch.tensor([[2.0, 3.0]]), torch.eye(2), k=1).values
    tensor([[-0.3133]])

    Arguments, result, errors and contract are those of :func:`linear_softmax_topk`.
    """
    if gone:
        refuse("linear_log_softmax_topk", gone)
    return _best("log_softmax", hidden, weight, k, bias, temperature, mask, normalize, backend)


def linear_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    backend: str | None = None,
    **gone: NoReturn,
) -> TopKLogits:
    """The k largest of the logits `hidden @ weight.T + bias` themselves, which are never all in memory.

    >>> linear_topk(torch.tensor([[2.0, 3.0]]), torch.eye(2), k=1).values
    tensor([[3.]])

    Arguments, errors and contract are those of :func:`linear_softmax_topk`.

    Returns:
        TopKLogits with values (..., k) in the dtype of `hidden` and indices int64 (..., k).
    """
    if gone:
        refuse("linear_topk", gone)
    values, indices, _ = _best("logits", hidden, weight, k, bias, 1.0, mask, "allowed", backend)
    return TopKLogits(values, indices)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    normalize: str = "allowed",
    k: int = 0,
    ranks: bool = False,
    entropy: bool = False,
    tail: bool = False,
    ties: str = "index",
    recompute: bool = True,
    backend: str | None = None,
) -> TokenLogprobs:
    """The log-probabilities of given tokens, of the logits `hidden @ weight.T + bias`, which are never all in memory.

    >>> linear_token_logprobs(torch.tensor([[2.0, 3.0]]), torch.eye(2), torch.tensor([0])).logprobs
    tensor([-1.3133])

    As `token_logprobs(torch.nn.functional.linear(hidden, weight, bias), tokens)`.

    The other arguments are those of :func:`linear_softmax_topk` and of :func:`token_logprobs`.

    Args:
        tokens: int64 (...), or (..., n) for n tokens of each row, such as a teacher's best ones.
        recompute: whether the backward pass computes the logits again. False: the logits are kept for it, in the dtype of `hidden`,
            which takes rows * V elements and saves a product.

    Returns:
        TokenLogprobs, as :func:`token_logprobs` returns it.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`linear_softmax_topk`.

    Contract:
        That of :func:`linear_softmax_topk`, and of entropy and tail that of :func:`token_logprobs`. The log-probabilities, the
        logsumexp, the entropy, the tail and the values of topk are differentiable, once, with respect to hidden, weight and bias.
        Nothing is computed for those that need no gradient.
        Memory: at most 64 MB beyond results and gradients; with recompute=False, and where a gradient is wanted, the logits besides.
        These become their gradient in the backward pass, so a second one through the same call raises. torch.compile keeps none. A weight's gradient of 16 bits
        is then summed in float32 over all rows and rounded once; with recompute=True once for each block of rows that fit into the
        64 MB.
        Where the logits do not fit into one piece, a token whose logit differs from a given
        one's by no more than the rounding of their sums may count in its rank either way. In a row with NaN ranks mean nothing.
        Tokens of V or more raise on the CPU, and must not occur on a GPU, where nothing outside of the weight is read.
    """
    check_common_normalize(normalize, "linear_token_logprobs")
    check_flags(ranks=ranks, entropy=entropy, tail=tail, recompute=recompute)
    check_ties(ties)
    check_hidden(hidden)
    if isinstance(weight, Tensor) and weight.dim() == 2:
        check_list("k", k, weight.shape[0])
    head = _checked_head(hidden, weight, bias, temperature, mask, normalize, backend)
    check_tokens(tokens, logits_of_head(head.rows.logits, weight))
    # Not by _replace(), which torch.compile of torch 2.6 cannot trace.
    rows, weight, bias, _, _ = head
    of_rows = tokens if tokens.dim() == hidden.dim() else tokens.unsqueeze(-1)
    head = LinearProblem(rows, weight, bias, of_rows, normalize)
    keeps_state = _is_learned(head)
    keeps_logits = keeps_state and not recompute and not is_traced()
    wanted = (k, "log_softmax", backend, ties if ranks else None, keeps_state, entropy, tail, keeps_logits)
    found = linear_pieces.LinearResult(*linear.linear_topk(*head.flat(), *wanted))
    logprobs, of_ranks = found.target_logprobs, found.target_ranks
    if tokens.dim() < hidden.dim():
        logprobs, of_ranks = logprobs.squeeze(-1), of_ranks.squeeze(-1) if ranks else of_ranks
    return TokenLogprobs(
        logprobs,
        found.logsumexp,
        of_ranks if ranks else None,
        found.entropy if entropy else None,
        found.tail if tail else None,
        TopK(found.values, found.indices, found.logsumexp) if k else None,
    )


def _best(
    values: str,
    hidden: Tensor,
    weight: Tensor,
    k: int,
    bias: Tensor | None,
    temperature: float | Tensor,
    mask: Tensor | None,
    normalize: str,
    backend: str | None,
) -> TopK:
    if (
        type(k) is int
        and type(normalize) is str
        and backend in backends.REQUESTS
        and type(weight) in PLAIN_TYPES
        and weight.is_cpu
        and (bias is None or (type(bias) in PLAIN_TYPES and bias.is_cpu))
        and not torch.is_autocast_enabled("cpu")
    ):
        rows = plain_rows(hidden, temperature, mask, others=(weight, bias))
        if rows is not None and hidden.is_cpu and have_whole_elements(hidden, weight, bias):
            planned = _plan(hidden.device, rows.layout(), like(weight), like_given(bias), k, values, normalize, backend)
            if planned is not None:
                return planned.run(rows, weight, bias)
    head = _checked_head(hidden, weight, bias, temperature, mask, normalize, backend)
    check_k(k, weight.shape[0])
    # Unpacked, because torch.compile of torch 2.6 cannot trace a slice of a named tuple.
    wanted = (k, values, backend, None, _is_learned(head), False, False, False)
    chosen, indices, logsumexp, *_ = linear.linear_topk(*head.flat(), *wanted)
    return TopK(chosen, indices, logsumexp)


@functools.lru_cache(maxsize=4096)
def _plan(
    device: torch.device,
    layout: RowsLayout,
    weight: Like,
    bias: Like | None,
    k: int,
    values: str,
    normalize: str,
    backend: str | None,
) -> Plan[TopK] | None:
    """Checks a head and the other arguments, and plans the call, once for all calls alike. None where the CPU's own kernel does not
    serve it. layout: of the rows, with the hidden states in the place of the logits."""
    hidden, temperature, mask, _ = layout.given()
    of_bias = None if bias is None else bias.meta()
    head = _checked_head(hidden, weight.meta(), of_bias, temperature, mask, normalize, backend)
    check_k(k, weight.shape[0])
    return linear_pieces.native_plan(device, head, k, values, backend)


def _checked_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    mask: Tensor | None,
    normalize: str,
    backend: str | None,
) -> LinearProblem:
    check_hidden(hidden)
    hidden, weight, bias = autocast.as_multiplied(hidden, weight, bias)
    check_head(weight, bias, hidden)
    check_normalize(normalize)
    check_backend(backend)
    rows = LogitRows(hidden)
    # Without these arguments their checks are skipped, because they take a good part of the time of a call of one row.
    if type(temperature) is not float or temperature != 1.0 or mask is not None:
        rows = check_rows(logits_of_head(hidden, weight), temperature, mask).with_logits(hidden)
    return LinearProblem(rows, weight, bias, None, normalize)


def _is_learned(head: LinearProblem) -> bool:
    """Whether a gradient may be wanted, which needs the state of each row."""
    # Not the property `hidden`, which torch.compile of torch 2.6 cannot read from a named tuple.
    return transform_is_active() or wants_gradient(head.rows.logits, head.weight, head.bias)
