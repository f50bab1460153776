# SPDX-License-Identifier: Apache-2.0
"""The warpers of sampling on the best tokens of each row instead of on the vocabulary.

Temperature, top-k, top-p and min-p keep the best tokens of a row. How many depends on the scores. So they run on a list of the
best. The list was long enough if they remove its last token. top-k keeps every token that ties with the k-th, as transformers
does. Normalization of the scores comes last and shifts a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...layout.topk_choice import MAX_K


class Filter(NamedTuple):
    """One step of the chain."""

    kind: str  # "temperature", "top_k", "top_p", "min_p" or "normalize"
    number: float  # the temperature, k, p or min_p
    at_least: int = 1  # how many tokens it keeps at least


# Subtracts the logsumexp from the scores.
NORMALIZE = Filter("normalize", 1.0)
# Length of the list if no top-k bounds it. In practice top-p and min-p keep far fewer tokens.
_WINDOW = 1024
# Room for tokens that tie with the k-th: with bfloat16 logits of 152k tokens, k = 1024 has 15 to 22 of them.
_ROOM_FOR_TIES = 64
# Temperatures that greedy decoding takes. Others may make a row's best tokens equal.
_TEMPERATURES = (1e-3, 1e3)
# In the order in which fused_topk.sample() applies them.
_PARAMETERS = ("temperature", "top_k", "top_p", "min_p")
# Beyond them scores overflow in float32, or have no digits left.
_SAMPLED_TEMPERATURES = (1e-30, 1e30)
# How many of the best tokens greedy decoding looks at. A warper may round some of them to the score of the best, and then the
# smallest index is taken. More become equal only in a row whose scores differ by hardly a digit.
GREEDY_LENGTH = 8


def list_length(filters: Sequence[Filter], vocab_size: int) -> int | None:
    """How many of a row's best tokens the filters need to see; None where they may keep the whole vocabulary."""
    for kind, number, _ in filters:
        if kind == "top_k":
            k = int(number)
            # A length beyond the kernels' limit is cut to that limit, if k itself is within it.
            length = k + max(_ROOM_FOR_TIES, k // 4)
            return min(vocab_size, length if length <= MAX_K else max(k, MAX_K))
    if any(kind not in ("temperature", "normalize") for kind, *_ in filters):
        return min(vocab_size, _WINDOW)
    return None


def parameters(filters: Sequence[Filter]) -> dict[str, float] | None:
    """The filters as the parameters of fused_topk.sample(), by name; None where sample() has no such parameter, or another order."""
    # To renormalise a row does not change its distribution.
    steps = [each for each in filters if each != NORMALIZE]
    kinds = [each.kind for each in steps]
    # sample() keeps one token at least.
    if kinds != [kind for kind in _PARAMETERS if kind in kinds] or any(each.at_least > 1 for each in steps):
        return None
    low, high = _SAMPLED_TEMPERATURES
    if any(each.kind == "temperature" and not low <= each.number <= high for each in steps):
        return None
    return {each.kind: each.number for each in steps}


def apply(
    filters: Sequence[Filter],
    scores: Tensor,
    vocab_size: int,
    log_total: Callable[[float], Tensor],
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """What the filters make of the best tokens of each row.

    Args:
        filters: in order.
        scores: float32 [R, n], the best of each row, best first.
        vocab_size: of the rows; a list of as many is always long enough.
        log_total: given a temperature, float32 [R, 1]: log of the sum of exp((score - best score) / temperature) over the
            row, in which an offset of its scores costs no digits.
        dtype: that the stock warpers would compute in; it decides what ties.

    Returns:
        New scores [R, n], -inf where removed; and bool [R], whether the list was long enough, None where it surely was.
    """
    is_whole = scores.shape[1] == vocab_size
    # Whether all tokens beyond the list are removed, if the list was long enough.
    is_cut = is_whole
    temperature = 1.0
    was_enough: Tensor | None = None
    for kind, number, at_least in filters:
        if kind == "temperature":
            scores = (scores / number).to(dtype).float()
            temperature *= number
            continue
        if kind == "normalize":
            scores = scores.log_softmax(-1) if is_cut else (scores - scores[:, :1]) - log_total(temperature)
            continue
        if kind == "top_k":
            # Another top-k before this one may have made the list shorter than k.
            kth = min(int(number), scores.shape[1]) - 1
            is_out = scores < scores[:, kth : kth + 1]
        elif kind == "min_p":
            is_out = (scores - scores[:, :1]).exp() < number
        else:
            probs = scores.softmax(-1) if is_cut else ((scores - scores[:, :1]) - log_total(temperature)).exp()
            # Added up as transformers does: in ascending order, beginning with the tokens beyond the list.
            shares = probs.flip(-1).cumsum(-1).flip(-1)
            if not is_cut:
                shares += 1 - shares[:, :1]
            is_out = shares <= 1 - number
        if kind != "top_k":
            is_out[:, :at_least] = False
        if not is_cut:
            is_cut = True
            last_out = is_out[:, -1] | scores[:, -1].isneginf()
            was_enough = last_out if was_enough is None else was_enough & last_out
        scores = scores.masked_fill(is_out, -torch.inf)
    return scores, was_enough


def keep_the_best(filters: Sequence[Filter]) -> bool:
    """Whether greedy decoding is known to take one of the best tokens of a row, whatever the filters do."""
    kinds = [kind for kind, *_ in filters]
    low, high = _TEMPERATURES
    # To renormalise after another filter would need to know all tokens that the filter keeps.
    return all(low <= number <= high for kind, number, _ in filters if kind == "temperature") and (
        "normalize" not in kinds or set(kinds) <= {"temperature", "normalize"}
    )


def greatest(filters: Sequence[Filter], scores: Tensor, ids: Tensor, log_total: Callable[[float], Tensor]) -> Tensor:
    """int64 [R]: the token that greedy decoding takes after filters that keep the best.

    Args:
        filters: in order.
        scores: float32 [R, n], the best of each row, best first.
        ids: int64 [R, n], their tokens.
        log_total: as of :func:`apply`.
    """
    temperature = 1.0
    total: Tensor | None = None
    for kind, number, _ in filters:
        if kind == "temperature":
            scores = scores / number
            temperature *= number
        elif kind == "normalize":
            total = log_total(temperature)
            scores = (scores - scores[:, :1]) - total
    # By rounding, others may have become equal to the best. Of these the smallest index is taken.
    is_best = scores == scores[:, :1]
    is_best[:, 0] = True
    chosen = ids.masked_fill(~is_best, torch.iinfo(torch.int64).max).amin(-1)
    # A temperature may make all scores -inf. Then the first token is taken.
    chosen = chosen.masked_fill(scores[:, 0].isneginf(), 0)
    # To renormalise a row with NaN, with +inf or of -inf alone leaves NaN everywhere. Then, too, the first token is taken.
    return chosen if total is None else chosen.where(total.squeeze(-1).isfinite(), 0)
