# SPDX-License-Identifier: Apache-2.0
"""One running generate() call: which of its steps can be fused, and what the loop gets instead of logits and processors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode

from .. import backends, functional
from ..backends import reference
from ..problem import TopK
from .model_logits import ModelLogits, is_of_a_loop, variables
from .processors import Processors, reason_against
from .record import Recorded
from .scores import LazyScores
from .selection import Rows
from .statistics import count_fallback

SEARCH = (GenerationMode.GREEDY_SEARCH, GenerationMode.BEAM_SEARCH)
SAMPLING = (GenerationMode.SAMPLE, GenerationMode.BEAM_SAMPLE)
BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
# The loop hands its scores to these methods, which a user's model may have of its own.
_OF_BEAMS = ("_unflatten_beam_dim", "_get_top_k_continuations")


class Options(NamedTuple):
    """What a user asks for: see :func:`fused_topk.generation.fused_decoding`."""

    sampling: bool = False
    topk_per_step: int = 0
    whole_step: bool | str = False

    @staticmethod
    def checked(sampling: Any, topk_per_step: Any, whole_step: Any) -> Options:
        if not isinstance(sampling, bool):
            raise TypeError(f"`sampling` must be a bool, got {type(sampling).__name__}; pass True or False")
        if not isinstance(whole_step, (bool, str)):
            kind = type(whole_step).__name__
            raise TypeError(f'`whole_step` must be a bool or "compiled", got {kind}; pass True or False')
        if isinstance(whole_step, str) and whole_step != "compiled":
            raise ValueError(f'`whole_step` must be True, False or "compiled", got {whole_step!r}; pass True')
        if isinstance(topk_per_step, bool) or not isinstance(topk_per_step, int):
            raise TypeError(f"`topk_per_step` must be an int, got {type(topk_per_step).__name__}; pass 0 for no record")
        if topk_per_step < 0:
            raise ValueError(f"`topk_per_step` must not be negative, got {topk_per_step}; pass 0 for no record")
        return Options(sampling, topk_per_step, whole_step)


class Session:
    """One running generate() call of one model.

    Args:
        reason: why no step of it can be fused; None if some can.
        loop: the code of a loop that computes as transformers' do; None for one of theirs.
    """

    def __init__(
        self, model: nn.Module, options: Options, reason: str | None = None, loop: CodeType | None = None
    ) -> None:
        self.model = model
        self.topk: list[TopK] = []
        self._options = options
        self._reason_of_call = reason
        # The same for the loop that runs; none does before its processors are known.
        self._reason: str | None = None
        self.has_begun = False
        self.is_open = True
        self._given_loop = self._loop = loop
        self._processors: LogitsProcessorList | None = None
        # What greedy decoding and sampling keep for the user. The tensor of the step that runs, which may not have been used.
        self._records_logits = self.records_scores = False
        self._recorded: Recorded | None = None
        # Calls of the model and steps of the loop so far; what is known of the step that runs.
        self._num_forwards = self._num_steps = 0
        self._is_taken = False
        self._reason_of_step: str | None = None
        # The backend for logits of the kind that came last, or why none serves them.
        self._kind: tuple[Any, ...] = ()
        self._backend: backends.Backend = reference
        self._reason_of_kind: str | None = None

    def begin(self, config: GenerationConfig, processors: LogitsProcessorList) -> LogitsProcessorList:
        """Before a loop with that configuration; gives the processors that it is to use."""
        if processors is self._processors:
            # Somebody has wrapped the method that asks, and that has been wrapped again.
            return processors
        self.has_begun = True
        self._reason = self._reason_of_call or self._reason_of_loop(config) or reason_against(processors)
        # Beam search takes copies for that: LazyScores.clone.
        is_kept = config.return_dict_in_generate and _mode(config) not in BEAMS
        self._records_logits = bool(is_kept and config.output_logits)
        self.records_scores = bool(is_kept and config.output_scores)
        if self._reason is not None:
            return processors
        self._loop = self._given_loop
        self._processors = Processors(self, processors, _mode(config) in SAMPLING)
        return self._processors

    def after_forward(self, output: Any, is_asked_by_loop: bool = True) -> Any:
        """Marks the logits that the model has returned to the loop."""
        logits = getattr(output, "logits", None) if self.has_begun else None
        if logits is None or type(logits) is ModelLogits:
            return output
        self._num_forwards += 1
        if is_asked_by_loop and self._reason is not None:
            self._num_steps += 1
            count_fallback(self._reason)
        elif is_asked_by_loop:
            self._reason_of_step = self._unserved(logits)
            if self._reason_of_step is None:
                self._reason_of_step = _replace_logits(output, ModelLogits.of(logits, self))
        return output

    def is_in(self, frame: FrameType) -> bool:
        """Whether the loop of this call is in the frame: it has the processors."""
        if frame.f_code is self._loop:
            return True
        if self._loop is None and is_of_a_loop(frame) and variables(frame).get("logits_processor") is self._processors:
            self._loop = frame.f_code
            return True
        return False

    def end_step(self) -> None:
        """Counts a step whose scores are not of the model's logits, as far as is known, before their processors run."""
        self._num_steps += 1
        if not self._is_taken:
            count_fallback(self._reason_of_step or self._unknown_loop())
        self._is_taken = False
        self._reason_of_step = None

    def _unknown_loop(self) -> str:
        return f"the loop of {type(self.model).__name__} does not take the last logits as transformers' loops do"

    def record(self, scores: LazyScores) -> Recorded:
        """What the loop keeps for the user and chooses from."""
        self._end_record()
        self._recorded = scores.recorded()
        return self._recorded

    def _end_record(self) -> None:
        if type(self._recorded) is Recorded:
            self._recorded.end()
        self._recorded = None

    def close(self) -> None:
        self.is_open = False
        self._end_record()
        # These two keep each other.
        self._processors = None
        # A loop that is not transformers', or does not ask the processors of this call.
        if not self._num_steps:
            for _ in range(self._num_forwards):
                count_fallback(self._reason or self._unknown_loop())

    def _reason_of_loop(self, config: GenerationConfig) -> str | None:
        mode = _mode(config)
        if mode not in SEARCH + SAMPLING:
            return f"generation mode {mode.value}"
        if mode in SAMPLING and not self._options.sampling:
            return "do_sample without sampling=True"
        if mode in BEAMS:
            for name in _OF_BEAMS:
                method = getattr(self.model, name, None)
                if not str(getattr(method, "__module__", "transformers.")).startswith("transformers."):
                    return f"{name} of {type(self.model).__name__}"
        return None

    def _unserved(self, logits: Any) -> str | None:
        """Why these logits would be served by torch operations, or not at all; None if by `self._backend`."""
        if type(logits) is not Tensor or logits.dim() != 3:
            dims = f" of {logits.dim()} dimensions" if isinstance(logits, Tensor) else ""
            return f"logits that are a {type(logits).__name__}{dims}"
        if logits.requires_grad:
            return "logits that require a gradient"
        kind = (logits.dtype, logits.device)
        if kind != self._kind:
            self._kind = kind
            self._backend = backends.pick(logits.device, logits.dtype, 1, None)
            self._reason_of_kind = None
            if self._backend is reference:
                cause = backends.available(logits.device).get(
                    logits.device.type, f"no kernels for {logits.device.type}"
                )
                self._reason_of_kind = cause or f"no kernels for {logits.dtype}"
        return self._reason_of_kind

    def take(self, rows: Tensor, of: Tensor) -> Any:
        self._is_taken = True
        if self._options.topk_per_step:
            self.topk.append(functional.log_softmax_topk(rows, min(self._options.topk_per_step, rows.shape[-1])))
        scores = LazyScores.of(Rows(rows, self._backend), of)
        return self.record(scores) if self._records_logits else scores


def _replace_logits(output: Any, logits: Tensor) -> str | None:
    """Puts the logits into a model's output; why that cannot be, or None where it is done."""
    try:
        # As an item, transformers' ModelOutput does not look through all of its fields.
        if isinstance(output, dict):
            output["logits"] = logits
        else:
            output.logits = logits
    # Named tuples, frozen dataclasses and properties without a setter raise the former, read-only mappings the latter.
    except (AttributeError, TypeError):
        return f"an output that cannot be assigned to, {type(output).__name__}"
    return None


def _mode(config: GenerationConfig) -> GenerationMode:
    mode: GenerationMode = config.get_generation_mode()
    return mode


# The generate() call that this thread is in.
_current: ContextVar[Session | None] = ContextVar("fused_topk_session", default=None)


@contextmanager
def running(session: Session) -> Iterator[None]:
    """The session is the current one of this thread within the block."""
    token = _current.set(session)
    try:
        yield
    finally:
        _current.reset(token)
        session.close()


def session_of(model: nn.Module) -> Session | None:
    """The generate() call of that model that this thread is in. A task that was started in a call may outlive it."""
    session = _current.get()
    return session if session is not None and session.model is model and session.is_open else None
