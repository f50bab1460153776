# SPDX-License-Identifier: Apache-2.0
"""Whether whole steps write what stock generate() writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from causal_models import CausalModel
from fused_topk.generation import stats
from whole_calls import STOCK, WHOLE, share_of_same, way_of

TOP_K, TOP_P = 50, 0.95


@dataclass(frozen=True)
class Check:
    """What a comparison has found.

    Attributes:
        mode: "beam search", "greedy" or "sampling".
        share_of_same: of the texts those that are equal.
        reasons: why calls in whole steps ran otherwise, and how many.
    """

    mode: str
    share_of_same: float
    reasons: dict[str, int]

    @property
    def is_right(self) -> bool:
        return self.share_of_same == 1.0


class SmallerIndexFirst(TorchFunctionMode):
    """Within it torch.topk takes the smaller index among equals, where it promises none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk or type(args[0]) is not Tensor:
            return func(*args, **kwargs)
        k = kwargs["k"] if "k" in kwargs else args[1]
        values, indices = args[0].sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], indices[..., :k]))


def options_of(mode: str, beams: int) -> dict[str, Any]:
    """The arguments of generate() for a mode."""
    if mode == "beam search":
        return {"num_beams": beams, "do_sample": False}
    if mode == "greedy":
        return {"num_beams": 1, "do_sample": False}
    return {"num_beams": 1, "do_sample": True, "top_k": TOP_K, "top_p": TOP_P}


def check(
    chosen: CausalModel, inputs: dict[str, Tensor], mode: str, *, beams: int, new_tokens: int
) -> tuple[Check, Tensor]:
    """Generates by stock and in whole steps, of one seed; what was found, and the texts of whole steps."""
    ways = {way: way_of(chosen.model, inputs, options_of(mode, beams), way) for way in (STOCK, WHOLE)}
    with SmallerIndexFirst():
        stock = ways[STOCK](new_tokens)
    stats(reset=True)
    found = ways[WHOLE](new_tokens)
    return Check(mode, share_of_same(found, stock), stats(reset=True).reasons), found
