# SPDX-License-Identifier: Apache-2.0
"""What a model and its configuration say: the arguments of its forward pass, its layers, its vocabulary and its positions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

# The names of methods' arguments, by function. Without it each call would ask inspect several times, 0.1 ms each.
_arguments: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()
# How many rows a table of positions may have beyond the positions, for padding and the like.
_MORE_POSITIONS = 8


def arguments_of(method: Callable[..., Any]) -> frozenset[str]:
    """The names of a method's arguments."""
    function = getattr(method, "__func__", None)
    if function is None:
        return frozenset(inspect.signature(method).parameters)
    if function not in _arguments:
        _arguments[function] = frozenset(inspect.signature(method).parameters)
    return _arguments[function]


def is_as_published(kind: type) -> bool:
    """Whether the class runs the code of the module that defines it, and nobody has patched its __call__."""
    code = getattr(kind.__call__, "__code__", None)
    return code is not None and code.co_filename == getattr(sys.modules.get(kind.__module__), "__file__", None)


def cache_argument(model: Any) -> str:
    """What the model's forward pass calls the cache: `cache` from transformers 5.2x on."""
    return "cache" if "cache" in arguments_of(model.forward) else "past_key_values"


def takes_positions(model: Any) -> bool:
    arguments = arguments_of(model.forward)
    if not model.config.is_encoder_decoder:
        return "position_ids" in arguments
    # A model that is made of two hands them on to its decoder.
    is_of_two = hasattr(model.config, "decoder") and hasattr(model, "decoder")
    return "decoder_position_ids" in arguments or (is_of_two and "position_ids" in arguments_of(model.decoder.forward))


def num_layers(config: Any) -> int:
    """How many layers the decoder has."""
    if config.is_encoder_decoder:
        # In some versions get_text_config() gives the number of the encoder's layers for the decoder.
        of_decoder = (getattr(config, name, None) for name in ("decoder_layers", "num_decoder_layers"))
        found = next((number for number in of_decoder if number is not None), None)
        if found is not None:
            return int(found)
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def vocab_size_of(config: Any) -> int:
    """How many tokens can be chosen. In some models another number of tokens can be read."""
    own = getattr(config, "decoder_vocab_size", None)
    return int(own or config.get_text_config(decoder=True).vocab_size)


def num_positions(config: Any) -> int | None:
    """How many positions a text may have; None where the model does not say."""
    config = config if hasattr(config, "max_position_embeddings") else config.get_text_config(decoder=True)
    # Whisper and its like use the second name.
    return getattr(config, "max_position_embeddings", getattr(config, "max_target_positions", None))


def has_table(model: Any, positions: int) -> bool:
    """Whether the model has learned its positions: an embedding for each, and perhaps for some more."""
    tokens = model.get_input_embeddings().weight
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each.weight is not tokens]
    return any(0 <= each.num_embeddings - positions <= _MORE_POSITIONS for each in tables)
