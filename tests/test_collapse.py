# SPDX-License-Identifier: Apache-2.0
"""Leading dimensions folded into as few as their strides allow, and kernels kept for each device."""

import itertools

import pytest

from fused_topk.cuda_runtime import driver
from fused_topk.layout.launch import collapse


def offsets(sizes, strides):
    """Where each row lies, in the order of the row numbers."""
    places = itertools.product(*map(range, sizes))
    return [sum(i * s for i, s in zip(place, strides, strict=True)) for place in places]


@pytest.mark.parametrize(
    ("shape", "strides", "sizes"),
    [
        ((), [()], [1]),
        ((2, 3), [(3, 1)], [6]),
        ((2, 3), [(4, 1)], [2, 3]),
        ((2, 3), [(0, 0)], [6]),
        ((2, 1, 3), [(3, 99, 1)], [6]),
        ((2, 3, 4), [(24, 4, 1)], [2, 12]),
        ((2, 3, 4), [(15, 5, 1)], [6, 4]),
        ((2, 3, 4, 5), [(1, 2, 6, 24)], [2, 3, 4, 5]),
        ((2, 3), [(3, 1), (4, 1)], [2, 3]),
        ((2, 3, 4), [(12, 4, 1), (0, 4, 1)], [2, 12]),
    ],
)
def test_collapse_folds_what_all_tensors_cross_in_one_stride(shape, strides, sizes):
    folded_sizes, folded = collapse(shape, strides)
    assert folded_sizes == sizes
    assert [offsets(folded_sizes, f) for f in folded] == [offsets(shape, s) for s in strides]


def test_each_device_has_its_own_kernel(monkeypatch):
    loads = []
    monkeypatch.setattr(driver, "_loaded", {})
    monkeypatch.setattr(
        driver, "_load", lambda device, kernel: loads.append((device, kernel)) or f"{kernel} of {device}"
    )
    for _ in range(2):
        assert [driver.function(d, "kernel") for d in (0, 1)] == ["kernel of 0", "kernel of 1"]
    assert loads == [(0, "kernel"), (1, "kernel")]
