# SPDX-License-Identifier: Apache-2.0
"""The collective of a call, and the checks that all processes of the group make the same call."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import env
from ..tracing import is_traced
from .packing import Header, Packing, describe_difference, headers_of

# Its name since torch 2.13.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

# For each group the calls that all of its processes are known to make alike. A group that is gone takes its entry with it.
_agreed: weakref.WeakKeyDictionary[Any, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def group_of(group: Any) -> Any:
    """The process group, by default the one of all processes.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed must be initialised for a vocabulary over several processes; start the program with torchrun "
            "and call torch.distributed.init_process_group()"
        )
    chosen = dist.group.WORLD if group is None else group
    if chosen is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("`group` must contain this process, got a group that does not; call it on the group's members")
    return chosen


def agree(header: Header, device: torch.device, group: Any) -> None:
    """Compares the call with those of the other processes, the first time that the group makes such a call.

    Buffers of different sizes would hang NCCL and abort Gloo. This exchange has one size, so a difference becomes an error on
    every rank. It is made once for each k, number of rows, dtype and normalize; with `FUSED_TOPK_CHECK_DISTRIBUTED` at every
    call. Not in traced or captured calls, which cannot raise.

    Raises:
        ValueError: the processes' calls differ.
    """
    if is_traced() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    known = _agreed.setdefault(group, set())
    if header[1:] in known and not env.check_distributed():
        return
    own = torch.tensor([header], dtype=torch.int64, device=device)
    check([Header(*row) for row in all_gather(own, group).tolist()])
    known.add(header[1:])


def check(headers: list[Header]) -> None:
    """
    Raises:
        ValueError: the processes' calls differ.
    """
    difference = describe_difference(headers)
    if difference is not None:
        raise ValueError(
            f"`local_logits`, `k` and `normalize` must fit together on all processes of the group, got: {difference}; pass the "
            "same k, dtype and number of rows everywhere"
        )


def exchange(buffer: Tensor, packing: Packing, group: Any) -> Tensor:
    """The buffers of all processes (processes, words), in the order of their ranks."""
    return all_gather(buffer.view(1, packing.words), group)


def headers(buffers: Tensor) -> list[Header]:
    """Reads the headers of all processes on the host, which waits for the GPU."""
    return [Header(*row) for row in headers_of(buffers).tolist()]


def all_gather(own: Tensor, group: Any) -> Tensor:
    """(1, n) of each process into (processes, n), in the order of their ranks."""
    if is_traced():
        from torch.distributed import _functional_collectives as functional

        gathered: Tensor = functional.all_gather_tensor(own, 0, group)
        return gathered
    everywhere = torch.empty(dist.get_world_size(group), own.shape[1], dtype=own.dtype, device=own.device)
    all_gather_single(everywhere, own, group=group)
    return everywhere
