# SPDX-License-Identifier: Apache-2.0
"""The reference backend: what its functions share. They are written for reading, in torch operations and several passes.

They are the oracle that the fast backends are tested against, and what runs where these do not: on MPS and XPU, on meta
tensors, and for a k beyond the native limit. They never wait for the device, so they can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import MergeProblem, TopK, TopkProblem
from ..scale import Scale

# The integers that have as many bytes as an element.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def unavailable(device: torch.device | None = None) -> str | None:
    """None: torch is all that it needs."""
    return None


def supports(dtype: torch.dtype, k: int) -> bool:
    """True: it takes every floating-point dtype and every k."""
    return True


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


def values_of(chosen: Tensor, m: Tensor, d: Tensor, scale: Scale, problem: TopkProblem | MergeProblem) -> Tensor:
    """Probabilities or log-probabilities of the chosen logits."""
    # (x - m) - log d rather than x - logsumexp: a large common offset of the logits then costs no accuracy.
    shifted = scale.log_weight(chosen, m)
    total = shifted.exp().sum(-1, keepdim=True) if problem.normalize == "topk" else d
    return shifted.exp() / total if problem.values == "softmax" else shifted - total.log()


def write_state(m: Tensor, d: Tensor, out: TopK) -> None:
    """m and d of every row, in place of the logsumexp. Relative to +inf there is no d."""
    out.logsumexp.copy_(torch.stack((m, d.where(m < torch.inf, torch.nan))))


def normalizer(x: Tensor, scale: Scale) -> tuple[Tensor, Tensor]:
    """(m, d) of every row."""
    m = x.amax(-1, keepdim=True)
    # Against an infinite maximum every difference would be NaN; against 0, d becomes 0 or inf, and log d -inf or inf.
    m = m.where(m.isfinite(), 0.0)
    return m, scale.weight(x, m).sum(-1, keepdim=True)


def _bits_of_infinity(dtype: torch.dtype) -> int:
    return int(torch.tensor(torch.inf, dtype=dtype, device="cpu").view(_INTEGERS[dtype.itemsize]))
