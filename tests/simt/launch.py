# SPDX-License-Identifier: Apache-2.0
"""Launches one kernel on the emulated machine (host.cpp) and says what went wrong."""

import ctypes
import functools
import math
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .build import Kernel, library, machine_library

SCHEDULES = ("forward", "reverse", "random", "starve", "rush")
"""Whose turn it is: the first thread that can run, the last one, any one; or any one, except that one warp or block, which the
seed names, goes last ("starve") or first ("rush")."""

# ByteState of memory.h.
_OUTSIDE, _UNINITIALISED, _INITIALISED = 0, 1, 2
_THREADS_AT_A_TIME = 4096


class Array(NamedTuple):
    """Memory that a kernel may touch.

    role: "input" is only read; "output" is written wholly, and not read before; "scratch" is not read before it is written;
    "zeros" is zero before and after; "inout" serves several launches, one of which writes what another reads.
    """

    name: str
    tensor: Tensor
    role: str


class Fault(NamedTuple):
    """What the machine, or the check after the launch, found."""

    kind: str
    text: str


class Outcome(NamedTuple):
    """The result of a launch: its faults, and counts of what happened."""

    faults: list[Fault]
    counts: dict[str, int]
    how: str  # which launch it was, with its seed

    def check(self) -> None:
        """Raises with all faults, if there are any."""
        assert not self.faults, "\n".join([self.how, *(f"{fault.kind}: {fault.text}" for fault in self.faults)])


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("dynamic_shared", ctypes.c_uint32),
        ("max_blocks", ctypes.c_uint32),
        ("schedule", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("max_steps", ctypes.c_uint64),
        ("tracks_memory", ctypes.c_uint32),
    ]


class _Array(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("state", ctypes.c_void_p),
        ("is_read_only", ctypes.c_uint32),
    ]


_COUNTS = ("accesses", "atomics", "warp_collectives", "block_barriers", "switches")


def launch(
    kernel: Kernel,
    grid: Sequence[int],
    threads: int,
    arguments: Sequence[np.generic | np.ndarray],
    arrays: Sequence[Array],
    *,
    shared_bytes: int = 0,
    schedule: str = "forward",
    seed: int = 0,
    max_blocks: int | None = None,
    max_steps: int = 500_000_000,
) -> Outcome:
    """Runs a kernel to its end, or to the first fault that it cannot go on after.

    Args:
        kernel: what to run; compiled if need be.
        grid: blocks along x, y and z; fewer numbers mean 1.
        threads: of a block.
        arguments: the kernel's, as NumPy scalars or arrays of their exact size.
        arrays: all the memory that it may touch.
        shared_bytes: dynamic shared memory of a block.
        schedule: one of SCHEDULES.
        seed: of everything that is random.
        max_blocks: how many run at a time; by default as many as have 4096 threads.
        max_steps: how many loads, stores and collectives there may be.
    """
    path = library(kernel)
    if max_blocks is None:
        max_blocks = max(1, _THREADS_AT_A_TIME // threads)
    grid = (*grid, 1, 1)[:3]
    kept = [np.ascontiguousarray(argument) for argument in arguments]
    states = [_state(array) for array in arrays]
    request = _Launch(
        ctypes.cast(_load(path).simt_kernel, ctypes.c_void_p),
        (ctypes.c_void_p * len(kept))(*(argument.ctypes.data for argument in kept)),
        grid,
        threads,
        shared_bytes,
        min(max_blocks, math.prod(grid)),
        SCHEDULES.index(schedule),
        seed,
        max_steps,
        not kernel.address_sanitizer,
    )
    described = (_Array * len(arrays))(
        *(
            _Array(begin, len(state), array.name.encode(), state.ctypes.data, array.role == "input")
            for array, (begin, state) in zip(arrays, states, strict=True)
        )
    )
    counts = (ctypes.c_uint64 * len(_COUNTS))()
    run = _load(machine_library()).simt_launch
    run.restype = ctypes.c_char_p
    reports = run(ctypes.byref(request), described, len(arrays), counts).decode()
    faults = _located(reports, path)
    if not faults and not kernel.address_sanitizer:
        faults = _left_undone(arrays, states)
    how = f"{kernel.name}, {math.prod(grid)} blocks of {threads} threads, schedule={schedule}, seed={seed}"
    return Outcome(faults, dict(zip(_COUNTS, counts, strict=True)), how)


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def _state(array: Array) -> tuple[int, np.ndarray]:
    """(address of the tensor's first byte, what each byte up to its last one holds)."""
    tensor = array.tensor
    itemsize = tensor.element_size()
    # Along a stride of 0 there is one element.
    extents = [(size if stride else 1, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    elements = 1 + sum((size - 1) * stride for size, stride in extents)
    held = _INITIALISED if array.role in ("input", "zeros", "inout") else _UNINITIALISED
    state = np.full((elements, itemsize), _OUTSIDE, dtype=np.uint8)
    of_elements = torch.from_numpy(state)[:, 0].as_strided(
        [size for size, _ in extents], [itemsize * stride for _, stride in extents]
    )
    of_elements.fill_(held)
    state[:, 1:] = state[:, :1]
    return tensor.data_ptr(), state.reshape(-1)


def _left_undone(arrays: Sequence[Array], states: Sequence[tuple[int, np.ndarray]]) -> list[Fault]:
    """What must hold after a launch and does not."""
    faults = []
    for array, (_, state) in zip(arrays, states, strict=True):
        if array.role == "output" and (missing := np.flatnonzero(state == _UNINITIALISED)).size:
            faults.append(Fault("not written", f"{missing.size} bytes of {array.name}, the first at byte {missing[0]}"))
        if array.role == "zeros" and (left := array.tensor.nonzero()).numel():
            place = tuple(left[0].tolist())
            faults.append(Fault("not reset", f"{array.name}{list(place)} is {array.tensor[place].item()}, not 0"))
    return faults


def _located(reports: str, path: Path) -> list[Fault]:
    """The machine's lines, with places in the source for places in the library."""
    faults = []
    places = sorted(set(re.findall(r" @([0-9a-f]+)", reports)))
    # A return address is one past the call.
    addresses = [hex(int(place, 16) - 1) for place in places]
    where = dict(zip(places, _source_lines(path, tuple(addresses)), strict=True))
    for line in reports.splitlines():
        kind, _, text = line.partition("\t")
        faults.append(Fault(kind, re.sub(r" @([0-9a-f]+)", lambda match: f" at {where[match[1]]}", text)))
    return faults


def _source_lines(path: Path, addresses: tuple[str, ...]) -> list[str]:
    """file:line of each address. If it is inlined, the lines of its callers follow."""
    if not addresses:
        return []
    command = ["addr2line", "--addresses", "--inlines", "--basenames", "-e", str(path), *addresses]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    chains: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("0x"):
            chains.append([])
        elif not line.startswith(("cuda.h", "ptx.h")):
            chains[-1].append(line.split(" (")[0])
    return [" in ".join(chain) for chain in chains]
