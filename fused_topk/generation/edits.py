# SPDX-License-Identifier: Apache-2.0
"""transformers' logits processors as sparse edits (:mod:`selection`), one class for each kind of change.

A processor is taken only if its class is exactly one of the table `ADAPTERS`, runs the code it was published with, and
has exactly the attributes known there, with values of the documented types: a subclass, a patched class, or a later
version with a further option is left to the stock operations. Semantics are those of
`transformers/generation/logits_process.py`, equal from 4.57 to 5.24 for what is here.
"""

from __future__ import annotations

import functools
import marshal
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from . import masks
from .selection import Edit, Rows
from .warpers import NORMALIZE, Filter, filters_of


class Ban:
    """Some tokens get the score -inf. `scanned` holds all others."""

    ids = None
    replaces_row = False

    def __init__(self, scanned: Tensor) -> None:
        self.scanned = scanned

    def apply(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores.where(masks.holds(self.scanned, ids), -torch.inf)


class Force:
    """The tokens `ids` [1, n] get the score 0, all others -inf."""

    scanned = None
    replaces_row = True

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def apply(self, ids: Tensor, scores: Tensor) -> Tensor:
        is_forced = (ids.unsqueeze(-1) == self.ids.view(1, 1, -1)).any(-1)
        return torch.zeros_like(scores).where(is_forced, -torch.inf)


class Step(NamedTuple):
    """What an adapter may look at."""

    input_ids: Tensor  # int64 [R, length]
    rows: Rows  # the model's logits
    edits: Sequence[Edit]  # of the processors before
    are_log_probs: bool
    # Some processors call a user's function, which must be called once. By the processor's id(): what the stock operations of
    # this step run in its place.
    answered: dict[int, Any]
    # To be called with a processor that an adapter has called: the processor may have changed its attributes.
    on_call: Callable[[Any], None]


class NotSparse(Exception):
    """In this step a processor does more than an edit can tell. The stock operations must run."""


# Returns a processor's edit in a step; None if it changes nothing.
Adapter = Callable[[Step], "Edit | None"]


class Plan:
    """How the processors of one generate() call are carried out.

    reason: why they cannot be fused; None if they can.
    filters: what the warpers at the end do to the best tokens of each row.
    reason_of_beams: why they cannot be fused in beam search; None if they can.
    """

    def __init__(self, processors: Iterable[Any], is_sampling: bool) -> None:
        self.processors = list(processors)
        self.filters: list[Filter] = []
        self.reason: str | None = None
        self.reason_of_beams: str | None = None
        self._adapters: list[Adapter] = []
        self._states: list[_State] = []
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

    def _on_call(self, called: Any) -> None:
        self._states = [
            _State(processor) if processor is called else state
            for processor, state in zip(self.processors, self._states, strict=True)
        ]


def _name_of(processor: Any) -> str:
    """What a user can look for: of transformers the class, of others the module too."""
    named = processor if isinstance(processor, FunctionType) else type(processor)
    # A function that is made by hand may have none.
    module = named.__module__
    is_stock = not module or module.startswith("transformers.")
    return named.__qualname__ if is_stock else f"{module}.{named.__qualname__}"


class _State:
    """What a processor does, as far as it shows: loops, streamers and criteria may change it between two steps."""

    def __init__(self, processor: Any) -> None:
        self._kind = type(processor)
        self._call: Any = self._kind.__call__
        self._names = list(vars(processor))
        self._values = list(vars(processor).values())
        # Those that can be changed in place, and what would show it.
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
    """What differs after a value has been changed in place; None for what cannot be, or is not looked into."""
    if isinstance(value, Tensor):
        if not value.is_inference():
            return value._version
        return value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.device.type == "cpu" else None
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if not isinstance(value, (list, tuple, dict, set)):
        return None
    try:
        # Of Python's own numbers, at the speed of C. This format is the last one without references, so that equal ones are.
        return marshal.dumps(value, 2)
    except ValueError:
        parts = [*value, *value.values()] if isinstance(value, dict) else list(value)
        return [(id(part), _contents(part)) for part in parts]


def is_as_published(kind: type) -> bool:
    """Whether the class runs the code of the module that defines it, and nobody has patched its __call__."""
    code = getattr(kind.__call__, "__code__", None)
    return code is not None and code.co_filename == getattr(sys.modules.get(kind.__module__), "__file__", None)


def _adapter_of(processor: Any) -> Adapter | None:
    make, known = ADAPTERS.get(type(processor), (None, frozenset()))
    # The table has all attributes, also those of single versions. A processor with any other attribute is unknown.
    if make is None or not vars(processor).keys() <= known or not is_as_published(type(processor)):
        return None
    return make(processor)


def _tokens(value: Any) -> list[int] | None:
    """The tokens that an attribute names. None if it is neither an integer nor a list of integers."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    # An empty list becomes float32.
    is_known = not tensor.numel() or tensor.dtype in (torch.int64, torch.int32)
    return tensor.flatten().tolist() if is_known else None


def _suppress(tokens: Any, applies: Callable[[Step], bool]) -> Adapter | None:
    """The same tokens get -inf in all rows, in the steps where that applies."""
    listed = _tokens(tokens)
    if listed is None:
        return None
    if not listed:
        return lambda step: None
    made: dict[tuple[int, torch.device], Ban] = {}

    def adapter(step: Step) -> Edit | None:
        if not applies(step):
            return None
        key = (step.rows.vocab_size, step.rows.logits.device)
        if key not in made:
            made[key] = Ban(masks.all_but(listed, *key))
        return made[key]

    return adapter


def _min_length(p: Any) -> Adapter | None:
    return _suppress(p.eos_token_id, lambda step: step.input_ids.shape[-1] < p.min_length)


def _min_new_tokens(p: Any) -> Adapter | None:
    return _suppress(p.eos_token_id, lambda step: step.input_ids.shape[-1] - p.prompt_length_to_skip < p.min_new_tokens)


def _suppress_tokens(p: Any) -> Adapter | None:
    return _suppress(p.suppress_tokens, lambda step: True)


def _suppress_tokens_at_begin(p: Any) -> Adapter | None:
    # Whisper moves begin_index between segments.
    return _suppress(p.begin_suppress_tokens, lambda step: step.input_ids.shape[-1] == p.begin_index)


@functools.cache
def _leaves_out_foreign(kind: Any, argument: Any) -> bool:
    """Whether a processor leaves out tokens of the text that the logits have no place for, as later versions do."""
    try:
        kind(argument)(torch.tensor([[2]]), torch.zeros(1, 1))
    except (IndexError, RuntimeError):
        return False
    return True


def text_check(kind: type, argument: Any) -> Callable[[Step], None]:
    """Raises NotSparse where a text has tokens that such a processor may raise for."""
    is_lenient = _leaves_out_foreign(kind, argument)
    is_first = True

    def check(step: Step) -> None:
        nonlocal is_first
        ids = step.input_ids
        # Tokens that were chosen have a place. So on a device only the first step of a call waits for it.
        if is_first or not ids.is_cuda:
            is_first = False
            is_foreign = ids < 0 if is_lenient else (ids < 0) | (ids >= step.rows.vocab_size)
            if bool(is_foreign.any()):
                raise NotSparse("a text with tokens outside the vocabulary")

    return check


def _ban_rows(tokens: Tensor, vocab_size: int) -> Ban:
    """`tokens` [R, n]: what each row may not choose, vocab_size where there is nothing."""
    return Ban(masks.all_but_rows(tokens.sort(-1).values, vocab_size))


def _no_repeat_ngram(p: Any) -> Adapter | None:
    if not isinstance(p.ngram_size, int) or p.ngram_size < 1:
        return None
    check = text_check(stock.NoRepeatNGramLogitsProcessor, 1)

    def adapter(step: Step) -> Edit | None:
        ids, size, vocab_size = step.input_ids, p.ngram_size, step.rows.vocab_size
        if ids.shape[1] < size:
            return None
        check(step)
        ngrams = ids.unfold(1, size, 1)
        # The last tokens begin an n-gram; what has completed it before is banned.
        begun = ids[:, ids.shape[1] + 1 - size :].unsqueeze(1)
        is_match = (ngrams[..., :-1] == begun).all(-1)
        return _ban_rows(ngrams[..., -1].where(is_match, vocab_size), vocab_size)

    return adapter


def _encoder_no_repeat_ngram(p: Any) -> Adapter | None:
    if not isinstance(p.ngram_size, int) or p.ngram_size < 1:
        return None
    ends = [end for text in p.generated_ngrams for ends in text.values() for end in ends]
    made: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def adapter(step: Step) -> Edit | None:
        ids, size, vocab_size = step.input_ids, p.ngram_size, step.rows.vocab_size
        if len(ids) % p.batch_size:
            raise NotSparse("an encoder's texts of other rows")
        if ids.shape[1] + 1 < size or not ends:
            return None
        if not 0 <= min(ends) <= max(ends) < vocab_size:
            raise NotSparse("a text with tokens outside the vocabulary")
        if ids.device not in made:
            made[ids.device] = _ngram_tables(p.generated_ngrams, size, ids.device)
        prefixes, last = (table.repeat_interleave(len(ids) // p.batch_size, 0) for table in made[ids.device])
        begun = ids[:, ids.shape[1] + 1 - size :].unsqueeze(1)
        is_match = (prefixes == begun).all(-1)
        return _ban_rows(last.where(is_match & (last >= 0), vocab_size), vocab_size)

    return adapter


def _ngram_tables(
    ngrams: list[dict[tuple[int, ...], list[int]]], size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The n-grams of each text: beginnings [batch, n, size - 1] and ends [batch, n], -1 where there are fewer."""
    listed = [[(*begin, end) for begin, ends in text.items() for end in ends] for text in ngrams]
    table = torch.full((len(listed), max(1, *map(len, listed)), size), -1)
    for row, text in zip(table, listed, strict=True):
        if text:
            row[: len(text)] = torch.tensor(text)
    return table[..., :-1].to(device), table[..., -1].to(device)


def _forced(tokens: Any, applies: Callable[[Step], bool]) -> Adapter | None:
    listed = _tokens(tokens)
    if not listed:
        return None
    made: dict[torch.device, Force] = {}

    def adapter(step: Step) -> Edit | None:
        if not applies(step):
            return None
        if not 0 <= min(listed) <= max(listed) < step.rows.vocab_size:
            raise NotSparse("a forced token outside the vocabulary")
        device = step.rows.logits.device
        if device not in made:
            made[device] = Force(torch.tensor([listed], device=device))
        return made[device]

    return adapter


def _forced_bos(p: Any) -> Adapter | None:
    return _forced(p.bos_token_id, lambda step: step.input_ids.shape[-1] == 1)


def _forced_eos(p: Any) -> Adapter | None:
    return _forced(p.eos_token_id, lambda step: step.input_ids.shape[-1] == p.max_length - 1)


def _known(*names: str) -> frozenset[str]:
    return frozenset(names)


ADAPTERS: dict[type, tuple[Callable[[Any], Adapter | None], frozenset[str]]] = {
    stock.MinLengthLogitsProcessor: (_min_length, _known("min_length", "eos_token_id")),
    stock.MinNewTokensLengthLogitsProcessor: (
        _min_new_tokens,
        _known("prompt_length_to_skip", "min_new_tokens", "eos_token_id"),
    ),
    stock.SuppressTokensLogitsProcessor: (_suppress_tokens, _known("suppress_tokens")),
    stock.SuppressTokensAtBeginLogitsProcessor: (
        _suppress_tokens_at_begin,
        _known("begin_suppress_tokens", "begin_index"),
    ),
    stock.NoRepeatNGramLogitsProcessor: (_no_repeat_ngram, _known("ngram_size")),
    stock.EncoderNoRepeatNGramLogitsProcessor: (
        _encoder_no_repeat_ngram,
        _known("ngram_size", "batch_size", "generated_ngrams"),
    ),
    stock.ForcedBOSTokenLogitsProcessor: (_forced_bos, _known("bos_token_id")),
    stock.ForcedEOSTokenLogitsProcessor: (_forced_eos, _known("max_length", "eos_token_id")),
}
