# SPDX-License-Identifier: Apache-2.0
"""Temperature, top-k, top-p and min-p as one logits processor, on a list of the best tokens of each row.

What the four keep are the best tokens of a row, and no more than top-k and its ties. So they run on a list of the best. The list was
long enough if they remove its last token.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as stock

from .. import functional
from ..arguments import check_int
from ..layout.topk_choice import MAX_K

# Room for tokens that tie with the k-th: with bfloat16 logits of 152k tokens, k = 1024 has 15 to 22 of them.
_ROOM_FOR_TIES = 64


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
            check_int(name, count)
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
        # The four that this one stands for, as far as they have an effect.
        warpers: list[Any] = [stock.TemperatureLogitsWarper(self.temperature), stock.TopKLogitsWarper(self.top_k)]
        if self.top_p < 1:
            warpers.append(stock.TopPLogitsWarper(self.top_p, min_tokens_to_keep=self.min_tokens_to_keep))
        if self.min_p > 0:
            warpers.append(stock.MinPLogitsWarper(self.min_p, min_tokens_to_keep=self.min_tokens_to_keep))
        for warper in warpers:
            rows = warper(input_ids, rows)
        return rows.masked_fill(rows.isneginf(), self.filter_value).view(scores.shape)

    def _kept(self, scores: Tensor) -> Tensor:
        vocab_size = scores.shape[-1]
        length = self.top_k + max(_ROOM_FOR_TIES, self.top_k // 4)
        # A length beyond the kernels' limit is cut to that limit, if k itself is within it.
        length = min(vocab_size, length if length <= MAX_K else max(self.top_k, MAX_K))
        found = functional.topk(scores, length)
        best = self._topk_of(found.values)
        if length < vocab_size and not bool(best[:, -1].isneginf().all()):
            # More ties than there was room for: the whole row as the list.
            found = functional.topk(scores, vocab_size)
            best = self._topk_of(found.values)
        kept = self._likely_of(best)
        kept = kept.masked_fill(kept.isneginf(), self.filter_value).to(scores.dtype)
        return torch.full_like(scores, self.filter_value).scatter_(-1, found.indices, kept)

    def _topk_of(self, scores: Tensor) -> Tensor:
        """float32 [R, n]: the best scores of each row, best first, divided by the temperature; -inf where top-k removes them."""
        # In the dtype of the scores, which decides what ties.
        wide = scores.float()
        wide = wide if self.temperature == 1 else (wide / self.temperature).to(scores.dtype).float()
        kth = min(self.top_k, wide.shape[1]) - 1
        return wide.masked_fill(wide < wide[:, kth : kth + 1], -torch.inf)

    def _likely_of(self, scores: Tensor) -> Tensor:
        """The same after top-p and min-p."""
        at_least = self.min_tokens_to_keep
        if self.top_p < 1:
            # Added up as transformers does, in ascending order.
            shares = scores.softmax(-1).flip(-1).cumsum(-1).flip(-1)
            is_out = shares <= 1 - self.top_p
            is_out[:, :at_least] = False
            scores = scores.masked_fill(is_out, -torch.inf)
        if self.min_p > 0:
            is_out = (scores - scores[:, :1]).exp() < self.min_p
            is_out[:, :at_least] = False
            scores = scores.masked_fill(is_out, -torch.inf)
        return scores
