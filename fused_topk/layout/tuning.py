# SPDX-License-Identifier: Apache-2.0
"""What the kernels are tuned to, by compute capability: the table of csrc/rows/tuning.cuh, read from that file."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from ..cuda_runtime.kernel_source import ARCHITECTURES, source_folder

_BACKGROUND_COPIES = 80
"""The least compute capability, times ten, that copies to shared memory in the background: kHasAsyncCopy of platform.cuh."""


class Tuning(NamedTuple):
    """struct Tuning of csrc/rows/tuning.cuh."""

    resident_warps: int
    tiles_ahead: int
    in_place: bool
    window: int

    @property
    def slots(self) -> int:
        """The tiles of a warp that have a place in shared memory: TileStream of csrc/rows/row.cuh."""
        return self.tiles_ahead if self.in_place or self.tiles_ahead == 2 else 0


def tuned_topk(
    capability: int, warps: int, method: int, itemsize: int, is_masked: bool, is_aligned: bool
) -> Tuning | None:
    """The first row of softmax_topk_kernel that fits."""
    values = (is_masked, is_aligned, itemsize == 4, method)
    for first, last, kernel, least_warps, most_warps, *rest in _table():
        if kernel or not (first <= capability <= last and least_warps <= warps <= most_warps):
            continue
        if all(held >> value & 1 for held, value in zip(rest[:4], values, strict=True)):
            return Tuning(rest[4], rest[5], bool(rest[6]), rest[7])
    return None


@cache
def most_slots(warps: int, method: int, itemsize: int, is_masked: bool, is_aligned: bool) -> int:
    """The slots of the GPU that has the most."""
    found = (
        tuned_topk(capability, warps, method, itemsize, is_masked, is_aligned)
        for capability in ARCHITECTURES
        if capability >= _BACKGROUND_COPIES
    )
    return max(tuning.slots for tuning in found if tuning)


@cache
def most_window(warps: int) -> int:
    """The tiles of a window, on the GPU that has the most."""
    found = (tuned_topk(capability, warps, 2, 2, False, True) for capability in ARCHITECTURES)
    return max(tuning.window for tuning in found if tuning)


@cache
def _table() -> list[tuple[int, ...]]:
    text = re.sub("//.*", "", (source_folder() / "rows" / "tuning.cuh").read_text(encoding="utf-8"))
    names = {"true": "1", "false": "0", **dict(re.findall(r"(k\w+) = (\d+)", text))}
    rows = re.findall(r"\{([^{}]+)\{([^{}]+)\}\}", text)
    return [tuple(int(names.get(word, word)) for word in re.findall(r"\w+", first + last)) for first, last in rows]
