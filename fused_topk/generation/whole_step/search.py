# SPDX-License-Identifier: Apache-2.0
"""The loops: a forward pass and a choice for each new token, apart or as one step that is kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..statistics import count_reason, count_whole
from . import beams, draws, graphs, room, texts
from .beams import Beams
from .choosing import Choices, Place
from .decoder import Decoder, Prompt
from .given_cache import fill
from .head import Head
from .kept import KeptStep, NotKept, unless_over
from .plan import Walk
from .prompts import Ready
from .reasons import Declined
from .results import KeptOutputs, of_beams, of_texts
from .row_form import decoder_of
from .shape import Shape, Way, most_room
from .texts import Texts


class Search(NamedTuple):
    """One call that is served, as far as that is known before it runs."""

    ready: Ready
    prompt: Prompt
    choices: Choices
    # The token after the end of a text; None where texts go on until all have ended.
    padding: int | None
    # How the steps of this call are made; None where none is kept.
    way: Way | None
    # Gets the new tokens; None for none.
    streamer: Any
    # The cache of transformers that gets the keys of the tokens that are read; None where the user does not ask for one.
    cache: Any
    # Whether the call is served only if its steps can be kept.
    only_kept: bool

    def told(self) -> str:
        """A text of all that decides which collectives of a tensor-parallel model run, and when texts end."""
        prompt, way = self.prompt, self.way
        shape = None if way is None else Shape.of(prompt, self.choices.rules, way)
        config = {name: value for name, value in self.choices.config.to_dict().items() if not name.startswith("_")}
        of_call = [
            prompt.is_text.shape,
            prompt.read.shape,
            prompt.longest,
            self.choices.rules,
            self.padding,
            self.choices.criteria.max_length,
            [type(each).__qualname__ for each in self.choices.plan.processors],
            self.ready.head is None,
            self.cache is None,
            self.only_kept,
            # With a record a choice needs logits.
            self.choices.topk is None,
            sorted(config.items()),
        ]
        # Each process has a device of its own, so the device is left out.
        of_kept = None if shape is None else (shape._replace(device=torch.device("cpu")), self.ready.store.made(shape))
        return repr((of_call, of_kept))

    def run(self) -> Any:
        """What generate() returns. Raises Declined where a step turns out to need the stock operations."""
        result = self._run_by_some_way()
        if self.streamer is not None:
            self.streamer.end()
        return result

    def _run_by_some_way(self) -> Any:
        ways = [] if self.way is None else self.way.and_simpler()
        for way in ways:
            try:
                return self._run_kept(way)
            except NotKept as error:
                if self.only_kept and way is ways[-1]:
                    raise Declined(str(error)) from error
                count_reason(str(error))
        head, (batch, length), source = self._head_alone(), self.prompt.is_text.shape, self.prompt.source
        places = None if source is None else source.hidden.shape[1]
        twin = self.ready.twin if head is None else head.headless
        decoder = decoder_of(twin)(twin, batch, length, self.choices.rules.beams, self.prompt.ids.device, places)
        return self._run(decoder, None, self.choices.rules.room, head, self._reads_logits(None))

    @property
    def _is_late(self) -> bool:
        """Whether the host knows the result of a step only some steps later."""
        asks_host = self.choices.plan.asks_host or self.choices.criteria.ask_host
        return graphs.is_cuda(self.prompt.ids.device) and not asks_host

    def _end_flag(self) -> graphs.EndFlag:
        return graphs.EndFlag(self._is_late, None if self.streamer is None else self.streamer.put, self.choices.group)

    def _streamed(self, state: Any, token: int) -> Tensor | None:
        """The token that a streamer gets; None where there is no streamer."""
        return None if self.streamer is None else state.tokens[:, token]

    # All of a step at once.

    def _run_kept(self, way: Way) -> Any:
        ready, shape = self.ready, Shape.of(self.prompt, self.choices.rules, way)
        with ready.store.step(ready.twin, ready.head, shape, self.choices.group) as step:
            # A step with a mask, which follows the texts from the first new token on.
            constraint = self.choices.plan.constraint
            if constraint is not None and constraint.begin_index > self.prompt.ids.shape[1]:
                constraint = None
            # A step without the LM head chooses on each process by itself.
            chooses_apart = self.choices.group is not None and step.head is None
            reads_logits = chooses_apart or self._reads_logits(constraint)
            if way.is_captured and not reads_logits:
                return self._run_at_once(step, way, constraint)
            head, walk = None if way.is_captured else step.head, None
            if head is not None and constraint is not None and not reads_logits:
                walk = Walk(constraint, self.prompt.ids, self.choices.rules.beams, head.vocab_size)
            return self._run(step, way, most_room(self.choices.rules), head, reads_logits, walk)

    def _run_at_once(self, step: KeptStep, way: Way, constraint: Any) -> Any:
        ids, rules = self.prompt.ids, self.choices.rules
        length, most = ids.shape[1], most_room(rules)
        last = min(rules.room, self.choices.criteria.max_length - length) - 1
        size = step.open(room.at_first(most, True))
        state, constants = self._first(size, last + 1)
        logits = step.decoder.read_prompt(self.prompt)
        place = Place.of(0, self.choices.criteria.end_all(ids, length + 1), ids.device)
        state = self.choices.after(state, constants, logits, ids, 0, place)
        step.begin(state, constants, last)
        flag = self._end_flag()
        walk = None if constraint is None else Walk(constraint, ids, rules.beams, logits.shape[-1])
        token = 1
        is_going = flag.goes_on(step.state.goes_on, self._streamed(step.state, 0))
        while is_going and token <= last:
            if token == size:
                # This waits for the device, as the capture of a larger step does. After the end that capture would be in vain.
                if not flag.now(step.state.goes_on):
                    break
                size = step.open(room.after(size, most, None))
            if self.choices.criteria.have_clocks and self.choices.criteria.end_all(ids, length + token + 1):
                step.last.fill_(token)
            mask = None if walk is None else walk.mask_after(step.state, token - 1)
            try:
                step.advance(mask)
            except NotKept as error:
                if token == 1:
                    raise
                # The user may have seen tokens, so the call goes on, one operation after another.
                self._note(error, way)
                step.advance(mask, by_operations=True)
            is_going = flag.goes_on(step.state.goes_on, self._streamed(step.state, token))
            token += 1
        flag.finish()
        if rules.beams > 1 and not ids.is_cuda and bool(step.state.running.scores.isnan().any()):
            # After a step with NaN the scores of all steps are NaN: see `choosing`.
            raise Declined("NaN among the scores")
        steps = int(step.count)
        count_whole(steps, way.is_compiled, way.is_captured)
        return self._result(step, step.state, steps, KeptOutputs.asked_for(self.choices.config))

    # The forward pass and the choice apart.

    def _run(
        self,
        reader: Decoder | KeptStep,
        way: Way | None,
        most: int,
        head: Head | None = None,
        reads_logits: bool = False,
        walk: Walk | None = None,
    ) -> Any:
        """Args:
        way: how the forward pass runs.
        most: for how many new tokens there may be room.
        head: the LM head, where the reader gives hidden states in place of logits. A kept step gives a prompt's logits all the same.
        reads_logits: whether the choice needs logits where there is a head.
        walk: gives the masks of the choices of a head after the first; None where there are none.
        """
        ids, rules = self.prompt.ids, self.choices.rules
        length = ids.shape[1]
        kept = KeptOutputs.asked_for(self.choices.config)
        size = reader.open(room.at_first(most, way is not None))
        state, constants = self._first(size, rules.room)
        is_late, flag, choices = self._is_late, self._end_flag(), self.choices
        steps = torch.zeros(1, dtype=torch.int64, device=ids.device)
        logits = reader.decoder.read_prompt(self.prompt)
        counted = way
        in_vain = draws.InVain(ids.device) if is_late and self.choices.config.do_sample else None
        for step in range(rules.room):
            ends_now = self.choices.criteria.end_all(ids, length + step + 1)
            place = Place.of(step, ends_now, ids.device)
            is_logits = head is None or (step == 0 and way is not None)
            if head is not None and not is_logits and reads_logits:
                logits, is_logits = head.logits(logits), True
            if head is None or is_logits:
                after = choices.after(state, constants, logits, ids, step, place, kept)
            else:
                mask = None if walk is None else walk.mask_after(state, step - 1)
                after = choices.by_head(head, state, constants, logits, step, place, mask)
            if is_late:
                steps += state.goes_on
                after = unless_over(state, after)
            state = after
            if in_vain is not None:
                in_vain.note()
            if not flag.goes_on(state.goes_on, self._streamed(state, step)) or ends_now:
                break
            if step + 1 == size:
                # This waits for the device: see _run_at_once().
                if not flag.now(state.goes_on):
                    break
                spare = reader.decoder.spare_room() if way is None else None
                size = reader.open(room.after(size, most, spare))
                state = state.with_room(size)
            if rules.beams == 1:
                tokens, parents = state.tokens[:, step], None
            else:
                # After the end there is no token. Any token will do, because its results are dropped.
                tokens, parents = state.running.tokens[:, :, step].clamp(min=0), state.running.parents
            try:
                logits = reader.read(tokens, parents, place.step, step + 1)
            except NotKept as error:
                # Processors have been called and numbers drawn, so the call goes on, one operation after another.
                self._note(error, way)
                reader, counted = reader.decoder, None
                logits = reader.read(tokens, parents, place.step, step + 1)
        flag.finish()
        count = int(steps) if is_late else step + 1
        if in_vain is not None:
            in_vain.take_back(count)
        if self.choices.topk is not None:
            del self.choices.topk.steps[count:]
        count_whole(count, counted is not None and counted.is_compiled, counted is not None and counted.is_captured)
        return self._result(reader, state, count, kept)

    def _note(self, error: NotKept, way: Way | None) -> None:
        assert way is not None
        count_reason(str(error))
        self.ready.store.note(Shape.of(self.prompt, self.choices.rules, way), str(error))

    def _reads_logits(self, constraint: Any) -> bool:
        """Whether a choice needs the logits of its step. Args: constraint: a processor whose mask stands for it; None for none."""
        is_asked_for = any(each is not None for each in KeptOutputs.asked_for(self.choices.config))
        return bool(
            len(self.choices.plan.processors) > (constraint is not None)
            or self.choices.config.do_sample
            or self.choices.criteria.read_text
            or self.choices.topk is not None
            or is_asked_for
        )

    def _head_alone(self) -> Head | None:
        """The LM head, if steps that are not kept are to read hidden states and go on by it; None for the twin's own logits."""
        rules, head = self.choices.rules, self.ready.head
        rows = len(self.prompt.ids) * rules.beams
        # A model may keep what it has prepared as attributes of the twin, which the twin without a head does not have.
        if head is None or self.prompt.inputs is not None or not head.is_quicker(rows):
            return None
        return head if head.serves(rows, 1 if rules.beams == 1 else rules.kept) else None

    def _first(self, size: int, longest: int) -> tuple[Any, Any]:
        """The state before the first token, with room for `size` tokens, and the constants of the choices of at most `longest`."""
        ids, rules = self.prompt.ids, self.choices.rules
        if rules.beams == 1:
            constants = texts.TextConstants.of(rules, self.padding, ids.device)
            return texts.at_first(len(ids), size, ids.device), constants
        return beams.at_first(rules, len(ids), size, ids.device), beams.BeamConstants.of(rules, longest, ids.device)

    def _result(self, reader: Decoder | KeptStep, state: Texts | Beams, steps: int, kept: KeptOutputs) -> Any:
        """Args: steps: how many tokens the longest text has."""
        ids, has_source, cache = self.prompt.ids, self.prompt.source is not None, self.cache
        if cache is not None:
            parents = None if isinstance(state, Texts) else state.running.parents
            fill(cache, reader.decoder, self.prompt, parents, steps - 1)
        kept = kept.of_first(steps)
        if isinstance(state, Texts):
            return of_texts(ids, state.tokens[:, :steps], kept, self.choices.config, has_source, cache)
        padding = -1 if self.padding is None else self.padding
        return of_beams(ids, state.ended, padding, kept, self.choices.config, has_source, cache)
