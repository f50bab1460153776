# SPDX-License-Identifier: Apache-2.0
"""What a model's own methods prepare for a prompt, and for the steps after it.

A prompt may have images or sounds. It is read with what the model prepares for it in transformers' loop, with a row for each beam, too.
The model is also asked what it would prepare for the first two steps. The call is served if that is what a step of text gets: a
token, its position, which goes up by one, a mask of what is text, and the cache.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin
from transformers.utils.generic import ModelOutput

from .facts import cache_argument
from .reasons import Declined, raise_if_from_a_signal, said_by


class Prepared(NamedTuple):
    """What a prompt and the steps after it get."""

    inputs: dict[str, Any]  # the arguments of the forward pass for the prompt
    last_positions: Tensor | None  # [..., rows, 1], the first step's positions less one; None where it gets none
    further: frozenset[str]  # the names of further tensors that steps get


# Inputs of a step that need no trial. For one token `logits_to_keep` changes nothing.
_OF_A_STEP = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep"})
_ARGUMENTS = frozenset(inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters)

# Some models keep what they have prepared for a prompt until they prepare a step.
_lock = threading.Lock()


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
