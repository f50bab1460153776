# SPDX-License-Identifier: Apache-2.0
"""The public functions of states (m, d, T): what is known of a part of every row, and its merge with other parts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..arguments import (
    check_backend,
    check_choice,
    check_k,
    check_logits,
    check_normalize,
    check_same_device,
    check_start,
    check_tensor,
)
from ..gone import refuse
from ..operators.dispatch import need_dispatcher
from ..operators.merging import merge_parts, plan
from ..operators.results import Plan
from ..operators.row_topk import plain_topk, row_topk
from ..problem import MergeProblem, TopK, TopKState, result_dtype
from ..row_arguments import check_rows, check_temperature, plain_rows
from ..rows import Like, like
from ..scale import Scale

_KINDS = ("softmax", "log_softmax", "logits")
_NO_TOKEN = -1


def topk_state(
    logits: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    start: int = 0,
    backend: str | None = None,
) -> TopKState:
    """The state (m, d, T) of a part of every row, in one read of the logits: what :func:`merge_topk` takes.

    >>> topk_state(torch.tensor([1.0, 3.0]), k=1, start=2).indices
    tensor([3])

    Milakov & Gimelshein 2018, equations 6 and 7 and Algorithm 4 (https://arxiv.org/abs/1805.02867).

    The other arguments, and the errors, are those of :func:`softmax_topk`.

    Args:
        logits: shape (..., V_part), the columns `start` ... `start` + V_part - 1 of every row.
        k: the number of candidates to keep. Where it exceeds V_part, all V_part are kept.
        temperature: a positive number, or a tensor with one number per row. The merge must be given the same.
        mask: the tokens of the part that may be chosen, bool or packed int32, with the part's first token first.
        lengths: how many of the part's first tokens there are, one number a row.
        normalize: "allowed": m and d are of the allowed tokens. "all": they are of the whole part, and the mask hides
            tokens from the choice only. "topk": as "allowed"; the merge then normalises by what it chooses.
        start: the token at which the part begins; start + V_part may exceed 2^31.

    Returns:
        TopKState with logits and indices of shape (..., min(k, V_part)), m and d of shape (...).

    Contract:
        The candidates, their order, ties, NaN, waiting and determinism are those of :func:`topk`. The logits are copied
        bit for bit. The logits, m and d are differentiable.
    """
    rows = plain_rows(logits, temperature, mask, lengths, may_learn=True)
    is_plain = rows is not None and logits.dim() > 0
    if rows is None or not is_plain:
        rows = check_rows(logits, temperature, mask, lengths)
    # A part that is shorter than k keeps all its tokens.
    check_k(k, 2**63 - 1)
    k = min(k, logits.shape[-1])
    check_start(start)
    check_normalize(normalize)
    check_backend(backend)
    if is_plain:
        best = plain_topk(rows, int(k), "state", normalize, backend)
    else:
        best = row_topk(rows, k, "state", normalize, backend)
    return _state(best, start)


def merge_states(
    parts: Sequence[TopKState],
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    backend: str | None = None,
) -> TopKState:
    """The state of the union of several parts of the same rows: the + of the monoid of states.

    >>> from fused_topk import topk_state
    >>> merge_states([topk_state(torch.tensor([1.0, 3.0]), 1), topk_state(torch.tensor([2.0]), 1, start=2)], k=2).indices
    tensor([1, 2])

    The other arguments, and the errors, are those of :func:`softmax_topk`.

    Args:
        parts: one or more states, as :func:`topk_state` and this function return them, of parts without a common token,
            in any order. Their leading shapes, dtypes and devices must agree; their numbers of candidates may differ.
        k: the number of candidates to keep. A part must hold its own k best, or all of its tokens. Where k exceeds what
            the parts hold together, all are kept.
        temperature: the one that the states were made with: a positive number, or a tensor with one number per row.

    Returns:
        TopKState of the union.

    Contract:
        Candidates and their order are exact: the greater logit first, equal ones by smaller index, whatever the order of the
        parts and however merges are nested. d is summed in the order of the parts; other orders differ by rounding.
        A part in which nothing is allowed changes no finite candidate, and neither m nor d. It may change which entries of
        -inf fill up the list.
        Differentiable with respect to the parts' logits, m and d.
    """
    return _state(_merge(parts, k, temperature, "state", "allowed", backend))


def merge_topk(
    parts: Sequence[TopKState],
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    normalize: str = "allowed",
    kind: str = "softmax",
    backend: str | None = None,
    **gone: NoReturn,
) -> TopK:
    """The k best of whole rows, from the states of their parts: what the unsharded call gives.

    >>> from fused_topk import topk_state
    >>> merge_topk([topk_state(torch.tensor([1.0, 3.0]), 1), topk_state(torch.tensor([2.0]), 1, start=2)], k=2).indices
    tensor([1, 2])

    The other arguments, and the errors, are those of :func:`merge_states`.

    Args:
        k: the number of results per row, at most what the parts hold together. A part must hold its own k best, or all of
            its tokens.
        normalize: the one that the states were made with. "topk": the values are relative to the k chosen. "allowed" and "all"
            make no difference here: the states have it.
        kind: what the values are, "softmax", "log_softmax" or "logits", as :func:`softmax_topk`, :func:`log_softmax_topk` and :func:`topk`.

    Returns:
        TopK with values and indices of shape (..., k), and logsumexp (...) of the scaled logits.

    Contract:
        Indices, and the values of kind "logits", are exactly those of the unsharded call, ties included. The rest is the contract of
        :func:`softmax_topk`. Differentiable with respect to the parts' logits, m and d, except where a logit is -inf.
    """
    if gone:
        refuse("merge_topk", gone)
    check_choice("kind", kind, _KINDS)
    return _merge(parts, k, temperature, kind, normalize, backend)


def _state(best: TopK, start: int = 0) -> TopKState:
    """A result that has m and d in place of the logsumexp, of a part that begins at a token."""
    logits, indices, normalizer = best
    # Not unbind(), whose results autograd lets nobody change in place.
    return TopKState(logits, indices + start if start else indices, normalizer.select(0, 0), normalizer.select(0, 1))


def _merge(
    parts: Sequence[TopKState],
    k: int,
    temperature: float | Tensor,
    values: str,
    normalize: str,
    backend: str | None,
) -> TopK:
    check_normalize(normalize)
    check_backend(backend)
    if _are_plain(parts, temperature, k):
        layouts = tuple(tuple(map(like, part)) for part in parts)
        request, planned = _planned(parts[0].m.device, layouts, k, temperature, values, normalize, backend)
        logits, indices, m, d = _stacked(parts)
        return planned.run(MergeProblem(logits, indices, m, d, None, *request))
    k, scale = _check(parts, k, temperature, values)
    logits, indices, m, d = _stacked(parts)
    return merge_parts(logits, indices, m, d, None, k, *scale, values, normalize, backend)


def _are_plain(parts: Any, temperature: Any, k: Any) -> bool:
    """Whether the checks of a call depend on the layouts of its tensors alone, and were perhaps made before."""
    if type(parts) not in (list, tuple) or not parts or type(temperature) is not float or type(k) is not int:
        return False
    if any(type(part) is not TopKState for part in parts):
        return False
    tensors = [tensor for part in parts for tensor in part]
    if any(type(tensor) is not Tensor for tensor in tensors) or need_dispatcher(*tensors):
        return False
    device = tensors[0].device
    return all(tensor.device == device for tensor in tensors)


@functools.lru_cache(maxsize=4096, typed=True)
def _planned(
    device: torch.device,
    layouts: tuple[tuple[Like, ...], ...],
    k: int,
    temperature: float,
    values: str,
    normalize: str,
    backend: str | None,
) -> tuple[tuple[int, Scale, str, str], Plan[TopK]]:
    """Checks and plans a call whose parts have these layouts, once for all such calls. Returns the fields k to normalize of
    :class:`MergeProblem`, too."""
    parts = [TopKState(*(each.meta() for each in layout)) for layout in layouts]
    k, scale = _check(parts, k, temperature, values)
    request = k, scale, values, normalize
    logits, indices, m, d = _stacked(parts)
    stacked = MergeProblem(logits, indices, m, d, None, *request)
    return request, plan(device, backend, *(like(x) if isinstance(x, Tensor) else x for x in stacked.flat()))


def _check(parts: Any, k: Any, temperature: Any, values: str) -> tuple[int, Scale]:
    """Checks a call. Returns how many candidates it keeps, and the scale."""
    if isinstance(parts, (Tensor, TopKState)) or not isinstance(parts, Sequence):
        raise TypeError(
            f"`parts` must be a sequence of TopKState, got {type(parts).__name__}; wrap a single one in a list"
        )
    if not parts:
        raise ValueError("`parts` must have at least one state, got none; a row has at least one part")
    for i, part in enumerate(parts):
        _check_part(f"parts[{i}]", part, parts[0])
    held = sum(part.indices.shape[-1] for part in parts)
    if values == "state":
        check_k(k, 2**63 - 1)
        k = min(k, held)
    else:
        check_k(k, held, "the candidates of all parts")
    logits = parts[0].logits
    return int(k), check_temperature(temperature, logits, result_dtype(logits.dtype))


def _check_part(name: str, part: Any, first: TopKState) -> None:
    """Checks a state, and that it fits the state of the first part."""
    if not isinstance(part, TopKState):
        raise TypeError(f"`{name}` must be a TopKState, got {type(part).__name__}; make it with topk_state()")
    logits, *others = part
    check_logits(logits, f"{name}.logits")
    check_same_device(f"{name}.logits", logits, first[0])
    if logits.dtype is not first[0].dtype:
        raise TypeError(
            f"`{name}.logits` must have the dtype {first[0].dtype} of the first part, got {logits.dtype}; convert the "
            "logits before topk_state()"
        )
    if logits.shape[:-1] != first[0].shape[:-1]:
        raise ValueError(
            f"`{name}.logits` must have the leading shape {tuple(first[0].shape[:-1])} of the first part, got "
            f"{tuple(logits.shape[:-1])}; the parts must be of the same rows"
        )
    if logits.shape[-1] == 0:
        raise ValueError(f"`{name}.logits` must have at least one candidate a row, got none; leave an empty part out")
    of_normalizer = logits.shape[:-1], result_dtype(logits.dtype)
    wanted = (logits.shape, torch.int64), of_normalizer, of_normalizer
    for field, tensor, (shape, dtype) in zip(("indices", "m", "d"), others, wanted, strict=True):
        check_tensor(f"{name}.{field}", tensor)
        check_same_device(f"{name}.{field}", tensor, first[0])
        if tensor.dtype is not dtype or tensor.shape != shape:
            raise ValueError(
                f"`{name}.{field}` must be {dtype} of shape {tuple(shape)}, got {tensor.dtype} of shape {tuple(tensor.shape)}; "
                "take it as topk_state() returns it"
            )


def _stacked(parts: Sequence[TopKState]) -> tuple[Tensor, ...]:
    """The fields of all parts, one tensor each: (parts, ..., width) or (parts, ...). Short lists end with entries that are no
    candidates."""
    width = max(part.indices.shape[-1] for part in parts)
    fillers = (-torch.inf, _NO_TOKEN, None, None)
    return tuple(
        torch.stack([x if filler is None else _padded(x, width, filler) for x in of_parts])
        for of_parts, filler in zip(zip(*parts, strict=True), fillers, strict=True)
    )


def _padded(x: Tensor, width: int, filler: float) -> Tensor:
    missing = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing), value=filler) if missing else x
