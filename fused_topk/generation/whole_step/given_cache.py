# SPDX-License-Identifier: Apache-2.0
"""A cache of transformers that a call is given, and that the user hands to the next call.

A call reads the keys of earlier tokens from the cache. At its end it adds the keys of its own tokens, as transformers' loops do: of
every token but the last one, with a row for each beam that went on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from .cache import STATE_LAYER, state_layers
from .decoder import Decoder, Prompt
from .reasons import Declined

# A layer without keys, or one that reads those of another layer. Older versions leave it out.
_NO_LAYER = getattr(cache_utils, "DummyLayer", None)
# The names of the cache among the arguments of generate(), in different versions of transformers.
NAMES = ("cache", "past_key_values")


class Past(NamedTuple):
    """The keys of the tokens before a prompt, a row for each sequence."""

    length: int  # in tokens
    # Keys and values [batch, heads, length, dim] of each layer, in a layer with a window only the last ones; None for a layer without.
    layers: list[tuple[Tensor, Tensor] | None]


def cache_of(inputs: Mapping[str, Any]) -> Any:
    """The cache among the arguments of generate(), or among what a loop hands to a model; None where there is none."""
    return next((inputs[name] for name in NAMES if inputs.get(name) is not None), None)


def is_used(cache: Any) -> bool:
    """Whether there is a cache, and it holds tokens already."""
    return cache is not None and bool(cache.get_seq_length())


def new_for(config: Any) -> Any:
    of_decoder = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return EncoderDecoderCache(DynamicCache(config=of_decoder), DynamicCache(config=of_decoder))
    return DynamicCache(config=of_decoder)


def reason_against(cache: Any, config: Any) -> str | None:
    """Why a call cannot add to a cache; None where it can. `config` is the model's."""
    parts = [cache]
    if config.is_encoder_decoder:
        if type(cache) is not EncoderDecoderCache:
            return f"a {type(cache).__name__}"
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    expected: list[Any] = DynamicCache(config=config.get_text_config(decoder=True)).layers
    states = state_layers(config)
    for part in parts:
        if type(part) is not DynamicCache or getattr(part, "offloading", False):
            return f"a {type(part).__name__}"
        if any("update" in vars(each) for each in (part, *part.layers)):
            return "a cache whose update() has been replaced"
        if states and (len(part.layers) <= max(states) or is_used(part)):
            return "a cache with states that is used, or not of the model"
        for number, layer in enumerate(part.layers):
            kind = type(layer)
            kinds = (STATE_LAYER,) if number in states else (DynamicLayer, _NO_LAYER, DynamicSlidingWindowLayer)
            if kind not in kinds or (kind not in (DynamicLayer, _NO_LAYER) and getattr(layer, "record_past", False)):
                return f"a cache with a {kind.__name__}"
            own = expected[number] if number < len(expected) else None
            windows = {getattr(each, "sliding_window", None) for each in (layer, own)}
            if kind is DynamicSlidingWindowLayer and len(windows) > 1:
                return "a cache with windows of another size"
    return None


def past_of(cache: Any, rows: int, beams: int, like: Tensor) -> Past:
    """What the used cache of a model without an encoder holds. Raises Declined where this call cannot go on with it.

    Args:
        rows: of the call, `beams` for each sequence.
        like: a weight of the model.
    """
    length = int(cache.get_seq_length())
    layers: list[tuple[Tensor, Tensor] | None] = []
    are_same = torch.ones((), dtype=torch.bool, device=like.device)
    for layer in cache.layers:
        if not layer.is_initialized or layer.keys is None:
            layers.append(None)
            continue
        window = getattr(layer, "sliding_window", None)
        places = length if window is None else min(length, window - 1)
        pair = layer.keys, layer.values
        for each in pair:
            if each.shape[0] != rows or each.shape[2] != places or layer.get_seq_length() != length:
                raise Declined("a cache of another shape")
            if (each.dtype, each.device) != (like.dtype, like.device):
                raise Declined(f"a cache of {each.dtype} on {each.device}")
            if beams > 1:
                of_beams = each.unflatten(0, (-1, beams))
                are_same &= (of_beams == of_beams[:, :1]).all()
        layers.append((pair[0][::beams], pair[1][::beams]))
    if not bool(are_same):
        raise Declined("a cache in which beams of a sequence differ")
    return Past(length, layers)


def fill(cache: Any, decoder: Decoder, prompt: Prompt, parents: Tensor | None, new: int) -> None:
    """Adds the keys of the `new` tokens that a call has read to a cache that :func:`reason_against` has no reason against.

    Args:
        parents: int64 [batch, beams, new + 1 or more], of the beams that went on: see `beams.Hypotheses`; None without beams.
    """
    own = cache
    if isinstance(cache, EncoderDecoderCache):
        own = cache.self_attention_cache
        for number, (keys, values) in decoder.rows_of_source(prompt):
            cache.cross_attention_cache.update(keys, values, number)
            cache.is_updated[number] = True
    for number, (keys, values) in decoder.rows(prompt.read.shape[1], new, parents):
        own.update(keys, values, number)
    for number, layer in decoder.states(new, parents):
        own.layers[number] = layer
