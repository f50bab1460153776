# SPDX-License-Identifier: Apache-2.0
"""A model's forward pass over beams that share their prompt, and an encoder's output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import MoEModelOutput

from .ancestry import Mask, Table
from .attention import AttentionCall, reads_tables, watched
from .cache import Length, Places, SharedPromptLayer, SourceLayer, state_layers
from .compiled import hide, let_vary
from .facts import arguments_of, cache_argument, num_layers, takes_positions, vocab_size_of


class Source(NamedTuple):
    """An encoder's output, a row for each sequence."""

    hidden: Tensor  # [batch, length, dim]
    is_text: Tensor | None  # bool [batch, length], False where it is padding; None where the model takes no mask


class Prompt(NamedTuple):
    """The inputs of a call, a row for each sequence."""

    ids: Tensor  # int64 [batch, n], the tokens that results begin with
    read: Tensor  # int64 [batch, length], the tokens that are to be read, or [batch, length, dim], their embeddings
    is_text: Tensor  # bool [batch, past + length], False where it is padding
    # int64 [batch, length]. Where the model has prepared its inputs, those of the last token alone: [..., batch, 1]
    positions: Tensor
    extra: dict[str, Any]  # further arguments of the model
    longest: int  # how many tokens the texts may have, with the prompt
    source: Source | None = None
    is_exact: bool = False  # whether steps take no padding before the prompt
    past: Any = None  # keys of the tokens before the prompt: see :class:`given_cache.Past`
    # What the model has prepared for the prompt, a row for each beam: see :mod:`prompts`. None where it has not been asked.
    inputs: dict[str, Any] | None = None

    @property
    def axes(self) -> tuple[int, ...]:
        """The further dimensions of positions, as models with images have them."""
        return tuple(self.positions.shape[:-2])


class Decoder:
    """Reads a prompt, then one token of each beam at a time. At first there is no room for these tokens: see :meth:`open`.

    A prompt shorter than `prompt` has padding before it, an encoder's output shorter than `source` has padding after it.

    Args:
        is_kept: whether later calls read other prompts with it, by the same compiled code.
        for_steps: a twin that reads the tokens after the prompt; None where `twin` does.
    """

    _kind_of_places: type[Places] = Places
    _kind_of_layer: type[SharedPromptLayer] = SharedPromptLayer
    # Whether each beam has a row of an encoder's output.
    _repeats_source = False
    # Whether compiled code is the same for any number of beams: only operators look at sizes that differ with it.
    shares_code = True

    def __init__(
        self,
        twin: Any,
        batch: int,
        prompt: int,
        beams: int,
        device: torch.device,
        source: int | None = None,
        is_kept: bool = False,
        for_steps: Any = None,
    ) -> None:
        self._twin = twin
        self.for_steps = twin if for_steps is None else for_steps
        # A frozenset: every version of torch.compile traces it.
        self._arguments = arguments_of(twin.forward)
        self._takes_positions = takes_positions(twin)
        self._cache_argument = cache_argument(twin)
        self._beams = beams
        self._is_kept = is_kept
        self._is_text = torch.zeros(batch, prompt, dtype=torch.bool, device=device)
        self._places = self._kind_of_places(self._is_text, beams, is_kept)
        number, self._states = num_layers(twin.config), state_layers(twin.config)
        cache = Cache(layers=[self._states.get(each, self._kind_of_layer(self._places)) for each in range(number)])
        self._of_text: list[Any] = cache.layers
        self._cache: Any = cache
        if source is not None:
            of_source: list[Any] = [SourceLayer(source, beams if self._repeats_source else 1) for _ in range(number)]
            self._cache = EncoderDecoderCache(cache, Cache(layers=of_source))
        # The layers that keep the text, without those that have a state.
        self._layers = [layer for layer in self._of_text if isinstance(layer, SharedPromptLayer)]
        self._last_positions = torch.zeros(batch * beams, 1, dtype=torch.int64, device=device)
        self._source = None if source is None else torch.zeros(batch, source, dtype=torch.int64, device=device)
        # A step needs only the shape of the encoder's output, and its mask.
        self._of_source: dict[str, Any] = {}
        self._mask: Mask | Table | None = None
        self.calls: list[AttentionCall] = []

    @property
    def num_bytes(self) -> int:
        """The bytes of the cache."""
        return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in self._all_layers)

    @property
    def _all_layers(self) -> list[Any]:
        """The layers that hold keys: of the text, and of the source. A layer that reads the keys of another layer holds none."""
        layers = [*self._layers, *([] if self._source is None else self._cache.cross_attention_cache.layers)]
        return [layer for layer in layers if layer.is_initialized]

    @property
    def capacity(self) -> int:
        """The largest number of new tokens that there has been room for."""
        return self._places.capacity + 1

    def let_sizes_vary(self, tokens: Tensor, step: Tensor, shown: Tensor, prepared: tuple[Tensor, ...]) -> None:
        """Makes code that is compiled for a step serve other numbers of rows and places. Args: shown: of that length. See :meth:`forward`."""
        for tensor, dims in ((tokens, (0,)), (shown, (0,)), (self._is_text, (1,))):
            let_vary(tensor, dims)
        let_vary(self._last_positions, (self._last_positions.dim() - 2,))
        if self._source is not None:
            let_vary(self._source, (0, 1))
            let_vary(self._of_source["encoder_outputs"].last_hidden_state, (0, 1))
        vary = hide if self.shares_code else let_vary
        vary(self._is_text, (0,))
        for each in prepared:
            vary(each, (0, 2, 3) if each.dim() == 4 else tuple(range(each.dim())))
        for layer in self._all_layers:
            vary(layer.keys, (0, 2))
            vary(layer.values, (0, 2))

    @property
    def decoder(self) -> Decoder:
        """Itself, as :attr:`KeptStep.decoder`."""
        return self

    def open(self, size: int) -> int:
        """Makes room for `size` new tokens of each beam. The last of them is never read. Returns `size`.

        What has been read stays, unless there is less room than before. Then a prompt must be read next.
        """
        places, room = self._places, size - 1
        used = places.up_to(min(room, places.room))
        is_larger = room > places.capacity
        places.capacity = max(room, places.capacity)
        # Layers that are not kept grow when they are written to, and attention looks at no place before that.
        for layer in self._layers if self._is_kept else ():
            if is_larger:
                layer.move(used)
            layer.clear(used, places.up_to(room))
        places.room = room
        return size

    def spare_room(self) -> int:
        """For how many further new tokens there may be room, so that a call holds no more memory than in transformers' loop.

        That loop has no room in advance. But it holds other things: a prompt for each beam; logits a second time, in float32; and
        while it reads the prompt, queries and hidden states, and the keys and values of a layer a second time.
        """
        places, beams = self._places, self._beams
        layers = [layer for layer in self._layers if layer.is_initialized]
        # The bytes of one place: in all layers, and in the largest tensor of keys or of values.
        of_place = [each.nbytes // each.shape[2] for layer in layers for each in (layer.keys, layer.values)]
        place, largest = sum(of_place), max(of_place)
        # While keys move to larger tensors, they are there twice. So they are in transformers' loop.
        moved = largest * places.up_to(places.capacity)
        of_prompts = (beams - 1) * places.prompt * place
        of_logits = 4 * len(self._is_text) * beams * vocab_size_of(self._twin.config) - moved
        of_reading = 4 * beams * places.prompt * largest - moved - beams * (places.room + 1) * place
        return (of_prompts + max(0, of_logits, of_reading)) // (beams * place)

    def read_prompt(self, prompt: Prompt) -> Tensor:
        """The last logits [batch, V]."""
        places, past = self._places, prompt.past
        padding = self._is_text.shape[1] - prompt.is_text.shape[1]
        self._is_text[:, :padding] = False
        self._is_text[:, padding:] = prompt.is_text
        positions = prompt.positions[..., -1:].repeat_interleave(self._beams, -2)
        if positions.shape != self._last_positions.shape:
            self._last_positions = torch.empty_like(positions)
        self._last_positions.copy_(positions)
        places.is_reading_prompt = True
        places.num_past = 0 if past is None else past.length
        if past is not None:
            for layer, pair in zip(self._layers, past.layers, strict=False):
                if pair is not None:
                    keys, values = pair
                    layer.begin_with(keys, values, padding + past.length)
        of_source = self._begin_source(prompt)
        with watched() as calls:
            if prompt.inputs is not None:
                logits = self._logits(self._twin, prompt.inputs)[:: self._beams]
            else:
                # Without padding transformers' functions are quicker if there is no mask.
                mask = None if bool(prompt.is_text.all()) else prompt.is_text.long()
                extra = {**of_source, **prompt.extra}
                logits = self._forward(self._twin, prompt.read, mask, prompt.positions, **extra)
        places.is_reading_prompt = False
        if self._states and self._beams > 1 and prompt.inputs is None:
            self._reorder_states(torch.arange(len(logits), device=logits.device).repeat_interleave(self._beams))
        self.calls = calls
        # A model that never calls our attention is not served: see :mod:`trial`.
        if self._mask is None and calls:
            pairs = [(layer.keys, layer.values) for layer in self._layers if layer.is_initialized]
            if reads_tables(pairs):
                self._mask = Table(self._is_text, self._beams)
            else:
                windows = [call.window for call in calls if call.window is not None]
                window = max(windows, default=None)
                self._mask = Mask(self._is_text, self._beams, calls[0].groups, window, logits.dtype)
        if isinstance(self._mask, Table):
            self._mask.begin()
        return logits

    def _begin_source(self, prompt: Prompt) -> dict[str, Any]:
        """The arguments for the encoder's output while the model reads the prompt."""
        source = prompt.source
        if source is None or self._source is None:
            return {}
        # The last token is not read.
        self._places.count_from(prompt.ids.shape[1], prompt.longest - 2)
        # So the next forward pass computes the keys of the source.
        self._cache.is_updated = dict.fromkeys(self._cache.is_updated, False)
        length, dim = source.hidden.shape[1:]
        is_masked = source.is_text is not None and not bool(source.is_text.all())
        self._source.zero_()
        self._source[:, :length] = 1 if source.is_text is None else source.is_text
        if not self._of_source or not self._is_kept:
            needs_mask = source.is_text is not None and (self._is_kept or is_masked)
            hidden = source.hidden.new_zeros(1, 1, 1).expand(*self._source.shape, dim)
            self._of_source = source_inputs(hidden, self._source if needs_mask else None)
        return source_inputs(source.hidden, self._source[:, :length] if is_masked else None)

    def read(self, tokens: Tensor, parents: Tensor | None, step: Tensor, shown: int) -> Tensor:
        """The last logits [batch * beams, V].

        Args:
            tokens: int64 [batch, beams], the new token of each beam.
            parents, step, shown: see :class:`ancestry.Mask`. There is room for as many as are shown.
        """
        return self.read_by(self.for_steps, tokens, parents, step, shown)

    def read_by(self, twin: Any, tokens: Tensor, parents: Tensor | None, step: Tensor, shown: int) -> Tensor:
        """The same by `twin`, a callable in the place of the twin; without an LM head what that would get, [batch * beams, H]."""
        return self.forward(twin, tokens.reshape(-1, 1), step, shown, self.prepared(parents, step, shown))

    def prepared(self, parents: Tensor | None, step: Tensor, shown: int) -> tuple[Tensor, ...]:
        """What a step does for all layers, and what differs with the number of beams. Args: see :meth:`read`."""
        made = self._mask
        assert made is not None
        if parents is not None:
            self._follow(parents, step)
        if isinstance(made, Mask) and parents is None and not self._is_kept:
            # All tokens that are shown have been written.
            mask = made.of_one_beam(shown)
        else:
            mask = made(parents, step, shown)
        return mask, self._places.written_by(step)

    def forward(self, twin: Any, tokens: Tensor, step: Tensor, shown: int, prepared: tuple[Tensor, ...]) -> Tensor:
        """The rest of :meth:`read_by`. Args: tokens: int64 [batch * beams, 1]."""
        mask, written = prepared
        self._places.begin_step(step, shown, written)
        extra = dict(self._of_source)
        if self._source is not None and "cache_position" in self._arguments:
            # Some versions count positions by it. Without it they compute it from the cache's length, and wait for the device.
            length = self._places.length
            extra["cache_position"] = (length.tensor if isinstance(length, Length) else length).view(1)  # type: ignore[union-attr]
        return self._forward(twin, tokens, mask, self._last_positions + (step + 1), **extra)

    @contextmanager
    def with_padded_source(self) -> Iterator[None]:
        """A block in which the last place of each source is hidden, for steps whose results do not count.

        transformers makes no mask of a source where it hides nothing. But in a capture it does not look. So a step would be another one
        there than in the trial before, and its code would be compiled in the capture.
        """
        if self._source is None:
            yield
            return
        shown = self._source[:, 1:][:, -1:].clone()
        self._source[:, 1:][:, -1:] = 0
        try:
            yield
        finally:
            self._source[:, 1:][:, -1:] = shown

    def states(self, new: int, parents: Tensor | None) -> Iterator[tuple[int, Any]]:
        """The number of each layer that has a state, and the layer, with a row for each beam that went on, as :meth:`rows`. No step may
        follow."""
        if parents is not None:
            self._follow(parents, torch.full((1,), new, device=parents.device))
        yield from self._states.items()

    def _follow(self, parents: Tensor, step: Tensor) -> None:
        """Gives each beam the states of the one that its token of this step goes on from."""
        if self._states:
            batch = torch.arange(len(parents), device=step.device)[:, None]
            # After the end of a search there is no parent. Any beam will do.
            before = parents.index_select(2, step).squeeze(2).clamp(min=0)
            self._reorder_states((batch * self._beams + before).flatten())

    def _reorder_states(self, rows: Tensor) -> None:
        for layer in self._states.values():
            layer.reorder_cache(rows)

    def rows(self, length: int, new: int, parents: Tensor | None) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """The number of each layer, with keys and values [batch * beams, heads, length + new, dim] of each beam's past: the last `length`
        tokens of the prompt, and `new` tokens. `parents` are those of :class:`ancestry.Mask`."""
        past = None if parents is None else parents[:, :, 1 : new + 1]
        for number, layer in enumerate(self._of_text):
            if isinstance(layer, SharedPromptLayer) and layer.is_initialized:
                yield number, layer.rows(self._places.prompt - length, new, past)

    def rows_of_source(self, prompt: Prompt) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """The same for the encoder's output."""
        assert prompt.source is not None
        batch, length = prompt.source.hidden.shape[:2]
        for number, layer in enumerate(self._cache.cross_attention_cache.layers):
            if layer.is_initialized:
                keys, values = (
                    each[:, :, :length].repeat_interleave(batch * self._beams // len(each), 0)
                    for each in (layer.keys, layer.values)
                )
                yield number, (keys, values)

    def _forward(self, twin: Any, ids: Tensor, mask: Tensor | None, positions: Tensor, **extra: Any) -> Tensor:
        prefix = "" if self._source is None else "decoder_"
        name = f"{prefix}input_ids" if ids.dim() == 2 else "inputs_embeds"
        inputs = {name: ids, f"{prefix}attention_mask": mask}
        if self._takes_positions:
            inputs[f"{prefix}position_ids"] = positions
        return self._logits(twin, {**inputs, **extra})

    def _logits(self, twin: Any, inputs: dict[str, Any]) -> Tensor:
        output = twin(use_cache=True, return_dict=True, **{self._cache_argument: self._cache}, **inputs)
        logits: Tensor = output.logits[:, -1]
        return logits


def source_inputs(hidden: Tensor, is_text: Tensor | None) -> dict[str, Any]:
    """The arguments for an encoder's output."""
    # The class with the most attributes: models with experts read some that other classes do not have.
    inputs: dict[str, Any] = {"encoder_outputs": MoEModelOutput(last_hidden_state=hidden)}
    return inputs if is_text is None else {**inputs, "attention_mask": is_text}


def positions_of(is_text: Tensor) -> Tensor:
    """Positions of tokens that are text, from 0 on, as generate() counts them."""
    return (is_text.long().cumsum(-1) - 1).clamp(min=0)
