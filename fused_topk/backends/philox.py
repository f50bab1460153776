# SPDX-License-Identifier: Apache-2.0
"""Random numbers that depend on nothing but their name: Philox4x32-10 in torch operations.

Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011), figures 2 and 3. The key is a row's seed.
The counter has four words of 32 bits: the row's counter (two words), the number of the sample, and the row's stream. So equal
names give equal numbers, on every device and in every batch. csrc/draws/philox.h has the same in C++, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS_OF_KEY = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def words(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of random bits for a key of two words and a counter of four: int64 tensors that hold 32 bits each."""
    key_0, key_1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high_0, low_0 = _product(c0, _MULTIPLIERS[0])
        high_1, low_1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0, key_1 = (key_0 + _STEPS_OF_KEY[0]) & _WORD, (key_1 + _STEPS_OF_KEY[1]) & _WORD
    return c0, c1, c2, c3


def uniforms(seed: Tensor, counter: Tensor, stream: Tensor, samples: int, dtype: torch.dtype) -> Tensor:
    """One uniform number for each of so many samples of each row, (R, samples) of `dtype`. The names of a row
    are int64, and broadcast to (R, 1).

    With the first two words as a number w of 64 bits it is (floor(w / 2^12) + 1/2) / 2^52. That is exact in float64, never 0
    and never 1: the least is 2^-53, the greatest 1 - 2^-53.
    """
    sample = torch.arange(samples, device=seed.device)
    name = torch.broadcast_tensors(seed, counter, stream, sample)  # type: ignore[no-untyped-call]
    seed, counter, stream, sample = name
    # `& _WORD` even where the numbers are small: without it torch.compile multiplies those of an arange in 32 bits on a GPU, and a
    # product does not fit.
    names = counter & _WORD, _high(counter), sample & _WORD, stream & _WORD
    w0, w1, _, _ = words((seed & _WORD, _high(seed)), names)
    return ((w0 >> 12 | w1 << 20).to(dtype) + 0.5) * 2.0**-52


def _high(x: Tensor) -> Tensor:
    return x >> 32 & _WORD


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of the product of two words. An int64 product keeps its low 64 bits, whatever its sign."""
    product = word * multiplier
    return _high(product), product & _WORD
