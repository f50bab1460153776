# SPDX-License-Identifier: Apache-2.0
"""Whether an answer is right, proven from the answer and the logits: no other top-k is trusted, and nothing is sorted.

The chosen tokens of a row are the k best exactly when each ranks before the next (greater logit, then smaller index)
and precisely k tokens of the row rank at or before the last of them. That is one gather, k comparisons and one count.
The logits must hold no NaN: the benchmark's do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_topk.problem import RouterTopK, Sample, TopK

# A weight is rounded to 2^-22 of itself, and a running sum by as much.
_ROUNDING_OF_SUMS = 2.0**-20
# Elements looked at together: float64 temporaries of the largest shapes would not fit beside the inputs.
_CHUNK = 1 << 26
# In units of float32 rounding of max(1, |value|).
_TOLERANCE_ULPS = 16
_EPSILON = torch.finfo(torch.float32).eps


def log_softmax_topk_error(logits: Tensor, k: int, got: TopK) -> str | None:
    """What is wrong with `got` as the answer of log_softmax_topk(logits, k), or None. `logits` is (rows, V)."""
    rows, vocab = logits.shape
    wrong_form = _form_error(got, (rows, k), (rows,))
    if wrong_form:
        return wrong_form
    step = max(_CHUNK // vocab, 1)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        error = _rows_error(logits[part], TopK(got.values[part], got.indices[part], got.logsumexp[part]), start)
        if error:
            return error
    return None


def sample_error(logits: Tensor, got: Sample, expected: Sample) -> str | None:
    """What is wrong with `got`, or None. `logits` is (rows, V), and `expected` what the reference draws by the same numbers.

    A random number that lies within rounding of the border between two tokens may draw either of them. This happens in one of
    100,000 rows of normal logits. In peaked rows it happens in a few of a thousand: there, most tokens weigh little more than the
    rounding of the best token's weight.
    """
    rows = len(logits)
    if got.tokens.shape != (rows, 1) or got.tokens.dtype != torch.int64:
        return f"tokens must be int64 of shape {(rows, 1)}, got {got.tokens.dtype} of {tuple(got.tokens.shape)}"
    if bool(((got.tokens < 0) | (got.tokens >= logits.shape[-1])).any()):
        return "a token is out of range"
    differs = (got.tokens != expected.tokens).squeeze(1)
    are_far = _mass_between(logits[differs], got.tokens[differs], expected.tokens[differs]) > _ROUNDING_OF_SUMS
    if int(differs.sum()) > max(1, rows // 100) or bool(are_far.any()):
        return f"{int(differs.sum())} of {rows} rows draw other tokens than the reference"
    log_probs = logits.double().log_softmax(-1).gather(1, got.tokens)
    far = _first_far(got.logprobs.flatten(), log_probs.flatten())
    return None if far is None else f"log-probabilities: {far}"


def _mass_between(logits: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The probability of the tokens that lie, by index, between two tokens (rows, 1) of each row."""
    p = logits.double().softmax(-1)
    ends = p.cumsum(-1)
    first, last = torch.minimum(one, other), torch.maximum(one, other)
    return ends.gather(1, last) - p.gather(1, last) - ends.gather(1, first)


def router_error(got: RouterTopK, expected: RouterTopK) -> str | None:
    """What is wrong with `got`, or None. `expected` is what the reference chooses: the same experts."""
    if got.experts.dtype != torch.int64 or not torch.equal(got.experts, expected.experts):
        others = int((got.experts != expected.experts).any(-1).sum())
        return f"{others} of {len(expected.experts)} tokens have other experts than the reference"
    far = _first_far(got.weights.flatten(), expected.weights.flatten().double())
    return None if far is None else f"weights: {far}"


def softmax_error(logits: Tensor, got: Tensor) -> str | None:
    """What is wrong with `got` as softmax(logits), or None. `logits` is (rows, V)."""
    if got.shape != logits.shape or got.dtype != logits.dtype:
        return (
            f"the result must be {logits.dtype} of shape {tuple(logits.shape)}, got {got.dtype} of {tuple(got.shape)}"
        )
    # The tolerance is relative to each probability. In float32 the rounding of the exponential's argument adds some tens of units.
    info = torch.finfo(got.dtype)
    relative = 64 * info.eps if got.dtype == torch.float32 else info.eps
    smallest = info.smallest_normal * info.eps
    step = max(_CHUNK // logits.shape[-1], 1)
    for start in range(0, logits.shape[0], step):
        expected = logits[start : start + step].double().softmax(-1)
        is_near = (got[start : start + step] - expected).abs() <= relative * expected + smallest
        far = (~is_near).nonzero()  # NaN is far.
        if far.numel():
            row, at = (int(i) for i in far[0])
            return f"element {at} of row {start + row} is {got[start + row, at]:.9g}, expected {expected[row, at]:.9g}"
    return None


def beam_topk_error(logits: Tensor, beam_scores: Tensor, k: int, got: TopK) -> str | None:
    """What is wrong with `got` as the answer of beam_topk(logits, beam_scores, k), or None. `logits` is (b, beams, V).

    The accumulated float32 scores of two beams may differ from float64's by a rounding and so swap places: values are
    compared with a tolerance, and exactness is asked of each beam alone, whose tokens must be its best ones in order.
    """
    batch, beams, vocab = logits.shape
    wrong_form = _form_error(got, (batch, k), (batch, beams))
    if wrong_form:
        return wrong_form
    if bool(((got.indices < 0) | (got.indices >= beams * vocab)).any()):
        return "an index is out of range"
    for entry in range(batch):
        row_logits, indices = logits[entry], got.indices[entry]
        wide = row_logits.double()
        lse = wide.logsumexp(-1)
        bad = _first_far(got.logsumexp[entry], lse)
        if bad is not None:
            return f"logsumexp of batch entry {entry}: {bad}"
        accumulated = (wide - lse[:, None] + beam_scores[entry, :, None].double()).flatten()
        for what, expected in (
            ("the value of the index", accumulated[indices]),
            ("the best value", accumulated.topk(k).values),
        ):
            bad = _first_far(got.values[entry], expected)
            if bad is not None:
                return f"batch entry {entry} against {what}: {bad}"
        for beam in range(beams):
            tokens = indices[indices // vocab == beam] % vocab
            misplaced = _first_misplaced(row_logits[beam : beam + 1], tokens[None]) if tokens.numel() else None
            if misplaced is not None:
                return f"batch entry {entry}, beam {beam}: {misplaced[1]}"
    return None


def _form_error(got: TopK, shape: tuple[int, ...], lse_shape: tuple[int, ...]) -> str | None:
    expected: tuple[tuple[str, Tensor, tuple[int, ...], Any], ...] = (
        ("values", got.values, shape, torch.float32),
        ("indices", got.indices, shape, torch.int64),
        ("logsumexp", got.logsumexp, lse_shape, torch.float32),
    )
    for name, tensor, wanted, dtype in expected:
        if tuple(tensor.shape) != wanted or tensor.dtype != dtype:
            return f"{name} must be {dtype} of shape {wanted}, got {tensor.dtype} of {tuple(tensor.shape)}"
    return None


def _rows_error(logits: Tensor, got: TopK, first_row: int) -> str | None:
    if bool(((got.indices < 0) | (got.indices >= logits.shape[-1])).any()):
        return "an index is out of range"
    misplaced = _first_misplaced(logits, got.indices)
    if misplaced is not None:
        return f"row {first_row + misplaced[0]}: {misplaced[1]}"
    wide = logits.double()
    lse = wide.logsumexp(-1)
    bad = _first_far(got.logsumexp, lse)
    if bad is None:
        bad = _first_far(got.values.flatten(), (wide.gather(-1, got.indices) - lse[:, None]).flatten())
    return None if bad is None else f"in the rows from {first_row}: {bad}"


def _first_misplaced(logits: Tensor, indices: Tensor) -> tuple[int, str] | None:
    """The first row of `indices` (rows, k) that is not the row's best k in order, and why."""
    chosen = logits.gather(-1, indices)
    greater, equal = chosen[:, :-1] > chosen[:, 1:], chosen[:, :-1] == chosen[:, 1:]
    in_order = (greater | (equal & (indices[:, :-1] < indices[:, 1:]))).all(-1)
    last, last_index = chosen[:, -1:], indices[:, -1:]
    position = torch.arange(logits.shape[-1], device=logits.device)
    at_or_before = ((logits > last) | ((logits == last) & (position <= last_index))).sum(-1)
    wrong = (~in_order | (at_or_before != indices.shape[-1])).nonzero()
    if not wrong.numel():
        return None
    row = int(wrong[0])
    if not in_order[row]:
        return row, f"not in order: indices {indices[row, :8].tolist()}, logits {chosen[row, :8].tolist()}"
    return row, f"{int(at_or_before[row])} tokens rank at or before the last of the {indices.shape[-1]} chosen"


def _first_far(got: Tensor, expected: Tensor) -> str | None:
    """The first element of `got` beyond the tolerance of the float64 `expected`; infinities must be equal."""
    wide = got.double()
    tolerance = _TOLERANCE_ULPS * _EPSILON * expected.abs().clamp(min=1.0)
    close = (wide == expected) | ((wide - expected).abs() <= tolerance.nan_to_num(posinf=0.0))
    far = (~close).flatten().nonzero()
    if not far.numel():
        return None
    at = int(far[0])
    return f"element {at} is {wide.flatten()[at]:.9g}, expected {expected.flatten()[at]:.9g}"
