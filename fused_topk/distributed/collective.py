# SPDX-License-Identifier: Apache-2.0
"""The collective of a call, and the checks that all processes of the group make the same call."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import env
from ..tracing import is_traced
from .packing import Header, headers_of

# Its name since torch 2.13.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

# For each group the kinds of calls that all of its processes have made alike. The entry of a group disappears with the group.
_agreed: weakref.WeakKeyDictionary[Any, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()
# The size in words of each group's next frame on the CPU. 4 KB take Gloo no longer than a few bytes.
_frames: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_SMALLEST_FRAME = 512
_PAUSE = 1e-4  # seconds between two looks at a collective


def group_of(group: Any) -> Any:
    """The process group, by default the one of all processes."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed must be initialised for a vocabulary over several processes; start the program with torchrun "
            "and call torch.distributed.init_process_group()"
        )
    chosen = dist.group.WORLD if group is None else group
    if chosen is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("`group` must contain this process, got a group that does not; call it on the group's members")
    if not is_traced() and not isinstance(chosen, dist.ProcessGroup):
        raise TypeError(
            f"`group` must be a ProcessGroup, got {type(chosen).__name__}; of a DeviceMesh pass .get_group()"
        )
    return chosen


def agree(header: Header, device: torch.device, group: Any) -> None:
    """Compares the call with those of the other processes, the first time that the group makes such a call.

    Buffers of different sizes may hang NCCL. This exchange has one size, so a difference becomes an error on every rank. It is
    made once for each kind of call; with `FUSED_TOPK_CHECK_DISTRIBUTED` at every call. Not in traced or captured calls, which
    cannot raise.
    """
    if is_traced() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    known = _agreed.setdefault(group, set())
    if header[1:] in known and not env.check_distributed():
        return
    own = torch.tensor([header], dtype=torch.int64, device=device)
    check([Header(*row) for row in _answers(own, group).tolist()])
    known.add(header[1:])


def check(headers: list[Header]) -> None:
    """Raises a ValueError where the processes' calls differ."""
    if any(header[1:] != headers[0][1:] for header in headers):
        difference = "; ".join(f"rank {rank} has {header}" for rank, header in enumerate(headers))
        raise ValueError(
            f"`local_logits`, `k` and `normalize` must fit together on all processes of the group, got: {difference}; pass the "
            "same arguments everywhere, but for this process's columns and their mask"
        )


def exchange(buffer: Tensor, header: Header, group: Any) -> Tensor:
    """The buffers of all processes (processes, words), in the order of their ranks. `buffer` begins with the header. A
    ValueError where the processes' calls differ."""
    if buffer.device.type == "cpu" and not is_traced():
        return _exchange_in_frames(buffer, group)
    agree(header, buffer.device, group)
    return all_gather(buffer.unsqueeze(0), group)


def _exchange_in_frames(buffer: Tensor, group: Any) -> Tensor:
    """exchange() on a CPU, where reading the headers waits for nothing.

    Buffers of different sizes would abort Gloo. So each process first gives a frame: the beginning of its buffer, or all of it and
    padding. The frame's size is that of the last call that all processes made alike. They have all seen the same headers,
    so they know the same size, whatever each of them asks for now. The rest of a longer buffer follows once the headers agree.
    """
    words, size = len(buffer), _frames.get(group, _SMALLEST_FRAME)
    frame = buffer[:size] if words >= size else torch.nn.functional.pad(buffer, (0, size - words))
    everywhere = all_gather(frame.unsqueeze(0), group)
    check(headers(everywhere))
    # A power of two, because the buffers of generate() may grow by some words a step.
    _frames[group] = max(_SMALLEST_FRAME, 1 << (words - 1).bit_length())
    if words > size:
        return torch.cat((everywhere, all_gather(buffer[size:].unsqueeze(0), group)), 1)
    return everywhere[:, :words]


def headers(buffers: Tensor) -> list[Header]:
    """Reads the headers of all processes on the host, which waits for the GPU."""
    return [Header(*row) for row in headers_of(buffers).tolist()]


def _answers(own: Tensor, group: Any) -> Tensor:
    """all_gather() that the host waits for, up to a time limit. NCCL itself would wait for a dead process without end."""
    if own.device.type == "cpu":
        return all_gather(own, group)
    everywhere = torch.empty(dist.get_world_size(group), own.shape[1], dtype=own.dtype, device=own.device)
    work = all_gather_single(everywhere, own, group=group, async_op=True)
    wait_for(work.is_completed, own.device, group)
    work.wait()
    return everywhere


def wait_for(is_done: Callable[[], bool], device: torch.device, group: Any) -> None:
    """Waits for a collective of GPUs, at most as long as the group's time limit. is_done: says whether it has ended."""
    limit = _time_limit(group, device)
    end = time.monotonic() + limit
    while not is_done():
        if time.monotonic() > end:
            raise RuntimeError(
                f"every process of the group must make the same call, got no answer of some within {limit:.0f} s; abort the group "
                "and make a new one of those that live"
            )
        time.sleep(_PAUSE)


def _time_limit(group: Any, device: torch.device) -> float:
    """The time limit in seconds: a little less than the group's own, after which torch ends the process."""
    try:
        limit = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        limit = dist.constants.default_pg_nccl_timeout
    seconds: float = limit.total_seconds()
    return 0.9 * seconds


def all_gather(own: Tensor, group: Any) -> Tensor:
    """(1, n) of each process into (processes, n), in the order of their ranks."""
    if is_traced():
        from torch.distributed import _functional_collectives as functional

        gathered: Tensor = functional.all_gather_tensor(own, 0, group)
        return gathered
    everywhere = torch.empty(dist.get_world_size(group), own.shape[1], dtype=own.dtype, device=own.device)
    all_gather_single(everywhere, own, group=group)
    return everywhere
