# SPDX-License-Identifier: Apache-2.0
"""One running generate() call: which of its steps can be fused, and what the loop gets instead of logits and processors."""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList

from ... import backends, functional
from ...backends import reference
from ..calls import Call
from ..choice.rows import Rows
from ..edits.plan import Plan, reason_against
from ..frames import is_of_a_loop, variables
from ..lm_head import sharded_head_of
from ..request import BEAMS, SAMPLING, SEARCH, Options, mode_of
from ..statistics import count_fallback, count_gathered
from ..tensor_parallel.sharded_head import ShardedHead, SharedGenerator
from ..tensor_parallel.sharded_logits import ShardedLogits
from ..tensor_parallel.sharded_rows import ShardedRows
from .lazy_scores import LazyScores
from .model_logits import LastLogits, ModelLogits, is_of_last
from .recorded import Recorded

# Methods that get the loop's scores. A user's model may override them.
_OF_BEAMS = ("_unflatten_beam_dim", "_get_top_k_continuations")


class Session(Call):
    """A running generate() call in transformers' own loop.

    Args:
        reason: why no step of the call can be fused; None if steps may be fused.
        loop: the code of a loop that computes as transformers' loops do, such as that of a demo; None for a loop of transformers.
    """

    def __init__(
        self, model: nn.Module, options: Options, reason: str | None = None, loop: CodeType | None = None
    ) -> None:
        super().__init__(model)
        self._options = options
        self._reason_of_call = reason
        # Why no step of the running loop can be fused. A loop runs once its processors are known.
        self._reason: str | None = None
        self._given_loop = self._loop = loop
        self._processors: LogitsProcessorList | None = None
        # What greedy decoding and sampling keep for the user, and the record of the running step.
        self._records_logits = self.records_scores = False
        self._recorded: Recorded | None = None
        # Calls of the model and steps of the loop so far. Then the running step: whether the loop has taken its logits, and
        # why it cannot be fused.
        self._num_forwards = self._num_steps = 0
        self._is_taken = False
        self._reason_of_step: str | None = None
        # The dtype and device of the last logits, and the backend for such logits or the reason why there is none.
        self._kind: tuple[Any, ...] = ()
        self._backend: backends.Backend = reference
        self._reason_of_kind: str | None = None
        # The LM head of a tensor-parallel model, why its logits are gathered, and random numbers that all processes have.
        self._head: ShardedHead | None = None
        self._reason_to_gather: str | None = None
        # Whether the head has given columns in this forward pass.
        self._has_given_columns = False
        self._generator: SharedGenerator | None = None

    def begin(self, config: GenerationConfig, processors: LogitsProcessorList) -> LogitsProcessorList:
        if processors is self._processors:
            # Somebody has wrapped the method that asks for processors, and it has been wrapped by us again.
            return processors
        self.has_begun = True
        self._reason = self._reason_of_call or self._reason_of_loop(config) or reason_against(processors)
        # Beam search keeps clones of the scores instead: LazyScores.clone.
        is_kept = config.return_dict_in_generate and mode_of(config) not in BEAMS
        self._records_logits = bool(is_kept and config.output_logits)
        self.records_scores = bool(is_kept and config.output_scores)
        self._begin_sharded(config, processors)
        if self._reason is not None:
            return processors
        self._loop = self._given_loop
        self._processors = Processors(self, processors, mode_of(config) in SAMPLING)
        return self._processors

    def _begin_sharded(self, config: GenerationConfig, processors: LogitsProcessorList) -> None:
        """Finds out whether the logits of a tensor-parallel model must be gathered in this call."""
        module = sharded_head_of(self.model)
        self._head = None if module is None else ShardedHead(self.model, module)
        if self._head is None:
            return
        mode = mode_of(config)
        reason = self._reason or self._head.reason()
        if config.return_dict_in_generate:
            kept = [name for name in ("output_logits", "output_scores") if getattr(config, name)]
            reason = reason or (kept[0] if kept else None)
        kinds = [type(each).__qualname__ for each in processors]
        call = repr((reason, mode.value, self._options, kinds))
        agreement = self._head.agree(call, mode in SAMPLING)
        if not agreement.is_alike:
            reason = "a call that is not the same on all processes"
        self._reason_to_gather = reason
        if agreement.is_alike and self._reason is None:
            self._generator = agreement.generator(self._head.module.weight.device)

    def columns_of(
        self, head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType
    ) -> ShardedLogits | None:
        own = self._head
        if own is None or head is not own.module or self._reason_to_gather is not None or not self.is_open:
            return None
        # Only the forward() of the model that is generating gets the columns.
        columns = own.columns(args, kwargs) if variables(caller).get("self") is self.model else None
        self._has_given_columns = columns is not None
        return columns

    def after_forward(self, output: Any, is_asked_by_loop: bool = True) -> Any:
        logits = getattr(output, "logits", None) if self.has_begun else None
        if logits is None or type(logits) is ModelLogits:
            return output
        self._num_forwards += 1
        if type(logits) is ShardedLogits:
            self._has_given_columns = False
            return self._after_sharded_forward(output, logits, is_asked_by_loop)
        if is_asked_by_loop and self._head is not None and not self._has_given_columns:
            count_gathered(
                self._reason_to_gather or "a forward pass whose LM head gives no columns, such as a compiled one"
            )
        # Otherwise an operation of the model has gathered the logits, and that has been counted.
        self._has_given_columns = False
        if is_asked_by_loop and self._reason is not None:
            self._num_steps += 1
            count_fallback(self._reason)
        elif is_asked_by_loop:
            self._reason_of_step = self._unserved(logits)
            if self._reason_of_step is None:
                self._reason_of_step = _replace_logits(output, ModelLogits.of(logits, self))
        return output

    def _after_sharded_forward(self, output: Any, logits: ShardedLogits, is_asked_by_loop: bool) -> Any:
        reason = None if logits.is_gathered else self._unserved(logits.local)
        if is_asked_by_loop and reason is None and not logits.is_gathered:
            logits.loop = self
            return output
        # The model's forward() may have gathered the logits already. Otherwise that happens here.
        whole = logits.whole(reason or "a call of the model in the middle of generate()")
        self._reason_of_step = _replace_logits(output, whole)
        if is_asked_by_loop and self._reason_of_step is None:
            self._reason_of_step = self._unserved(whole)
            if self._reason_of_step is None:
                _replace_logits(output, ModelLogits.of(whole, self))
        return output

    def is_in(self, frame: FrameType) -> bool:
        """Whether the frame is the loop of this call. The loop is the function that has this call's processors."""
        if frame.f_code is self._loop:
            return True
        if self._loop is None and is_of_a_loop(frame) and variables(frame).get("logits_processor") is self._processors:
            self._loop = frame.f_code
            return True
        return False

    def taken(self, logits: ShardedLogits, index: Any, frame: FrameType) -> LastLogits | None:
        """What the function in the frame gets by that index, if it is the loop and takes the last rows; else None."""
        return LastLogits(logits.last(), logits, self) if is_of_last(index) and self.is_in(frame) else None

    def end_step(self) -> None:
        """Called before the processors of a step run. Counts the step as a fallback if the loop has not taken the logits."""
        self._num_steps += 1
        if not self._is_taken:
            count_fallback(self._reason_of_step or self._unknown_loop())
        self._is_taken = False
        self._reason_of_step = None

    def _unknown_loop(self) -> str:
        return f"the loop of {type(self.model).__name__} does not take the last logits as transformers' loops do"

    def record(self, scores: LazyScores) -> Recorded:
        """The tensor that the loop keeps for the user and chooses from."""
        self._end_record()
        self._recorded = scores.recorded()
        return self._recorded

    def _end_record(self) -> None:
        if type(self._recorded) is Recorded:
            self._recorded.end()
        self._recorded = None

    def close(self) -> None:
        super().close()
        self._end_record()
        # Session and processors refer to each other. Without this they would live until the garbage collector runs.
        self._processors = None
        # No step was counted: the loop is not one of transformers, or does not run this call's processors.
        if not self._num_steps:
            for _ in range(self._num_forwards):
                count_fallback(self._reason or self._unknown_loop())

    def _reason_of_loop(self, config: GenerationConfig) -> str | None:
        mode = mode_of(config)
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
        """Why no kernel serves these logits; None if `self._backend` does."""
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
        k = min(self._options.topk_per_step, rows.shape[-1])
        if type(rows) is ShardedLogits:
            taken: Rows = ShardedRows(rows, self._backend, self._generator)
            if k:
                self.topk.append(taken.log_softmax_topk(k))
        else:
            taken = Rows(rows, self._backend, self._generator)
            if k:
                self.topk.append(functional.log_softmax_topk(rows, k))
        scores = LazyScores.of(taken, of)
        return self.record(scores) if self._records_logits else scores


class Processors(LogitsProcessorList):
    """A loop's processors, which turn lazy scores into lazy scores if all of them can be fused.

    Loops may add some of their own, and change them.
    """

    def __init__(self, session: Session, processors: LogitsProcessorList, is_sampling: bool) -> None:
        super().__init__(processors)
        self._session = session
        self._is_sampling = is_sampling
        self._plan: Plan | None = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self._session.end_step()
        if type(scores) is Recorded:
            scores = scores.end()
        if not isinstance(scores, LazyScores):
            return super().__call__(input_ids, scores, **kwargs)
        if self._plan is None or not self._plan.is_for(self):
            self._plan = Plan(self, self._is_sampling)
        result = scores.processed(self._plan, input_ids, kwargs)
        is_kept = self._session.records_scores and isinstance(result, LazyScores)
        return self._session.record(result) if is_kept else result


def _replace_logits(output: Any, logits: Tensor) -> str | None:
    """Puts the logits into a model's output. Returns None, or why that is impossible."""
    try:
        # Setting an item is quicker than setting an attribute: transformers' ModelOutput then does not walk its fields.
        if isinstance(output, dict):
            output["logits"] = logits
        else:
            output.logits = logits
    # AttributeError: a named tuple, a frozen dataclass, a property without setter. TypeError: a read-only mapping.
    except (AttributeError, TypeError):
        return f"an output that cannot be assigned to, {type(output).__name__}"
    return None
