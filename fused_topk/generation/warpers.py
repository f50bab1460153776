# SPDX-License-Identifier: Apache-2.0
"""The warpers of sampling on the best tokens of each row instead of on the vocabulary.

Temperature, top-k, top-p and min-p keep the best tokens of a row. How many depends on the scores. So they run on a list of the
best. The list was long enough if they remove its last token. top-k keeps every token that ties with the k-th, as transformers
does. Normalization of the scores comes last and shifts a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as stock

from .. import functional
from ..layout.topk_choice import MAX_K

# Length of the list if no top-k bounds it. In practice top-p and min-p keep far fewer tokens.
_WINDOW = 1024
# Room for tokens that tie with the k-th: with bfloat16 logits of 152k tokens, k = 1024 has 15 to 22 of them.
_ROOM_FOR_TIES = 64


class Filter(NamedTuple):
    """One step of the chain."""

    kind: str  # "temperature", "top_k", "top_p", "min_p" or "normalize"
    number: float  # the temperature, k, p or min_p
    at_least: int = 1  # how many tokens it keeps at least


# Subtracts the logsumexp from the scores.
NORMALIZE = Filter("normalize", 1.0)
# Temperatures that greedy decoding takes. Others may make a row's best tokens equal.
_TEMPERATURES = (1e-3, 1e3)
# In the order in which fused_topk.sample() applies them.
_PARAMETERS = ("temperature", "top_k", "top_p", "min_p")
# Beyond them scores overflow in float32, or have no digits left.
_SAMPLED_TEMPERATURES = (1e-30, 1e30)
# Of tokens that become equal to the best by rounding, the smallest index among these is taken. More than these become equal only in
# a row that has hardly a digit of difference.
GREEDY_LENGTH = 8


def filters_of(processor: Any) -> list[Filter] | None:
    """What a warper does. None for anything but the exact classes, with the known attributes and the filter value -inf."""
    kind = type(processor)
    known = _ATTRIBUTES.get(kind)
    if (
        known is None
        or not vars(processor).keys() <= known
        or getattr(processor, "filter_value", -math.inf) != -math.inf
    ):
        return None
    p = processor
    if kind is stock.TemperatureLogitsWarper:
        filters = [Filter("temperature", p.temperature)]
    elif kind is stock.TopKLogitsWarper:
        filters = [Filter("top_k", p.top_k)]
    elif kind is stock.TopPLogitsWarper:
        filters = [Filter("top_p", p.top_p, p.min_tokens_to_keep)]
    elif kind is stock.MinPLogitsWarper:
        filters = [Filter("min_p", p.min_p, p.min_tokens_to_keep)]
    elif kind is stock.LogitNormalization:
        filters = [NORMALIZE]
    else:
        filters = list(p.filters)
    return filters if all(map(_is_within_range, filters)) else None


def _is_within_range(each: Filter) -> bool:
    """Whether the numbers are what the constructors accept: attributes may have been set later."""
    kind, number, at_least = each
    if (
        not isinstance(at_least, int)
        or at_least < 1
        or not isinstance(number, int if kind == "top_k" else (int, float))
    ):
        return False
    return {"temperature": 0 < number < math.inf, "top_k": number >= 1}.get(kind, 0 <= number <= 1)


def list_length(filters: Sequence[Filter], vocab_size: int) -> int | None:
    """How many of a row's best tokens the filters need to see; None where they may keep the whole vocabulary."""
    for kind, number, _ in filters:
        if kind == "top_k":
            k = int(number)
            # The kernels' limit is taken as it is if k itself is within it.
            length = k + max(_ROOM_FOR_TIES, k // 4)
            return min(vocab_size, length if length <= MAX_K else max(k, MAX_K))
    if any(kind not in ("temperature", "normalize") for kind, *_ in filters):
        return min(vocab_size, _WINDOW)
    return None


def parameters(filters: Sequence[Filter]) -> dict[str, float] | None:
    """The filters as the parameters of fused_topk.sample(), by name; None where they are others, or in another order."""
    # What renormalises a row leaves its distribution as it is.
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
    # Whether everything beyond the list is out, if the list was long enough.
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
            kth = min(int(number), vocab_size) - 1
            is_out = scores < scores[:, kth : kth + 1]
        elif kind == "min_p":
            is_out = (scores - scores[:, :1]).exp() < number
        else:
            probs = scores.softmax(-1) if is_cut else ((scores - scores[:, :1]) - log_total(temperature)).exp()
            # Ascending, and what is beyond the list first, as transformers adds them up.
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
    # What the others keep would have to be known to renormalise it.
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
    # By rounding, others may have become equal to the best: of them the smallest index.
    is_best = scores == scores[:, :1]
    is_best[:, 0] = True
    chosen = ids.masked_fill(~is_best, torch.iinfo(torch.int64).max).amin(-1)
    # A temperature may leave -inf alone, of which the first token is taken.
    chosen = chosen.masked_fill(scores[:, 0].isneginf(), 0)
    # Of a row with NaN or +inf, or with nothing else than -inf, renormalising leaves NaN everywhere.
    return chosen if total is None else chosen.where(total.squeeze(-1).isfinite(), 0)


class FusedTopKLogitsProcessor(LogitsProcessor):
    r"""
    [`LogitsProcessor`] that performs temperature, top-k, top-p and min-p filtering in one pass over the scores. Keeps
    what [`TemperatureLogitsWarper`], [`TopKLogitsWarper`], [`TopPLogitsWarper`] and [`MinPLogitsWarper`] keep one after
    the other: all tokens that tie with the k-th are kept. Among equal tokens at the boundary of top-p, where those keep
    an arbitrary one, the smaller index is kept.

    `scores` are never changed in place. On a CUDA device it waits for the scores, to know whether more tokens tie with
    the k-th than it made room for. Scores of other types than float32, float16 and bfloat16 go through the four warpers.

    Args:
        top_k (`int`):
            The number of highest probability tokens to keep.
        temperature (`float`, *optional*, defaults to 1.0):
            Strictly positive value that the scores are divided by. Smaller than `1` makes the distribution sharper,
            greater flatter.
        top_p (`float`, *optional*, defaults to 1.0):
            Of what `k` keeps, only the most probable tokens with probabilities that add up to `top_p` or higher.
        min_p (`float`, *optional*, defaults to 0.0):
            Tokens with less than `min_p` times the probability of the most probable one are removed.
        filter_value (`float`, *optional*, defaults to -inf):
            All filtered values will be set to this float value.
        min_tokens_to_keep (`int`, *optional*, defaults to 1):
            Minimum number of tokens that cannot be filtered.

    Examples:

    >>> import torch
    >>> from fused_topk.generation import FusedTopKLogitsProcessor

    >>> processor = FusedTopKLogitsProcessor(top_k=2, temperature=0.5)
    >>> processor(None, torch.tensor([[1.0, 3.0, 2.0, 2.0]]))
    tensor([[-inf, 6., 4., 4.]])
    """

    def __init__(
        self,
        top_k: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        filter_value: float = -float("inf"),
        min_tokens_to_keep: int = 1,
    ) -> None:
        for name, count in (("top_k", top_k), ("min_tokens_to_keep", min_tokens_to_keep)):
            if isinstance(count, bool) or not isinstance(count, Integral):
                raise TypeError(f"`{name}` must be an int, got {type(count).__name__}; use int({name})")
            if count < 1:
                raise ValueError(
                    f"`{name}` must be at least 1, got {count}; leave the processor out to keep all tokens"
                )
        for name, number in (
            ("temperature", temperature),
            ("top_p", top_p),
            ("min_p", min_p),
            ("filter_value", filter_value),
        ):
            if isinstance(number, bool) or not isinstance(number, Real):
                raise TypeError(f"`{name}` must be a number, got {type(number).__name__}; use float(...)")
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(
                f"`temperature` must be positive and finite, got {temperature}; for the best token use top_k=1"
            )
        if not 0 < top_p <= 1:
            raise ValueError(f"`top_p` must satisfy 0 < top_p <= 1, got {top_p}; 1.0 keeps everything")
        if not 0 <= min_p <= 1:
            raise ValueError(f"`min_p` must satisfy 0 <= min_p <= 1, got {min_p}; 0.0 keeps everything")
        self.top_k = max(int(top_k), int(min_tokens_to_keep))
        self.temperature = float(temperature)
        self.top_p = float(top_p)
        self.min_p = float(min_p)
        self.filter_value = float(filter_value)
        self.min_tokens_to_keep = int(min_tokens_to_keep)

    @property
    def filters(self) -> list[Filter]:
        """The chain of warpers that this one stands for, those without effect left out."""
        at_least = self.min_tokens_to_keep
        chain = [] if self.temperature == 1 else [Filter("temperature", self.temperature)]
        chain.append(Filter("top_k", self.top_k))
        if self.top_p < 1:
            chain.append(Filter("top_p", self.top_p, at_least))
        if self.min_p > 0:
            chain.append(Filter("min_p", self.min_p, at_least))
        return chain

    def __call__(self, input_ids: torch.LongTensor | None, scores: Tensor) -> Tensor:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`):
                Not looked at.
            scores (`torch.Tensor` of shape `(..., vocab_size)`):
                Prediction scores of a language modeling head.

        Return:
            `torch.Tensor` of the shape of `scores`: The processed prediction scores.
        """
        rows = scores.reshape(-1, scores.shape[-1])
        if scores.dtype in (torch.float32, torch.float16, torch.bfloat16):
            return self._kept(rows).view(scores.shape)
        for each in self.filters:
            rows = _warper(each)(input_ids, rows)
        return rows.masked_fill(rows.isneginf(), self.filter_value).view(scores.shape)

    def _kept(self, scores: Tensor) -> Tensor:
        vocab_size = scores.shape[-1]
        length = list_length(self.filters, vocab_size)
        assert length is not None  # there is a top_k
        found = functional.topk(scores, length)
        kept, was_enough = apply(self.filters, found.values.float(), vocab_size, _no_total, scores.dtype)
        if was_enough is not None and not bool(was_enough.all()):
            # More ties than there was room for: the whole row as the list.
            found = functional.topk(scores, vocab_size)
            kept, _ = apply(self.filters, found.values.float(), vocab_size, _no_total, scores.dtype)
        kept = kept.masked_fill(kept.isneginf(), self.filter_value).to(scores.dtype)
        return torch.full_like(scores, self.filter_value).scatter_(-1, found.indices, kept)


def _warper(each: Filter) -> Any:
    """The stock warper that does the same."""
    kind, number, at_least = each
    if kind == "temperature":
        return stock.TemperatureLogitsWarper(number)
    if kind == "top_k":
        return stock.TopKLogitsWarper(int(number))
    return (stock.TopPLogitsWarper if kind == "top_p" else stock.MinPLogitsWarper)(number, min_tokens_to_keep=at_least)


def _no_total(temperature: float) -> Tensor:
    raise AssertionError("top_k comes before top_p")


_ATTRIBUTES: dict[type, frozenset[str]] = {
    stock.TemperatureLogitsWarper: frozenset({"temperature"}),
    stock.TopKLogitsWarper: frozenset({"top_k", "filter_value", "min_tokens_to_keep"}),
    stock.TopPLogitsWarper: frozenset({"top_p", "filter_value", "min_tokens_to_keep"}),
    stock.MinPLogitsWarper: frozenset({"min_p", "filter_value", "min_tokens_to_keep"}),
    stock.LogitNormalization: frozenset(),
    FusedTopKLogitsProcessor: frozenset(
        {"top_k", "temperature", "top_p", "min_p", "filter_value", "min_tokens_to_keep"}
    ),
}
