# SPDX-License-Identifier: Apache-2.0
"""The logits of a step, and the kernels that read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ... import backends
from ...backends import Backend
from ...functional.sampling import random_names
from ...plans import plan_of_sample, topk_plan
from ...problem import Sample, SampleProblem, TopK, TopKState
from ...rows import LogitRows, like

# Up to this V, torch's argmax is as quick on a GPU as our kernel, and the host launches it in a third of the time.
_ARGMAX_VOCAB_SIZE = 1 << 16
# The new scores [R, S] of the tokens [R, S], given their scores [R, S] before. A token's new score does not depend on its place.
Change = Callable[[Tensor, Tensor], Tensor]


class Rows:
    """The last logits of a forward pass, and the backend whose kernels read them.

    Its methods are the package's functions without their checks and operators, which would cost more than the launch in each step.
    A decoding step's arguments are right by construction, and nothing needs a gradient.
    """

    __slots__ = ("backend", "generator", "logits")

    def __init__(
        self, logits: Tensor, backend: Backend, generator: Callable[[], torch.Generator] | None = None
    ) -> None:
        self.logits = logits  # [R, V], in the model's dtype
        self.backend = backend
        # Gives the generator to draw with. None: a draw takes the generator that its caller passes.
        self.generator = generator

    def maker(self) -> Callable[[Tensor], Rows]:
        """A function that makes rows like these of a model's logits [R, length, V]. It holds no logits."""
        # On the device where the loop had them: it may differ from the model's.
        device, backend, generator = self.logits.device, self.backend, self.generator
        return lambda logits: Rows(logits.select(1, -1).to(device), backend, generator)

    def gather(self, reason: str) -> None:
        """Gathers all columns on this process. Plain rows have them already."""

    @property
    def is_sharded(self) -> bool:
        """Whether each process has only some of the columns."""
        return False

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]

    def supports(self, k: int) -> bool:
        """Whether the kernels take this k."""
        return bool(self.backend.supports(self.logits.dtype, k))

    def greatest(self) -> Tensor:
        """int64 [R]: the token of the greatest logit of each row; of equal ones the smallest, NaN above +inf."""
        logits = self.logits
        if self.vocab_size <= _ARGMAX_VOCAB_SIZE and logits.is_cuda and not self.is_sharded:
            # argmax gives the same answer, also in one read.
            return logits.argmax(-1)
        return self.topk(1).indices.squeeze(1)

    def topk(self, k: int, mask: Tensor | None = None) -> TopK:
        """The k greatest logits, in the model's dtype, and the logsumexp of the tokens in `mask` [1 or R, W]."""
        return self._scan(k, mask, "logits", "allowed", 1.0)

    def log_softmax_topk(self, k: int, mask: Tensor | None = None) -> TopK:
        """The k greatest log-probabilities of the tokens in `mask` [1 or R, W]."""
        return self._scan(k, mask, "log_softmax", "all", 1.0)

    def scan(self, k: int, mask: Tensor | None, are_log_probs: bool) -> TopK:
        """The k best scores of the tokens in `mask` [1 or R, W], float32: log-probabilities of the whole row, or logits."""
        if are_log_probs:
            return self.log_softmax_topk(k, mask)
        found = self.topk(k, mask)
        return found._replace(values=found.values.float())

    def state(self, k: int, mask: Tensor | None = None, normalize: str = "all", temperature: float = 1.0) -> TopKState:
        """The state of each row, whose candidates are tokens in `mask` [1 or R, W]. See :func:`fused_topk.topk_state`."""
        logits, indices, (m, d) = self._scan(k, mask, "state", normalize, temperature)
        return TopKState(logits, indices, m, d)

    def state_and_logits(self, k: int, mask: Tensor | None, ids: Tensor) -> tuple[TopKState, Tensor]:
        """The state of each whole row, and the logits of the tokens `ids` [R, S]."""
        return self.state(k, mask), self.logits.gather(1, ids)

    def beam_topk(self, beam_scores: Tensor, k: int, mask: Tensor | None = None) -> TopK:
        """The k best continuations over all beams of a sequence, of the tokens in `mask` [1 or R, W].

        Args:
            beam_scores: float32 [batch, beams], batch * beams = R.
        """
        batch, beams = beam_scores.shape
        if mask is not None:
            mask = mask.expand(batch * beams, -1).view(batch, beams, -1)
        rows = LogitRows(self.logits.view(batch, beams, -1), mask=mask)
        return self._run(rows, k, "log_softmax", "all", beam_scores)

    def edited(self, ids: Tensor, change: Change, replaces_row: bool) -> Rows:
        """Rows of float32 logits in which the tokens `ids` [R, S] have other scores. See the function of this name below."""
        return Rows(edited(self.logits, ids, change, replaces_row), self.backend, self.generator)

    def draws(self, parameters: Mapping[str, float]) -> bool:
        """Whether :meth:`sample` takes these parameters."""
        return True

    def sample(
        self,
        parameters: Mapping[str, float],
        mask: Tensor | None,
        generator: torch.Generator | None,
        noise: Tensor | None = None,
    ) -> Sample:
        """A token [R, 1] of each row, drawn from the tokens in `mask` [1 or R, W]. See :func:`fused_topk.sample`.

        Args:
            parameters: temperature, top_k, top_p and min_p, as far as they are set.
            noise: float32 [R, V] in place of random numbers of the generator's.
        """
        logits = self.logits
        if mask is not None:
            mask = mask.expand(len(logits), -1)
        seeds: Any = (0, None, 0, None)
        if noise is None:
            seed, counter = random_names(len(logits), logits.device, generator)
            seeds = (*seed, *counter)
        temperature = float(parameters.get("temperature", 1.0))
        top_k, top_p, min_p = (
            int(parameters.get("top_k", 0)),
            float(parameters.get("top_p", 1.0)),
            float(parameters.get("min_p", 0.0)),
        )
        of_rows = LogitRows(logits, temperature=temperature, mask=mask)
        fields: Any = (of_rows, top_k, None, top_p, None, min_p, None, *seeds, 1, 0, False, False, 0, noise)
        problem = SampleProblem(*fields)
        return plan_of_sample(problem, backends.name_of(self.backend)).run(problem)

    def _scan(self, k: int, mask: Tensor | None, values: str, normalize: str, temperature: float) -> TopK:
        if mask is not None:
            mask = mask.expand(len(self.logits), -1)
        return self._run(LogitRows(self.logits, temperature=temperature, mask=mask), k, values, normalize)

    def _run(self, rows: LogitRows, k: int, values: str, normalize: str, beam_scores: Tensor | None = None) -> TopK:
        scores = None if beam_scores is None else like(beam_scores)
        name = backends.name_of(self.backend)
        return topk_plan(rows.logits.device, rows.layout(), k, values, normalize, name, scores).run(rows, beam_scores)


def edited(logits: Tensor, ids: Tensor, change: Change, replaces_row: bool, start: int = 0) -> Tensor:
    """float32 [R, n]: a copy of the logits [R, n] in which some tokens have the scores that `change` gives them.

    A draw reads such a copy where processors change scores. Nothing here waits for the device.

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
