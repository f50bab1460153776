# SPDX-License-Identifier: Apache-2.0
"""Steps of one shape that are kept for later calls: compiled, captured as a CUDA graph, or both.

Such a step reads and writes tensors that stay where they are, the cache and the state of the search, and has one shape.
Shapes are few: prompts and sources are rounded up, prompts with padding before them, sources with padding behind them.

The room for new tokens is no part of the shape. It grows in a call as its texts do (:mod:`room`), and the tensors with it. Where an
earlier call had more room, a step looks only at the first places of the tensors. On a GPU a step is captured for each size of room.

Compiled code serves all batches, lengths and sizes of room, on a CPU all numbers of beams, too. So few shapes need code of their own, and
the code is kept when the tensors and graphs of a shape are dropped.

A captured shape has three kinds of step. One does the forward pass and the choice of tokens. The second does the same, and chooses among
the tokens of a mask. The third does the forward pass alone, for calls with other processors, with sampling or with scores to be returned.
On a CPU there is the third alone. With the choice, code took 1.4 times as long to compile, and was another for each kind of choice; steps
took 1.65 and 3.33 ms, greedy and with 4 beams, not 1.85 and 3.65 (two threads of a shared Xeon, Llama of 2 layers, 32,000 tokens).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import graphs, layers
from .compiled import Codes, OneGraph
from .decoder import Decoder
from .head import Head, choose
from .parallel import all_say
from .reasons import raise_if_from_a_signal, said_by
from .row_form import decoder_of
from .shape import Shape
from .texts import Texts

logger = logging.getLogger("fused_topk.generation")


class NotKept(Exception):
    """Raised if a step cannot be compiled or captured. The message gives the reason, and the call runs without."""


class KeptStep:
    """The steps of one shape. They serve one call at a time.

    Attributes:
        head: the LM head that chooses tokens from hidden states; None where it chooses from logits.
        state: of the search. The next call writes over it.
        count: int64 [1], how many new tokens there are.
        last: int64 [1], the number of the one that ends every text, from 0 on.
    """

    def __init__(self, twin: Any, head: Head | None, shape: Shape, codes: Codes, group: Any = None) -> None:
        device, is_greedy = shape.device, shape.beams == 1
        # Layers that are compiled by themselves are those of the twin with its head.
        for_steps = None
        if all(shape.way):
            for_steps = layers.apart(twin, layers.compiled(codes.of(layers.called, shape.of_layers())))
        if head is not None and (
            for_steps or not head.serves(shape.batch * shape.beams, 1 if is_greedy else shape.kept)
        ):
            head = None
        self.head = head
        if not shape.way.is_captured and head is not None:
            # The choice is no part of the step.
            for_steps = head.headless
        self._group = group
        of_shape = shape.batch, shape.prompt, shape.beams, device, shape.source
        self.decoder = decoder_of(twin)(twin, *of_shape, is_kept=True, for_steps=for_steps)
        self.shape = shape
        self.count = torch.ones(1, dtype=torch.int64, device=device)
        self.last = torch.zeros(1, dtype=torch.int64, device=device)
        self.state: Any = None
        self._constants: Any = None
        self._tokens = torch.zeros(shape.batch, shape.beams, dtype=torch.int64, device=device)
        # Without beams there are no parents.
        self._parents = (
            None if is_greedy else torch.zeros(shape.batch, shape.beams, 1, dtype=torch.int64, device=device)
        )
        # int32 [batch, beams, W], or [batch, W] without beams: which tokens may come next, for steps with a mask.
        self._mask: Tensor | None = None
        # For how many new tokens there is room.
        self._size = 0
        # Its length is the number of new tokens to look at. A tensor, because compiled code is the same for all sizes of tensors, but
        # not for all numbers.
        self._shown = torch.empty(0, device=device)
        # Of a compiled step: see Decoder.prepared.
        self._prepared: tuple[Tensor, ...] = ()
        self._codes = codes
        # A function that runs a kind of step, by the name of the kind and by the room.
        self._runs: dict[tuple[str, int], Callable[[], Any]] = {}
        self._graphs: list[graphs.Graph] = []

    @property
    def made(self) -> tuple[Any, ...]:
        """Which steps have been made, and for how much room: whether a process must make a step before it runs."""
        return sorted(self._runs), self.decoder.capacity, self.state is None, self._mask is None

    @property
    def num_bytes(self) -> int:
        """The bytes of the cache and of the graphs' own memory."""
        return self.decoder.num_bytes + sum(graph.num_bytes for graph in self._graphs)

    def open(self, size: int) -> int:
        """Makes room for `size` new tokens, or for more where a step with more has been captured. Returns for how many.

        What has been read and chosen stays, unless there is less room than before. Then a call must begin.
        """
        if self.shape.way.is_captured:
            size = min((made for _, made in self._runs if size <= made <= 4 * size), default=size)
        # Compiled code has one place more than attention ever looks at: to read all of a tensor needs other code.
        spare = 0 if self.shape.way.is_captured else 1
        if size + spare > self.decoder.capacity:
            # These read and write the tensors of the old size.
            self._runs.clear()
            self._graphs.clear()
            if self.state is not None:
                self.state = self.state.with_room(size)
            if self._parents is not None:
                shape = *self._tokens.shape, size + spare
                self._parents = torch.zeros(shape, dtype=torch.int64, device=self.shape.device)
        self.decoder.open(size + spare)
        # The last of the new tokens is not read.
        self._shown = torch.empty(size - 1, device=self.shape.device)
        self._size = size
        return size

    def begin(self, state: Any, constants: Any, last: int) -> None:
        """Starts a search with its first token. Args: constants: of its choices. last: see the class."""
        state = state.with_room(self.decoder.capacity)
        if self.state is None:
            self.state, self._constants = (_mapped(torch.clone, each) for each in (state, constants))
        _write((self.state, self._constants), (state, constants))
        self.count.fill_(1)
        self.last.fill_(last)

    def advance(self, mask: Tensor | None = None, by_operations: bool = False) -> None:
        """Goes on by one token, which the mask allows: int32 [batch, beams, W], or [batch, W] without beams. `by_operations` says
        whether to run one operation after another, because the step could not be made."""
        if mask is not None:
            if self._mask is None:
                self._mask = torch.empty_like(mask)
            self._mask.copy_(mask)
        kind = "advance" if mask is None else "advance among those of a mask"
        run = self._runs.get((kind, self._size))
        if run is not None:
            run()
            return
        given = None if mask is None else self._mask
        args = self.decoder, self.head, given, self.state, self._constants, self.count, self.last, len(self._shown)
        if by_operations:
            graphs.Bound(_advance, args)()
            return
        # Before a capture the step runs for trial. Like a step after the end it must change nothing.
        goes_on = self.state.goes_on.clone()
        self.state.goes_on.fill_(False)
        try:
            run = self._make(kind, _advance, args)
        finally:
            self.state.goes_on.copy_(goes_on)
        run()

    def rest(self) -> None:
        """Lets go of the model's weights, which are the inputs of compiled code. The next call finds the code again."""
        if not self.shape.way.is_captured:
            self._runs.clear()

    def read(self, tokens: Tensor, parents: Tensor | None, step: Tensor, shown: int) -> Tensor:
        """The logits of these tokens, as :meth:`Decoder.read` gives them; the next call writes over them.

        On a CPU these are the hidden states that the head chooses from, where there is one.
        """
        self._tokens.copy_(tokens.view_as(self._tokens))
        if self._parents is not None and parents is not None:
            # The parents beyond belong to no token yet.
            self._parents[:, :, :shown] = parents[:, :, :shown]
        self.count.copy_(step)
        logits: Tensor = self._run_of_read()()
        return logits

    def _run_of_read(self) -> Callable[[], Any]:
        """What does the forward pass. On a CPU the rest is done here: it is no part of compiled code, which serves any number of beams."""
        run, args = self._runs.get(("read", self._size)), (self._parents, self.count, len(self._shown))
        if self.shape.way.is_captured:
            return run or self._make("read", self.decoder.read, (self._tokens, *args))
        prepared = self.decoder.prepared(*args)
        if run is not None:
            _write(self._prepared, prepared)
            return run
        self._prepared = prepared
        return self._make("read", _forward, (self.decoder, self._tokens.view(-1, 1), self.count, self._shown, prepared))

    def _make(self, kind: str, function: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
        """Makes and keeps what runs the function on the arguments. The function has then run at least once."""
        shape, started, number = self.shape, time.perf_counter(), len(self._codes)
        run: Callable[[], Any]
        try:
            if shape.way.is_captured:
                bound = graphs.Bound(function, args)
                with self.decoder.with_padded_source():
                    bound()
                    self._graphs.append(self._captured(bound))
                run = self._graphs[-1].replay
            else:
                self.decoder.let_sizes_vary(*args[1:])
                of_code = shape.of_code(self.decoder.shares_code)
                run = OneGraph(self._codes.of(function, (of_code, self.head is None)), args)
                run()
        # An error of torch.compile, of the C++ compiler, or of the capture. Whatever it is, the call runs without.
        except Exception as error:
            raise_if_from_a_signal(error)
            raise NotKept(f"a step that is to be {shape.way} raises {said_by(error)}") from error
        if shape.way.is_captured or len(self._codes) > number:
            # To compile takes long, so the user should know why. A capture is quick.
            logger.log(
                logging.WARNING if shape.way.is_compiled else logging.INFO,
                "fused_topk: a step of %d x %d beams, with up to %d + %d tokens, was %s in %.1f s, for later calls, too",
                *(shape.batch, shape.beams, shape.prompt, self._size, shape.way, time.perf_counter() - started),
            )
        self._runs[kind, self._size] = run
        return run

    def _captured(self, run: Callable[[], Any]) -> graphs.Graph:
        """A graph of the run. For a tensor-parallel model all processes have one, or all raise."""
        graph = None
        error: Exception = RuntimeError("a capture on another process")
        try:
            graph = graphs.Graph(run, self.shape.device, self._graphs[0] if self._graphs else None)
        except Exception as raised:
            error = raised
        are_all = self._group is None or all_say(graph is not None, self.shape.device, self._group)
        if graph is None or not are_all:
            raise error
        return graph


# No method: a graph that held the step that holds it would be a cycle, in which weights live on until Python collects it.
def _advance(
    decoder: Decoder,
    head: Head | None,
    mask: Tensor | None,
    state: Any,
    constants: Any,
    step: Tensor,
    last: Tensor,
    shown: int,
) -> None:
    before, texts = step - 1, state if isinstance(state, Texts) else state.running
    tokens, parents = texts.tokens.index_select(-1, before).squeeze(-1), getattr(texts, "parents", None)
    twin = decoder.for_steps if head is None else head.headless
    read = decoder.read_by(twin, tokens, parents, before, shown)
    after = choose(head, state, constants, read, mask, step, step >= last)
    step.add_(state.goes_on)
    _write(state, unless_over(state, after))


def _forward(decoder: Decoder, tokens: Tensor, step: Tensor, shown: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
    return decoder.forward(decoder.for_steps, tokens, step, shown.shape[0], prepared)


def unless_over(before: Any, after: Any) -> Any:
    """`after` while the search goes on; else `before`."""
    return _mapped(lambda one, other: torch.where(before.goes_on, other, one), before, after)


def _mapped(function: Callable[..., Tensor], *of: Any) -> Any:
    """Applies a function to the tensors at the same places of named tuples, which may be nested. Gives such a named tuple."""
    if isinstance(of[0], Tensor):
        return function(*of)
    return type(of[0])(*(_mapped(function, *each) for each in zip(*of, strict=True)))


def _write(to: Any, of: Any) -> None:
    if isinstance(to, Tensor):
        to.copy_(of)
        return
    for each, other in zip(to, of, strict=True):
        _write(each, other)
