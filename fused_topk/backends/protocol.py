# SPDX-License-Identifier: Apache-2.0
"""What a backend is: it gets a request ready once, and then runs it on any tensors of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..problem import (
    FullRowProblem,
    MergeProblem,
    RankProblem,
    RouterProblem,
    RouterTopK,
    Sample,
    SampleProblem,
    TokenSumsProblem,
    TopK,
    TopkProblem,
)
from ..rows import LogitRows


class StartTopk(Protocol):
    """Runs a prepared top-k request on tensors of the layout that it was prepared for, and writes `out`."""

    def __call__(self, rows: LogitRows, out: TopK, beam_scores: Tensor | None = None) -> None: ...


# Likewise for the other families. The last argument is the contiguous `out`. A merge is given a whole request, and takes only its
# tensors; a draw takes only its tensors, its seeds and its noise.
StartMerge = Callable[[MergeProblem, TopK], None]
StartFullRows = Callable[[LogitRows, Tensor], None]
StartRouter = Callable[[LogitRows, Tensor | None, RouterTopK], None]
StartSample = Callable[[SampleProblem, Sample], None]


class Backend(Protocol):
    """The modules :mod:`reference`, :mod:`cpu` and :mod:`cuda` are such backends."""

    def __hash__(self) -> int: ...

    def unavailable(self, device: torch.device | None = None) -> str | None:
        """None if it works on that device, else the cause and the remedy in one sentence. Without a device: on any."""

    def supports(self, dtype: torch.dtype, k: int) -> bool:
        """Whether it takes logits of that dtype, and that k. Functions without a k ask for k = 1."""

    def prepare_topk(self, problem: TopkProblem, device: torch.device, beam_scores: Tensor | None = None) -> StartTopk:
        """Plans a call once for its shapes and strides. The returned function takes only the tensors.

        It computes the k best of every row, their values, and the row's logsumexp if the values are no logits. With beam_scores, it computes the k best
        continuations of every batch entry over all of its beams. The tensors of `problem`, and beam_scores, may be meta
        tensors: only their layouts count.
        """

    def prepare_merge(self, problem: MergeProblem, device: torch.device) -> StartMerge:
        """Plans a merge once: the k best of the candidates of a row's parts, and the normalizer of the whole row."""

    def prepare_full_rows(self, problem: FullRowProblem, device: torch.device, dtype: torch.dtype) -> StartFullRows:
        """Plans once probabilities, log-probabilities or the logsumexp of every row, into an `out` of that dtype."""

    def prepare_router(self, problem: RouterProblem, device: torch.device) -> StartRouter:
        """Plans once the choice of experts for every row. Their numbers are int64 or int32, as `out` has them.

        Backends other than the reference take at most MOST_EXPERTS experts, and choose at most MOST_CHOSEN of them
        (:mod:`fused_topk.layout.router_launch`).
        """

    def prepare_sample(self, problem: SampleProblem, device: torch.device) -> StartSample:
        """Plans the draw of tokens from each row once. The seeds, the counters and the noise of `problem` do not count."""

    def target_ranks(self, problem: RankProblem, out: Tensor) -> None:
        """Counts for each target the tokens of its row that do not rank behind it, and writes `out`."""

    def token_sums(self, problem: TokenSumsProblem, sums: Tensor, token_logits: Tensor) -> None:
        """Adds the rows to their `sums`, and writes the logits of the tokens that are in them."""
