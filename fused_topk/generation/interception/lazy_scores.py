# SPDX-License-Identifier: Apache-2.0
"""Scores that a decoding loop computes on instead of a tensor. Nothing is computed until tokens are chosen.

The docstring of `fused_topk.generation` has the idea. A loop goes through the stages below. An operation that leads to the next
stage is recognised. Any other operation gets the tensor that the stock operations give.

    greedy, sampling    LOGITS -> processors -> argmax, or PROBS -> multinomial
    beam search         LOGITS -> LOG_PROBS -> processors -> BEAMS -> BEAM_TOTALS -> TOTALS -> topk
    beam sampling       the same up to TOTALS -> PROBS -> multinomial, then TOTALS -> gather
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..choice import tokens, warping
from ..choice.edit import Edit, NotSparse
from ..choice.rows import Rows
from ..edits.plan import Plan
from ..statistics import count_fallback, count_fused
from .recorded import Recorded
from .stand_in import StandIn


class ScoredStep:
    """The last logits of one forward pass, until its tokens are chosen.

    After that the step holds no logits. The loop drops the model's output before it computes the next one, and the memory must
    become free then, even if the loop still has some of the scores.
    """

    def __init__(self, rows: Rows, of: Tensor) -> None:
        self._rows: Rows | None = rows
        self._of = weakref.ref(of)  # [R, length, V]
        self._is_counted = False

    @property
    def rows(self) -> Rows:
        if self._rows is not None:
            return self._rows
        logits = self._of()
        if logits is None:
            raise RuntimeError(
                "the scores of a decoding step were used after the model's output had been dropped, when they are gone; "
                "call disable(model), and please report the versions of transformers and fused_topk"
            )
        return self._rows_of(logits)

    def gather(self, reason: str) -> None:
        """Gathers the logits on every process, because of an operation that needs them all."""
        if self._rows is not None:
            self._rows.gather(reason)

    def end(self, reason: str | None = None) -> None:
        """Counts the step as fused. With a reason, counts it as a fallback."""
        is_sharded = False
        if self._rows is not None:
            is_sharded = self._rows.is_sharded
            self._rows_of = self._rows.maker()
            self._rows = None
        if not self._is_counted:
            self._is_counted = True
            if reason is None:
                count_fused(is_sharded)
            else:
                count_fallback(reason)


class Stage(Enum):
    LOGITS = "logits [R, V]"
    LOG_PROBS = "log-probabilities [R, V]"
    BEAMS = "log-probabilities [batch, beams, V]"
    BEAM_TOTALS = "with the beams' scores added [batch, beams, V]"
    TOTALS = "all continuations of a sequence in a row [batch, beams * V]"
    PROBS = "softmax of LOGITS or TOTALS"


class LazyScores(StandIn):
    """float32 scores that have not been computed yet. Stands in for a tensor in a decoding loop."""

    __slots__ = ("_beam_scores", "_chosen", "_compute", "_dense", "_edits", "_filters", "_stage", "_step", "shape")

    def __init__(
        self,
        step: ScoredStep,
        stage: Stage,
        shape: tuple[int, ...],
        compute: Callable[[], Tensor],
        edits: Sequence[Edit] = (),
        filters: Sequence[warping.Filter] | None = None,
        beam_scores: Tensor | None = None,
    ) -> None:
        self.shape = shape if type(shape) is torch.Size else torch.Size(shape)
        self._step = step
        self._stage = stage
        # Runs the stock operations up to this stage.
        self._compute = compute
        self._dense: Tensor | None = None
        # What the processors do. The filters are None until the processors have run; they are empty if none is a warper.
        self._edits = edits
        self._filters = filters
        # [batch, beams], from BEAM_TOTALS on.
        self._beam_scores = beam_scores
        # What sampling from TOTALS has drawn: (flat indices, their scores).
        self._chosen: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def of(cls, rows: Rows, of: Tensor) -> LazyScores:
        """The model's last logits in float32, as a loop takes them. of: all of the model's logits, [R, length, V]."""
        step = ScoredStep(rows, of)
        return cls(step, Stage.LOGITS, rows.logits.shape, lambda: step.rows.logits.to(copy=True, dtype=torch.float32))

    # The attributes of a tensor that loops ask for.

    dtype = torch.float32
    requires_grad = False

    @property
    def device(self) -> torch.device:
        return self._step.rows.logits.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def clone(self, **kwargs: Any) -> Tensor:
        """The tensor, which the loop keeps as a record. The step can still be fused."""
        if self._dense is not None:
            return self._dense.clone()
        self._step.gather("a copy of the scores")
        return self._compute()

    def recorded(self) -> Recorded:
        """The tensor, which the loop keeps as a record and chooses from. The choice is made with these scores."""
        tensor = self._compute()
        self._compute = lambda: tensor
        return Recorded.of(tensor, self)

    def dense(self, reason: str) -> Tensor:
        """The tensor, because of an operation that cannot be fused. From here on these scores are that tensor."""
        if self._dense is None:
            self._step.gather(reason)
            self._dense = self._compute()
            self._step.end(reason)
        return self._dense

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recognised = _RECOGNISED.get(func)
        if recognised is not None:
            if not args:
                args = (kwargs.pop("input"),)
            first = args[0]
            if type(first) is LazyScores and first._dense is None:
                result = recognised(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        return super().__torch_function__(func, types, args, kwargs)

    # The operations of the loops, in the order in which they run.

    def processed(self, plan: Plan, input_ids: Tensor, kwargs: dict[str, Any]) -> Any:
        """These scores after the logits processors.

        Args:
            plan: what the processors do.
            input_ids: the tokens so far.
            kwargs: further arguments that the loop hands to its processors.
        """
        answered: dict[int, Any] = {}

        def run_stock(scores: Tensor) -> Any:
            return plan.run_stock(input_ids, scores, answered, **kwargs)

        is_known_place = self._stage in (Stage.LOGITS, Stage.LOG_PROBS) and self._filters is None
        if self._dense is not None or not is_known_place:
            return run_stock(self.dense("logits processors in an unknown place"))
        if not plan.processors:
            self._filters = ()
            return self
        reason = plan.reason
        if reason is None and self._stage is Stage.LOG_PROBS:
            reason = plan.reason_of_beams
        if reason is not None:
            return run_stock(self.dense(reason))
        try:
            edits = plan.edits(input_ids, self._step.rows, self._stage is Stage.LOG_PROBS, answered)
        except NotSparse as cause:
            return run_stock(self.dense(str(cause)))
        return LazyScores(self._step, self._stage, self.shape, lambda: run_stock(self._tensor()), edits, plan.filters)

    def _log_softmax(self, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        if self._stage is not Stage.LOGITS or self._filters is not None or dim not in (-1, 1) or dtype is not None:
            return NotImplemented
        return self._next(Stage.LOG_PROBS, self.shape, lambda: F.log_softmax(self._tensor(), dim=-1))

    def reshape(self, *shape: Any) -> Any:
        if len(shape) == 1 and not isinstance(shape[0], int):
            shape = tuple(shape[0])
        stage = None
        if self._dense is None and self._stage is Stage.LOG_PROBS:
            # Gives each beam an index of its own.
            rows, vocab_size = self.shape
            if len(shape) == 3 and shape[0] * shape[1] == rows and shape[2] == vocab_size:
                stage = Stage.BEAMS
        elif self._dense is None and self._stage is Stage.BEAM_TOTALS:
            # Joins the beams of a sequence.
            batch, beams, vocab_size = self.shape
            if len(shape) == 2 and shape[0] == batch and shape[1] in (-1, beams * vocab_size):
                stage, shape = Stage.TOTALS, (batch, beams * vocab_size)
        if stage is None:
            return self.dense("operation reshape").reshape(*shape)
        return self._next(stage, shape, lambda: self._tensor().reshape(shape))

    def __add__(self, other: Any) -> Any:
        if (
            self._stage is Stage.BEAMS
            and self._dense is None
            and type(other) is Tensor
            and other.dtype is torch.float32
            and other.shape == (*self.shape[:2], 1)
        ):
            return self._next(Stage.BEAM_TOTALS, self.shape, lambda: self._tensor() + other, other.squeeze(-1))
        return self.dense("operation add") + other

    def _topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        is_known = self._stage is Stage.TOTALS and dim in (-1, 1) and largest
        # A k that is out of range is left to torch.topk, which says so: the kernels would read past the row.
        if not is_known or type(k) is not int or not 1 <= k <= self.shape[-1]:
            return NotImplemented
        found = self._asked(tokens.continuations, self._beam_scores, k)
        if found is None:
            return NotImplemented
        if not found[0].is_cuda and bool(found[0][:, 0].isnan().any()):
            # A row with a NaN is all NaN, and torch.topk decides its order. On a GPU that order is arbitrary, so no step waits
            # for the values to look for a NaN.
            self.dense("NaN among the scores")
            return NotImplemented
        self._step.end()
        return torch.return_types.topk(found)

    def _argmax(self, dim: int | None = None, keepdim: bool = False) -> Any:
        if self._stage is not Stage.LOGITS or dim not in (-1, 1) or keepdim:
            return NotImplemented
        ids = self._asked(tokens.greatest)
        if ids is None:
            return NotImplemented
        self._step.end()
        return ids

    def _asked(self, choose: Callable[..., Any], *args: Any) -> Any:
        """What a function of :mod:`tokens` gives; None where stock operations must choose. Then these may have become a tensor."""
        try:
            return choose(self._step.rows, self._edits, self._filters or (), *args)
        except NotSparse as cause:
            self.dense(str(cause))
            return None

    def _softmax(self, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        if self._stage not in (Stage.LOGITS, Stage.TOTALS) or dim not in (-1, 1) or dtype is not None:
            return NotImplemented

        def compute() -> Tensor:
            if self._stage is Stage.TOTALS and self._dense is None:
                self._dense = self._compute()
            return F.softmax(self._tensor(), dim=-1)

        result = self._next(Stage.PROBS, self.shape, compute)
        # Beam sampling draws from the probabilities. Then it gathers from the scores (_gather), when the step may have ended.
        result._chosen = self._chosen
        return result

    def _multinomial(self, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Any:
        """Samples from the few tokens that the warpers leave. The distribution is the stock one, the random numbers differ."""
        rows, beams, filters = self._step.rows, self._beam_scores, self._filters or ()
        if self._stage is not Stage.PROBS or replacement:
            return NotImplemented
        if generator is None and rows.generator is not None:
            generator = rows.generator()
        drawn = tokens.sampled(rows, self._edits, filters, generator) if beams is None and num_samples == 1 else None
        if drawn is not None:
            if tokens.has_no_distribution(drawn):
                # torch.multinomial says so.
                return self._stock_multinomial("a row without a distribution", 1, generator)
            self._step.end()
            return drawn.tokens
        if warping.list_length(filters, rows.vocab_size) is None:
            return self._stock_multinomial("sampling from the whole vocabulary", num_samples, generator)
        # The list must have as many tokens as are drawn, if need be with probability 0.
        at_least = 1 if beams is None else -(-num_samples // beams.shape[1])
        if not tokens.can_list(rows, filters, at_least):
            return self._stock_multinomial("operation multinomial", num_samples, generator)
        left = self._asked(tokens.left_over, at_least, beams is not None)
        if left is None:
            return self._stock_multinomial("the warpers keep more tokens than were listed", num_samples, generator)
        self._step.end()
        if beams is None:
            return tokens.drawn(left, num_samples, generator)
        continuations = tokens.drawn_continuations(left, beams, rows.vocab_size, num_samples, generator)
        self._chosen.append((continuations.indices, continuations.scores))
        return continuations.indices

    def _stock_multinomial(self, reason: str, num_samples: int, generator: Any) -> Tensor:
        return tokens.drawn_from(self.dense(reason), num_samples, generator)

    def _gather(self, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
        for indices, scores in self._chosen:
            if index is indices and dim in (-1, 1):
                return scores
        return NotImplemented

    def _next(
        self, stage: Stage, shape: tuple[int, ...], compute: Callable[[], Tensor], beam_scores: Tensor | None = None
    ) -> LazyScores:
        if beam_scores is None:
            beam_scores = self._beam_scores
        return LazyScores(self._step, stage, shape, compute, self._edits, self._filters, beam_scores)

    def _tensor(self) -> Tensor:
        return self._compute() if self._dense is None else self._dense


_RECOGNISED: dict[Any, Callable[..., Any]] = {
    F.log_softmax: LazyScores._log_softmax,
    F.softmax: LazyScores._softmax,
    torch.reshape: LazyScores.reshape,
    torch.topk: LazyScores._topk,
    torch.argmax: LazyScores._argmax,
    torch.multinomial: LazyScores._multinomial,
    torch.gather: LazyScores._gather,
    torch.clone: LazyScores.clone,
}
