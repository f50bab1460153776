# SPDX-License-Identifier: Apache-2.0
"""What a processor does to the scores of one step, as a change of the few tokens that it touches."""

from __future__ import annotations

from torch import Tensor


class Edit:
    """What one processor does to the scores of one step."""

    # Words [1 or R, W] of the tokens that the scan may choose; None for all.
    scanned: Tensor | None = None
    # int64 [1 or R, S], touched tokens that may still be chosen; those >= V are ignored. None if there are none.
    ids: Tensor | None = None
    # Whether the scores before the edit do not matter, and all tokens but `ids` have -inf after it.
    replaces_row = False
    # Whether the processor also changes NaN and infinite scores of scanned tokens, which the edit leaves as they are. Then the
    # choice is right only where the chosen tokens have finite scores.
    expects_finite_scores = False

    def apply(self, ids: Tensor, scores: Tensor) -> Tensor:
        """The new scores [R, S] of tokens `ids` [R, S], whose scores are `scores` before the edit."""
        raise NotImplementedError


class NotSparse(Exception):
    """In this step a processor does more than an edit can express. The stock operations must run."""
