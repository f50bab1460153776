# SPDX-License-Identifier: Apache-2.0
"""Leading dimensions of several tensors, folded into as few as their strides allow."""

from __future__ import annotations

from collections.abc import Sequence


def collapse(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Folds dimensions that every tensor crosses in one stride.

    Args:
        shape: the leading dimensions that the tensors share; none of them 0.
        strides: for each tensor, its strides along them.

    Returns:
        (sizes, strides of each tensor), with at least one dimension; the row numbers are those of the original shape.
    """
    sizes: list[int] = []
    folded: list[list[int]] = [[] for _ in strides]
    for d, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(f[-1] == s[d] * size for f, s in zip(folded, strides, strict=True)):
            sizes[-1] *= size
            for f, s in zip(folded, strides, strict=True):
                f[-1] = s[d]
        else:
            sizes.append(size)
            for f, s in zip(folded, strides, strict=True):
                f.append(s[d])
    if not sizes:
        return [1], [[0] for _ in strides]
    return sizes, folded
