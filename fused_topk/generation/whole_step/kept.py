# SPDX-License-Identifier: Apache-2.0
"""Steps of one shape that are kept for later calls: compiled, captured as a CUDA graph, or both.

Such a step reads and writes tensors that stay where they are, the cache and the state of the search, and has one shape.
Shapes are few: prompts, sources and texts are rounded up, prompts with padding before them, sources with padding behind
them, texts with steps that are not taken.

A shape has kinds of step. One does the forward pass and the choice of tokens, one more chooses among those of a mask. Another one does
the forward pass alone, for calls with other processors, with sampling or with scores to be returned.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import functional
from ..choice.edit import NotSparse
from . import compiled, graphs
from .beams import Rules, choose
from .compiled import Bound
from .decoder import Decoder, Prompt
from .head import Head
from .reasons import Declined, said_by
from .texts import choose_tokens

logger = logging.getLogger("fused_topk.generation")

# Of one model. Guesses: a service has few shapes, and the cache of one may be as large as the model.
MAX_SHAPES = 8
MAX_BYTES = 1 << 32
# More beams than that are those of models that add few tokens.
_WIDE = 32


class NotKept(Exception):
    """Raised if a step cannot be compiled or captured. The message gives the reason, and the call runs without."""


class Way(NamedTuple):
    """How the steps of a call are to run."""

    is_compiled: bool
    is_captured: bool

    @staticmethod
    def on(device: torch.device, whole_step: bool | str | None) -> Way | None:
        """None where nothing is kept.

        Args:
            whole_step: None for a step that is captured, where that can be. True for one that is compiled elsewhere.
                "compiled" for both. "eager" for neither.
        """
        is_captured = graphs.is_cuda(device)
        if whole_step == "eager" or (whole_step is None and not is_captured):
            return None
        return Way(whole_step == "compiled" or not is_captured, is_captured)

    def and_simpler(self) -> list[Way]:
        """This one, and what is tried where it fails: some models are captured that are not compiled in one piece."""
        return [self, Way(False, True)] if all(self) else [self]

    def __str__(self) -> str:
        return " and ".join(name for name, is_so in zip(("compiled", "captured"), self, strict=True) if is_so)


class Shape(NamedTuple):
    """What a step is made for."""

    batch: int
    prompt: int
    source: int | None  # of what an encoder has read
    rules: Rules  # with the room rounded up
    device: torch.device
    way: Way
    # Tensors of that mode cannot be written outside of it.
    is_inference: bool

    @staticmethod
    def of(prompt: Prompt, rules: Rules, way: Way) -> Shape:
        (batch, length), source = prompt.ids.shape, None
        if prompt.source is not None:
            source = prompt.source.hidden.shape[1]
            # Without a mask there is no padding.
            source = source if prompt.source.is_text is None else rounded_up(source)
        # A place for a new token is one for each beam.
        rounded = rules._replace(room=rounded_up(rules.room, 4 if rules.beams > _WIDE else 16))
        mode = torch.is_inference_mode_enabled()
        return Shape(batch, rounded_up(length), source, rounded, prompt.ids.device, way, mode)

    def serves(self, other: Shape) -> bool:
        """Whether a step of this shape does what is asked of the other, with at most four times the room."""
        is_same = self == other._replace(rules=other.rules._replace(room=self.rules.room))
        return is_same and other.rules.room <= self.rules.room <= 4 * other.rules.room


def rounded_up(length: int, least: int = 16) -> int:
    """The length rounded up to 16, 24, 32, 48, 64, and so on: to less than half as much again, from 16 on.

    Args:
        least: the first of them, a power of two.
    """
    size = least
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


class KeptStep:
    """The steps of one shape. Serve one call at a time.

    goes_on: bool [], whether the search does.
    """

    def __init__(self, twin: Any, head: Head | None, shape: Shape) -> None:
        rules, device = shape.rules, shape.device
        if head is not None and not head.serves(shape.batch * rules.beams, 1 if rules.beams == 1 else rules.kept):
            head = None
        self._head = head
        self.decoder = Decoder(
            twin,
            shape.batch,
            shape.prompt,
            rules.beams,
            rules.room - 1,
            device,
            shape.source,
            is_kept=True,
            headless=None if head is None else head.headless,
        )
        self.shape = shape
        # How many tokens there are; where the last of them is.
        self.count = torch.ones(1, dtype=torch.int64, device=device)
        self._last = torch.zeros(1, dtype=torch.int64, device=device)
        self._state: Any = None
        self._constants: Any = None
        self._tokens = torch.zeros(shape.batch, rules.beams, dtype=torch.int64, device=device)
        self._parents = torch.zeros(shape.batch, rules.beams, rules.room, dtype=torch.int64, device=device)
        # int32 [batch, beams, W], or [batch, W] without beams: which tokens may come next, for steps that ask.
        self._mask: Tensor | None = None
        # With that mask, and without.
        self._advance: dict[bool, Callable[[], Any]] = {}
        self._read: Callable[[], Any] | None = None
        self._graph_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of the cache and of the graphs' own memory."""
        return self.decoder.num_bytes + self._graph_bytes

    @property
    def state(self) -> Any:
        """The state of the search. The next call writes over it."""
        return self._state

    @property
    def goes_on(self) -> Tensor:
        flag: Tensor = self._state.goes_on
        return flag

    def begin(self, state: Any, constants: Any, last: int) -> None:
        """Starts a search with its first token.

        Args:
            state: of the search.
            constants: of its choices.
            last: which of the new tokens is the last one, from 0 on.
        """
        if self._state is None:
            self._state, self._constants = _copies(state), _copies(constants)
        _write((self._state, self._constants), (state, constants))
        self.count.fill_(1)
        self._last.fill_(last)

    def end_with(self, token: int) -> None:
        """Makes one of the new tokens the last one, counted from 0 on."""
        self._last.fill_(token)

    def advance(self, mask: Tensor | None = None) -> None:
        """Goes on by one token.

        Args:
            mask: int32 [batch, beams, W], or [batch, W] without beams: which tokens it may be; None for any.
        """
        has_mask = mask is not None
        if mask is not None:
            if self._mask is None:
                self._mask = torch.empty_like(mask)
            self._mask.copy_(mask)
        if has_mask in self._advance:
            self._advance[has_mask]()
            return
        is_late = graphs.is_cuda(self.shape.device)
        rules, kept_mask = self.shape.rules, self._mask if has_mask else None
        args = (
            self.decoder,
            self._head,
            rules,
            kept_mask,
            self._state,
            self._constants,
            self.count,
            self._last,
            is_late,
        )
        if not self.shape.way.is_captured:
            # Made by running it.
            self._advance[has_mask] = self._made(_advance, args)
            return
        # Steps that are tried before one is captured change nothing, as steps after the end.
        goes_on = self.goes_on.clone()
        self.goes_on.fill_(False)
        self._advance[has_mask] = self._made(_advance, args)
        self.goes_on.copy_(goes_on)
        self._advance[has_mask]()

    def read_prompt(self, prompt: Prompt) -> Tensor:
        return self.decoder.read_prompt(prompt)

    def read(self, tokens: Tensor, parents: Tensor, step: Tensor, shown: int) -> Tensor:
        """The logits of these tokens, as :meth:`Decoder.read` gives them; the next call writes over them."""
        self._tokens.copy_(tokens.view_as(self._tokens))
        self._parents[:, :, : parents.shape[2]] = parents
        self.count.copy_(step)
        if self._read is None:
            args = (self.decoder, self._tokens, self._parents, self.count)
            self._read = self._made(_read, args)
        logits: Tensor = self._read()
        return logits

    def _made(self, function: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
        """What runs the function on the arguments, on which it has run at least once."""
        started = time.perf_counter()
        ways: list[Callable[[], Any]] = [Bound(function, args)]
        if self.shape.way.is_compiled:
            ways = compiled.ways(function, args, id(self))
        for number, run in enumerate(ways, 1):
            try:
                run()
                if self.shape.way.is_captured:
                    graph = graphs.Graph(run, self.shape.device)
                    self._graph_bytes += graph.num_bytes
                    run = _Replay(graph)
                break
            # Of the compiler, of the C++ compiler that it runs, or of the capture: whatever it is, the call runs without.
            except Exception as error:
                if number == len(ways):
                    raise NotKept(f"what is to be {self.shape.way} raises {said_by(error)}") from error
        self._tell(time.perf_counter() - started)
        return run

    def _tell(self, seconds: float) -> None:
        shape = self.shape
        logger.warning(
            "fused_topk: a step of %d x %d beams, with up to %d + %d tokens, was %s in %.1f s, for later calls, too",
            shape.batch,
            shape.rules.beams,
            shape.prompt,
            shape.rules.room,
            shape.way,
            seconds,
        )


class _Replay:
    def __init__(self, graph: graphs.Graph) -> None:
        self._graph = graph

    def __call__(self) -> Any:
        self._graph.replay()
        return self._graph.output


def _advance(
    decoder: Decoder,
    head: Head | None,
    rules: Rules,
    mask: Tensor | None,
    state: Any,
    constants: Any,
    step: Tensor,
    last: Tensor,
    is_late: bool,
) -> None:
    before, are_last = step - 1, step >= last
    if rules.beams == 1:
        args = state.tokens.index_select(1, before), constants.parents, before, decoder.room
        if head is None:
            chosen = functional.topk(decoder.read(*args), 1, mask=mask).indices.squeeze(1)
        else:
            chosen = head.greatest(decoder.read_states(*args), mask)
        after: Any = choose_tokens(state, constants, chosen, step, are_last)
    else:
        tokens = state.running.tokens.index_select(2, before).squeeze(2)
        args = tokens, state.running.parents, before, decoder.room
        if head is None:
            logits = decoder.read(*args)
            vocab_size = logits.shape[-1]
            of_beams = logits.view(-1, rules.beams, vocab_size)
            scores, indices, _ = functional.beam_topk(
                of_beams, state.running.scores, rules.kept, mask=mask, normalize="all"
            )
        else:
            vocab_size = len(head.weight)
            mask = None if mask is None else mask.flatten(0, 1)
            scores, indices = head.continuations(decoder.read_states(*args), state.running.scores, rules.kept, mask)
        after = choose(state, rules, constants, scores, indices, vocab_size, step, are_last)
    if is_late:
        after = unless_over(state, after)
        step.add_(state.goes_on)
    else:
        step.add_(1)
    _write(state, after)


def _read(decoder: Decoder, tokens: Tensor, parents: Tensor, step: Tensor) -> Tensor:
    return decoder.read(tokens, parents, step, decoder.room)


def unless_over(before: Any, after: Any) -> Any:
    """`after`, but for a search that does not go on: then it stays as it was."""
    return _mapped(lambda one, other: torch.where(before.goes_on, other, one), before, after)


def _mapped(function: Callable[..., Tensor], *of: Any) -> Any:
    """A named tuple of what the function makes of the tensors in such named tuples, which may be in each other."""
    if isinstance(of[0], Tensor):
        return function(*of)
    return type(of[0])(*(_mapped(function, *each) for each in zip(*of, strict=True)))


def _copies(value: Any) -> Any:
    return _mapped(torch.clone, value)


def _write(to: Any, of: Any) -> None:
    if isinstance(to, Tensor):
        to.copy_(of)
        return
    for each, other in zip(to, of, strict=True):
        _write(each, other)


class Store:
    """The steps that are kept of one model."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Shape, KeptStep] = OrderedDict()
        self._used: set[Shape] = set()
        self._failed: dict[Shape, str] = {}
        self._lock = threading.Lock()

    @contextmanager
    def step(self, twin: Any, head: Head | None, shape: Shape) -> Iterator[KeptStep]:
        """Lends one call the step of a shape, or one that has been made for longer texts.

        Raises:
            NotKept: another call uses it, or it could not be made before.
        """
        with self._lock:
            longer = [each for each in self._kept if each.serves(shape)]
            shape = min(longer, key=lambda each: each.rules.room, default=shape)
            if shape in self._failed:
                raise NotKept(self._failed[shape])
            if shape in self._used:
                raise NotKept("another call of the same shape runs")
            self._used.add(shape)
            step = self._kept.pop(shape, None)
        try:
            step = KeptStep(twin, head, shape) if step is None else step
            try:
                yield step
            # Of this call: the next one may not raise it.
            except (Declined, NotSparse):
                self._keep(shape, step)
                raise
            self._keep(shape, step)
        except NotKept as error:
            self._failed[shape] = str(error)
            raise
        finally:
            self._used.discard(shape)

    def _keep(self, shape: Shape, step: KeptStep) -> None:
        with self._lock:
            self._kept[shape] = step
            while len(self._kept) > MAX_SHAPES or (
                len(self._kept) > 1 and sum(each.num_bytes for each in self._kept.values()) > MAX_BYTES
            ):
                self._kept.popitem(last=False)

    def __len__(self) -> int:
        return len(self._kept)
