# SPDX-License-Identifier: Apache-2.0
"""The logits processors of a generate() call as edits (`choice/edit.py`).

A processor is taken only if its class is exactly one of the table `ADAPTERS`, runs the code it was published with, and
has exactly the attributes known there, with values of the documented types: a subclass, a patched class, or a later
version with a further option is left to the stock operations. Semantics are those of
`transformers/generation/logits_process.py`, equal from 4.57 to 5.24 for what is here.
"""

from __future__ import annotations

import marshal
import operator
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from ..choice.edit import Edit
from ..choice.rows import Rows
from ..choice.warping import NORMALIZE, Filter
from . import bans, biases, constraints, grammars, penalties, timestamps, tries
from .adapter import Adapter, Adapters, Step, is_as_published
from .warpers import filters_of

ADAPTERS: Adapters = {
    kind: adapter
    for of in (bans, penalties, biases, constraints, timestamps, tries)
    for kind, adapter in of.ADAPTERS.items()
}


def reason_against(processors: Any) -> str | None:
    """Why a plan cannot stand for a loop's list of processors; None if it can."""
    if type(processors) is LogitsProcessorList and is_as_published(LogitsProcessorList):
        return None
    return f"logits processors in a {type(processors).__name__}"


class Plan:
    """How the processors of one generate() call are carried out.

    reason: why the processors cannot be fused; None if they can.
    filters: what the warpers at the end do to the best tokens of each row.
    reason_of_beams: why they cannot be fused in beam search; None if they can.
    asks_host: whether one of them looks at texts on the host. It waits for the GPU at each token, and must not see the tokens of
        steps that run after the end.
    is_known: whether all of them are edits, or warpers behind them.
    is_called_once: whether one of them must be called exactly once in a step, as one that is not known.

    Args:
        has_beams: whether scores are log-probabilities of beams.
    """

    def __init__(self, processors: Iterable[Any], is_sampling: bool, has_beams: bool = False) -> None:
        self.processors = list(processors)
        self.filters: list[Filter] = []
        self.reason: str | None = None
        self.reason_of_beams: str | None = None
        self._adapters: list[Adapter] = []
        self._states: list[_State] = []
        self._read(is_sampling)
        self.is_known = self.reason is None and not (has_beams and self.reason_of_beams)
        self.is_called_once = not self.is_known or any(map(grammars.is_grammar, self.processors))
        self.asks_host = self.is_called_once or any(
            isinstance(each, PrefixConstrainedLogitsProcessor) for each in self.processors
        )

    def _read(self, is_sampling: bool) -> None:
        for processor in self.processors:
            reason = f"logits processor {_name_of(processor)}"
            filters = filters_of(processor) if is_as_published(type(processor)) else None
            if filters is not None and NORMALIZE not in self.filters:
                self.filters += filters
                if not is_sampling and filters != [NORMALIZE]:
                    self.reason_of_beams = self.reason_of_beams or reason
                continue
            adapter = _adapter_of(processor)
            if adapter is None or self.filters:
                self.reason = reason
                return
            if grammars.is_grammar(processor):
                self.reason_of_beams = self.reason_of_beams or reason
            self._adapters.append(adapter)
        self._states = [_State(processor) for processor in self.processors]

    def is_for(self, processors: list[Any]) -> bool:
        """Whether these are the same processors, and none of them has been changed since."""
        return (
            len(processors) == len(self.processors)
            and all(map(operator.is_, processors, self.processors))
            and all(state.is_of(processor) for state, processor in zip(self._states, processors, strict=False))
        )

    def edits(
        self, input_ids: Tensor, rows: Rows, are_log_probs: bool, answered: dict[int, Any] | None = None
    ) -> list[Edit]:
        """What the processors do in a step, without the warpers at the end.

        Args:
            answered: gets :attr:`Step.answered`.

        Raises:
            NotSparse: the stock operations must run in this step.
        """
        edits: list[Edit] = []
        answered = {} if answered is None else answered
        for adapter in self._adapters:
            edit = adapter(Step(input_ids, rows, edits, are_log_probs, answered, self._on_call))
            if edit is not None:
                if edit.replaces_row:
                    edits.clear()
                edits.append(edit)
        return edits

    def run_stock(self, input_ids: Any, scores: Tensor, answered: dict[int, Any], **kwargs: Any) -> Any:
        """The processors themselves on all scores [R, V], with what `answered` has in the place of some of them.

        Args:
            kwargs: further arguments that a loop hands to its processors.
        """
        processors = LogitsProcessorList(answered.get(id(each), each) for each in self.processors)
        return processors(input_ids, scores, **kwargs)

    def _on_call(self, called: Any) -> None:
        self._states = [
            _State(processor) if processor is called else state
            for processor, state in zip(self.processors, self._states, strict=True)
        ]


def _name_of(processor: Any) -> str:
    """A name that a user can look for. For processors of transformers the class, for any other one also its module."""
    named = processor if isinstance(processor, FunctionType) else type(processor)
    # A function that is made by hand may have no module.
    module = named.__module__
    is_stock = not module or module.startswith("transformers.")
    return named.__qualname__ if is_stock else f"{module}.{named.__qualname__}"


class _State:
    """What can be seen of a processor's state. Loops, streamers and criteria may change it between two steps."""

    def __init__(self, processor: Any) -> None:
        self._kind = type(processor)
        self._call: Any = self._kind.__call__
        self._names = list(vars(processor))
        self._values = list(vars(processor).values())
        # The values that can be changed in place, with their contents now.
        found = [(value, _contents(value)) for value in self._values]
        self._contents = [(value, contents) for value, contents in found if contents is not None]

    def is_of(self, processor: Any) -> bool:
        kind, attributes = type(processor), vars(processor)
        return (
            kind is self._kind
            and kind.__call__ is self._call
            and list(attributes) == self._names
            and all(map(operator.is_, attributes.values(), self._values))
            and all(_contents(value) == contents for value, contents in self._contents)
        )


def _contents(value: Any) -> Any:
    """Something that differs once the value has been changed in place; None if it cannot be, or is not looked into."""
    if isinstance(value, Tensor):
        if not value.is_inference():
            return value._version
        return value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.device.type == "cpu" else None
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if not isinstance(value, (list, tuple, dict, set)):
        return None
    try:
        # Fast for Python's own numbers. Format 2 is the last one without references, so equal values give equal bytes.
        return marshal.dumps(value, 2)
    except ValueError:
        parts = [*value, *value.values()] if isinstance(value, dict) else list(value)
        return [(id(part), _contents(part)) for part in parts]


def _adapter_of(processor: Any) -> Adapter | None:
    found = ADAPTERS.get(type(processor)) or grammars.ADAPTERS.get(grammars.name_of(processor))
    make, known = found or (None, frozenset())
    # The table has all attributes, also those of single versions. A processor with any other attribute is unknown.
    if make is None or not vars(processor).keys() <= known or not is_as_published(type(processor)):
        return None
    return make(processor)
