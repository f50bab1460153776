# SPDX-License-Identifier: Apache-2.0
"""Searches with one compiled call a token, for the forward pass, the choice, and all around them.

Compiled code is of one shape. Shapes are few: prompts and texts are rounded up, prompts with padding before them, texts
with steps that are not taken. What is compiled is kept for later calls of the same shape, with its cache.
"""

from __future__ import annotations

import logging
import threading
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import functional
from .beams import Beams, Constants, Rules, at_first, choose
from .decoder import Decoder, Prompt

logger = logging.getLogger("fused_topk.generation")

# Of one model. Guesses: a service has few shapes, and the cache of one may be as large as the model.
MAX_SHAPES = 8
MAX_BYTES = 1 << 32


class NotCompiled(Exception):
    """The call is to run without, for the reason that this names."""


class Shape(NamedTuple):
    """What a step is compiled for."""

    batch: int
    prompt: int
    source: int | None  # of what an encoder has read
    rules: Rules  # with the room rounded up
    device: torch.device

    @staticmethod
    def of(prompt: Prompt, rules: Rules) -> Shape:
        (batch, length), device = prompt.ids.shape, prompt.ids.device
        source = None
        if prompt.source is not None:
            source = prompt.source.hidden.shape[1]
            # Without a mask there is no padding.
            source = source if prompt.source.is_text is None else rounded_up(source)
        return Shape(batch, rounded_up(length), source, rules._replace(room=rounded_up(rules.room)), device)


def rounded_up(length: int) -> int:
    """To 16, 24, 32, 48, 64, and so on: to less than half as much again, from 16 on."""
    size = 16
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


class Step:
    """The compiled step of one shape. Serves one call at a time."""

    def __init__(self, twin: Any, shape: Shape) -> None:
        rules = shape.rules
        self.decoder = Decoder(
            twin, shape.batch, shape.prompt, rules.beams, rules.room - 1, shape.device, shape.source, is_kept=True
        )
        self.shape = shape
        # Compiled code is kept by the code of the function, at most eight of one. This is a function of its own.
        advance = _advance_greedy if rules.beams == 1 else _advance_beams
        code = advance.__code__.replace(co_name=f"{advance.__name__}_{id(self)}")
        self._advance: Callable[..., Any] = torch.compile(types.FunctionType(code, globals()), dynamic=False)
        self._is_new = True

    def __call__(self, state: Any, constants: Any, step: Tensor, are_last: Tensor) -> Any:
        """The state after one more token; `step` is int64 [1], which one, from 1 on."""
        if self._is_new:
            return self._compiled(state, constants, step, are_last)
        return self._advance(self.decoder, self.shape.rules, state, constants, step, are_last)

    def _compiled(self, *args: Any) -> Any:
        started = time.perf_counter()
        try:
            found = self._advance(self.decoder, self.shape.rules, *args)
        # Of the compiler, or of the C++ compiler that it runs: whatever it is, the step runs without.
        except Exception as error:
            raise NotCompiled(f"torch.compile raises {type(error).__name__}") from error
        self._is_new = False
        rules = self.shape.rules
        logger.warning(
            "fused_topk: a step of %d x %d beams, with up to %d + %d tokens, was compiled in %.1f s, for later calls, too",
            self.shape.batch,
            rules.beams,
            self.shape.prompt,
            rules.room,
            time.perf_counter() - started,
        )
        return found


def _advance_beams(
    decoder: Decoder, rules: Rules, beams: Beams, constants: Constants, step: Tensor, are_last: Tensor
) -> Beams:
    before = step - 1
    tokens = beams.running.tokens.index_select(2, before).squeeze(2)
    logits = decoder.read(tokens, beams.running.parents, before, decoder.room)
    return best_beams(rules, beams, constants, logits, step, are_last)


def best_beams(
    rules: Rules, beams: Beams, constants: Constants, logits: Tensor, step: Tensor, are_last: Tensor
) -> Beams:
    """The choice from the logits [batch * beams, V]."""
    vocab_size = logits.shape[-1]
    of_beams = logits.view(-1, rules.beams, vocab_size)
    found = functional.beam_topk(of_beams, beams.running.scores, rules.kept, normalize="all")
    return choose(beams, rules, constants, found.values, found.indices, vocab_size, step, are_last)


class Texts(NamedTuple):
    """What greedy search holds between two tokens."""

    tokens: Tensor  # int64 [batch, room]
    has_ended: Tensor  # bool [batch]


class Padding(NamedTuple):
    """What it needs of the call."""

    ends: Tensor  # int64 [n]
    padding: Tensor  # int64 [1]
    parents: Tensor  # int64 [batch, 1, room], zeros: no beam has another's past


def _advance_greedy(
    decoder: Decoder, rules: Rules, texts: Texts, constants: Padding, step: Tensor, are_last: Tensor
) -> Texts:
    before = step - 1
    logits = decoder.read(texts.tokens.index_select(1, before), constants.parents, before, decoder.room)
    return best_texts(texts, constants, logits, step)


def best_texts(texts: Texts, constants: Padding, logits: Tensor, step: Tensor) -> Texts:
    """The choice from the logits [batch, V]."""
    chosen = functional.topk(logits, 1).indices.squeeze(1)
    chosen = torch.where(texts.has_ended, constants.padding, chosen)
    return Texts(
        texts.tokens.index_copy(1, step, chosen[:, None]), texts.has_ended | torch.isin(chosen, constants.ends)
    )


def first_beams(step: Step, prompt: Prompt, room: int) -> tuple[Beams, Constants]:
    """The state of the beams with their first token."""
    rules, device = step.shape.rules, step.shape.device
    constants = Constants.of(rules, room, device)
    logits = step.decoder.read_prompt(prompt).repeat_interleave(rules.beams, 0)
    first, are_last = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([room == 1], device=device)
    return best_beams(rules, at_first(rules, step.shape.batch, device), constants, logits, first, are_last), constants


def first_texts(step: Step, prompt: Prompt, padding: int | None) -> tuple[Texts, Padding]:
    """The state of greedy search with the first token."""
    batch, rules, device = step.shape.batch, step.shape.rules, step.shape.device
    constants = Padding(
        torch.tensor(rules.ends, dtype=torch.int64, device=device),
        torch.tensor([padding or 0], device=device),
        torch.zeros(batch, 1, rules.room, dtype=torch.int64, device=device),
    )
    none = Texts(
        torch.zeros(batch, rules.room, dtype=torch.int64, device=device),
        torch.zeros(batch, dtype=torch.bool, device=device),
    )
    first = torch.zeros(1, dtype=torch.int64, device=device)
    return best_texts(none, constants, step.decoder.read_prompt(prompt), first), constants


class Store:
    """The compiled steps of one model."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Shape, Step] = OrderedDict()
        self._used: set[Shape] = set()
        self._failed: dict[Shape, str] = {}
        self._lock = threading.Lock()

    @contextmanager
    def step(self, twin: Any, shape: Shape) -> Iterator[Step]:
        """That of a shape, for one call.

        Raises:
            NotCompiled: another call uses it, or it could not be compiled before.
        """
        with self._lock:
            if shape in self._failed:
                raise NotCompiled(self._failed[shape])
            if shape in self._used:
                raise NotCompiled("another call of the same shape runs")
            self._used.add(shape)
            step = self._kept.pop(shape, None)
        try:
            step = Step(twin, shape) if step is None else step
            yield step
            self._keep(shape, step)
        except NotCompiled as error:
            self._failed[shape] = str(error)
            raise
        finally:
            self._used.discard(shape)

    def _keep(self, shape: Shape, step: Step) -> None:
        with self._lock:
            self._kept[shape] = step
            while len(self._kept) > MAX_SHAPES or (
                len(self._kept) > 1 and sum(each.decoder.num_bytes for each in self._kept.values()) > MAX_BYTES
            ):
                self._kept.popitem(last=False)

    def __len__(self) -> int:
        return len(self._kept)
