# SPDX-License-Identifier: Apache-2.0
"""Which columns of a tensor-parallel model's logits a process has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...distributed.collective import all_gather


class Columns(NamedTuple):
    """The columns of this process. All processes but the last ones have `block` of them."""

    group: Any
    processes: int
    start: int
    length: int
    block: int
    vocab_size: int

    @staticmethod
    def of(group: Any, rank: int, processes: int, vocab_size: int) -> Columns:
        """The columns of a rank, cut as DTensor and torch.chunk cut a dimension."""
        block = -(-vocab_size // processes)
        start = min(rank * block, vocab_size)
        return Columns(group, processes, start, min(block, vocab_size - start), block, vocab_size)

    def gathered(self, local: Tensor) -> Tensor:
        """The whole tensor (..., V), of which each process has the columns (..., length). A collective."""
        padded = torch.nn.functional.pad(local, (0, self.block - self.length)).contiguous()
        everywhere = all_gather(padded.view(1, -1), self.group).view(self.processes, *padded.shape)
        return everywhere.movedim(0, -2).flatten(-2)[..., : self.vocab_size]

    def of_mask(self, words: Tensor) -> Tensor:
        """int32 [R, W]: the packed mask of this process's columns, of one [R, W] of the vocabulary."""
        first, shift = divmod(self.start, 32)
        count = -(-self.length // 32)
        low = words[:, first : first + count]
        if not shift:
            return low.contiguous()
        # Bits of the next word move in from above. A shift to the right brings copies of the sign bit, which are cleared.
        high = torch.nn.functional.pad(words, (0, 1))[:, first + 1 : first + 1 + count]
        low = low.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1)
        return high.bitwise_left_shift(32 - shift).bitwise_or_(low)
