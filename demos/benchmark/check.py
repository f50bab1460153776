# SPDX-License-Identifier: Apache-2.0
"""Whether an answer is right. Each function takes a case, its input and our answer, and returns what is wrong, or None.

That tokens are the k best is proven from the answer and the logits: no other top-k is trusted, and nothing is sorted. They are the k best
exactly when each ranks before the next (greater logit, then smaller index) and precisely k tokens of the row rank at or before the last
of them. That is one gather, k comparisons and one count. Numbers are compared with float64. The logits must hold no NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from fused_topk import TopK

from . import ours
from .cases import Case
from .inputs import beam_scores, target_tokens, weight_of

# A weight is rounded to 2^-22 of itself, and a running sum by as much.
_ROUNDING_OF_SUMS = 2.0**-20
# Elements looked at together: float64 temporaries of the largest shapes would not fit beside the inputs.
_CHUNK = 1 << 26
# In units of float32 rounding of max(1, |value|).
_TOLERANCE_ULPS = 16
_EPSILON = torch.finfo(torch.float32).eps


def topk(case: Case, logits: Tensor, got: Any) -> str | None:
    """log_softmax_topk of logits (rows, V)."""
    rows, vocab = logits.shape
    if wrong := _form_error(got, (rows, case.k), (rows,)):
        return wrong
    step = max(_CHUNK // vocab, 1)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        if wrong := _rows_error(logits[part], TopK(*(x[part] for x in got)), start):
            return wrong
    return None


def beams(case: Case, logits: Tensor, got: Any) -> str | None:
    """beam_topk of logits (texts, beams, V).

    The accumulated float32 scores of two beams may differ from float64's by a rounding and so swap places: values are
    compared with a tolerance, and exactness is asked of each beam alone, whose tokens must be its best ones in order.
    """
    scores = beam_scores(case, logits.device)
    if wrong := _form_error(got, (case.rows, case.k), (case.rows, case.beams)):
        return wrong
    if bool(((got.indices < 0) | (got.indices >= case.beams * case.vocab)).any()):
        return "an index is out of range"
    for text in range(case.rows):
        indices, wide = got.indices[text], logits[text].double()
        lse = wide.logsumexp(-1)
        accumulated = (wide - lse[:, None] + scores[text, :, None].double()).flatten()
        for what, found, expected in (
            ("logsumexp", got.logsumexp[text], lse),
            ("the value of the index", got.values[text], accumulated[indices]),
            ("the best value", got.values[text], accumulated.topk(case.k).values),
        ):
            if far := _first_far(found, expected):
                return f"text {text}, {what}: {far}"
        for beam in range(case.beams):
            tokens = indices[indices // case.vocab == beam] % case.vocab
            if tokens.numel() and (misplaced := _first_misplaced(logits[text, beam, None], tokens[None])):
                return f"text {text}, beam {beam}: {misplaced[1]}"
    return None


def softmax(case: Case, logits: Tensor, got: Tensor) -> str | None:
    if got.shape != logits.shape or got.dtype != logits.dtype:
        return f"must be {logits.dtype} of shape {tuple(logits.shape)}, got {got.dtype} of {tuple(got.shape)}"
    # The tolerance is relative to each probability. In float32 the rounding of the exponential's argument adds some tens of units.
    info = torch.finfo(got.dtype)
    relative = 64 * info.eps if got.dtype == torch.float32 else info.eps
    step = max(_CHUNK // logits.shape[-1], 1)
    for start in range(0, logits.shape[0], step):
        expected = logits[start : start + step].double().softmax(-1)
        error = (got[start : start + step] - expected).abs()
        far = (~(error <= relative * expected + info.smallest_normal * info.eps)).nonzero()  # NaN is far.
        if far.numel():
            row, at = (int(i) for i in far[0])
            return f"element {at} of row {start + row} is {got[start + row, at]:.9g}, expected {expected[row, at]:.9g}"
    return None


def draws(case: Case, logits: Tensor, got: Any) -> str | None:
    """The tokens are those that the reference draws by the same numbers.

    A random number that lies within rounding of the border between two tokens may draw either of them. This happens in one of
    100,000 rows of normal logits. In peaked rows it happens in a few of a thousand: there, most tokens weigh little more than the
    rounding of the best token's weight.
    """
    rows, expected = len(logits), ours.draw(case, logits.device, "reference")(logits).tokens
    if got.tokens.shape != (rows, 1) or got.tokens.dtype != torch.int64:
        return f"tokens must be int64 of shape {(rows, 1)}, got {got.tokens.dtype} of {tuple(got.tokens.shape)}"
    if bool(((got.tokens < 0) | (got.tokens >= logits.shape[-1])).any()):
        return "a token is out of range"
    differs = (got.tokens != expected).squeeze(1)
    is_far = _mass_between(logits[differs], got.tokens[differs], expected[differs]) > _ROUNDING_OF_SUMS
    if int(differs.sum()) > max(1, rows // 100) or bool(is_far.any()):
        return f"{int(differs.sum())} of {rows} rows draw other tokens than the reference"
    far = _first_far(got.logprobs, logits.double().log_softmax(-1).gather(1, got.tokens))
    return far and f"log-probabilities: {far}"


def _mass_between(logits: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The probability of the tokens that lie, by index, between two tokens (rows, 1) of each row."""
    p = logits.double().softmax(-1)
    ends = p.cumsum(-1)
    first, last = torch.minimum(one, other), torch.maximum(one, other)
    return ends.gather(1, last) - p.gather(1, last) - ends.gather(1, first)


def routers(case: Case, logits: Tensor, got: Any) -> str | None:
    """The experts are those that the reference chooses."""
    expected = ours.route(case, logits.device, "reference")(logits)
    if got.experts.dtype != torch.int64 or not torch.equal(got.experts, expected.experts):
        others = int((got.experts != expected.experts).any(-1).sum())
        return f"{others} of {len(expected.experts)} tokens have other experts than the reference"
    far = _first_far(got.weights, expected.weights.double())
    return far and f"weights: {far}"


def heads(case: Case, hidden: Tensor, got: Any) -> str | None:
    """Some rows at a time: float64 numbers of all logits would not fit."""
    weight = weight_of(case, hidden.device)
    for first in range(0, len(hidden), 256):
        part = slice(first, first + 256)
        if wrong := topk(case, linear(hidden[part], weight), TopK(*(x[part] for x in got))):
            return f"of the rows from {first}: {wrong}"
    return None


def training(case: Case, hidden: Tensor, got: Any) -> str | None:
    """The loss, and the gradient of hidden states: what 16 bits round is small beside the greatest of its elements."""
    (loss, gradient), rows = got, len(hidden)
    weight, tokens = weight_of(case, hidden.device), target_tokens(case, hidden.device)
    total, worst, greatest = 0.0, 0.0, 0.0
    for first in range(0, rows, 128):
        part = slice(first, first + 128)
        log_probs = linear(hidden[part], weight).double().log_softmax(-1)
        total -= float(log_probs.gather(1, tokens[part, None]).sum())
        of_logits = log_probs.exp().scatter_add(1, tokens[part, None], log_probs.new_full((len(log_probs), 1), -1.0))
        expected = (of_logits / rows) @ weight.double()
        worst = max(worst, float((gradient[part] - expected).abs().max()))
        greatest = max(greatest, float(expected.abs().max()))
    if not abs(float(loss) - total / rows) <= 1e-4 * abs(total / rows):
        return f"the loss is {float(loss):.9g}, expected {total / rows:.9g}"
    tolerance = 2.0**-5 if hidden.element_size() == 2 else 2.0**-15
    return (
        None if worst <= tolerance * greatest else f"a gradient is off by {worst:.3g}, the greatest is {greatest:.3g}"
    )


def sharded(case: Case, own: Tensor, got: Any) -> str | None:
    """log_softmax_topk of the columns of all processes, which have as many each."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return topk(case, torch.cat(parts, -1), got)


def _form_error(got: Any, shape: tuple[int, ...], lse_shape: tuple[int, ...]) -> str | None:
    if not isinstance(got, TopK):
        return f"a {type(got).__name__}, which is no TopK"
    dtypes = torch.float32, torch.int64, torch.float32
    for name, tensor, wanted, dtype in zip(got._fields, got, (shape, shape, lse_shape), dtypes):
        if tuple(tensor.shape) != wanted or tensor.dtype != dtype:
            return f"{name} must be {dtype} of shape {wanted}, got {tensor.dtype} of {tuple(tensor.shape)}"
    return None


def _rows_error(logits: Tensor, got: TopK, first_row: int) -> str | None:
    if bool(((got.indices < 0) | (got.indices >= logits.shape[-1])).any()):
        return "an index is out of range"
    if misplaced := _first_misplaced(logits, got.indices):
        return f"row {first_row + misplaced[0]}: {misplaced[1]}"
    wide = logits.double()
    lse = wide.logsumexp(-1)
    far = _first_far(got.logsumexp, lse) or _first_far(got.values, wide.gather(-1, got.indices) - lse[:, None])
    return far and f"in the rows from {first_row}: {far}"


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
