# SPDX-License-Identifier: Apache-2.0
"""torch.autocast, which a product with an LM head follows as `torch.nn.functional.linear` does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# torch.is_autocast_enabled() raises for a device that it does not know, such as "meta".
_DEVICES = ("cpu", "cuda", "mps", "xpu")


def as_multiplied(hidden: Tensor, weight: Any, bias: Any) -> tuple[Tensor, Any, Any]:
    """The operands as a linear layer takes them: under autocast in its dtype, except float64. Differentiable."""
    device = hidden.device.type
    if device not in _DEVICES or not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return _converted(hidden, device, dtype), _converted(weight, device, dtype), _converted(bias, device, dtype)


def _converted(operand: Any, device: str, dtype: torch.dtype) -> Any:
    # The operands have not been checked yet: they need not be tensors.
    if not isinstance(operand, Tensor) or operand.device.type != device:
        return operand
    is_wanted = operand.is_floating_point() and operand.dtype is not torch.float64
    return operand.to(dtype) if is_wanted else operand
