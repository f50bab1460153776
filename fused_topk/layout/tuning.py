# SPDX-License-Identifier: Apache-2.0
"""How the kernels are tuned to each compute capability: the table of csrc/rows/tuning.cuh, read from that file."""

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
    ahead: int
    in_place: bool
    window: int

    @property
    def slots(self) -> int:
        """The tiles of a warp that have a place in shared memory: TileStream of csrc/rows/row.cuh."""
        return self.ahead if self.in_place or self.ahead == 2 else 0


def tuned_topk(
    capability: int, warps: int, method: int, itemsize: int, is_masked: bool, is_aligned: bool
) -> Tuning | None:
    """The first row of softmax_topk_kernel that fits."""
    return _tuned("kTopk", capability, warps, (is_masked, is_aligned, itemsize == 4, method))


@cache
def resident_warps(kernel: str, capability: int) -> int:
    """The warps of an unmasked kernel other than softmax_topk_kernel that are promised to fit on a multiprocessor. kernel: its name in
    the table."""
    found = _tuned(kernel, capability, 0, (False, True, True, 0))
    assert found is not None, "the table has a row for every capability"
    return found.resident_warps


@cache
def least_resident_warps(kernel: str) -> int:
    """The same for the GPU that holds the fewest."""
    return min(resident_warps(kernel, capability) for capability in ARCHITECTURES)


def _tuned(kernel: str, capability: int, warps: int, values: tuple[int, ...]) -> Tuning | None:
    """The first row that fits. values: whether there is a mask, whether rows are aligned, whether logits have 32 bits, and the
    method."""
    for first, last, of_kernel, least_warps, most_warps, *rest in _table():
        if of_kernel != _names()[kernel] or not (first <= capability <= last and least_warps <= warps <= most_warps):
            continue
        if all(held >> value & 1 for held, value in zip(rest[:4], values, strict=True)):
            return Tuning(rest[4], rest[5], bool(rest[6]), rest[7])
    return None


@cache
def most_slots(warps: int, method: int, itemsize: int, is_masked: bool, is_aligned: bool) -> int:
    """The slots of a warp on the GPU that has the most."""
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
def _text() -> str:
    return re.sub("//.*", "", (source_folder() / "rows" / "tuning.cuh").read_text(encoding="utf-8"))


@cache
def _names() -> dict[str, int]:
    """The numbers after `=`."""
    return {name: int(number) for name, number in re.findall(r"(k\w+) = (\d+)", _text())}


@cache
def _table() -> list[tuple[int, ...]]:
    numbers = {"true": 1, "false": 0, **_names()}
    rows = re.findall(r"\{([^{}]+)\{([^{}]+)\}\}", _text())
    words = (re.findall(r"\w+", first + last) for first, last in rows)
    return [tuple(numbers[word] if word in numbers else int(word) for word in row) for row in words]
