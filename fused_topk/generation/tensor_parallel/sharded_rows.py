# SPDX-License-Identifier: Apache-2.0
"""The choice of tokens from logits of which each process has some columns. Each method is one small collective.

So all processes of the group must call the same methods in the same order (:mod:`sharded_head`). The results are the same on all
processes, bit for bit: each computes them in the same way from the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ... import distributed
from ...backends import Backend
from ...distributed.functions import gather_states
from ...operators import calls
from ...problem import Sample, TopK, TopKState
from ..choice import masks
from ..choice.rows import Change, Rows, edited
from .sharded_logits import ShardedLogits


class ShardedRows(Rows):
    """Rows whose columns are spread over the processes of a group."""

    __slots__ = ("_columns", "_local")

    logits: ShardedLogits

    def __init__(
        self, logits: ShardedLogits, backend: Backend, generator: Callable[[], torch.Generator] | None
    ) -> None:
        super().__init__(logits, backend, generator)
        self._local = logits.local  # [R, columns]
        self._columns = logits.columns

    @property
    def is_sharded(self) -> bool:
        return not self.logits.is_gathered

    def maker(self) -> Callable[[Any], Rows]:
        backend, generator = self.backend, self.generator
        return lambda logits: ShardedRows(logits.last(), backend, generator)

    def gather(self, reason: str) -> None:
        self.logits.whole(reason)

    def topk(self, k: int, mask: Tensor | None = None) -> TopK:
        return distributed.topk(self._local, k, group=self._columns.group, mask=self._own(mask))

    def log_softmax_topk(self, k: int, mask: Tensor | None = None) -> TopK:
        return distributed.log_softmax_topk(
            self._local, k, group=self._columns.group, mask=self._own(mask), normalize="all"
        )

    def beam_topk(self, beam_scores: Tensor, k: int, mask: Tensor | None = None) -> TopK:
        own = self._own(mask)
        if own is not None:
            own = own.view(*beam_scores.shape, -1)
        return distributed.beam_topk(
            self._local.view(*beam_scores.shape, self._columns.length),
            beam_scores,
            k,
            group=self._columns.group,
            mask=own,
            normalize="all",
        )

    def state(self, k: int, mask: Tensor | None = None, normalize: str = "all", temperature: float = 1.0) -> TopKState:
        return self._gathered(k, mask, normalize, temperature, None)[0]

    def state_and_logits(self, k: int, mask: Tensor | None, ids: Tensor) -> tuple[TopKState, Tensor]:
        # Every process sends a number for every token. The number from the process that has the token is taken.
        columns = self._columns
        within = (ids - columns.start).clamp_(0, max(columns.length - 1, 0))
        own = self._local.gather(1, within) if columns.length else self._local.new_zeros(ids.shape)
        state, everywhere = self._gathered(k, mask, "all", 1.0, own)
        assert everywhere is not None
        return state, everywhere.gather(0, (ids // columns.block).unsqueeze(0)).squeeze(0)

    def _gathered(
        self, k: int, mask: Tensor | None, normalize: str, temperature: float, tail: Tensor | None
    ) -> tuple[TopKState, Tensor | None]:
        """The state of whole rows, and the `tail` of each process, which travels along."""
        group = self._columns.group
        call = gather_states(self._local, k, group, temperature, self._own(mask), normalize, None, tail=tail)
        logits, ids, (m, d) = calls.merge_parts(*call.parts, k, *call.scale, "state", normalize, None)
        return TopKState(logits, ids, m, d), call.tails

    def edited(self, ids: Tensor, change: Change, replaces_row: bool) -> Rows:
        local = edited(self._local, ids, change, replaces_row, self._columns.start)
        return ShardedRows(ShardedLogits.of(local, self._columns), self.backend, self.generator)

    def draws(self, parameters: Mapping[str, float]) -> bool:
        # With other parameters a list of the best tokens takes one collective, and shows whether it is too short.
        return parameters.keys() <= {"temperature"}

    def sample(
        self,
        parameters: Mapping[str, float],
        mask: Tensor | None,
        generator: torch.Generator | None,
        noise: Tensor | None = None,
    ) -> Sample:
        return distributed.sample(
            self._local,
            group=self._columns.group,
            mask=self._own(mask),
            generator=generator,
            temperature=parameters.get("temperature", 1.0),
        )

    def _own(self, mask: Tensor | None) -> Tensor | None:
        """The mask of this process's columns [R, words], cut from the mask of all tokens [1 or R, W]."""
        if mask is None:
            return None
        return masks.cut(mask, self._columns.start, self._columns.length).expand(len(self._local), -1)
