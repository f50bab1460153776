# SPDX-License-Identifier: Apache-2.0
"""The draws of stock generate(): torch.multinomial's, of the user's generator, so that a seed gives the same texts.

torch.multinomial draws q of the exponential distribution for each probability p, and takes the greatest p / q; n tokens without
replacement are the n greatest. So only q is drawn here, in the same order, and the choice may leave out what p / q cannot be greatest of.

On a GPU steps run beyond the end of a search. They draw in vain, and :class:`InVain` takes these draws back.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..choice import tokens


def noise(rows: int, columns: int, device: torch.device) -> Tensor:
    """float32 [rows, columns]: what torch.multinomial would draw for as many probabilities, from the default generator."""
    found = torch.empty(rows, columns, dtype=torch.float32, device=device)
    if device.type == "cpu" and _is_quick_form_equal():
        return _by_uniform(found)
    return found.exponential_()


def _by_uniform(found: Tensor) -> Tensor:
    """The same numbers as exponential_(), whose logarithms a CPU computes in parallel: 0.67 ms for 128,256 of them, not 2.8."""
    uniform = torch.empty(found.shape, dtype=torch.float64, device="cpu").uniform_()
    return found.copy_(uniform.neg_().log1p_().neg_())


@functools.cache
def _is_quick_form_equal() -> bool:
    """Whether the two forms give the same numbers, and leave the generator in the same state. No version of torch promises that."""
    with torch.random.fork_rng([]):
        both, states = [], []
        for draw in (_by_uniform, Tensor.exponential_):
            torch.manual_seed(1)
            both.append([draw(torch.empty(n, dtype=torch.float32, device="cpu")) for n in (1, 15, 16, 4099)])
            states.append(torch.get_rng_state())
        return all(map(torch.equal, *both)) and torch.equal(*states)


def drawn(probs: Tensor, count: int) -> Tensor:
    """int64 [R, count]: places of `probs` [R, n], as torch.multinomial draws them without replacement, for any n.

    Raises:
        RuntimeError: a row is no distribution; on a CPU.
    """
    rows, columns = probs.shape
    is_quick = probs.device.type == "cpu" and probs.dtype is torch.float32 and columns <= tokens.CATEGORIES
    if not is_quick or not bool(probs.isfinite().all() & (probs >= 0).all()):
        # It also says what is wrong.
        return tokens.drawn_from(probs, count)
    quotients = probs / noise(rows, columns, probs.device)
    return quotients.argmax(-1, keepdim=True) if count == 1 else quotients.topk(count).indices


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
