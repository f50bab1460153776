# SPDX-License-Identifier: Apache-2.0
"""A copy of logits in which some tokens have other scores. A draw reads such a copy where processors change scores.

Nothing here waits for the device or has a shape that depends on what a tensor holds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# The new scores [R, S] of the tokens [R, S], given their scores [R, S] before. A token's new score does not depend on its place.
Change = Callable[[Tensor, Tensor], Tensor]


def edited(logits: Tensor, ids: Tensor, change: Change, replaces_row: bool, start: int = 0) -> Tensor:
    """float32 [R, n]: a copy of the logits [R, n] in which some tokens have the scores that `change` gives them.

    Args:
        ids: int64 [R, S], possibly repeated. A token outside the columns counts as the nearest column.
        replaces_row: whether all scores are -inf before the change.
        start: the token of the first column.
    """
    columns = logits.shape[1]
    if replaces_row:
        scores = torch.full_like(logits, -torch.inf, dtype=torch.float32)
    else:
        scores = logits.to(torch.float32, copy=True)
    if not columns:
        return scores
    ids = ids.clamp(start, start + columns - 1)
    places = ids - start if start else ids
    # A repeated token gets the same score each time.
    return scores.scatter_(1, places, change(ids, scores.gather(1, places)))
