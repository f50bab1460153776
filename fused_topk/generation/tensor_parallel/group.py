# SPDX-License-Identifier: Apache-2.0
"""Small questions that the processes of a tensor-parallel model settle together. Each function is a collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.collective import all_gather


def all_say(is_so: bool, device: torch.device, group: Any) -> bool:
    """Whether `is_so` is true on all processes. Waits for the device."""
    return bool(all_gather(torch.tensor([[int(is_so)]], device=device), group).all())


def of_first(tensor: Tensor, group: Any) -> Tensor:
    """The first process's tensor, whose shape is the same on all processes; without a group the tensor itself."""
    if group is None:
        return tensor
    tensor = tensor.contiguous()
    dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
    return tensor
