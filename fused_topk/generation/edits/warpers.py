# SPDX-License-Identifier: Apache-2.0
"""Warpers as filters of each row's best tokens, and one processor that stands for four of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as stock

from ... import functional
from ..choice.warping import NORMALIZE, Filter, apply, list_length


def filters_of(processor: Any) -> list[Filter] | None:
    """What a warper does. None for anything but the exact classes, with the known attributes and the filter value -inf."""
    make, known = WARPERS.get(type(processor), (None, frozenset()))
    if make is None or not vars(processor).keys() <= known:
        return None
    if getattr(processor, "filter_value", -math.inf) != -math.inf:
        return None
    filters = make(processor)
    return filters if all(map(_is_within_range, filters)) else None


def _is_within_range(each: Filter) -> bool:
    """Whether a constructor would accept the numbers. A user may have set the attributes later."""
    kind, number, at_least = each
    if (
        not isinstance(at_least, int)
        or at_least < 1
        or not isinstance(number, int if kind == "top_k" else (int, float))
    ):
        return False
    return {"temperature": 0 < number < math.inf, "top_k": number >= 1}.get(kind, 0 <= number <= 1)


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


# By class: what makes its filters, and the attributes that it has in any version.
WARPERS: dict[type, tuple[Callable[[Any], list[Filter]], frozenset[str]]] = {
    stock.TemperatureLogitsWarper: (
        lambda p: [Filter("temperature", p.temperature)],
        frozenset({"temperature"}),
    ),
    stock.TopKLogitsWarper: (
        lambda p: [Filter("top_k", p.top_k)],
        frozenset({"top_k", "filter_value", "min_tokens_to_keep"}),
    ),
    stock.TopPLogitsWarper: (
        lambda p: [Filter("top_p", p.top_p, p.min_tokens_to_keep)],
        frozenset({"top_p", "filter_value", "min_tokens_to_keep"}),
    ),
    stock.MinPLogitsWarper: (
        lambda p: [Filter("min_p", p.min_p, p.min_tokens_to_keep)],
        frozenset({"min_p", "filter_value", "min_tokens_to_keep"}),
    ),
    stock.LogitNormalization: (lambda p: [NORMALIZE], frozenset()),
    FusedTopKLogitsProcessor: (
        lambda p: p.filters,
        frozenset({"top_k", "temperature", "top_p", "min_p", "filter_value", "min_tokens_to_keep"}),
    ),
}
