# SPDX-License-Identifier: Apache-2.0
"""The public functions of top-k. They check the arguments and run a plan, or the operator where torch must see the call."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from ..arguments import (
    check_backend,
    check_beam_scores,
    check_common_normalize,
    check_k,
    check_normalize,
    check_whole_rows,
    is_distributed,
)
from ..backends import REQUESTS
from ..gone import refuse
from ..operators.dispatch import is_seen_by_torch
from ..operators.results import row_result
from ..operators.row_topk import beam_topk as run_beams
from ..operators.row_topk import plain_beam_topk, plain_topk, plan, plan_of_logits, row_topk
from ..problem import TopK, TopKLogits, result_dtype
from ..row_arguments import check_rows, is_plain, plain_rows
from .out import copied_into, may_be_plain, run_into

_OUT_TYPES = (TopK, TopKLogits, tuple)


def softmax_topk(
    logits: Tensor,
    k: int,
    dim: int = -1,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    backend: str | None = None,
    **gone: NoReturn,
) -> TopK:
    """The k largest probabilities of `softmax(logits / temperature)`, sorted, in one read of the logits.

    >>> softmax_topk(torch.tensor([1.0, 3.0, 2.0]), k=2).indices
    tensor([1, 2])

    Online normalizer with a running top-k: Milakov & Gimelshein 2018, Algorithm 4 (https://arxiv.org/abs/1805.02867).

    Args:
        logits: shape (..., V), float32, float16, bfloat16 or float64, any strides, any device. Rows with adjacent
            elements are read in place, others are copied first.
        k: the number of results per row, 1 <= k <= V.
        dim: the vocabulary dimension.
        temperature: divides the logits. A positive number, or a floating-point tensor with one number per row,
            broadcastable to the shape of `logits` without `dim`. The values of a CPU tensor are checked. Those of a
            CUDA tensor are not: a row whose temperature is not positive has NaN values and a NaN logsumexp.
        mask: the allowed tokens, the ones that may be chosen. bool, broadcastable to `logits`, True where allowed; or
            int32 of shape (..., ceil(V / 32)), the vocabulary last, where bit j of word i is for token 32 i + j. A
            token that is not allowed counts as a logit of -inf.
        lengths: how many of a row's first tokens there are: int32 or int64, 0 <= length <= V, broadcastable to the shape of
            `logits` without `dim`. A token at or beyond its row's length counts as a logit of -inf, whatever lies there, and
            is not read. The values of a CPU tensor are checked; those of a CUDA tensor are clamped.
        normalize: the tokens whose probabilities sum to 1. "allowed": the allowed tokens. "all": the whole row, up to its
            length, as if the mask came after softmax. "topk": the k chosen tokens.
        out: (values, indices, logsumexp) to write into instead of new tensors. They may have any strides, and may be
            interleaved. Contiguous int64 `indices` and contiguous other tensors are written in place. `indices` may
            also be int32: int64 indices are computed and copied.
        backend: None picks the fastest backend that works, and falls back to torch operations. "cuda", "cpu" (native)
            and "reference" (torch operations) name one; if it does not work, the call raises.

    Returns:
        TopK with values float32 (..., k), indices int64 (..., k), both with the k along `dim`, and logsumexp float32
        (...) of the scaled logits. The logsumexp is over the whole row with normalize="all", else over the allowed
        tokens. float64 logits give float64 values and logsumexp.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: a value, shape or device that breaks a rule above, or `out` overlapping an input.
        RuntimeError: the requested backend does not work here, or a kernel does not compile.

    Contract:
        Greater logits first, equal ones by smaller index: docs/promises.md has the order, special values, determinism and waiting,
        which are the same for all functions. Values and logsumexp are differentiable with respect to the logits.
    """
    if gone:
        refuse("softmax_topk", gone)
    return _row("softmax", logits, k, dim, temperature, mask, lengths, normalize, out, backend)


def log_softmax_topk(
    logits: Tensor,
    k: int,
    dim: int = -1,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    backend: str | None = None,
    **gone: NoReturn,
) -> TopK:
    """The k largest log-probabilities of `log_softmax(logits / temperature)`, sorted, in one read of the logits.

    >>> log_softmax_topk(torch.tensor([1.0, 3.0, 2.0]), k=2).values
    tensor([-0.4076, -1.4076])

    Arguments, result, errors and contract are those of :func:`softmax_topk`. A token that is not allowed has the value -inf.
    """
    if gone:
        refuse("log_softmax_topk", gone)
    return _row("log_softmax", logits, k, dim, temperature, mask, lengths, normalize, out, backend)


def topk(
    logits: Tensor,
    k: int,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
    **gone: NoReturn,
) -> TopKLogits:
    """The k largest logits themselves, sorted, in one read of the logits.

    >>> topk(torch.tensor([1.0, 3.0, 2.0]), k=2).values
    tensor([3., 2.])

    Like `torch.topk`, but ties are determined. The other arguments, the errors and the contract are those of :func:`softmax_topk`.

    Args:
        out: (values, indices) to write into.

    Returns:
        TopKLogits with values (..., k), bit-exact copies in the dtype of `logits`, and indices int64 (..., k).
    """
    if gone:
        refuse("topk", gone)
    values, indices, _ = _row("logits", logits, k, dim, 1.0, mask, lengths, "allowed", out, backend)
    return TopKLogits(values, indices)


def beam_topk(
    logits: Tensor,
    beam_scores: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    backend: str | None = None,
) -> TopK:
    """The k best continuations of every sequence, over all of its beams: one step of beam search in one read.

    >>> beam_topk(torch.tensor([[[1.0, 3.0], [2.0, 0.0]]]), torch.zeros(1, 2), k=2).indices
    tensor([[1, 2]])

    Equals `torch.topk((log_softmax(logits.float(), -1) + beam_scores[..., None]).flatten(1), k)`.

    The other arguments, and the errors, are those of :func:`softmax_topk`.

    Args:
        logits: shape (batch, beams, V).
        beam_scores: shape (batch, beams), the accumulated log-probability of each beam.
        k: the number of results per sequence, 1 <= k <= beams * V.
        normalize: "allowed" (the mask comes before log_softmax) or "all" (after it, as in transformers' beam search).

    Returns:
        TopK with values float32 (batch, k), the accumulated log-probabilities; indices int64 (batch, k), each
        beam * V + token; logsumexp float32 (batch, beams).

    Contract:
        Order: greater accumulated values first, after rounding to float32; equal values by smaller beam, and within a
        beam in the order of its logits. So a beam contributes its best tokens even if its score is so low that all of its
        sums round to the same number. The rest is the contract of :func:`softmax_topk`.
    """
    check_common_normalize(normalize, "beam_topk")
    check_backend(backend)
    rows = plain_rows(logits, temperature, mask, lengths, may_learn=True)
    if (
        rows is not None
        and type(k) is int
        and logits.dim() == 3
        and logits.shape[1] > 0
        and is_plain(beam_scores, logits, result_dtype(logits.dtype), logits.shape[:2])
    ):
        return plain_beam_topk(rows, beam_scores, k, normalize, backend)
    if is_distributed(logits):
        from ..distributed import dtensors

        check_whole_rows("lengths", lengths, "hide the tokens by a mask")
        return dtensors.beams(logits, beam_scores, k, temperature, mask, normalize, backend)
    rows = check_rows(logits, temperature, mask, lengths)
    check_beam_scores(beam_scores, logits)
    check_k(k, logits.shape[1] * logits.shape[2], "beams times the vocabulary size")
    return run_beams(rows, beam_scores, k, normalize, backend)


def _row(
    values: str,
    logits: Tensor,
    k: int,
    dim: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    normalize: str,
    out: tuple[Tensor, ...] | None,
    backend: str | None,
) -> TopK:
    # Arguments of exactly these types can be the key of a cached plan. All others are checked below.
    if (
        type(k) is int
        and type(dim) is int
        and type(normalize) is str
        and backend in REQUESTS
        and (out is None or (dim == -1 and may_be_plain(out, _OUT_TYPES, len(_fields(values)))))
    ):
        # The plainest call has a path of its own: for a short row, making its rows would show.
        if (
            mask is None
            and lengths is None
            and out is None
            and dim == -1
            and type(temperature) is float
            and temperature == 1.0
            and type(logits) is Tensor
            and not logits.requires_grad
            and not is_seen_by_torch(logits)
        ):
            key = logits.dtype, logits.shape, logits.stride()
            return plan_of_logits(key, logits.device, k, values, normalize, backend)(logits)
        rows = plain_rows(logits, temperature, mask, lengths, out or (), dim, may_learn=out is None)
        if rows is not None:
            if out is not None:
                return run_into(plan(logits.device, rows.layout(), k, values, normalize, backend), out, rows)
            best = plain_topk(rows, k, values, normalize, backend)
            return best if dim == -1 else _with_dim(best, dim)
    check_normalize(normalize)
    check_backend(backend)
    if is_distributed(logits):
        # Imported here: plain tensors need no torch.distributed.
        from ..distributed import dtensors

        check_whole_rows("lengths", lengths, "hide the tokens by a mask")
        check_whole_rows("out", out, "use the result")
        return dtensors.row(values, logits, k, dim, temperature, mask, normalize, backend)
    rows = check_rows(logits, temperature, mask, lengths, dim)
    check_k(k, logits.shape[dim])

    def compute() -> TopK:
        best = row_topk(rows, k, values, normalize, backend)
        return best if rows.logits is logits else _with_dim(best, dim)

    if out is None:
        return compute()
    return copied_into(out, _fields(values), row_result(rows.logits, k, values), compute, rows, dim)


def _with_dim(best: TopK, dim: int) -> TopK:
    """The result with the k best along a dimension."""
    return TopK(best.values.movedim(-1, dim), best.indices.movedim(-1, dim), best.logsumexp)


def _fields(values: str) -> tuple[str, ...]:
    """The fields of `out`."""
    return TopKLogits._fields if values == "logits" else TopK._fields
