# SPDX-License-Identifier: Apache-2.0
"""What the reference chooses from, in which order, and in which type it computes."""

from __future__ import annotations

import torch
from torch import Tensor

# The integers that have as many bytes as an element.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def ranking(x: Tensor) -> Tensor:
    """Positions along the last dimension in the project's order: NaN, then greater values, then smaller positions."""
    return order_keys(x).sort(dim=-1, descending=True, stable=True).indices


def order_keys(x: Tensor) -> Tensor:
    """Integers in the order of the floats."""
    # A radix sort of floats, which torch uses for long rows on a GPU, tells NaNs of different bits apart, and after
    # torch.set_flush_denormal(True) denormals compare as equal.
    bits = x.view(_INTEGERS[x.element_size()])
    greatest = torch.iinfo(bits.dtype).max
    magnitude = bits & greatest
    return magnitude.where(bits >= 0, -magnitude).masked_fill(magnitude > _bits_of_infinity(x.dtype), greatest)


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """The elements at the indices, bit for bit: of 16-bit floats torch.gather on the CPU may rewrite the NaNs."""
    return x.view(_INTEGERS[x.element_size()]).gather(-1, indices).view(x.dtype)


def working_dtype(logits: Tensor) -> torch.dtype:
    """float64 where the device has it; MPS and some XPUs do not."""
    return torch.promote_types(logits.dtype, torch.float32) if logits.device.type in ("mps", "xpu") else torch.float64


def _bits_of_infinity(dtype: torch.dtype) -> int:
    return int(torch.tensor(torch.inf, dtype=dtype, device="cpu").view(_INTEGERS[dtype.itemsize]))
