# SPDX-License-Identifier: Apache-2.0
"""The public functions of top-k. They check the arguments, move the vocabulary last, and run a plan, or the operator where
torch must see the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..arguments import (
    check_backend,
    check_beam_scores,
    check_dim,
    check_k,
    check_logits,
    check_no_lengths,
    check_normalize,
    check_rows,
    check_start,
    is_distributed,
    plain_rows,
    vocabulary_last,
)
from ..operators import calls
from ..plans import TopkPlan, row_result, topk_plan
from ..problem import TopK, TopKState
from ..rows import LogitRows
from .out import check_out, have_changed, is_plain_out

_BACKENDS = (None, *backends.NAMES)
_OUT_TYPES = (TopK, tuple)


def softmax_topk(
    logits: Tensor,
    k: int,
    dim: int = -1,
    *,
    temperature: float | Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    backend: str | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
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
        backend: None picks the fastest backend that works, and falls back to torch operations. "cuda", "cpu" (native)
            and "reference" (torch operations) name one; if it does not work, the call raises.
        out: (values, indices, logsumexp) to write into instead of new tensors. They may have any strides, and may be
            interleaved. Contiguous int64 `indices` and contiguous other tensors are written in place. `indices` may
            also be int32: int64 indices are computed and copied.

    Returns:
        TopK with values float32 (..., k), indices int64 (..., k), both with the k along `dim`, and logsumexp float32
        (...) of the scaled logits. The logsumexp is over the whole row with normalize="all", else over the allowed
        tokens. float64 logits give float64 values and logsumexp.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: a value, shape or device that breaks a rule above, or `out` overlapping an input.
        RuntimeError: the requested backend does not work here, or a kernel does not compile.

    Contract:
        Order: greater logits first, NaN above +inf; equal logits (-0 equals +0) by smaller index. So the indices are
        fully determined: they are equal on every backend and in every run. They are always in range and distinct.
        There are always k results. Where fewer tokens are allowed or finite, the rest have probability 0.
        A row with NaN has NaN values and a NaN logsumexp. Another row with +inf has NaN values and the logsumexp +inf.
        A row of only -inf, or with no allowed token, has NaN values, the logsumexp -inf and the indices 0 ... k - 1.
        Deterministic: the same row gives the same bits in every call and in every batch.
        A call does not wait for the device, except the first call of a kernel on a GPU, which compiles and loads it.
        :func:`warm_up` does that ahead. Can be captured in a CUDA graph and compiled with fullgraph=True.
        Values and logsumexp are differentiable with respect to the logits.
    """
    return _row("softmax", logits, k, dim, temperature, mask, lengths, normalize, backend, out)


def log_softmax_topk(
    logits: Tensor,
    k: int,
    dim: int = -1,
    *,
    temperature: float | Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    backend: str | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> TopK:
    """The k largest log-probabilities of `log_softmax(logits / temperature)`, sorted, in one read of the logits.

    >>> log_softmax_topk(torch.tensor([1.0, 3.0, 2.0]), k=2).values
    tensor([-0.4076, -1.4076])

    The contract is that of :func:`softmax_topk`. The values are computed as (x - m) / T - log d with the row's maximum
    m. So a large common offset of the logits costs no accuracy. A token that is not allowed has the value -inf.

    Args:
        logits: see :func:`softmax_topk`, which describes all arguments.
        k: the number of results per row, 1 <= k <= V.
        dim: the vocabulary dimension.
        temperature: a positive number, or a tensor with one number per row.
        mask: the tokens that may be chosen, bool or packed int32.
        lengths: how many of a row's first tokens there are, one number a row.
        normalize: "allowed", "all" (log-probabilities of the whole row, as in beam search) or "topk".
        backend: None, "cuda", "cpu" or "reference".
        out: (values, indices, logsumexp) to write into.

    Returns:
        TopK with values float32 (..., k), indices int64 (..., k), logsumexp float32 (...).

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`softmax_topk`.
    """
    return _row("log_softmax", logits, k, dim, temperature, mask, lengths, normalize, backend, out)


def topk(
    logits: Tensor,
    k: int,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    backend: str | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> TopK:
    """The k largest logits themselves, sorted, and each row's logsumexp from the same read.

    >>> topk(torch.tensor([1.0, 3.0, 2.0]), k=2).values
    tensor([3., 2.])

    Like `torch.topk`, but ties are determined: the order and the contract are those of :func:`softmax_topk`.

    Args:
        logits: see :func:`softmax_topk`, which describes all arguments.
        k: the number of results per row, 1 <= k <= V.
        dim: the vocabulary dimension.
        mask: the tokens that may be chosen; the others have the value -inf.
        lengths: how many of a row's first tokens there are, one number a row; the others have the value -inf.
        backend: None, "cuda", "cpu" or "reference".
        out: (values, indices, logsumexp) to write into.

    Returns:
        TopK with values (..., k), bit-exact copies in the dtype of `logits`; indices int64 (..., k); logsumexp float32
        (...) of the allowed logits.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`softmax_topk`.
    """
    return _row("logits", logits, k, dim, None, mask, lengths, "allowed", backend, out)


def beam_topk(
    logits: Tensor,
    beam_scores: Tensor,
    k: int,
    *,
    temperature: float | Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    backend: str | None = None,
) -> TopK:
    """The k best continuations of every sequence, over all of its beams: one step of beam search in one read.

    >>> beam_topk(torch.tensor([[[1.0, 3.0], [2.0, 0.0]]]), torch.zeros(1, 2), k=2).indices
    tensor([[1, 2]])

    Equals `torch.topk((log_softmax(logits.float(), -1) + beam_scores[..., None]).flatten(1), k)`.

    Args:
        logits: shape (batch, beams, V). See :func:`softmax_topk`, which describes all arguments.
        beam_scores: shape (batch, beams), the accumulated log-probability of each beam.
        k: the number of results per sequence, 1 <= k <= beams * V.
        temperature: a positive number, or a tensor with one number per row, broadcastable to (batch, beams).
        mask: the tokens that may be chosen.
        lengths: how many of a beam's first tokens there are, one number a beam, broadcastable to (batch, beams).
        normalize: "allowed" (the mask comes before log_softmax) or "all" (after it, as in transformers' beam search).
        backend: None, "cuda", "cpu" or "reference".

    Returns:
        TopK with values float32 (batch, k), the accumulated log-probabilities; indices int64 (batch, k), each
        beam * V + token; logsumexp float32 (batch, beams).

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`softmax_topk`.

    Contract:
        Order: greater accumulated values first, after rounding to float32; equal values by smaller beam, and within a
        beam in the order of its logits. So a beam contributes its best tokens even if its score is so low that all of its
        sums round to the same number. The rest of the contract is that of :func:`softmax_topk`.
    """
    check_normalize(normalize)
    if normalize == "topk":
        raise ValueError(
            "`normalize` must be 'allowed' or 'all' for beam_topk, got 'topk'; beams need a common measure"
        )
    if is_distributed(logits):
        from ..distributed import dtensors

        check_no_lengths(lengths, "hide the tokens by a mask")
        return dtensors.beams(logits, beam_scores, k, temperature, mask, normalize, backend)
    check_logits(logits)
    check_beam_scores(beam_scores, logits)
    rows = check_rows(logits, temperature, mask, lengths)
    check_k(k, logits.shape[1] * logits.shape[2], "beams times the vocabulary size")
    check_backend(backend)
    return calls.beam_topk(rows, beam_scores, k, normalize, backend)


def topk_state(
    logits: Tensor,
    k: int,
    *,
    start: int = 0,
    temperature: float | Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    backend: str | None = None,
) -> TopKState:
    """The state (m, d, T) of a part of every row, in one read of the logits: what :func:`merge_topk` takes.

    >>> topk_state(torch.tensor([1.0, 3.0]), k=1, start=2).indices
    tensor([3])

    Milakov & Gimelshein 2018, equations 6 and 7 and Algorithm 4 (https://arxiv.org/abs/1805.02867).

    Args:
        logits: shape (..., V_part), the columns `start` ... `start` + V_part - 1 of every row. See :func:`softmax_topk`,
            which describes all arguments but `start`.
        k: the number of candidates to keep. Where it exceeds V_part, all V_part are kept.
        start: the token at which the part begins; start + V_part may exceed 2^31.
        temperature: a positive number, or a tensor with one number per row. The merge must be given the same.
        mask: the tokens of the part that may be chosen, bool or packed int32, with the part's first token first.
        lengths: how many of the part's first tokens there are, one number a row.
        normalize: "allowed": m and d are of the allowed tokens. "all": they are of the whole part, and the mask hides
            tokens from the choice only. "topk": as "allowed"; the merge then normalises by what it chooses.
        backend: None, "cuda", "cpu" or "reference".

    Returns:
        TopKState with logits and indices of shape (..., min(k, V_part)), m and d of shape (...).

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`softmax_topk`.

    Contract:
        The candidates, their order, ties, NaN, waiting and determinism are those of :func:`topk`. The logits are copied
        bit for bit. The logits, m and d are differentiable.
    """
    rows = check_rows(logits, temperature, mask, lengths)
    # Any k suits a part that is shorter.
    check_k(k, 2**63 - 1)
    k = min(k, logits.shape[-1])
    check_start(start)
    check_normalize(normalize)
    check_backend(backend)
    best, indices, normalizer = calls.row_topk(rows, k, "state", normalize, backend)
    return TopKState(best, indices + start if start else indices, normalizer.select(0, 0), normalizer.select(0, 1))


def _row(
    values: str,
    logits: Tensor,
    k: int,
    dim: int,
    temperature: float | Tensor | None,
    mask: Tensor | None,
    lengths: Tensor | None,
    normalize: str,
    backend: str | None,
    out: tuple[Tensor, Tensor, Tensor] | None,
) -> TopK:
    # Arguments of exactly these types can be the key of a cached plan. All others are checked below.
    if (
        type(k) is int
        and type(dim) is int
        and dim == -1
        and type(normalize) is str
        and backend in _BACKENDS
        and (out is None or _may_be_plain(out))
    ):
        rows = plain_rows(logits, temperature, mask, lengths, out or ())
        if rows is not None:
            plan = topk_plan(logits.device, rows.layout(), k, values, normalize, backend)
            return plan.run(rows) if out is None else _written(plan, rows, out)
    if is_distributed(logits):
        # Imported here: plain tensors need no torch.distributed.
        from ..distributed import dtensors

        check_no_lengths(lengths, "hide the tokens by a mask")
        return dtensors.row(values, logits, k, dim, temperature, mask, normalize, backend, out)
    check_logits(logits)
    dims = logits.dim()
    dim = check_dim(dim, dims)
    moved = dim != dims - 1
    if moved:
        logits, mask = logits.movedim(dim, -1), vocabulary_last(mask, dim, dims)
    rows = check_rows(logits, temperature, mask, lengths)
    check_k(k, logits.shape[-1])
    check_normalize(normalize)
    check_backend(backend)
    if out is None:
        result = calls.row_topk(rows, k, values, normalize, backend)
        if not moved:
            return result
        return TopK(result.values.movedim(-1, dim), result.indices.movedim(-1, dim), result.logsumexp)

    expected = list(row_result(logits, k, values))
    if moved:
        shape = list(logits.shape[:-1])
        shape.insert(dim, k)
        expected[:2] = [(tuple(shape), dtype) for _, dtype in expected[:2]]
    check_out(out, expected, rows)
    written = TopK(*out)
    last = (
        TopK(written.values.movedim(dim, -1), written.indices.movedim(dim, -1), written.logsumexp) if moved else written
    )
    if not calls.row_topk_into(rows, k, values, normalize, backend, last):
        have_changed(written)
    return written


def _may_be_plain(out: Any) -> bool:
    return type(out) in _OUT_TYPES and len(out) == 3 and type(out[0]) is type(out[1]) is type(out[2]) is Tensor


def _written(plan: TopkPlan, rows: LogitRows, out: tuple[Tensor, Tensor, Tensor]) -> TopK:
    """Runs a plan into `out`, once it is checked."""
    # tuple.__new__ avoids the named tuple's own __new__, which is written in Python.
    written = out if type(out) is TopK else tuple.__new__(TopK, out)
    if not is_plain_out(written, plan.result, rows):
        check_out(written, plan.result, rows)
    elif written.indices.dtype is torch.int64:
        plan.start(rows, written)
        have_changed(written)
        return written
    plan.run_into(written, rows)
    have_changed(written)
    return written
