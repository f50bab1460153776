# SPDX-License-Identifier: Apache-2.0
"""Sets of tokens as masks of the kernels: int32 words, bit j of word i for token 32 i + j, 1 where scanned.

Nothing here waits for a device or has a shape that depends on what a tensor holds.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def all_but(tokens: Iterable[int], vocab_size: int, device: torch.device) -> Tensor:
    """Words [1, W] that leave out `tokens`; those outside the vocabulary are ignored."""
    allowed = np.ones(-(-vocab_size // 32) * 32, dtype=bool)
    allowed[[t for t in tokens if 0 <= t < vocab_size]] = False
    return _words(allowed[None]).to(device)


def of(allowed: np.ndarray, device: torch.device) -> Tensor:
    """Words [R, W] of a bool array [R, V]."""
    return _words(np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))).to(device)


def all_but_rows(sorted_ids: Tensor, vocab_size: int) -> Tensor:
    """Words [R, W] that leave out each row's tokens.

    Args:
        sorted_ids: int64 [R, S], ascending in each row, possibly repeated; those >= vocab_size are ignored.
    """
    counts = sorted_ids < vocab_size
    # A repeated token may set its bit only once: bits are added up.
    counts[:, 1:] &= sorted_ids[:, 1:] != sorted_ids[:, :-1]
    bits = torch.bitwise_left_shift(counts.int(), (sorted_ids & 31).int())
    words = -(-vocab_size // 32)
    left_out = bits.new_zeros((len(sorted_ids), words))
    left_out.scatter_add_(1, (sorted_ids >> 5).clamp_(max=words - 1), bits)
    return left_out.bitwise_not_()


def holds(words: Tensor, ids: Tensor) -> Tensor:
    """bool [R, S]: whether the set [1 or R, W] holds each of the tokens `ids` [R, S], which are within the vocabulary."""
    word = words.expand(len(ids), -1).gather(1, ids >> 5)
    return torch.bitwise_right_shift(word, (ids & 31).int()).bitwise_and_(1).bool()


def cut(words: Tensor, start: int, length: int) -> Tensor:
    """Words of the tokens `start` ... `start` + `length` - 1 of the sets [1 or R, W], the first of them as bit 0."""
    first, shift = divmod(start, 32)
    count = -(-length // 32)
    low = words[:, first : first + count]
    if not shift:
        return low.contiguous()
    # Bits of the next word move in from above. A shift to the right brings copies of the sign bit, which are cleared.
    high = torch.nn.functional.pad(words, (0, 1))[:, first + 1 : first + 1 + count]
    low = low.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1)
    return high.bitwise_left_shift(32 - shift).bitwise_or_(low)


def _words(allowed: np.ndarray) -> Tensor:
    return torch.from_numpy(np.packbits(allowed, axis=-1, bitorder="little").view(np.dtype("<i4")).copy())
