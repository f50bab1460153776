# SPDX-License-Identifier: Apache-2.0
"""The prompt of a call, from the arguments of a loop. generate() has made a row for each beam; one row a sequence is taken.

A prompt may have images or sounds. It is read with what the model's own methods prepare for it in transformers' loop, with a row for each
beam, too. The model is also asked what it would prepare for the first two steps. The call is served if that is what a step of text gets:
a token, its position, which goes up by one, a mask of what is text, and the cache.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.utils.generic import ModelOutput

from . import given_cache, reasons, trial
from .decoder import Prompt, Source, positions_of
from .facts import arguments_of, cache_argument
from .head import Head
from .reasons import Declined, decline_for, raise_if_from_a_signal, said_by
from .row_form import RowDecoder, decoder_of
from .store import Store
from .traces import SameModules
from .twin import Snapshot

# Fields of an encoder's output. A decoder reads the first one only, or none.
_OF_ENCODER = frozenset({"last_hidden_state", "pooler_output", "hidden_states", "attentions"})
# Inputs of a step that need no trial. For one token `logits_to_keep` changes nothing.
_OF_A_STEP = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep"})
_ARGUMENTS = frozenset(inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters)

# Some models keep what they have prepared for a prompt until they prepare a step.
_lock = threading.Lock()


class Ready(NamedTuple):
    """What is known of a model: its twin, or the reason why there is none."""

    twin: Any
    reason: str | None
    of: Snapshot | SameModules
    store: Store
    head: Head | None
    # Whether steps can be kept: these have places for more tokens than there are.
    is_static: bool
    # Whether the decoder reads the mask of the source. If the source is not text, the shape of that mask is not known.
    reads_mask: bool
    # The names of tensors that steps of text do not read, as far as it has been tried.
    unread: set[str]
    # Gives the reason why no prompt of the model can follow a given cache; None where one can.
    reason_against_past: Callable[[], str | None] = lambda: None
    # Gives the reason why its layers cannot be compiled by themselves: see :mod:`layers`.
    reason_against_layers: Callable[[], str | None] = lambda: None
    # Why steps cannot be captured, though they can be kept; None as far as is known.
    of_capture: str | None = None


def of_text(
    ready: Ready, ids: Tensor, beams: int, longest: int, config: GenerationConfig, inputs: dict[str, Any]
) -> Prompt:
    """The prompt of a model that reads text or embeddings, and prepares nothing more."""
    rows, ids = len(ids), ids[::beams]
    embeddings, mask = inputs.get("inputs_embeds"), inputs.get("attention_mask")
    read = ids if embeddings is None else embeddings[::beams]
    past = _past(ready, rows, beams, inputs)
    before = 0 if past is None else past.length
    # Without padding later versions of transformers drop the mask, and keep its length.
    of_mask = getattr(config, "_mask_length", read.shape[1]) if mask is None else mask.shape[1]
    unread = read.shape[1]
    if of_mask == unread > before:
        # The given tokens include those of the cache.
        unread -= before
    elif not (before and of_mask == unread + before and embeddings is None and reasons.TAKES_NEW_TOKENS):
        raise Declined("an attention mask of another length")
    read = read[:, -unread:]
    shape = len(read), before + unread
    is_text = _is_text(None if mask is None else mask[::beams], shape, ids.device)
    positions = inputs.get("position_ids")
    if positions is None:
        # 1 for padding, as in versions of transformers that make positions in each step: a returned cache has keys of padding, too.
        positions = positions_of(is_text).where(is_text, 1)
    elif positions.shape != (rows, shape[1]):
        raise Declined("position_ids of another shape")
    else:
        positions = positions[::beams]
    kept = inputs.get("logits_to_keep")
    extra = {} if kept is None else {"logits_to_keep": kept}
    return Prompt(ids, read, is_text, positions[:, -unread:], extra, longest, past=past)


def _past(ready: Ready, rows: int, beams: int, inputs: dict[str, Any]) -> given_cache.Past | None:
    cache = given_cache.cache_of(inputs)
    if not given_cache.is_used(cache):
        return None
    decline_for(given_cache.reason_against(cache, ready.twin.config) or ready.reason_against_past())
    return given_cache.past_of(cache, rows, beams, next(ready.twin.parameters()))


def _is_text(mask: Tensor | None, shape: Sequence[int], device: torch.device) -> Tensor:
    is_text = torch.ones(*shape, dtype=torch.bool, device=device) if mask is None else mask.bool()
    if is_text.shape != torch.Size(shape) or not bool(is_text[:, -1].all()):
        raise Declined("an attention mask that is not of left padding")
    return is_text


def prepared_by_model(ready: Ready, ids: Tensor, beams: int, longest: int, inputs: dict[str, Any]) -> Prompt:
    """The prompt of a model that prepares more than its tokens, as of images."""
    original = reasons.original_length(ready.twin.config)
    if original is not None and longest > original and reasons.prepares_itself(ready.twin):
        # There Phi-3 drops its cache.
        raise Declined(f"a preparation of the model's own for texts of more than {original} tokens")
    if inputs.get("inputs_embeds") is not None:
        raise Declined("inputs_embeds before a preparation of the model's own")
    if given_cache.is_used(given_cache.cache_of(inputs)):
        raise Declined("a cache that has been used, before a preparation of the model's own")
    is_text = _is_text(inputs.get("attention_mask"), ids.shape, ids.device)
    asked = prepared(ready.twin, ids, is_text, inputs)
    for name in sorted(asked.further - ready.unread):
        if trial.steps_read(ready.twin, name):
            raise Declined(f"steps with {name}")
        ready.unread.add(name)
    positions = asked.last_positions
    if positions is None:
        positions = positions_of(is_text)
        if "position_ids" in arguments_of(ready.twin.forward):
            raise Declined("steps without positions")
    is_text, ids = is_text[::beams], ids[::beams]
    return Prompt(ids, ids, is_text, positions[..., ::beams, -1:], {}, longest, inputs=asked.inputs)


class Prepared(NamedTuple):
    """What a prompt and the steps after it get."""

    inputs: dict[str, Any]  # the arguments of the forward pass for the prompt
    last_positions: Tensor | None  # [..., rows, 1], the first step's positions less one; None where it gets none
    further: frozenset[str]  # the names of further tensors that steps get


def prepared(model: Any, ids: Tensor, is_text: Tensor, inputs: Mapping[str, Any]) -> Prepared:
    """What a model prepares for a prompt, given what transformers' loop would hand on, and for the first two steps after it. Raises
    Declined where steps get something else. `model` is the twin, because a preparation may change attributes."""
    try:
        with _lock:
            of_prompt, *of_steps = _asked(model, ids, dict(inputs))
    # Whatever a model raises here: transformers' loop raises it again, for the user to see.
    except Exception as error:
        raise_if_from_a_signal(error)
        raise Declined(f"a preparation that raises {said_by(error)}") from error
    first, second = (_of_step(model, each, is_text, number) for number, each in enumerate(of_steps, 1))
    goes_up = first is second if first is None or second is None else torch.equal(first + 1, second)
    if not goes_up:
        raise Declined("positions that do not go up by one")
    own = {cache_argument(model), *_OF_A_STEP}
    further = {name for name, value in of_steps[0].items() if name not in own and isinstance(value, Tensor)}
    for name in (cache_argument(model), "use_cache", "return_dict"):
        of_prompt.pop(name, None)
    return Prepared(of_prompt, None if first is None else first - 1, frozenset(further))


def _asked(model: Any, ids: Tensor, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments that the model prepares for a prompt, and for each of two steps."""
    is_first = {"is_first_iteration": True} if "is_first_iteration" in _ARGUMENTS else {}
    one_token = {"next_sequence_length": 1} if "next_sequence_length" in _ARGUMENTS else {}
    # transformers before 5.4 hands the places of the tokens in the text to the preparation.
    if "cache_position" in _ARGUMENTS:
        inputs["cache_position"] = torch.arange(ids.shape[1], device=ids.device)
    found = [dict(model.prepare_inputs_for_generation(ids, **is_first, **inputs))]
    for _ in range(2):
        output: Any = ModelOutput()  # type: ignore[no-untyped-call]
        # A cache that holds as many tokens as the texts.
        output[cache_argument(model)] = cache = DynamicCache()
        states = torch.zeros(1, 1, ids.shape[1], 1, device=ids.device)
        cache.update(states, states, 0)
        inputs = dict(model._update_model_kwargs_for_generation(output, inputs, is_encoder_decoder=False))
        ids = torch.cat([ids, ids[:, -1:]], 1)
        found.append(dict(model.prepare_inputs_for_generation(ids, **one_token, **inputs)))
    return found


def _of_step(model: Any, inputs: dict[str, Any], is_text: Tensor, number: int) -> Tensor | None:
    """The positions [..., rows, 1] of a step; None where it gets none. Declines a step with other inputs than those of text."""
    rows, length = is_text.shape
    tokens, mask, positions = (inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if tokens is None or tokens.shape != (rows, 1):
        raise Declined("steps of more than a token")
    if mask is not None:
        expected = torch.cat([is_text, is_text.new_ones(rows, number)], 1)
        if not isinstance(mask, Tensor) or mask.shape != expected.shape or not torch.equal(mask.bool(), expected):
            raise Declined("steps with a mask of their own")
    for name, value in inputs.items():
        if name not in (cache_argument(model), *_OF_A_STEP) and not isinstance(value, Tensor) and value:
            raise Declined(f"steps with {name}")
    if positions is None:
        return None
    if positions.dim() < 2 or positions.shape[-1] != 1 or positions.shape[-2] not in (1, rows):
        raise Declined("positions of another shape")
    return positions.expand(*positions.shape[:-2], rows, 1)  # type: ignore[no-any-return]


def with_source(ready: Ready, ids: Tensor, beams: int, longest: int, inputs: dict[str, Any]) -> Prompt:
    """The prompt of an encoder-decoder, whose encoder generate() has run."""
    if given_cache.is_used(given_cache.cache_of(inputs)):
        raise Declined("a cache of an encoder-decoder that has been used")
    outputs, mask = inputs["encoder_outputs"], inputs.get("attention_mask")
    # Some decoders read further fields, which the trial does not have.
    further = sorted(set(outputs) - _OF_ENCODER) if isinstance(outputs, Mapping) else []
    if further:
        raise Declined(f"encoder_outputs with {further[0]}")
    hidden = outputs[0]
    of_prompt = inputs.get("decoder_attention_mask")
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or len(hidden) != len(ids):
        raise Declined("encoder_outputs for another number of rows")
    if of_prompt is not None and not bool(of_prompt.all()):
        raise Declined("decoder_attention_mask with padding")
    takes_mask = ready.twin.main_input_name == "input_ids"
    if not takes_mask and ready.reads_mask and mask is not None and not bool(mask.all()):
        raise Declined(f"padding of {ready.twin.main_input_name}")
    # Contiguous, because some models take a view of the source in another shape.
    hidden = hidden[::beams].contiguous()
    if takes_mask and mask is not None and mask.shape != (len(ids), hidden.shape[1]):
        raise Declined("an attention mask of another shape")
    is_source = None
    if takes_mask:
        is_source = hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if mask is None else mask[::beams].bool()
        # Some implementations make attention to nothing a mean over all places, whose number is rounded up in a step.
        if not bool(is_source.any(1).all()):
            raise Declined("a source of padding alone")
    ids = ids[::beams]
    is_text = torch.ones_like(ids, dtype=torch.bool)
    positions = inputs.get("decoder_position_ids")
    positions = positions_of(is_text) if positions is None else positions[::beams]
    if positions.shape != ids.shape:
        raise Declined("decoder_position_ids of another shape")
    is_exact = decoder_of(ready.twin) is RowDecoder
    return Prompt(ids, ids, is_text, positions, {}, longest, Source(hidden, is_source), is_exact)
