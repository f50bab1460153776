# SPDX-License-Identifier: Apache-2.0
"""The draws of stock generate(): torch.multinomial's, of the user's generator, so that a seed gives the same texts.

torch.multinomial draws q of the exponential distribution for each probability p, and takes the greatest p / q; n tokens without
replacement are the n greatest. So only q is drawn here, in the same order, and the choice may leave out what p / q cannot be greatest of.

On a GPU steps run beyond the end of a search. They draw in vain, and :class:`InVain` takes these draws back.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ... import functional
from ...problem import TopKLogits

# The most categories that torch.multinomial takes.
_CATEGORIES = 1 << 24
# The most places of a row that are drawn from apart. Three beams with top-k 50 have 150.
_FEW = 512


def noise(rows: int, columns: int, device: torch.device, places: Tensor | None = None) -> Tensor:
    """float32 [rows, columns]: what torch.multinomial would draw for as many probabilities, from the default generator. All are drawn.
    `places`, int64 [rows, n], says which of the columns are wanted; None for all."""
    if device.type == "cpu" and _is_quick_form_equal():
        uniform = torch.empty(rows, columns, dtype=torch.float64, device=device).uniform_()
        return _exponential(uniform if places is None else uniform.gather(1, places))
    found = torch.empty(rows, columns, dtype=torch.float32, device=device).exponential_()
    return found if places is None else found.gather(1, places)


def _exponential(uniform: Tensor) -> Tensor:
    """The same numbers as exponential_(), whose logarithms a CPU computes in parallel: 0.67 ms for 128,256 of them, not 2.8."""
    return uniform.neg_().log1p_().float().neg_()


@functools.cache
def _is_quick_form_equal() -> bool:
    """Whether the two forms give the same numbers, and leave the generator in the same state. No version of torch promises that."""
    ours, stocks = (torch.Generator(device="cpu").manual_seed(1) for _ in range(2))
    for n in (1, 15, 16, 4099):
        uniform = torch.empty(n, dtype=torch.float64, device="cpu").uniform_(generator=ours)
        expected = torch.empty(n, dtype=torch.float32, device="cpu").exponential_(generator=stocks)
        if not torch.equal(_exponential(uniform), expected):
            return False
    return torch.equal(ours.get_state(), stocks.get_state())


def few_that_top_k_keeps(logits: Tensor, parameters: dict[str, Any], mask: Tensor | None) -> TopKLogits | None:
    """The best logits [R, n] of each row and their places, in the order of top-k, where top-k among a sampler's parameters keeps no
    others. None where it may: it keeps all tokens that are equal to the last one. A draw from the few is the draw from all, and takes
    the logarithms of their noise alone."""
    top_k = parameters.get("top_k")
    if top_k is None or 2 * top_k > min(_FEW, logits.shape[-1]):
        return None
    best = functional.topk(logits, 2 * top_k, mask=mask)
    scaled = best.values[:, [top_k - 1, -1]].float() / parameters.get("temperature", 1.0)
    return best if bool((scaled[:, 0] > scaled[:, 1]).all()) else None


def drawn(scores: Tensor, count: int) -> Tensor:
    """int64 [R, count]: places of `scores` [R, n], as torch.multinomial draws them of their softmax without replacement.

    Raises:
        RuntimeError: there are more places than torch.multinomial takes, or, on a CPU, a row has no distribution.
    """
    probs = scores.softmax(-1)
    rows, columns = probs.shape
    is_quick = probs.device.type == "cpu" and probs.dtype is torch.float32 and columns <= _CATEGORIES
    # A row without a distribution has NaN everywhere.
    if not is_quick or bool(probs[:, 0].isnan().any()):
        # It also says what is wrong.
        return torch.multinomial(probs, count)
    best = functional.topk(probs, min(_FEW, columns))
    if bool((best.values[:, -1] == 0).all()):
        # No others can be drawn, as after top-k. The logarithms of all would take longer than all else here.
        of_few = best.values / noise(rows, columns, probs.device, best.indices)
        quotients = torch.zeros_like(probs).scatter_(1, best.indices, of_few)
    else:
        quotients = probs / noise(rows, columns, probs.device)
    found = functional.topk(quotients, count)
    # Among tokens of probability 0 the order is that of torch.topk.
    return quotients.topk(count).indices if bool((found.values[:, -1] == 0).any()) else found.indices


class InVain:
    """Takes back the draws of steps after the end of a search on a GPU. Other draws of the process stay."""

    def __init__(self, device: torch.device) -> None:
        # A device without an index is the current one.
        index = torch.cuda.current_device() if device.index is None else device.index
        self._generator = torch.cuda.default_generators[index]
        self._offsets: list[int] = []
        self.note()

    def note(self) -> None:
        """Called before the first step and after each."""
        self._offsets.append(self._generator.get_offset())

    def take_back(self, steps: int) -> None:
        """Takes back the draws after so many steps."""
        in_vain = self._offsets[-1] - self._offsets[min(steps, len(self._offsets) - 1)]
        if in_vain:
            self._generator.set_offset(self._generator.get_offset() - in_vain)
