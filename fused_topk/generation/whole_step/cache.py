# SPDX-License-Identifier: Apache-2.0
"""A cache that keeps a prompt once for all beams of its sequence, and is never reordered.

A layer has one tensor of keys and one of values, [batch, heads, prompt + room * beams, dim]: places for the prompt, then
`beams` places for each new token. Beam j of step t writes to place prompt + t * beams + j, for good. Which of the places
are a beam's past is said by a mask (:mod:`ancestry`). Where no place is left, keys and values move to larger tensors.

Keys of an encoder's output, the source, are shared by the beams of a sequence, too: [batch, heads, length of the source, dim].

Some layers have a state in the place of keys, as of a convolution or a recurrence. Each token replaces the state. So these are layers
of transformers, with a row for each beam, and are reordered at every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import CacheLayerMixin

from ...operators.operator import Operator
from ...tracing import is_traced_by_dynamo
from .compiled import is_in_code_of_a_cpu

# A layer that has a state in the place of keys. In older versions models with states make caches of their own.
STATE_LAYER = getattr(cache_utils, "LinearAttentionLayer", None)
# The names in configurations of layers with keys and without a state.
WITH_KEYS = frozenset({"full_attention", "sliding_attention"})


class Length:
    """How many tokens a text has: a number on the device, of which the host knows a bound.

    Models that count positions by their cache add to it. Models whose table of positions grows first compare it with the table's
    size. The comparison uses the bound, so it does not wait for the device.
    """

    def __init__(self, tensor: Tensor, most: int) -> None:
        self.tensor = tensor
        self._most = most

    def __add__(self, other: Any) -> Any:
        return Length(self.tensor + other, self._most + other) if isinstance(other, int) else self.tensor + other

    __radd__ = __add__

    def __gt__(self, other: int) -> bool:
        return self._most > other


class Places:
    """Where all layers of a cache write, and which places attention looks at.

    Args:
        is_text: [batch, prompt]. A prompt is written to the last of its places.
        beams: rows for each sequence.
        is_kept: whether the tensors are kept for later calls. Then their places are made in advance. Else tensors grow with each step.
    """

    def __init__(self, is_text: Tensor, beams: int, is_kept: bool) -> None:
        self._is_text = is_text
        self.is_kept = is_kept
        # How many new tokens of each beam can be written now; and how many the layers have places for, or are to grow to. Places
        # beyond the first number may hold anything.
        self.room = 0
        self.capacity = 0
        self.is_reading_prompt = True
        # How many tokens were read before the prompt that is read.
        self.num_past = 0
        self._of_step = torch.arange(beams, device=is_text.device) + is_text.shape[1]
        # int64 [beams], where a step writes.
        self.written = self._of_step
        # As many numbers as there are new tokens with places that attention looks at.
        self._shown = is_text.new_empty(0, 0)
        self._length: Length | Tensor | None = None
        self._text_length: Tensor | None = None
        self._most = 0

    @property
    def batch(self) -> int:
        return self._is_text.shape[0]

    @property
    def prompt(self) -> int:
        """Places for the prompt. The size of a tensor, as others here: compiled code serves all sizes, but one value of an attribute."""
        return self._is_text.shape[1]

    @property
    def beams(self) -> int:
        return self._of_step.shape[0]

    @property
    def shown(self) -> int:
        """How many new tokens have places that attention looks at."""
        return self._shown.shape[0]

    @property
    def end(self) -> int:
        return self.up_to(self.shown)

    def sizes_that_vary(self) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Tensors with the dimensions whose sizes the code of a layer does not depend on."""
        yield self._is_text, (0, 1)
        yield from ((each, (0,)) for each in (self._of_step, self.written, self._shown))

    @property
    def length(self) -> Length | Tensor | int:
        """How many tokens were read before a step, for a model that counts its positions by the cache: see `count_from`."""
        return self.prompt if self._length is None else self._length

    def up_to(self, new: int) -> int:
        """How many places the prompt and `new` new tokens of each beam take."""
        return self.prompt + new * self.beams

    def count_from(self, length: int, most: int) -> None:
        """From here on the cache says how many tokens a text has: the prompt's `length` and the tokens since, at most `most`.

        The number is a tensor, so that compiled and captured steps are the same for every length.
        """
        if self._text_length is None:
            self._text_length = torch.zeros((), dtype=torch.int64, device=self._of_step.device)
        self._text_length.fill_(length)
        self._most = most

    def written_by(self, step: Tensor) -> Tensor:
        """Where a step writes, int64 [beams]. Args: see ancestry.Mask."""
        return self._of_step + step * self.beams

    def begin_step(self, step: Tensor, shown: int, written: Tensor) -> None:
        """Args: see ancestry.Mask. written: of :meth:`written_by`."""
        self.written = written
        self._shown = self._is_text.new_empty(shown, 0)
        if self._text_length is not None:
            length = self._text_length + step.squeeze(0)
            # torch.compile would make other code for each bound of a Length.
            self._length = length if is_traced_by_dynamo() else Length(length, self._most)


class SharedPromptLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = places

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if not self.is_initialized:
            self.keys, self.values = self._empty(key_states), self._empty(value_states)
            self.is_initialized = True
        # The tensors may hold keys of the call before.
        self.clear(0, self._places.up_to(self._places.room))

    def _empty(self, like: Tensor) -> Tensor:
        batch, heads, _, dim = like.shape
        return like.new_empty(batch, heads, self._places.up_to(self._places.capacity), dim)

    def sizes_that_vary(self) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        if self.is_initialized:
            yield from ((each, (0, 2)) for each in (self.keys, self.values))
        yield from self._places.sizes_that_vary()

    def clear(self, begin: int, end: int) -> None:
        """Makes places zero: attention multiplies what no beam looks at by zero, and 0 * NaN would be NaN."""
        if self.is_initialized:
            for kept in (self.keys, self.values):
                kept[:, :, begin:end].zero_()

    def move(self, places: int) -> None:
        """Moves keys and values to tensors of the capacity. Args: places: how many places, the first ones, are in use."""
        for name in ("keys", "values") if self.is_initialized else ():
            kept = getattr(self, name)
            larger = self._empty(kept)
            larger[:, :, :places] = kept[:, :, :places]
            setattr(self, name, larger)

    def begin_with(self, keys: Tensor, values: Tensor, end: int) -> None:
        """Writes the keys and values of what was read before a prompt, up to the place `end`."""
        self.lazy_initialization(keys, values)
        begin = end - keys.shape[2]
        self.keys[:, :, begin:end] = keys
        self.values[:, :, begin:end] = values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        places = self._places
        if places.is_reading_prompt:
            # The rows of a sequence's beams are the same: one of them is written.
            rows = len(key_states) // places.batch
            of_keys, of_values = key_states[::rows], value_states[::rows]
            if not places.is_kept and key_states.shape[2] == places.prompt:
                # The whole prompt, without places for more.
                dense = torch.contiguous_format
                self.keys, self.values = (each.clone(memory_format=dense) for each in (of_keys, of_values))
                self.is_initialized = True
                return key_states, value_states
            if not places.num_past:
                self.lazy_initialization(of_keys, of_values)
            begin = places.prompt - key_states.shape[2]
            self.keys[:, :, begin : places.prompt] = of_keys
            self.values[:, :, begin : places.prompt] = of_values
            if not places.num_past:
                return key_states, value_states
            begin -= places.num_past
            return self.keys[:, :, begin : places.prompt], self.values[:, :, begin : places.prompt]
        # One after the other, so that the old keys are gone before there are new values.
        self.keys = self._with(self.keys, key_states)
        self.values = self._with(self.values, value_states)
        keys, values = self.keys, self.values
        if is_in_code_of_a_cpu(keys):
            return keys, values
        if places.is_kept or keys.shape[2] > places.end:
            keys, values = keys[:, :, : places.end], values[:, :, : places.end]
        return keys, values

    def _with(self, kept: Tensor, written: Tensor) -> Tensor:
        """The tensor `kept` with a new token of each beam. Args: written: [batch * beams, heads, 1, dim]."""
        places = self._places
        if is_in_code_of_a_cpu(kept):
            _write_as_one(kept, written, places.written)
            return kept
        if places.is_kept or kept.shape[2] >= places.end:
            _write(kept, written, places.written)
            return kept
        written = _of_beams(written, places.beams)
        # As transformers' caches do, and as quick: the new token is put behind all others.
        parts = [kept, written]
        spare = places.up_to(places.capacity) - places.end
        if spare:
            batch, heads, _, dim = kept.shape
            parts.append(kept.new_empty(batch, heads, spare, dim))
        return torch.cat(parts, 2)

    def rows(self, begin: int, new: int, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values [batch * beams, heads, prompt - begin + new, dim] of each beam's own past, from place `begin` of the prompt on.

        Args:
            past: int64 [batch, beams, new], the place among the beams where each new token was written; None without beams.
        """
        return self._rows(self.keys, begin, new, past), self._rows(self.values, begin, new, past)

    def _rows(self, kept: Tensor, begin: int, new: int, past: Tensor | None) -> Tensor:
        places = self._places
        prompt, beams = places.prompt, places.beams
        if past is None:
            return kept[:, :, begin : places.up_to(new)]
        batch, heads, _, dim = kept.shape
        of_new = kept[:, :, prompt : places.up_to(new)].reshape(batch, heads, new, beams, dim).permute(0, 3, 1, 2, 4)
        # [batch, beams, heads, new tokens, dim]
        own = of_new.gather(1, past[:, :, None, :, None].expand(-1, -1, heads, -1, dim))
        of_prompt = kept[:, None, :, begin:prompt].expand(-1, beams, -1, -1, -1)
        return torch.cat([of_prompt, own], 3).flatten(0, 1)

    def get_seq_length(self, *args: Any) -> Any:
        return self._places.num_past if self._places.is_reading_prompt else self._places.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        # Before transformers 5.5 the argument holds the positions of the queries.
        length = query_length if isinstance(query_length, int) else len(query_length)
        return (self._places.num_past if self._places.is_reading_prompt else self._places.prompt) + length, 0

    def get_max_length(self) -> int:
        return -1

    # As transformers 4 and 5.0 call it.
    get_max_cache_shape = get_max_length


def _write(kept: Tensor, written: Tensor, places: Tensor) -> None:
    """Writes a new token of each beam. Args: kept: of a layer. written: [batch * beams, heads, 1, dim]. places: int64 [beams]."""
    kept.index_copy_(2, places, _of_beams(written, places.shape[0]))


# The same as one operation of torch.compile.
_write_as_one = Operator("write_places(Tensor(a!) kept, Tensor written, Tensor places) -> ()", _write)


def _of_beams(written: Tensor, beams: int) -> Tensor:
    """[batch, heads, beams, dim] of [batch * beams, heads, 1, dim]."""
    if beams == 1:
        return written
    _, heads, _, dim = written.shape
    return written.view(-1, beams, heads, dim).transpose(1, 2)


class SourceLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values of an encoder's output, the source. A source shorter than `length` takes the first places. Each
    sequence has `copies` rows: 1 where its beams share them."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, length: int, copies: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._length = length
        self._copies = copies

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if not self.is_initialized:
            self.keys, self.values = (
                each.new_zeros(self._copies * len(each), each.shape[1], self._length, each.shape[3])
                for each in (key_states, value_states)
            )
            self.is_initialized = True

    def sizes_that_vary(self) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        yield from ((each, (0, 2)) for each in (self.keys, self.values))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.lazy_initialization(key_states, value_states)
        for kept, written in ((self.keys, key_states), (self.values, value_states)):
            length = written.shape[2]
            # Rows of a sequence are beside each other.
            rows = kept[:, :, :length].unflatten(0, (-1, self._copies))  # type: ignore[no-untyped-call]
            rows.copy_(written.unsqueeze(1))
            # The source of the call before may have been longer.
            kept[:, :, length:] = 0
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        return self._length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self._length, 0

    def get_max_length(self) -> int:
        return self._length

    # As transformers 4 and 5.0 call it.
    get_max_cache_shape = get_max_length


def state_layers(config: Any) -> dict[int, Any]:
    """The layers of a new cache of transformers that have a state in the place of keys, by number."""
    config = config.get_text_config(decoder=True)
    # Most models have none. To make a cache takes 10 us a layer.
    if set(getattr(config, "layer_types", None) or ()) <= WITH_KEYS:
        return {}
    layers: list[Any] = DynamicCache(config=config).layers
    return {number: layer for number, layer in enumerate(layers) if type(layer) is STATE_LAYER}
